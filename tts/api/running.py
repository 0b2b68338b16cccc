"""A service that runs in this process, and the thread of its event loop."""

from __future__ import annotations

import atexit
from collections.abc import Coroutine
from concurrent.futures import Future
from threading import Lock
from typing import Any, TypeVar

from tts.api.loop import LoopThread, wait
from tts.engine.local_client import LocalEngineClient
from tts.errors import Precondition, PreconditionError
from tts.factory import Service
from tts.speech.synthesizer import Synthesizer

Result = TypeVar("Result")


class RunningService:
    """A service that speaks, its event loop, and how both end.

    Raises `PreconditionError`, and stops the service, when it only writes text. A program that ends
    without `close` stops the engine first: no thread may compute while the interpreter ends.
    """

    def __init__(self, service: Service) -> None:
        assert isinstance(service.client, LocalEngineClient)
        self._client = service.client
        if service.synthesizer is None:
            self._client.stop()
            raise PreconditionError(Precondition.SPEECH, "this model writes text only")
        self.model = service.model
        self.synthesizer: Synthesizer = service.synthesizer
        self.loop = LoopThread()
        self._closing = Lock()
        atexit.register(self._client.stop)

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the service's loop. Raises `RuntimeError` once closed."""
        return self.loop.submit(work)

    def close(self) -> None:
        """Cancel what runs and release the model. Calling it again is harmless."""
        with self._closing:
            if self.loop.is_stopped:
                return
            wait(self.loop.submit(self._client.close()))
            self.loop.stop()
        atexit.unregister(self._client.stop)

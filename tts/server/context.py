"""State that the servicers of one server share: configuration, calls, queue, metrics and model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from tts.config.server import ServerConfig
from tts.engine.admission import Admission
from tts.observe.metrics import Metrics
from tts.observe.tracing import create_tracer
from tts.server.call import Call, CallTracker, ServerState
from tts.server.speech_api import SpeechApi
from tts.server.text_api import TextApi

if TYPE_CHECKING:
    from tts.engine.client import Slot
    from tts.factory import Service
    from tts.ipc.remote_admission import RemoteAdmission
    from tts.server.remote_speaker import RemoteSpeaker


class ServerContext:
    """Shared state of a server, created before the model is loaded."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.calls = CallTracker(
            self.metrics,
            config.slow_reader_timeout_s,
            config.log_user_text,
            create_tracer(config.trace_requests),
        )
        self.admission: Admission | RemoteAdmission = Admission(
            config.admission_limits, self.metrics.note_requests
        )
        self.is_healthy = False
        """Whether load balancers should send calls: the model is loaded, its engine lives, and the
        server does not drain."""
        self.is_speaker_serving = False
        """Whether the speech server serves, if there is one."""
        self.service: Service
        """The models' components; set by `serve`, before the first call."""
        self.speech: SpeechApi
        """Implementation of SpeechService; set by `serve`."""
        self.speaker: SpeechApi | RemoteSpeaker
        """The part that speaks generated texts: `speech`, or another server; set by `serve`."""
        self.text: TextApi
        """Implementation of TextService; set by `serve`."""

    def __repr__(self) -> str:
        return f"ServerContext({self.calls.state.value}, {self.admission!r})"

    @asynccontextmanager
    async def enter(self, call: Call) -> AsyncIterator[None]:
        """Hold a slot among the running calls; wait for a free one first, see `Slot.held`."""
        async with self.request(call) as slot:
            await slot.held()
            yield

    def request(self, call: Call) -> AbstractAsyncContextManager[Slot]:
        """Request a slot for the body, which begins at once and may not hold it yet."""
        return self.admission.request(call.client, call.note_admission)

    def serve(self, service: Service, speaker: RemoteSpeaker | None = None) -> None:
        """Accept calls with the loaded model; `speaker` speaks what it generates."""
        self.service = service
        self.speech = SpeechApi(service.synthesizer, self.config)
        self.speaker = speaker or self.speech
        self.text = TextApi(service.for_text, self.config)
        self.calls.state = ServerState.SERVING

    def drain(self) -> None:
        """Accept no more calls; running calls continue."""
        self.calls.state = ServerState.DRAINING

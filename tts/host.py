"""What the servicers of one server share: configuration, calls, queue, metrics and the model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tts.admission import Admission, AdmissionLimits
from tts.config import ServerConfig
from tts.errors import LoadingError
from tts.metrics import Metrics
from tts.rpc import Call, Calls, ServerState
from tts.tracing import Phases, create_tracer

if TYPE_CHECKING:
    from tts.factory import Service
    from tts.ipc.places import SharedAdmission


def admission_limits(config: ServerConfig) -> AdmissionLimits:
    """How many calls a server has at once, all its front ends together."""
    return AdmissionLimits(
        max_running=config.max_concurrent_requests,
        max_waiting=config.max_queued_requests,
        max_per_client=config.max_streams_per_client,
    )


class Host:
    """Exists before the model is loaded, so that health can say so."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.calls = Calls(
            self.metrics,
            config.slow_reader_timeout_s,
            config.log_user_text,
            create_tracer(config.trace_requests),
        )
        self.admission: Admission | SharedAdmission = Admission(
            admission_limits(config), self.metrics.note_requests
        )
        self._service: Service | None = None

    def __repr__(self) -> str:
        return f"Host({self.calls.state.value}, {self.admission!r})"

    @property
    def service(self) -> Service:
        """The model's parts; LoadingError while there are none."""
        if self._service is None:
            raise LoadingError("the model is still loading; try again in a moment")
        return self._service

    @asynccontextmanager
    async def enter(self, call: Call) -> AsyncIterator[None]:
        """Hold a place among the calls that run; see `Admission.enter`."""
        async with self.admission.enter(call.client):
            call.facts.phases = Phases(admission_s=call.age_s)
            yield

    def serve(self, service: Service) -> None:
        """The model is there: take calls."""
        self._service = service
        self.calls.state = ServerState.SERVING

    def drain(self) -> None:
        """Take no more calls; those that run go on."""
        self.calls.state = ServerState.DRAINING

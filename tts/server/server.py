"""The grpc.aio server: listens at once, serves when the model is loaded, drains before it stops.

start ─▶ NOT_SERVING (loading) ─▶ serve ─▶ SERVING ─▶ drain ─▶ NOT_SERVING ─▶ stop
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from llm import ConfigError
from tts.config.server import LOOPBACK, ServerConfig
from tts.server import speech_service, text_service
from tts.server.access import AccessControl
from tts.server.context import ServerContext
from tts.server.health_service import HealthServicer
from tts.server.interceptor import AccessInterceptor
from tts.server.listener import Listener, Unregistered
from tts.server.remote_speaker import RemoteSpeaker
from tts.server.sockets import address_of
from tts.server.speech_service import SpeechServicer
from tts.server.text_service import TextServicer
from tts.v1 import speech_pb2_grpc, text_pb2_grpc

if TYPE_CHECKING:
    from tts.factory import Service

logger = logging.getLogger("tts.server")

SERVICES = (speech_service.SERVICE, text_service.SERVICE)
TEXT_ONLY = (text_service.SERVICE,)
MAX_STREAMS_PER_CONNECTION = 128
MAX_METADATA_BYTES = 16 * 1024
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 60, 20
SHORTEST_CLIENT_PING_S = 10
NO_LIMIT_MS = 2**31 - 1  # gRPC's infinity
MAX_PEM_BYTES = 2**20  # a device file has no end
STATUS_PERIOD_S = 0.5
SPOKEN_TEXT = f"{text_service.SERVICE}.GenerateSpeech"
"""Name for health checks of calls that the speech server speaks, if there is one."""
LAST_WORDS_S = 1.0  # time to deliver final statuses after the last call

_GONE = (logging.ERROR, "the engine has exited or hangs; NOT_SERVING")
_BACK = (logging.INFO, "the engine is back; SERVING")

_Status = health_pb2.HealthCheckResponse


def server_options(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    """Return the gRPC channel arguments. Only the front ends of one server share a port."""
    return (
        *_age_options(config.max_connection_age_s),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        # Each unread stream buffers HTTP/2's initial window, 64 KiB; BDP probing would enlarge it.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server_handshake_timeout_ms", round(config.receive_timeout_s * 1000)),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", SHORTEST_CLIENT_PING_S * 1000),
        ("grpc.so_reuseport", int(config.front_ends > 1)),
    )


def _age_options(max_age_s: float | None) -> tuple[tuple[str, int], ...]:
    """Return the options that close old connections, for new calls only.

    Calls that run on a connection always finish: the server's own limits bound each of them.
    """
    if max_age_s is None:
        return ()
    return (
        ("grpc.max_connection_age_ms", round(max_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", NO_LIMIT_MS),
    )


def exposure_warnings(config: ServerConfig) -> list[str]:
    """Return warnings about missing authentication and encryption."""
    warnings = []
    if config.host not in LOOPBACK:
        if not (config.auth_token or config.admin_token or config.tls_client_ca):
            warnings.append(f"every client that reaches {config.host} may call; see auth_token")
        elif config.tls_cert is None:
            warnings.append(f"tokens travel unencrypted to {config.host}; see tls_cert")
    speaker = config.speech_server or ""
    is_far = speaker.rpartition(":")[0].strip("[]") not in LOOPBACK
    is_open = not (config.speech_server_tls or config.speech_server_ca)
    if config.speech_server_token and is_far and is_open:
        warnings.append(f"the token travels unencrypted to {speaker}; see speech_server_tls")
    return warnings


@dataclass(frozen=True, slots=True)
class ProtocolService:
    """Speech service of another protocol: its full name, and the function that registers it."""

    name: str
    register: Callable[[ServerContext, grpc.aio.Server], None]


class SpeechServer:
    """One listening server: `start` binds, `serve` accepts calls, `drain` and `stop` end it.

    `others` are served on the same port as SpeechService and TextService.
    """

    def __init__(self, config: ServerConfig, others: Sequence[ProtocolService] = ()) -> None:
        self._config = config
        self.host = ServerContext(config)
        self.access = AccessControl(config)
        self._interceptor = AccessInterceptor(config, self.access, self.host.calls)
        self._others = others
        self._names = (*SERVICES, *(other.name for other in others))
        self._spoken = (SPOKEN_TEXT,) if config.speech_server is not None else ()
        self._health = HealthServicer(("", *self._names, *self._spoken))
        self._credentials: grpc.ServerCredentials | None = None
        self._listener = Listener(self._create, self._bind)
        self._watch: asyncio.Task[None] | None = None
        self._speaker: RemoteSpeaker | None = None
        self._is_draining = False
        self.port = 0
        """Bound port; set by `start`."""

    @property
    def address(self) -> str:
        """Return host:port as a client writes it."""
        return address_of(self._config.host, self.port)

    async def start(self) -> None:
        """Bind the port; every method but health and reflection returns UNAVAILABLE until `serve`.

        Raises ConfigError when the address or the TLS files cannot be used.
        """
        await self._set_health(_Status.NOT_SERVING, (*self._names, *self._spoken))
        for warning in exposure_warnings(self._config):
            logger.warning("%s", warning)
        config = self._config
        self._credentials = _credentials(config)
        self._speaker = _speaker(config)
        try:
            self.port = await self._listener.start(config.port)
        except RuntimeError as error:
            address = address_of(config.host, config.port)
            raise ConfigError(f"cannot listen on {address}: {error}") from error

    async def serve(self, service: Service) -> None:
        """Accept calls with the loaded model."""
        if self._speaker is not None:
            await self._speaker.start()
        self.host.serve(service, self._speaker)
        await self._set_health(_Status.SERVING, self._services(service))
        await self._set_spoken()
        self._watch = asyncio.create_task(self._watch_engine(service))

    async def drain(self, delay_s: float | None = None, grace_s: float | None = None) -> bool:
        """Report NOT_SERVING, wait for load balancers, refuse new calls, wait for running ones.

        Return False if some are left after the grace period; `stop` cancels them. The defaults of
        the times come from the configuration.
        """
        config = self._config
        self._is_draining, self.host.is_healthy = True, False
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(config.drain_delay_s if delay_s is None else delay_s)
        self.host.drain()
        return await self.host.calls.wait_idle(config.drain_grace_s if grace_s is None else grace_s)

    async def stop(self) -> None:
        """Cancel the remaining calls and close the port. The caller closes the model."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        is_idle = self.host.calls.num_open == 0
        await self._listener.stop(LAST_WORDS_S if is_idle else None)
        if self._speaker is not None:
            await self._speaker.close()

    def _create(self) -> grpc.aio.Server:
        """Return a server with all services, not bound to a port."""
        made = grpc.aio.server(
            interceptors=(self._interceptor,), options=server_options(self._config)
        )
        server = Unregistered(made)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        speech_pb2_grpc.add_SpeechServiceServicer_to_server(SpeechServicer(self.host), server)
        text_pb2_grpc.add_TextServiceServicer_to_server(TextServicer(self.host), server)
        for other in self._others:
            other.register(self.host, server)
        if self._config.enable_reflection:
            names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            servicer = reflection.aio.ReflectionServicer(names)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
        return made

    def _bind(self, server: grpc.aio.Server, port: int) -> int:
        address = address_of(self._config.host, port)
        if self._credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self._credentials))

    async def _watch_engine(self, service: Service) -> None:
        """Report NOT_SERVING while an engine is not alive, and while no connection can be made."""
        was_alive = was_serving = True
        while True:
            is_alive = await self._read_status(service)
            if is_alive != was_alive:
                was_alive = is_alive
                logger.log(*(_BACK if was_alive else _GONE))
            if (is_serving := was_alive and self._listener.is_up) != was_serving:
                was_serving = is_serving
                health_status = _Status.SERVING if is_serving else _Status.NOT_SERVING
                await self._set_health(health_status, self._services(service))
            await self._set_spoken()
            await asyncio.sleep(STATUS_PERIOD_S)

    async def _read_status(self, service: Service) -> bool:
        """Update the metrics' snapshots; return whether all engines live."""
        metrics = self.host.metrics
        status = metrics.engine.status = await service.client.status()
        if service.synthesizer is not None:
            metrics.note_broken_lexicons(service.synthesizer.num_broken_lexicons)
        if service.text_service is None:
            return status.is_alive
        text_status = metrics.text_engine.status = await service.text_service.client.status()
        return status.is_alive and text_status.is_alive

    def _services(self, service: Service) -> Iterable[str]:
        return self._names if service.synthesizer else TEXT_ONLY

    async def _set_spoken(self) -> None:
        """Report whether texts are spoken by the speech server, if there is one."""
        if self._speaker is not None:
            self.host.is_speaker_serving = self._speaker.is_serving
            is_serving = self._speaker.is_serving and self.host.is_healthy
            status = _Status.SERVING if is_serving else _Status.NOT_SERVING
            await self._health.set(SPOKEN_TEXT, status)

    async def _set_health(self, status: int, services: Iterable[str]) -> None:
        self.host.is_healthy = status == _Status.SERVING and not self._is_draining
        for service in ("", *services):
            await self._health.set(service, status)


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Return TLS credentials; None for plain text. With a CA, client certificates are required."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    pair = (_pem(config.tls_key), _pem(config.tls_cert))
    client_ca = _pem(config.tls_client_ca) if config.tls_client_ca else None
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


def _speaker(config: ServerConfig) -> RemoteSpeaker | None:
    """Return the client of the speech server; None without one."""
    if config.speech_server is None:
        return None
    credentials = None
    if config.speech_server_tls or config.speech_server_ca is not None:
        ca = _pem(config.speech_server_ca) if config.speech_server_ca is not None else None
        credentials = grpc.ssl_channel_credentials(ca)
    token = config.speech_server_token
    return RemoteSpeaker(config.speech_server, config.max_message_bytes, token, credentials)


def _pem(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(text) > MAX_PEM_BYTES:
        raise ConfigError(f"{path} has more than {MAX_PEM_BYTES} bytes; name a PEM file")
    return text

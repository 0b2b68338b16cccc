"""SpeechService and TextService as a deployment of Ray Serve.

client ═▶ Serve's gRPC proxy ─▶ replica: SpeechDeployment ─▶ the servicers of tts.server ─▶ engine

The servicers are those of `tts.serve`; `CallContext` is their gRPC context. Serve sends the details
of a status only together with a response, and makes INTERNAL with a stack trace of an exception. So
no call raises: after a failure an empty response carries the status, which `tts.cluster.proxy`
leaves out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext

from llm import ConfigError
from tts.cli.program import end_process
from tts.cluster.flags import parsed_flags
from tts.config.environment import prepare_libraries
from tts.config.pipeline import PrometheusMetricsMode, config_from_args
from tts.config.server import ServerConfig
from tts.errors import TTSError, UnavailableError
from tts.factory import create_service
from tts.observe.logs import configure_logging
from tts.processes.collector import collect_regularly, tune_gc
from tts.serve import read_config
from tts.server.access import AccessControl
from tts.server.context import ServerContext
from tts.server.interceptor import admitted
from tts.server.speech_service import SpeechServicer
from tts.server.text_service import TextServicer
from tts.v1 import speech_pb2, text_pb2

logger = logging.getLogger("tts.cluster")

NAME = "Sonant"
"""Name of the deployment, for options in a configuration file of Serve."""
SERVICES = (
    speech_pb2.DESCRIPTOR.services_by_name["SpeechService"],
    text_pb2.DESCRIPTOR.services_by_name["TextService"],
)
NOT_SERVED = (
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "http_port",
    "wyoming_port",
    "front_ends",
    "prefill_devices",
    "speech_server",
    "max_connection_age_s",
    "unload_after_s",
)
"""Fields of ServerConfig for listeners, processes and connections that a replica does not have."""
FAILED = 1  # exit status of a replica that has lost a part of its engine
MAX_REMEMBERED = 64  # ids of a replica that Serve's proxies know; the least recent one leaves


class CallContext:
    """The part of `grpc.aio.ServicerContext` that servicers use, on a call of Ray Serve."""

    def __init__(self, context: RayServegRPCContext) -> None:
        self._context = context
        self.responses: asyncio.Queue[Message | None] = asyncio.Queue()
        """Responses of a stream, and None at its end. Without a limit: Serve takes each at once."""
        self.has_failed = False

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata that the client has sent."""
        return tuple(self._context.invocation_metadata())

    def peer(self) -> str:
        """Return the address of the proxy's client."""
        return str(self._context.peer())

    def time_remaining(self) -> None:
        """Return None: Serve does not forward deadlines; its proxy cancels the call."""

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Set the metadata that follows the last response."""
        self._context.set_trailing_metadata(list(metadata))

    async def write(self, response: Message) -> None:
        """Send a response of a stream."""
        self.responses.put_nowait(response)

    async def abort(
        self,
        code: grpc.StatusCode,
        message: str,
        metadata: tuple[tuple[str, str | bytes], ...] = (),
    ) -> NoReturn:
        """End the call with a status. Raises AbortError."""
        self.has_failed = True
        self._context.set_code(code)
        self._context.set_details(message)
        self.set_trailing_metadata(metadata)
        raise grpc.aio.AbortError


class SpeechDeployment:
    """Replica: an engine in this process, and a method for each RPC of SERVICES.

    Raises the errors of a wrong configuration, with which the deployment fails.
    """

    async def __init__(self, flags: Mapping[str, Any]) -> None:  # type: ignore[misc]  # for Serve
        prepare_libraries()
        args = parsed_flags(flags)
        server = check_server(config_from_args(ServerConfig, args))
        configure_logging(server.log_level, server.log_format)
        config = await asyncio.to_thread(read_config, args)
        if config.model.prometheus_metrics_mode is not PrometheusMetricsMode.INSTRUMENT_ONLY:
            raise ConfigError("prometheus_metrics_mode: Ray exports the metrics of its deployments")
        self._host = ServerContext(server)
        self._access = AccessControl(server)
        self._service = await asyncio.to_thread(
            create_service, config.model, server, config.text, on_ranks_lost=_ranks_lost
        )
        await self._service.warm_up()
        tune_gc()
        collect_regularly(asyncio.get_running_loop())
        self._host.serve(self._service)
        self._servicers = {
            SERVICES[0].full_name: SpeechServicer(self._host),
            SERVICES[1].full_name: TextServicer(self._host),
        }

    async def check_health(self) -> None:
        """Raise UnavailableError when an engine has stopped; Serve then replaces the replica."""
        for service in self._service.services:
            if not (await service.client.status()).is_alive:
                raise UnavailableError("the engine has stopped or hangs")

    @serve.multiplexed(max_num_models_per_replica=MAX_REMEMBERED)
    async def _remember(self, name: str) -> str:
        """Let Serve send calls with this `multiplexed_model_id` here from now on."""
        return name

    async def _call(self, method: MethodDescriptor, request: Any, context: CallContext) -> Any:
        """Run a servicer's method behind the checks of access; a failure becomes the status."""
        service, name = method.containing_service.full_name, method.name
        with suppress(grpc.aio.AbortError):
            try:
                with admitted(self._access, f"/{service}/{name}", context):
                    if affinity := serve.get_multiplexed_model_id():
                        await self._remember(affinity)
                    return await getattr(self._servicers[service], name)(request, context)
            except TTSError as error:  # errors of the method itself are already statuses
                async with self._host.calls.serve(context, service, name, refusal=error):
                    return None

    async def _unary(
        self, method: MethodDescriptor, request: Any, grpc_context: RayServegRPCContext
    ) -> Message:
        """Return the response, or an empty one that carries the status of a failure."""
        response: Message | None = await self._call(method, request, CallContext(grpc_context))
        return GetMessageClass(method.output_type)() if response is None else response

    async def _stream(
        self, method: MethodDescriptor, request: Any, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[Message, None]:
        """Yield the responses, and an empty one that carries the status of a failure."""
        context = CallContext(grpc_context)
        running = asyncio.create_task(self._call(method, request, context))
        running.add_done_callback(lambda _: context.responses.put_nowait(None))
        try:
            while (response := await context.responses.get()) is not None:
                yield response
            running.result()
            if context.has_failed:
                yield GetMessageClass(method.output_type)()
        finally:
            running.cancel()
            await asyncio.wait((running,))


def _ranks_lost(reason: str) -> NoReturn:
    """End the replica with its calls at once; the steps of the other ranks would fail anyway."""
    logger.error("%s: the replica ends", reason)
    end_process(FAILED)


def _handler(method: MethodDescriptor) -> Callable[..., Any]:
    """Return the method of the deployment for an RPC: (request or requests, grpc_context)."""
    if method.server_streaming:

        async def streamed(
            self: SpeechDeployment, request: Any, grpc_context: RayServegRPCContext
        ) -> AsyncIterator[Message]:
            return self._stream(method, request, grpc_context)

        return streamed

    async def unary(
        self: SpeechDeployment, request: Any, grpc_context: RayServegRPCContext
    ) -> Message:
        return await self._unary(method, request, grpc_context)

    return unary


for _service in SERVICES:
    for _method in _service.methods:
        setattr(SpeechDeployment, _method.name, _handler(_method))


def check_server(server: ServerConfig) -> ServerConfig:
    """Return the configuration. Raises ConfigError for a field that a replica cannot follow."""
    given = [name for name in NOT_SERVED if name in server.model_fields_set]
    if given:
        raise ConfigError(
            f"{given[0]}: not for a replica of Ray Serve, which listens for it and speaks with its "
            "own model; leave it out, or place servers with tts.cluster.servers"
        )
    return server


def create_application(flags: Mapping[str, Any], **options: Any) -> serve.Application:
    """Return an application of Serve with one deployment, whose replicas have these flags.

    `flags` as in `parsed_flags`; `options` are those of `serve.deployment`. Raises ConfigError for
    a wrong flag of the server; a wrong model makes the deployment fail.
    """
    server = check_server(config_from_args(ServerConfig, parsed_flags(flags)))
    most = server.max_concurrent_requests + server.max_queued_requests
    deployment = serve.deployment(SpeechDeployment)
    defaults = {
        "name": NAME,
        "max_ongoing_requests": most,
        "graceful_shutdown_timeout_s": server.drain_grace_s,
    }
    return deployment.options(**{**defaults, **options}).bind(dict(flags))


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application for flags in a configuration file of Serve, or after `serve run`."""
    return create_application(args)

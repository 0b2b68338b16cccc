"""A real server on the loopback interface, and the calls that tests make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, TypeVar

import grpc
import numpy as np
import soundfile
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status.rpc_status import from_call

from tests.deadlines import HANG_S
from tests.fakes import wait_until_idle
from tts.config.server import ServerConfig
from tts.factory import Service
from tts.processes.calls import PROTOCOLS
from tts.server.server import SpeechServer
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub
from tts.v1.text_pb2_grpc import TextServiceStub

TEXT = "Hello there. This is a short test."
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # not a second, behind a server that listens again
)
SMALL_WINDOW = ("grpc.http2.bdp_probe", 0)  # HTTP/2's 64 KiB, never more

Result = TypeVar("Result")
Detail = TypeVar("Detail", bound=Message)


@dataclass(frozen=True)
class Serving:
    """A server that takes calls, and a channel to it."""

    server: SpeechServer
    channel: grpc.aio.Channel
    expected: bytes = b""  # audio of a request before the fault

    @property
    def speech(self) -> SpeechServiceStub:
        return SpeechServiceStub(self.channel)

    @property
    def text(self) -> TextServiceStub:
        return TextServiceStub(self.channel)

    def metric(self, name: str, **labels: str) -> float:
        return self.server.host.metrics.value(name, **labels)


@asynccontextmanager
async def serving(
    service: Service, *channel_options: tuple[str, int], **values: Any
) -> AsyncIterator[Serving]:
    """Serve with these values of ServerConfig, by default on a free port."""
    server = SpeechServer(ServerConfig(**{"port": 0, **values}), PROTOCOLS)
    await server.start()
    await server.serve(service)
    options = (*CHANNEL_OPTIONS, *channel_options)
    try:
        async with grpc.aio.insecure_channel(server.address, options) as channel:
            yield Serving(server, channel)
    finally:
        await server.drain(0, 5)
        await server.stop()
        server.host.admission.check_integrity()
        assert server.host.admission.running == 0


def run(work: Coroutine[Any, Any, Result], timeout_s: float = HANG_S) -> Result:
    return asyncio.run(asyncio.wait_for(work, timeout_s))


def run_with_server(
    service: Service, ask: Callable[[Serving], Coroutine[Any, Any, Result]], **values: Any
) -> Result:
    """Serve, run the calls, stop."""

    async def scenario() -> Result:
        async with serving(service, **values) as served:
            return await ask(served)

    return run(scenario())


def config(seed: int | None = 7, max_tokens: int | None = 40, **values: Any) -> pb.SynthesisConfig:
    """Return a config with few speech tokens: some sentences of random weights do not end."""
    proto = pb.SynthesisConfig(**values)
    if max_tokens is not None and "sampling" not in values:
        proto.sampling.max_tokens = max_tokens
    if seed is not None:
        proto.sampling.seed = seed
    return proto


def stream_request(text: str = TEXT, **values: Any) -> pb.SynthesizeStreamRequest:
    return pb.SynthesizeStreamRequest(config=config(**values), input=pb.SynthesisInput(text=text))


def unary_request(text: str = TEXT, **values: Any) -> pb.SynthesizeRequest:
    return pb.SynthesizeRequest(config=config(**values), input=pb.SynthesisInput(text=text))


def session_config(**values: Any) -> pb.StreamingSynthesizeRequest:
    times = {k: values.pop(k) for k in ("max_text_delay", "idle_timeout", "eager") if k in values}
    first = pb.StreamingSynthesizeConfig(synthesis=config(**values), **times)
    return pb.StreamingSynthesizeRequest(config=first)


def say(text: str) -> pb.StreamingSynthesizeRequest:
    return pb.StreamingSynthesizeRequest(text=text)


def flush(flush_id: str = "") -> pb.StreamingSynthesizeRequest:
    return pb.StreamingSynthesizeRequest(flush=pb.Flush(flush_id=flush_id))


CANCEL = pb.StreamingSynthesizeRequest(cancel=pb.CancelUtterance())


@dataclass(frozen=True)
class SpeechResponses:
    """Responses of a stream, by kind; their order is checked."""

    started: pb.SynthesisStarted
    audio: tuple[pb.AudioChunk, ...]
    done: pb.SynthesisDone

    @property
    def data(self) -> bytes:
        return b"".join(chunk.data for chunk in self.audio)


def grouped(responses: list[Any]) -> SpeechResponses:
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started", *["audio"] * (len(kinds) - 2), "done"]
    audio = tuple(response.audio for response in responses[1:-1])
    return SpeechResponses(responses[0].started, audio, responses[-1].done)


async def collect_speech(served: Serving, text: str = TEXT, **values: Any) -> SpeechResponses:
    call = served.speech.SynthesizeStream(stream_request(text, **values))
    return grouped([response async for response in call])


@asynccontextmanager
async def checked_server(
    service: Service, *channel_options: tuple[str, int], **values: Any
) -> AsyncIterator[Serving]:
    """A server that must still answer after the body, with no resource in use."""
    async with serving(service, *channel_options, **values) as served:
        expected = (await collect_speech(served)).data
        yield replace(served, expected=expected)
        assert await served.server.host.calls.wait_idle(60)
        await wait_until_idle(service.client)
        assert (await collect_speech(served)).data == expected


async def run_conversation(
    served: Serving, *messages: pb.StreamingSynthesizeRequest
) -> list[pb.StreamingSynthesizeResponse]:
    """Send all messages, close, and read to the end."""
    call = served.speech.StreamingSynthesize(iter(messages))
    return [response async for response in call]


async def health(channel: grpc.aio.Channel, name: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    return (await HealthStub(channel).Check(request)).status


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    """Return the error that a unary or a streamed call ends with.

    A stream that is refused by its headers must have no requests: the client reports INTERNAL when
    it sends one after the refusal.
    """
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")


async def error_of_reading(call: Any) -> grpc.aio.AioRpcError:
    """Return the error that a call read with `read` ends with."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")


def detail(error: grpc.aio.AioRpcError, kind: type[Detail]) -> Detail:
    """Return one of the google.rpc details of an error."""
    status = from_call(_SyncCall(error))
    assert status is not None, error
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            return kind.FromString(packed.value)
    raise AssertionError(f"no {kind.__name__} in {status}")


class _SyncCall:
    """grpc_status reads a call through methods."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code, self.details = error.code, error.details
        self.trailing_metadata = lambda: tuple(error.trailing_metadata() or ())


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    """Return the wrong fields that an INVALID_ARGUMENT names."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    return [violation.field for violation in detail(error, BadRequest).field_violations]


def reason_of(error: grpc.aio.AioRpcError) -> str:
    return str(detail(error, ErrorInfo).reason)


def retry_s(error: grpc.aio.AioRpcError) -> float:
    """Return the retry delay in seconds of RESOURCE_EXHAUSTED and UNAVAILABLE."""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert detail(error, QuotaFailure).violations
    return float(detail(error, RetryInfo).retry_delay.ToMilliseconds() / 1000)


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    file = BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def hum(seconds: float, rate: int = 16_000) -> np.ndarray:
    """Return a signal like a voice: a few partials of 120 Hz with a varying level."""
    t = np.arange(round(seconds * rate)) / rate
    partials = sum(np.sin(2 * np.pi * 120 * k * t) / k for k in range(1, 8))
    return (0.2 * partials * (1 + np.sin(2 * np.pi * 3 * t))).astype(np.float32)

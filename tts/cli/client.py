"""`SpeechClient`: one interface to a service in this process and to a server, in wire messages.

SpeechClient ─┬─ RemoteClient ── channel ──▶ a server's SpeechService and TextService
              └─ LocalClient ─── Service of this process, without a network (`tts.cli.local`)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from tts.cli.options import Credentials
from tts.cli.request import in_flags
from tts.server.status import DETAILS_KEY
from tts.v1 import common_pb2, speech_pb2, speech_pb2_grpc, text_pb2, text_pb2_grpc

MAX_MESSAGE_BYTES = 16 * 2**20
WRONG_REQUEST = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class SayError(Exception):
    """A request that was refused or failed, in one line; `exit_status` is 2 if it was wrong."""

    def __init__(
        self, code: grpc.StatusCode, message: str, retry_after_s: float | None = None
    ) -> None:
        """`retry_after_s`: the delay after which a busy server may have room."""
        super().__init__(in_flags(" ".join(message.split())))
        self.code, self.retry_after_s = code, retry_after_s
        self.exit_status = 2 if code in WRONG_REQUEST else 1


class ResponseTooLongError(SayError):
    """A text that was cut off at its token limit."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.OUT_OF_RANGE, "the model's answer does not end")


class SpeechClient(Protocol):
    """A speech service. Closing an iterator cancels its request; all methods raise SayError."""

    def synthesize(
        self, request: speech_pb2.SynthesizeStreamRequest
    ) -> AsyncGenerator[speech_pb2.SynthesizeStreamResponse, None]:
        """Synthesize a complete text."""

    def converse(
        self,
        config: speech_pb2.StreamingSynthesizeConfig,
        fragments: AsyncIterator[str],
    ) -> AsyncGenerator[speech_pb2.StreamingSynthesizeResponse, None]:
        """Synthesize a text from its fragments as they come."""

    async def model(self) -> speech_pb2.ModelInfo:
        """Return what the model of speech is and can do."""

    async def has_word_times(self) -> bool:
        """Return whether the model of speech knows when its words are spoken."""

    async def voices(self, language_code: str) -> Sequence[speech_pb2.Voice]:
        """Return all voices, or those of a language."""

    def complete_chat(self, message: str, max_tokens: int) -> AsyncGenerator[str, None]:
        """Generate the greedy answer to a chat of one message, piece by piece."""

    async def close(self) -> None:
        """Cancel running requests and release the connection or the model."""


class RemoteClient:
    """A server as a `SpeechClient`. The channel is opened at the first request."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address, self._credentials = address, credentials
        self._opened: grpc.aio.Channel | None = None
        token = credentials.token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def synthesize(
        self, request: speech_pb2.SynthesizeStreamRequest
    ) -> AsyncGenerator[speech_pb2.SynthesizeStreamResponse, None]:
        call = self._stub().SynthesizeStream(request, metadata=self._metadata)
        async with self._calling(call):
            async for event in call:
                yield event

    async def converse(
        self,
        config: speech_pb2.StreamingSynthesizeConfig,
        fragments: AsyncIterator[str],
    ) -> AsyncGenerator[speech_pb2.StreamingSynthesizeResponse, None]:
        accepted = asyncio.Event()

        async def requests() -> AsyncIterator[speech_pb2.StreamingSynthesizeRequest]:
            yield speech_pb2.StreamingSynthesizeRequest(config=config)
            await accepted.wait()  # a write into a refused call hides the reason of the refusal
            async for text in fragments:
                yield speech_pb2.StreamingSynthesizeRequest(text=text)

        call = self._stub().StreamingSynthesize(requests(), metadata=self._metadata)
        async with self._calling(call):
            async for event in call:
                accepted.set()
                yield event

    async def model(self) -> speech_pb2.ModelInfo:
        request = speech_pb2.GetServerInfoRequest()
        call = self._stub().GetServerInfo(request, metadata=self._metadata)
        async with self._calling(call):
            models = (await call).models
        return next((model for model in models if model.codec), speech_pb2.ModelInfo())

    async def has_word_times(self) -> bool:
        return (await self.model()).word_timestamps

    async def voices(self, language_code: str) -> Sequence[speech_pb2.Voice]:
        found: list[speech_pb2.Voice] = []
        request = speech_pb2.ListVoicesRequest(language_code=language_code)
        while True:
            call = self._stub().ListVoices(request, metadata=self._metadata)
            async with self._calling(call):
                response = await call
            found += response.voices
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    async def complete_chat(self, message: str, max_tokens: int) -> AsyncGenerator[str, None]:
        chat = text_pb2.ChatMessage(role=text_pb2.CHAT_ROLE_USER, content=message)
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = text_pb2.GenerateStreamRequest(
            config=text_pb2.GenerationConfig(sampling=sampling),
            input=text_pb2.GenerationInput(chat=text_pb2.ChatMessages(messages=[chat])),
        )
        stub = text_pb2_grpc.TextServiceStub(self._channel())
        call = stub.GenerateStream(request, metadata=self._metadata)
        async with self._calling(call):
            async for event in call:
                yield event.delta.text
                if event.done.finish_reason == common_pb2.FINISH_REASON_LENGTH:
                    raise ResponseTooLongError

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def _stub(self) -> speech_pb2_grpc.SpeechServiceStub:
        return speech_pb2_grpc.SpeechServiceStub(self._channel())

    def _channel(self) -> grpc.aio.Channel:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> grpc.aio.Channel:
        options = (
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        )
        secrets = self._credentials
        if not secrets.use_tls:
            return grpc.aio.insecure_channel(self._address, options)
        tls = grpc.ssl_channel_credentials(
            secrets.root_certificates, secrets.private_key, secrets.certificate
        )
        return grpc.aio.secure_channel(self._address, tls, options)

    @asynccontextmanager
    async def _calling(self, call: grpc.aio.Call) -> AsyncIterator[None]:
        """Convert a failure of the call to SayError, and cancel the call at the end."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            message = error.details() or error.code().name
            if error.code() not in WRONG_REQUEST:
                message = f"{self._address}: {message}"
            raise SayError(error.code(), message, _retry_after_s(error)) from error
        finally:
            call.cancel()


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """Return the delay that a busy server asks for; None if it names none."""
    retry = RetryInfo()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            with suppress(DecodeError):
                for detail in Status.FromString(value).details:
                    if detail.Unpack(retry):
                        return retry.retry_delay.ToTimedelta().total_seconds()
    return None

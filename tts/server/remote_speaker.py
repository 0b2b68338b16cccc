"""`RemoteSpeaker`: another server that speaks the texts which this server's model generates.

                  ┌ watch ──▶ health, model and voices of the speech server
pieces ─▶ session ┴ feed ───▶ its StreamingSynthesize ─▶ events

Its statuses pass through `tts.server.status`; a call that ends here is cancelled there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tts.errors import SpeechServerLostError
from tts.server.speech_api import OpenSession, longest_whole_s
from tts.server.status import error_of_call
from tts.server.wire.common import optional, to_duration
from tts.server.wire.speech import ENCODINGS, read_event
from tts.speech.types import Done, SessionEvent
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice

logger = logging.getLogger("tts.server")

SERVICE = pb.DESCRIPTOR.services_by_name["SpeechService"].full_name
FRAGMENT_CHARACTERS = 500  # of one message; servers have a limit
MAX_VOICES = 10_000  # whose names are kept; requests may use others
ANSWER_S = 5.0
RETRY_S = 1.0
OPTIONS = (
    ("grpc.max_send_message_length", -1),  # the speech server has the limit
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # longest attempt to connect
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
LOST = "the speech server does not serve; texts alone are not affected"


@dataclass(frozen=True, slots=True)
class SpeakerNames:
    """Names that requests may use on the speech server, and its sample rate in Hz."""

    model: str
    adapters: tuple[str, ...]
    voices: VoiceRegistry
    sample_rate: int
    takes_instructions: bool  # False of a server of a version before this field
    times_words: bool


class RemoteSpeaker:
    """Client of a speech server. One event loop.

    `credentials` None: a connection without TLS; `token` None: calls without a token.
    `max_message_bytes` limits audio that is collected for one response.
    """

    def __init__(
        self,
        address: str,
        max_message_bytes: int,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._address, self._max_message_bytes = address, max_message_bytes
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, OPTIONS)
        self._stub = SpeechServiceStub(self._channel)
        self._names: SpeakerNames | None = None
        self._problem = "not connected yet"
        self._noted = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"RemoteSpeaker({self._address}, {self._problem or 'serving'})"

    @property
    def is_serving(self) -> bool:
        """Whether the speech server answered last that it serves."""
        return not self._problem

    @property
    def names(self) -> SpeakerNames:
        """Names of the speech server. Raises SpeechServerLostError while it does not serve."""
        if self._problem or self._names is None:
            raise SpeechServerLostError(LOST)
        return self._names

    async def start(self) -> None:
        """Watch the speech server from now on; wait a few seconds for its first answer."""
        self._watching = asyncio.create_task(self._watch())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._noted.wait(), ANSWER_S)
        if self._problem:
            logger.warning("speech server %s: %s", self._address, self._problem)

    async def close(self) -> None:
        """Cancel all sessions and close the connection."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        await self._channel.close()

    def prepare(
        self, config: pb.SynthesisConfig, request_id: str, *, is_whole: bool = False
    ) -> OpenSession:
        """Return the function that opens a session for the speech of a generated text.

        The speech server checks the request when the session has been opened. Raises
        SpeechServerLostError while it does not serve.
        """
        names, sent = self.names, pb.SynthesisConfig()
        sent.CopyFrom(config)
        sent.segment_mode = config.segment_mode or pb.SEGMENT_MODE_CLAUSE
        sent.request_id = config.request_id or request_id
        if is_whole:
            output = config.audio_format
            rate = output.sample_rate_hertz or names.sample_rate
            encoding = ENCODINGS.get(output.encoding, ENCODINGS[pb.AUDIO_ENCODING_UNSPECIFIED])
            longest_s = longest_whole_s(self._max_message_bytes, rate, encoding)
            given_s = optional(config, "max_audio_duration")
            if given_s is None or given_s > longest_s:
                sent.ClearField("max_audio_duration")
                sent.MergeFrom(pb.SynthesisConfig(max_audio_duration=to_duration(longest_s)))

        async def open_session() -> RemoteSession:
            return RemoteSession(self._converse, sent)

        return open_session

    def _converse(self, requests: AsyncIterator[pb.StreamingSynthesizeRequest]) -> _Conversation:
        return self._stub.StreamingSynthesize(requests, metadata=self._metadata)

    async def _watch(self) -> None:
        """Follow the health of the speech server, and connect again after each loss."""
        while True:
            try:
                await self._follow()
            except grpc.aio.AioRpcError as error:
                self._note(f"{error.code().name}: {error.details()}")
            except asyncio.CancelledError:
                if not _is_remote_end():
                    raise
                self._note("the connection was cancelled")
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Read the names, which needs the token, then the health until it is not SERVING.

        The calls of the next round may reach another server at this address, as new calls do.
        """
        self._names = await self._read_names()
        if self._names is None:
            self._note("its model does not speak")
            return
        watch = HealthStub(self._channel).Watch(HealthCheckRequest(service=SERVICE))
        try:
            async for response in watch:
                if response.status != HealthCheckResponse.SERVING:
                    self._note("its health is NOT_SERVING")
                    return
                self._note("")
            self._note("the connection has ended")
        finally:
            watch.cancel()

    async def _read_names(self) -> SpeakerNames | None:
        """Return the names of the speech server; None if its models do not speak."""
        timing = {"metadata": self._metadata, "timeout": ANSWER_S}
        info = await self._stub.GetServerInfo(pb.GetServerInfoRequest(), **timing)
        speaking = (m for m in info.models if m.codec and m.native_sample_rate_hertz > 0)
        model = next(speaking, None)
        if model is None:
            return None
        found: list[pb.Voice] = []
        request = pb.ListVoicesRequest()
        while True:
            page = await self._stub.ListVoices(request, **timing)
            found += page.voices
            if not (page.next_page_token and page.voices) or len(found) >= MAX_VOICES:
                break
            request.page_token = page.next_page_token
        voices = [
            Voice(
                voice.name,
                voice.display_name,
                tuple(voice.language_codes),
                is_builtin=voice.builtin,
            )
            for voice in found
        ]
        return SpeakerNames(
            model.name,
            tuple(model.adapters),
            VoiceRegistry(voices, ""),
            model.native_sample_rate_hertz,
            model.instructions,
            model.word_timestamps,
        )

    def _note(self, problem: str) -> None:
        """Record why the speech server cannot be used ("": it can)."""
        if problem != self._problem and self._noted.is_set():
            level = logging.WARNING if problem else logging.INFO
            logger.log(level, "speech server %s: %s", self._address, problem or "serving")
        self._problem = problem
        self._noted.set()


_Conversation: TypeAlias = grpc.aio.StreamStreamCall[
    pb.StreamingSynthesizeRequest, pb.StreamingSynthesizeResponse
]


class RemoteSession:
    """Session of one text on the speech server; its call begins with the first event."""

    def __init__(
        self,
        converse: Callable[[AsyncIterator[pb.StreamingSynthesizeRequest]], _Conversation],
        config: pb.SynthesisConfig,
    ) -> None:
        self._converse, self._config = converse, config
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()
        self._accepted = asyncio.Event()
        self._has_ended = False

    @property
    def awaits_first_audio(self) -> bool:
        """Whether its engines, which share this machine with those of the text, prepare its first
        audio: never, they are those of another server.
        """
        return False

    def feed(self, text: str) -> None:
        """Append text."""
        for start in range(0, len(text), FRAGMENT_CHARACTERS):
            self._texts.put_nowait(text[start : start + FRAGMENT_CHARACTERS])

    def close(self) -> None:
        """End the text: the rest is spoken, then `Done` follows."""
        self._texts.put_nowait(None)

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        """Yield all events. Closing the iterator cancels the call of the speech server.

        Raises the errors of `error_of_call`.
        """
        call, event = self._converse(self._requests()), None
        try:
            async for response in call:
                self._accepted.set()
                event = _event_of(response)
                yield event
            if not isinstance(event, Done):
                raise SpeechServerLostError("the speech server ended the call too early")
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error
        except asyncio.CancelledError:
            if not _is_remote_end():
                raise
            raise SpeechServerLostError("the speech server cancelled the call") from None
        finally:
            call.cancel()
            self._has_ended = True  # gRPC does not cancel the requests of a call that was refused
            self._accepted.set()
            self.close()

    async def _requests(self) -> AsyncIterator[pb.StreamingSynthesizeRequest]:
        config = pb.StreamingSynthesizeConfig(synthesis=self._config)
        yield pb.StreamingSynthesizeRequest(config=config)
        await self._accepted.wait()  # a write into a refused call hides the reason of the refusal
        while (text := await self._texts.get()) is not None and not self._has_ended:
            yield pb.StreamingSynthesizeRequest(text=text)


def _event_of(response: pb.StreamingSynthesizeResponse) -> SessionEvent:
    """Return an event. Raises SpeechServerLostError for one that this version does not know."""
    try:
        return read_event(response)
    except (KeyError, ValueError) as error:
        raise SpeechServerLostError(
            f"the speech server sends what this version cannot read: {error!r}"
        ) from error


def _is_remote_end() -> bool:
    """Return whether a CancelledError is gRPC's, for a call that its server cancelled."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()

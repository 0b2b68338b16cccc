"""SpeechService over gRPC: `SpeechApi` with calls, queue, backpressure and voice administration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TypeAlias

import grpc

from decoder import supported_encodings
from tts import __version__
from tts.errors import IdleTimeoutError, InvalidRequestError
from tts.factory import Service
from tts.server.call import Call, note_event, note_input, note_result
from tts.server.context import ServerContext
from tts.server.voice_admin import create_voice
from tts.server.wire.common import Violations, to_duration
from tts.server.wire.speech import (
    ENCODING_NUMBERS,
    check_voice_name,
    to_chunking,
    to_done,
    to_fields,
    to_mark,
    to_segment,
    to_session_response,
    to_started,
    to_voice,
    to_words,
)
from tts.v1 import speech_pb2 as pb
from tts.v1 import speech_pb2_grpc as pb_grpc
from tts.voices.types import Voice

SERVICE = "tts.v1.SpeechService"
DEFAULT_PAGE, LARGEST_PAGE = 100, 1000

Context: TypeAlias = grpc.aio.ServicerContext


class SpeechServicer(pb_grpc.SpeechServiceServicer):
    """Servicer of SpeechService. `CallTracker.serve` turns all errors into statuses."""

    def __init__(self, host: ServerContext) -> None:
        self._host = host

    async def Synthesize(
        self, request: pb.SynthesizeRequest, context: Context
    ) -> pb.SynthesizeResponse:
        async with self._host.calls.serve(context, SERVICE, "Synthesize") as call:
            call.adopt_id(request.config.request_id)
            checked = self._host.speech.check(request, call.request_id)
            call.note_text(checked.text)
            async with self._host.enter(call):
                speech = await self._host.speech.whole(checked)
            call.audio_s = speech.result.usage.audio_s
            note_result(call, speech.result)
            return pb.SynthesizeResponse(
                audio=speech.audio,
                started=to_started(speech.started),
                words=to_words(speech.words).words,
                segments=map(to_segment, speech.segments),
                marks=map(to_mark, speech.marks),
                done=to_done(speech.result),
            )

    async def SynthesizeStream(self, request: pb.SynthesizeStreamRequest, context: Context) -> None:
        async with self._host.calls.serve(context, SERVICE, "SynthesizeStream") as call:
            call.adopt_id(request.config.request_id)
            checked = self._host.speech.check(request, call.request_id)
            call.note_text(checked.text)
            stream = self._host.speech.synthesizer.stream
            async with (
                self._host.request(call) as slot,
                aclosing(stream(checked, slot)) as events,
            ):
                async for event in events:
                    note_event(call, self._host.metrics, event)
                    await call.write(pb.SynthesizeStreamResponse(**to_fields(event)))

    async def StreamingSynthesize(
        self, requests: AsyncIterator[pb.StreamingSynthesizeRequest], context: Context
    ) -> None:
        async with self._host.calls.serve(context, SERVICE, "StreamingSynthesize") as call:
            first = await self._first(requests)
            if first is not None:
                call.adopt_id(first.config.synthesis.request_id)
            checked, times = self._host.speech.check_session(first, call.request_id)
            messages = _noted(call, requests)
            events = self._host.speech.converse(checked, times, messages)
            async with self._host.enter(call), aclosing(events):
                async for event in events:
                    note_event(call, self._host.metrics, event)
                    await call.write(to_session_response(event))

    async def ListVoices(
        self, request: pb.ListVoicesRequest, context: Context
    ) -> pb.ListVoicesResponse:
        async with self._host.calls.serve(context, SERVICE, "ListVoices"):
            synthesizer = self._host.speech.synthesizer
            with Violations() as wrong:
                if request.language_code:
                    wrong.language(request.language_code, "language_code")
                wrong.require(request.page_size >= 0, "page_size", "must not be negative")
            voices = synthesizer.voices.voices(request.language_code)
            start = _page_start(voices, request.page_token)
            end = start + min(request.page_size or DEFAULT_PAGE, LARGEST_PAGE)
            model = synthesizer.settings.model
            return pb.ListVoicesResponse(
                voices=[to_voice(voice, model) for voice in voices[start:end]],
                next_page_token=voices[end - 1].name if end < len(voices) else "",
            )

    async def CreateVoice(
        self, request: pb.CreateVoiceRequest, context: Context
    ) -> pb.CreateVoiceResponse:
        async with self._host.calls.serve(context, SERVICE, "CreateVoice") as call:
            created = await create_voice(self._host, call, request)
            model = self._host.speech.synthesizer.settings.model
            return pb.CreateVoiceResponse(voice=to_voice(created, model))

    async def DeleteVoice(
        self, request: pb.DeleteVoiceRequest, context: Context
    ) -> pb.DeleteVoiceResponse:
        async with self._host.calls.serve(context, SERVICE, "DeleteVoice"):
            voices = self._host.speech.synthesizer.voices
            check_voice_name(request.name, "name")
            voices.delete(request.name)
            return pb.DeleteVoiceResponse()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        async with self._host.calls.serve(context, SERVICE, "GetServerInfo"):
            return pb.GetServerInfoResponse(
                version=__version__,
                models=[model_info(service) for service in self._host.service.services],
                limits=self._limits(),
                encodings=sorted(ENCODING_NUMBERS[e] for e in supported_encodings()),
            )

    async def _first(
        self, requests: AsyncIterator[pb.StreamingSynthesizeRequest]
    ) -> pb.StreamingSynthesizeRequest | None:
        """Return the call's first message; None when the client closed its side without one."""
        idle_s = self._host.config.idle_timeout_s
        try:
            return await asyncio.wait_for(anext(requests, None), idle_s)
        except TimeoutError:
            raise IdleTimeoutError(f"no config arrived for {idle_s:g} s") from None

    def _limits(self) -> pb.ServerLimits:
        config = self._host.config
        return pb.ServerLimits(
            max_text_characters=config.max_text_characters,
            max_prompt_audio_bytes=config.max_prompt_audio_bytes,
            min_prompt_duration=to_duration(config.min_prompt_duration_s),
            max_prompt_duration=to_duration(config.max_prompt_duration_s),
            max_audio_duration=to_duration(config.max_audio_duration_s),
            max_concurrent_requests=config.max_concurrent_requests,
            max_queued_requests=config.max_queued_requests,
            max_streams_per_client=config.max_streams_per_client,
        )


async def _noted(
    call: Call, messages: AsyncIterator[pb.StreamingSynthesizeRequest]
) -> AsyncIterator[pb.StreamingSynthesizeRequest]:
    """Yield the client's later messages; record the time of the first and all characters."""
    async for message in messages:
        note_input(call, message.text)
        yield message


def _page_start(voices: tuple[Voice, ...], token: str) -> int:
    """Return the index of a page's first voice; the token is the last voice of the page before."""
    if not token:
        return 0
    for index, voice in enumerate(voices):
        if voice.name == token:
            return index + 1
    raise InvalidRequestError.of("page_token", "is not valid (any more); start from the first page")


def model_info(service: Service) -> pb.ModelInfo:
    """Return the message of a served model; another one may answer its requests for text."""
    text = service.text
    info = pb.ModelInfo(
        name=service.model,
        family=service.family,
        text_generation=text.generates and service.for_text is service,
        embeddings=text.embeds,
        echo=text.echoes and text.generates,
        structured_output=text.takes_schemas and text.generates,
        adapters=text.adapters,
    )
    if service.synthesizer is not None:
        codec = service.synthesizer.codec
        info.codec = codec.name
        info.native_sample_rate_hertz = codec.sample_rate
        info.speech_tokens_per_second = codec.codes_per_second
        info.voice_cloning = service.synthesizer.cloner.can_clone
        info.instructions = service.synthesizer.takes_instructions
        info.word_timestamps = service.synthesizer.settings.aligner is not None
        info.default_chunking.CopyFrom(to_chunking(service.synthesizer.settings.streaming))
    return info

"""SpeechService over gRPC: `SpeechApi` with calls, queue, backpressure and voice administration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from decoder import supported_encodings
from tts import __version__
from tts.errors import IdleTimeoutError, InvalidRequestError
from tts.host import Host
from tts.proto_checks import Violations
from tts.proto_events import ENCODING_NUMBERS, to_chunking, to_duration, to_voice
from tts.proto_values import check_voice_name, read_prompt
from tts.rpc import Call
from tts.speech_api import SpeechApi
from tts.utterance import closing
from tts.v1 import speech_pb2 as pb
from tts.v1 import speech_pb2_grpc as pb_grpc
from tts.voices import Voice

SERVICE = "tts.v1.SpeechService"
DEFAULT_PAGE, LARGEST_PAGE = 100, 1000
MAX_DISPLAY_NAME = 200
MAX_CONSENT = 1000

Context: TypeAlias = grpc.aio.ServicerContext
Response = pb.SynthesizeStreamResponse | pb.StreamingSynthesizeResponse


class SpeechServicer(pb_grpc.SpeechServiceServicer):
    """Methods as the contract describes them. Errors leave through `Calls.serve` alone."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def Synthesize(
        self, request: pb.SynthesizeRequest, context: Context
    ) -> pb.SynthesizeResponse:
        async with self._host.calls.serve(context, SERVICE, "Synthesize") as call:
            call.adopt_id(request.config.request_id)
            checked = self._api().check(request, call.request_id)
            call.note_text(checked.request.text)
            async with self._host.enter(call):
                response = await self._api().whole(checked)
            call.facts.audio_s = _audio_s(response.done)
            _note_done(call, response.done)
            return response

    async def SynthesizeStream(self, request: pb.SynthesizeStreamRequest, context: Context) -> None:
        async with self._host.calls.serve(context, SERVICE, "SynthesizeStream") as call:
            call.adopt_id(request.config.request_id)
            checked = self._api().check(request, call.request_id)
            call.note_text(checked.request.text)
            async with self._host.enter(call):
                await self._send(call, self._api().stream(checked))

    async def StreamingSynthesize(
        self, requests: AsyncIterator[pb.StreamingSynthesizeRequest], context: Context
    ) -> None:
        async with self._host.calls.serve(context, SERVICE, "StreamingSynthesize") as call:
            first = await self._first(requests)
            if first is not None:
                call.adopt_id(first.config.synthesis.request_id)
            checked = self._api().check_session(first, call.request_id)
            messages = _Heard(call, requests)
            async with self._host.enter(call):
                await self._send(call, self._api().converse(checked, messages))

    async def ListVoices(
        self, request: pb.ListVoicesRequest, context: Context
    ) -> pb.ListVoicesResponse:
        async with self._host.calls.serve(context, SERVICE, "ListVoices"):
            synthesizer = self._api().synthesizer
            with Violations() as wrong:
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
            synthesizer = self._api().synthesizer
            _check_new_voice(request)
            synthesizer.voices.check_new(request.voice_id)
            async with self._host.enter(call):
                read = await read_prompt(request.prompt, synthesizer, "prompt")
            languages = (request.language_code,) if request.language_code else ()
            voice = Voice(
                name=request.voice_id,
                display_name=request.display_name or request.voice_id,
                language_codes=languages,
                prompt=read,
                consent=request.consent,
            )
            created = synthesizer.voices.create(voice)
            return pb.CreateVoiceResponse(voice=to_voice(created, synthesizer.settings.model))

    async def DeleteVoice(
        self, request: pb.DeleteVoiceRequest, context: Context
    ) -> pb.DeleteVoiceResponse:
        async with self._host.calls.serve(context, SERVICE, "DeleteVoice"):
            voices = self._api().synthesizer.voices
            check_voice_name(request.name, "name")
            voices.delete(request.name)
            return pb.DeleteVoiceResponse()

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        async with self._host.calls.serve(context, SERVICE, "GetServerInfo"):
            return pb.GetServerInfoResponse(
                version=__version__,
                models=[self._model_info()],
                limits=self._limits(),
                encodings=sorted(ENCODING_NUMBERS[e] for e in supported_encodings()),
            )

    def _api(self) -> SpeechApi:
        return SpeechApi(self._host.service.synthesizer, self._host.config)

    async def _first(
        self, requests: AsyncIterator[pb.StreamingSynthesizeRequest]
    ) -> pb.StreamingSynthesizeRequest | None:
        """The call's first message; None when the client closed without one."""
        idle_s = self._host.config.idle_timeout_s
        try:
            return await asyncio.wait_for(anext(requests, None), idle_s)
        except TimeoutError:
            raise IdleTimeoutError(f"no config arrived for {idle_s:g} s") from None

    async def _send(self, call: Call, responses: AsyncIterator[Response]) -> None:
        async with closing(responses):
            async for response in responses:
                self._note(call, response)
                await call.write(response)

    def _note(self, call: Call, response: Response) -> None:
        facts = call.facts
        match response.WhichOneof("event"):
            case "started":
                facts.sample_rate = response.started.audio_format.sample_rate_hertz
            case "audio":
                facts.audio_s += response.audio.sample_count / facts.sample_rate
                if facts.first_audio_s is None:
                    facts.first_audio_s = call.heard_ago_s
                    self._host.metrics.first_audio.observe(facts.first_audio_s)
            case "done":
                _note_done(call, response.done)

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

    def _model_info(self) -> pb.ModelInfo:
        service = self._host.service
        text = service.text
        info = pb.ModelInfo(
            name=service.model,
            family=service.family,
            text_generation=not text.embeds,
            embeddings=text.embeds,
            echo=text.echoes and not text.embeds,
            structured_output=text.takes_schemas and not text.embeds,
            adapters=text.adapters,
        )
        if service.synthesizer is not None:
            codec = service.synthesizer.codec
            info.codec = codec.name
            info.native_sample_rate_hertz = codec.sample_rate
            info.speech_tokens_per_second = codec.codes_per_second
            info.voice_cloning = codec.can_encode
            info.word_timestamps = service.synthesizer.settings.aligner is not None
            info.default_chunking.CopyFrom(to_chunking(service.synthesizer.settings.streaming))
        return info


class _Heard:
    """The client's later messages; notes when the first came, and how many characters."""

    def __init__(self, call: Call, messages: AsyncIterator[pb.StreamingSynthesizeRequest]) -> None:
        self._call, self._messages = call, messages
        self._is_first = True

    def __aiter__(self) -> _Heard:
        return self

    async def __anext__(self) -> pb.StreamingSynthesizeRequest:
        message = await anext(self._messages)
        if self._is_first:
            self._call.note_heard()
            self._is_first = False
        self._call.note_text(message.text)
        return message


def _audio_s(done: pb.SynthesisDone) -> float:
    duration = done.usage.audio_duration
    return float(duration.seconds + duration.nanos / 1e9)


def _note_done(call: Call, done: pb.SynthesisDone) -> None:
    call.facts.prompt_tokens = done.usage.prompt_tokens
    call.facts.output_tokens = done.usage.output_tokens
    call.facts.warnings = len(done.warnings)
    timings = done.timings
    call.note_timings(
        timings.queue.ToTimedelta().total_seconds(), timings.prefill.ToTimedelta().total_seconds()
    )


def _check_new_voice(request: pb.CreateVoiceRequest) -> None:
    with Violations() as wrong:
        wrong.language(request.language_code, "language_code")
        for field, most in (("display_name", MAX_DISPLAY_NAME), ("consent", MAX_CONSENT)):
            value = getattr(request, field)
            ok = len(value) <= most and value.isprintable()
            wrong.require(ok, field, f"must be at most {most} printable characters")


def _page_start(voices: tuple[Voice, ...], token: str) -> int:
    """A page token is the last voice of the page before."""
    if not token:
        return 0
    for index, voice in enumerate(voices):
        if voice.name == token:
            return index + 1
    raise InvalidRequestError.of("page_token", "is not valid (any more); start from the first page")

"""`nvidia.riva.tts.RivaSpeechSynthesis` on the synthesizer of SpeechService.

Synthesize           ─▶ SpeechApi.check, whole            as SpeechService.Synthesize
SynthesizeOnline     ─▶ SpeechApi.check_session, converse  as StreamingSynthesize: the text of each
                                                           request, and a flush
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TypeAlias

import grpc

from tts.errors import InvalidRequestError, ModelNotFoundError
from tts.riva.stubs import tts_pb2 as pb
from tts.riva.stubs import tts_pb2_grpc as pb_grpc
from tts.riva.wire import (
    check_phrase,
    check_settings,
    riva_names,
    to_config,
    to_configs,
    to_input,
    to_words,
)
from tts.server.call import Call, note_event, note_result
from tts.server.context import ServerContext
from tts.server.server import ProtocolService
from tts.server.wire.common import Violations
from tts.speech.types import AudioChunk, FlushDone, WordTimes
from tts.v1 import speech_pb2

SERVICE = "nvidia.riva.tts.RivaSpeechSynthesis"
MAX_PHRASES_AHEAD = 16  # requests whose text is read before the text of earlier ones is spoken

Context: TypeAlias = grpc.aio.ServicerContext


class RivaServicer(pb_grpc.RivaSpeechSynthesisServicer):
    """Servicer of RivaSpeechSynthesis. `CallTracker.serve` turns all errors into statuses."""

    def __init__(self, host: ServerContext) -> None:
        self._host = host

    async def Synthesize(
        self, request: pb.SynthesizeSpeechRequest, context: Context
    ) -> pb.SynthesizeSpeechResponse:
        async with self._host.calls.serve(context, SERVICE, "Synthesize") as call:
            with riva_names():
                call.adopt_id(request.id.value)
                api = self._host.speech
                with Violations() as wrong:
                    proto = speech_pb2.SynthesizeRequest(
                        config=to_config(request, api.synthesizer, wrong),
                        input=to_input(request.text),
                    )
                    checked = api.check(proto, call.request_id)
                call.note_text(checked.text)
                async with self._host.enter(call):
                    speech = await api.whole(checked)
            call.audio_s = speech.result.usage.audio_s
            note_result(call, speech.result)
            meta = to_words(speech.words)
            meta.text, meta.processed_text = request.text, speech.result.spoken_text
            return _response(request, speech.audio, meta)

    async def SynthesizeOnline(
        self, requests: AsyncIterator[pb.SynthesizeSpeechRequest], context: Context
    ) -> None:
        async with self._host.calls.serve(context, SERVICE, "SynthesizeOnline") as call:
            with riva_names():
                first = await anext(requests, None)
                if first is None:
                    raise InvalidRequestError.of("", "the call has no request; send one")
                call.adopt_id(first.id.value)
                api = self._host.speech
                with Violations() as wrong:
                    config = to_config(first, api.synthesizer, wrong)
                    session = speech_pb2.StreamingSynthesizeConfig(synthesis=config)
                    checked, times = api.check_session(
                        speech_pb2.StreamingSynthesizeRequest(config=session), call.request_id
                    )
                ahead = asyncio.Semaphore(MAX_PHRASES_AHEAD)
                messages = self._messages(call, first, requests, ahead)
                events = api.converse(checked, times, messages)
                async with self._host.enter(call), aclosing(events):
                    async for event in events:
                        note_event(call, self._host.metrics, event)
                        match event:
                            case AudioChunk(data=data) if data:
                                await call.write(_response(first, data))
                            case WordTimes():
                                await call.write(_response(first, meta=to_words(event.words)))
                            case FlushDone():
                                ahead.release()

    async def GetRivaSynthesisConfig(
        self, request: pb.RivaSynthesisConfigRequest, context: Context
    ) -> pb.RivaSynthesisConfigResponse:
        async with self._host.calls.serve(context, SERVICE, "GetRivaSynthesisConfig"):
            synthesizer = self._host.speech.synthesizer
            model = synthesizer.settings.model
            if request.model_name not in ("", model):
                raise ModelNotFoundError(request.model_name, (model,))
            rate = synthesizer.codec.sample_rate
            configs = to_configs(synthesizer.voices.voices(), model, rate)
            return pb.RivaSynthesisConfigResponse(model_config=configs)

    async def _messages(
        self,
        call: Call,
        first: pb.SynthesizeSpeechRequest,
        later: AsyncIterator[pb.SynthesizeSpeechRequest],
        ahead: asyncio.Semaphore,
    ) -> AsyncIterator[speech_pb2.StreamingSynthesizeRequest]:
        """Yield the session's messages for all requests of a call; record their characters.

        Each text is fed in fragments and then flushed. `ahead` is acquired for each flush.
        """
        limits = self._host.config
        async for request in _with_first(first, later):
            check_settings(first, request)
            check_phrase(request.text, limits.max_text_characters)
            if not request.text.strip():
                continue
            if request is not first and not call.characters:
                call.first_input = time.monotonic()
            call.note_text(request.text)
            for start in range(0, len(request.text), limits.max_fragment_characters):
                fragment = request.text[start : start + limits.max_fragment_characters]
                yield speech_pb2.StreamingSynthesizeRequest(text=fragment)
                await asyncio.sleep(0)  # let other streams run
            await ahead.acquire()
            yield speech_pb2.StreamingSynthesizeRequest(flush=speech_pb2.Flush())
        if not call.characters:
            raise InvalidRequestError.of("text", "is empty")


async def _with_first(
    first: pb.SynthesizeSpeechRequest, later: AsyncIterator[pb.SynthesizeSpeechRequest]
) -> AsyncIterator[pb.SynthesizeSpeechRequest]:
    yield first
    async for request in later:
        yield request


def _response(
    request: pb.SynthesizeSpeechRequest,
    audio: bytes = b"",
    meta: pb.SynthesizeSpeechResponseMetadata | None = None,
) -> pb.SynthesizeSpeechResponse:
    """Return a response with the request's id, if it has one."""
    request_id = request.id if request.HasField("id") else None
    return pb.SynthesizeSpeechResponse(audio=audio, meta=meta, id=request_id)


def _register(host: ServerContext, server: grpc.aio.Server) -> None:
    pb_grpc.add_RivaSpeechSynthesisServicer_to_server(RivaServicer(host), server)


PROTOCOL = ProtocolService(SERVICE, _register)

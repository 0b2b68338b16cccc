"""TextService over gRPC: text generation, spoken or not, and embedding on the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from typing import TypeAlias

import grpc

from llm import Request
from tts.server.call import Call
from tts.server.context import ServerContext
from tts.server.spoken_text import check_spoken, generate_spoken
from tts.server.text_api import note_piece
from tts.server.wire.common import FINISH_REASONS, to_timings
from tts.server.wire.speech import to_fields
from tts.server.wire.text import to_logprobs
from tts.speech.types import SpeechEvent
from tts.textgen.generator import TextPiece
from tts.v1 import common_pb2, speech_pb2
from tts.v1 import text_pb2 as pb
from tts.v1 import text_pb2_grpc as pb_grpc

SERVICE = "tts.v1.TextService"
ECHO_PER_MESSAGE = 128  # scored prompt tokens; about 40 KB per message with all alternatives
Context: TypeAlias = grpc.aio.ServicerContext


class TextServicer(pb_grpc.TextServiceServicer):
    """Servicer of TextService. `CallTracker.serve` turns all errors into statuses."""

    def __init__(self, host: ServerContext) -> None:
        self._host = host

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._host.calls.serve(context, SERVICE, "Generate") as call:
            asked = await self._host.text.check(call, request)
            stops = request.config.sampling.stop
            async with self._host.enter(call):
                pieces = [piece async for piece in self._host.text.write(asked, stops)]
            note_piece(call, pieces[-1])
            assert pieces[-1].finish_reason is not None
            return pb.GenerateResponse(
                request_id=asked.request_id,
                text="".join(piece.text for piece in pieces),
                token_ids=[i for piece in pieces for i in piece.token_ids],
                finish_reason=FINISH_REASONS[pieces[-1].finish_reason],
                usage=_usage(call, pieces[-1]),
                logprobs=[entry for p in pieces for entry in to_logprobs(p.logprobs)],
                prompt_logprobs=[e for p in pieces for e in to_logprobs(p.prompt_logprobs)],
            )

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Context) -> None:
        async with self._host.calls.serve(context, SERVICE, "GenerateStream") as call:
            asked = await self._host.text.check(call, request)
            stops = request.config.sampling.stop
            async with self._host.enter(call):
                await call.write(self._started(asked))
                async with aclosing(self._host.text.write(asked, stops)) as pieces:
                    async for piece in pieces:
                        note_piece(call, piece)
                        for response in _responses(call, piece):
                            await call.write(response)

    async def GenerateSpeech(self, request: pb.GenerateSpeechRequest, context: Context) -> None:
        async with self._host.calls.serve(context, SERVICE, "GenerateSpeech") as call:
            asked = await check_spoken(self._host, call, request)
            async with self._host.enter(call):
                await call.write(pb.GenerateSpeechResponse(text=self._started(asked.text)))
                async with aclosing(generate_spoken(self._host, call, asked)) as events:
                    async for event in events:
                        for response in _spoken_responses(call, event):
                            await call.write(response)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        async with self._host.calls.serve(context, SERVICE, "Embed") as call:
            text = self._host.text
            text.check_embed(call, request)
            async with self._host.enter(call):
                found = await text.embed(call, request)
            return pb.EmbedResponse(
                embeddings=[
                    pb.Embedding(values=vector, input=index, token_id=token_id)
                    for index, item in enumerate(found)
                    for token_id, vector in item.labelled()
                ],
                usage=common_pb2.Usage(
                    input_characters=call.characters, prompt_tokens=call.prompt_tokens
                ),
            )

    def _started(self, asked: Request) -> pb.GenerateStreamResponse:
        started = pb.GenerationStarted(
            request_id=asked.request_id,
            model=self._host.text.service.model,
            seed=asked.sampling.seed,
        )
        return pb.GenerateStreamResponse(started=started)


def _responses(call: Call, piece: TextPiece) -> Iterator[pb.GenerateStreamResponse]:
    """Yield the messages of a piece."""
    scored = piece.prompt_logprobs
    for start in range(0, len(scored), ECHO_PER_MESSAGE):
        part = to_logprobs(scored[start : start + ECHO_PER_MESSAGE])
        yield pb.GenerateStreamResponse(delta=pb.TextDelta(prompt_logprobs=part))
    if piece.text or piece.token_ids:
        scores = to_logprobs(piece.logprobs) if piece.logprobs else ()
        delta = pb.TextDelta(text=piece.text, token_ids=piece.token_ids, logprobs=scores)
        yield pb.GenerateStreamResponse(delta=delta)
    if piece.finish_reason is not None:
        done = pb.GenerationDone(
            finish_reason=FINISH_REASONS[piece.finish_reason],
            usage=_usage(call, piece),
            timings=to_timings(piece.queue_s, piece.prefill_s, piece.total_s),
        )
        yield pb.GenerateStreamResponse(done=done)


def _spoken_responses(
    call: Call, event: TextPiece | SpeechEvent
) -> Iterator[pb.GenerateSpeechResponse]:
    """Yield the messages of a piece of text or of an event of its speech."""
    if isinstance(event, TextPiece):
        for response in _responses(call, event):
            yield pb.GenerateSpeechResponse(text=response)
    else:
        fields = to_fields(event)
        yield pb.GenerateSpeechResponse(speech=speech_pb2.SynthesizeStreamResponse(**fields))


def _usage(call: Call, piece: TextPiece) -> common_pb2.Usage:
    return common_pb2.Usage(
        input_characters=call.characters,
        prompt_tokens=piece.prompt_tokens,
        cached_prompt_tokens=piece.cached_prompt_tokens,
        output_tokens=piece.output_tokens,
    )

"""TextService over gRPC: text generation and embedding on the engine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TypeAlias

import grpc

from llm import RequestError, check_json_schema
from tts.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    ModelNotFoundError,
    Precondition,
    PreconditionError,
)
from tts.families.prompt import encoded
from tts.server.call import Call
from tts.server.context import ServerContext
from tts.server.wire.common import FINISH_REASONS, Violations, to_timings
from tts.server.wire.text import (
    check_config,
    check_embed,
    check_input,
    input_texts,
    length_of,
    prompt_ids,
    read_text_sampling,
    to_logprobs,
)
from tts.textgen.embedder import TextEmbedder
from tts.textgen.generator import TextPiece, TextRequest
from tts.v1 import common_pb2
from tts.v1 import text_pb2 as pb
from tts.v1 import text_pb2_grpc as pb_grpc

SERVICE = "tts.v1.TextService"
ECHO_PER_MESSAGE = 128  # scored prompt tokens; about 40 KB per message with all alternatives
Context: TypeAlias = grpc.aio.ServicerContext
GenerateProto = pb.GenerateRequest | pb.GenerateStreamRequest


class TextServicer(pb_grpc.TextServiceServicer):
    """Servicer of TextService. `CallTracker.serve` turns all errors into statuses."""

    def __init__(self, host: ServerContext) -> None:
        self._host = host

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._host.calls.serve(context, SERVICE, "Generate") as call:
            asked = await self._read(call, request)
            async with self._host.enter(call):
                pieces = [piece async for piece in self._host.writer.write(asked)]
            _note(call, pieces[-1])
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
            asked = await self._read(call, request)
            started = pb.GenerationStarted(
                request_id=asked.request_id,
                model=self._host.service.model,
                seed=asked.sampling.seed,
            )
            async with self._host.enter(call):
                await call.write(pb.GenerateStreamResponse(started=started))
                async with aclosing(self._host.writer.write(asked)) as pieces:
                    async for piece in pieces:
                        await _send(call, piece)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        async with self._host.calls.serve(context, SERVICE, "Embed") as call:
            call.adopt_id(request.request_id)
            if request.model:
                self._check_model(request.model)
            if not self._host.service.text.embeds:
                raise PreconditionError(
                    Precondition.EMBEDDING, "this model generates; it does not embed texts"
                )
            if request.lora:
                self._check_adapter(request.lora)
            check_embed(request, self._host.config.max_stream_characters)
            for text in request.inputs:
                call.note_text(text)
            async with self._host.enter(call):
                found = await self._embedder().embed(call.request_id, request.inputs, request.lora)
            call.stats.prompt_tokens = sum(item.num_tokens for item in found)
            return pb.EmbedResponse(
                embeddings=[
                    pb.Embedding(values=vector, input=index, token_id=token_id)
                    for index, item in enumerate(found)
                    for token_id, vector in item.labelled()
                ],
                usage=common_pb2.Usage(
                    input_characters=call.stats.characters, prompt_tokens=call.stats.prompt_tokens
                ),
            )

    def _embedder(self) -> TextEmbedder:
        service = self._host.service
        return TextEmbedder(service.client, service.prompts, pools=service.text.pools_embeddings)

    def _check_model(self, name: str) -> None:
        model = self._host.service.model
        if name != model:
            raise ModelNotFoundError(name, (model,))

    async def _read(self, call: Call, proto: GenerateProto) -> TextRequest:
        """Return the checked request with its prompt tokens and sampling parameters."""
        config = proto.config
        call.adopt_id(config.request_id)
        if config.model:
            self._check_model(config.model)
        if self._host.service.text.embeds:
            reason = Precondition.TEXT_GENERATION
            raise PreconditionError(reason, "this model embeds texts; it does not generate")
        if config.lora:
            self._check_adapter(config.lora)
        with Violations() as wrong:
            if config.request_id:
                wrong.request_id(config.request_id, "config.request_id")
            check_config(config, wrong)
            can_echo = self._host.service.text.echoes or not config.echo
            wrong.require(can_echo, "config.echo", "this server runs without enable_echo")
            check_input(proto.input, self._host.config.max_stream_characters, wrong)
        if config.json_schema:
            await self._check_schema(config.json_schema)
        for text in input_texts(proto.input):
            call.note_text(text)
        prompts = self._host.service.prompts
        return TextRequest(
            request_id=call.request_id,
            prompt_ids=await encoded(length_of(proto.input), prompt_ids, proto.input, prompts),
            sampling=read_text_sampling(config, self._host.service.text),
            stops=tuple(config.sampling.stop),
            priority=config.priority,
            lora=config.lora,
        )

    def _check_adapter(self, name: str) -> None:
        adapters = self._host.service.text.adapters
        if name not in adapters:
            raise AdapterNotFoundError(name, adapters)

    async def _check_schema(self, schema: str) -> None:
        if not self._host.service.text.takes_schemas:
            raise InvalidRequestError.of(
                "config.json_schema", "this server runs without sampling.enable_structured_output"
            )
        try:
            # Compiling a large schema takes milliseconds and would block the event loop.
            await asyncio.to_thread(check_json_schema, schema)
        except RequestError as error:
            raise InvalidRequestError.of("config.json_schema", str(error)) from error


async def _send(call: Call, piece: TextPiece) -> None:
    scored = piece.prompt_logprobs
    for start in range(0, len(scored), ECHO_PER_MESSAGE):
        part = to_logprobs(scored[start : start + ECHO_PER_MESSAGE])
        await call.write(pb.GenerateStreamResponse(delta=pb.TextDelta(prompt_logprobs=part)))
    if piece.text or piece.token_ids:
        scores = to_logprobs(piece.logprobs) if piece.logprobs else ()
        delta = pb.TextDelta(text=piece.text, token_ids=piece.token_ids, logprobs=scores)
        await call.write(pb.GenerateStreamResponse(delta=delta))
    _note(call, piece)
    if piece.finish_reason is not None:
        done = pb.GenerationDone(
            finish_reason=FINISH_REASONS[piece.finish_reason],
            usage=_usage(call, piece),
            timings=to_timings(piece.queue_s, piece.prefill_s, piece.total_s),
        )
        await call.write(pb.GenerateStreamResponse(done=done))


def _note(call: Call, piece: TextPiece) -> None:
    call.stats.prompt_tokens, call.stats.output_tokens = piece.prompt_tokens, piece.output_tokens
    call.note_timings(piece.queue_s, piece.prefill_s)


def _usage(call: Call, piece: TextPiece) -> common_pb2.Usage:
    return common_pb2.Usage(
        input_characters=call.stats.characters,
        prompt_tokens=piece.prompt_tokens,
        cached_prompt_tokens=piece.cached_prompt_tokens,
        output_tokens=piece.output_tokens,
    )

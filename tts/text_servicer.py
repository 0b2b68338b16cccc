"""TextService over gRPC: plain text generation on the engine that also speaks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

import grpc

from llm import RequestError, SamplingParams, TokenLogprob, check_json_schema
from tts.chat import ChatMessage, ChatRole
from tts.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    ModelNotFoundError,
    Precondition,
    PreconditionError,
)
from tts.factory import TextModel
from tts.host import Host
from tts.prompt import PromptBuilder
from tts.proto_checks import Violations, read_sampling
from tts.proto_events import FINISH_REASONS, to_timings
from tts.rpc import Call
from tts.speech import MAX_PRIORITY
from tts.text import TextError, check_text
from tts.text_embedder import TextEmbedder
from tts.text_generator import TextGenerator, TextPiece, TextRequest
from tts.utterance import closing
from tts.v1 import common_pb2
from tts.v1 import text_pb2 as pb
from tts.v1 import text_pb2_grpc as pb_grpc

SERVICE = "tts.v1.TextService"
DEFAULT_MAX_TOKENS = 1024
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000
MAX_TOP_LOGPROBS = 20
MAX_EMBED_INPUTS = 256
ECHO_PER_MESSAGE = 128  # scored prompt tokens; with all alternatives a message is some 40 KB

ROLES: Mapping[int, ChatRole] = {
    pb.CHAT_ROLE_SYSTEM: ChatRole.SYSTEM,
    pb.CHAT_ROLE_USER: ChatRole.USER,
    pb.CHAT_ROLE_ASSISTANT: ChatRole.ASSISTANT,
}

Context: TypeAlias = grpc.aio.ServicerContext
GenerateProto = pb.GenerateRequest | pb.GenerateStreamRequest


class TextServicer(pb_grpc.TextServiceServicer):
    """Methods as the contract describes them. Errors leave through `Calls.serve` alone."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._host.calls.serve(context, SERVICE, "Generate") as call:
            asked = await self._read(call, request)
            async with self._host.enter(call):
                pieces = [piece async for piece in self._write(asked)]
            _note(call, pieces[-1])
            assert pieces[-1].finish_reason is not None
            return pb.GenerateResponse(
                request_id=asked.request_id,
                text="".join(piece.text for piece in pieces),
                token_ids=[i for piece in pieces for i in piece.token_ids],
                finish_reason=FINISH_REASONS[pieces[-1].finish_reason],
                usage=_usage(call, pieces[-1]),
                logprobs=[entry for p in pieces for entry in _logprobs(p.logprobs)],
                prompt_logprobs=[e for p in pieces for e in _logprobs(p.prompt_logprobs)],
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
                async with closing(self._write(asked)) as pieces:
                    async for piece in pieces:
                        await _send(call, piece)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        async with self._host.calls.serve(context, SERVICE, "Embed") as call:
            call.adopt_id(request.request_id)
            self._check_model(request.model)
            if not self._host.service.text.embeds:
                raise PreconditionError(
                    Precondition.EMBEDDING, "this model writes text and speaks; it does not embed"
                )
            self._check_adapter(request.lora)
            _check_inputs(request, self._host.config.max_stream_characters)
            call.facts.characters = sum(map(len, request.inputs))
            async with self._host.enter(call):
                found = await self._embedder().embed(call.request_id, request.inputs, request.lora)
            call.facts.prompt_tokens = sum(item.num_tokens for item in found)
            return pb.EmbedResponse(
                embeddings=[
                    pb.Embedding(values=vector, input=index, token_id=token_id)
                    for index, item in enumerate(found)
                    for token_id, vector in item.labelled()
                ],
                usage=common_pb2.Usage(
                    input_characters=call.facts.characters, prompt_tokens=call.facts.prompt_tokens
                ),
            )

    def _embedder(self) -> TextEmbedder:
        service = self._host.service
        return TextEmbedder(service.client, service.prompts, pools=service.text.pools_embeddings)

    def _write(self, asked: TextRequest) -> AsyncIterator[TextPiece]:
        service = self._host.service
        return TextGenerator(service.client, service.prompts).write(asked)

    def _check_model(self, name: str) -> None:
        model = self._host.service.model
        if name not in ("", model):
            raise ModelNotFoundError(name, (model,))

    async def _read(self, call: Call, proto: GenerateProto) -> TextRequest:
        """The request, checked, with everything decided that the engine needs."""
        config = proto.config
        call.adopt_id(config.request_id)
        self._check_model(config.model)
        if self._host.service.text.embeds:
            reason = Precondition.TEXT_GENERATION
            raise PreconditionError(reason, "this model embeds texts; it writes none")
        self._check_adapter(config.lora)
        with Violations() as wrong:
            wrong.request_id(config.request_id, "config.request_id")
            _check_config(config, wrong)
            can_echo = self._host.service.text.echoes or not config.echo
            wrong.require(can_echo, "config.echo", "this server runs without enable_echo")
            self._check_input(proto.input, wrong)
        await self._check_schema(config.json_schema)
        for text in _texts(proto.input):
            call.note_text(text)
        return TextRequest(
            request_id=call.request_id,
            prompt_ids=_prompt_ids(proto.input, self._host.service.prompts),
            sampling=_sampling(config, self._host.service.text),
            stops=tuple(config.sampling.stop),
            priority=config.priority,
            lora=config.lora,
        )

    def _check_adapter(self, name: str) -> None:
        adapters = self._host.service.text.adapters
        if name and name not in adapters:
            raise AdapterNotFoundError(name, adapters)

    async def _check_schema(self, schema: str) -> None:
        if not schema:
            return
        if not self._host.service.text.takes_schemas:
            raise InvalidRequestError.of(
                "config.json_schema", "this server runs without sampling.enable_structured_output"
            )
        try:
            # A large schema takes milliseconds, which are not the event loop's to give.
            await asyncio.to_thread(check_json_schema, schema)
        except RequestError as error:
            raise InvalidRequestError.of("config.json_schema", str(error)) from error

    def _check_input(self, proto: pb.GenerationInput, wrong: Violations) -> None:
        kind = proto.WhichOneof("input")
        wrong.require(kind is not None, "input", "holds neither prompt, chat nor token_ids")
        most, length = self._host.config.max_stream_characters, _num_characters(proto)
        wrong.require(length <= most, f"input.{kind}", f"is longer than {most} characters")
        most_ids = f"has more than {most} tokens"
        wrong.require(len(proto.token_ids.ids) <= most, "input.token_ids", most_ids)
        if kind == "prompt":
            _check_characters(proto.prompt, "input.prompt", wrong)
        for index, message in enumerate(proto.chat.messages):
            path = f"input.chat.messages[{index}]"
            wrong.one_of(message.role, ROLES, f"{path}.role")
            _check_characters(message.content, f"{path}.content", wrong)


def _check_config(config: pb.GenerationConfig, wrong: Violations) -> None:
    wrong.found += read_sampling(config.sampling).violations()
    stops = config.sampling.stop
    wrong.require(
        len(stops) <= MAX_STOPS and all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops),
        "config.sampling.stop",
        f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
    )
    few = len(config.sampling.stop_token_ids) <= MAX_STOPS
    wrong.require(few, "config.sampling.stop_token_ids", f"must be at most {MAX_STOPS} ids")
    most = MAX_TOP_LOGPROBS
    wrong.require(
        0 <= config.top_logprobs <= most, "config.top_logprobs", f"must be in [0, {most}]"
    )
    wrong.require(
        abs(config.priority) <= MAX_PRIORITY, "config.priority", f"must be in ±{MAX_PRIORITY}"
    )


def _check_inputs(request: pb.EmbedRequest, max_characters: int) -> None:
    with Violations() as wrong:
        wrong.request_id(request.request_id, "request_id")
        most = MAX_EMBED_INPUTS
        wrong.require(0 < len(request.inputs) <= most, "inputs", f"must be 1 to {most} texts")
        for index, text in enumerate(request.inputs[:most]):
            field = f"inputs[{index}]"
            _check_characters(text, field, wrong)
            fits = 0 < len(text) <= max_characters
            wrong.require(fits, field, f"must have 1 to {max_characters} characters")


def _check_characters(text: str, field: str, wrong: Violations) -> None:
    try:
        check_text(text)
    except TextError as error:
        wrong.require(False, field, error.violations[0].description)


def _num_characters(proto: pb.GenerationInput) -> int:
    return sum(map(len, _texts(proto)))


def _texts(proto: pb.GenerationInput) -> list[str]:
    return [proto.prompt, *(message.content for message in proto.chat.messages)]


def _prompt_ids(proto: pb.GenerationInput, prompts: PromptBuilder) -> tuple[int, ...]:
    kind = proto.WhichOneof("input")
    if kind == "prompt":
        return prompts.text_prompt(proto.prompt)
    if kind == "chat":
        return prompts.chat_prompt(
            [ChatMessage(ROLES[m.role], m.content) for m in proto.chat.messages]
        )
    if not proto.token_ids.ids:
        raise InvalidRequestError.of("input.token_ids", "there are no tokens")
    return tuple(proto.token_ids.ids)


def _sampling(config: pb.GenerationConfig, model: TextModel) -> SamplingParams:
    asked = read_sampling(config.sampling)
    min_tokens = asked.min_tokens or 0
    try:
        return replace(
            asked.over(model.sampling),
            seed=secrets.randbits(64) if asked.seed is None else asked.seed,
            min_tokens=min_tokens,
            max_tokens=asked.max_tokens or max(DEFAULT_MAX_TOKENS, min_tokens),
            stop_token_ids=tuple(
                dict.fromkeys((*model.stop_token_ids, *config.sampling.stop_token_ids))
            ),
            ignore_eos=config.sampling.ignore_eos,
            top_logprobs=config.top_logprobs or (0 if config.echo else None),
            echo=config.echo,
            json_schema=config.json_schema,
        )
    except RequestError as error:
        raise InvalidRequestError.of("config.sampling", str(error)) from error


async def _send(call: Call, piece: TextPiece) -> None:
    scored = piece.prompt_logprobs
    for start in range(0, len(scored), ECHO_PER_MESSAGE):
        part = _logprobs(scored[start : start + ECHO_PER_MESSAGE])
        await call.write(pb.GenerateStreamResponse(delta=pb.TextDelta(prompt_logprobs=part)))
    if piece.text or piece.token_ids:
        delta = pb.TextDelta(
            text=piece.text, token_ids=piece.token_ids, logprobs=_logprobs(piece.logprobs)
        )
        await call.write(pb.GenerateStreamResponse(delta=delta))
    _note(call, piece)
    if piece.finish_reason is not None:
        done = pb.GenerationDone(
            finish_reason=FINISH_REASONS[piece.finish_reason],
            usage=_usage(call, piece),
            timings=to_timings(piece.timings),
        )
        await call.write(pb.GenerateStreamResponse(done=done))


def _logprobs(entries: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.TopLogprob(token_id=i, logprob=value) for i, value in entry.top],
        )
        for entry in entries
    ]


def _note(call: Call, piece: TextPiece) -> None:
    call.facts.prompt_tokens, call.facts.output_tokens = piece.prompt_tokens, piece.output_tokens
    call.note_timings(piece.timings.queue_s or 0.0, piece.timings.prefill_s or 0.0)


def _usage(call: Call, piece: TextPiece) -> common_pb2.Usage:
    return common_pb2.Usage(
        input_characters=call.facts.characters,
        prompt_tokens=piece.prompt_tokens,
        cached_prompt_tokens=piece.cached_prompt_tokens,
        output_tokens=piece.output_tokens,
    )

"""TextService without gRPC: protocol messages in, pieces of text and embeddings out.

Servicers of all protocols use it, so they check, limit and count requests alike. Checks are cheap
and run before a request waits in the queue.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from llm import Request, RequestError, check_json_schema
from tts.config.server import ServerConfig
from tts.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    ModelNotFoundError,
    Precondition,
    PreconditionError,
)
from tts.families.prompt import encoded
from tts.server.call import Call
from tts.server.wire.common import Violations
from tts.server.wire.text import (
    TEMPLATE_CHARACTERS,
    check_config,
    check_embed,
    check_input,
    prompt_ids,
    read_text_sampling,
)
from tts.textgen.embedder import Embedded, TextEmbedder
from tts.textgen.generator import TextGenerator, TextPiece
from tts.v1 import text_pb2 as pb

if TYPE_CHECKING:
    from tts.factory import Service

GenerateProto = pb.GenerateRequest | pb.GenerateStreamRequest | pb.GenerateSpeechRequest


class TextApi:
    """Implementation of TextService's messages on one served model."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self.service = service
        self._config = config
        self.write = TextGenerator(service.client, service.prompts).write
        """Stream a checked request; see `TextGenerator.write`."""
        pools = service.text.pools_embeddings
        self._embedder = TextEmbedder(service.client, service.prompts, pools=pools)

    async def check(self, call: Call, proto: GenerateProto) -> Request:
        """Return the checked request with its prompt tokens and sampling parameters.

        Raises InvalidRequestError with every wrong field found, ModelNotFoundError,
        AdapterNotFoundError or PreconditionError.
        """
        config, text = proto.config, self.service.text
        if config.request_id:
            call.adopt_id(config.request_id)
        if config.model:
            self._check_model(config.model)
        if text.embeds or text.only_speaks:
            does = "embeds texts; it does not generate" if text.embeds else "only speaks"
            raise PreconditionError(Precondition.TEXT_GENERATION, f"this model {does}")
        if config.lora:
            self._check_adapter(config.lora)
        wrong = Violations()
        if config.request_id:
            wrong.request_id(config.request_id, "config.request_id")
        given = check_config(config, wrong)
        can_echo = text.echoes or not config.echo
        wrong.require(can_echo, "config.echo", "this server runs without enable_echo")
        texts = check_input(proto.input, self._config.max_stream_characters, wrong)
        if wrong:
            raise InvalidRequestError(*wrong)
        if config.json_schema:
            await self._check_schema(config.json_schema)
        for part in texts:
            call.note_text(part)
        length = sum(map(len, texts)) + TEMPLATE_CHARACTERS * len(proto.input.chat.messages)
        prompts = self.service.prompts
        return Request(
            request_id=call.request_id,
            prompt_ids=await encoded(length, prompt_ids, proto.input, prompts),
            sampling=read_text_sampling(config, given, text),
            priority=config.priority,
            lora=config.lora,
        )

    def check_embed(self, call: Call, proto: pb.EmbedRequest) -> None:
        """Check a request for embeddings; raises as `check` does."""
        call.adopt_id(proto.request_id)
        if proto.model:
            self._check_model(proto.model)
        if not self.service.text.embeds:
            raise PreconditionError(
                Precondition.EMBEDDING, "this model generates; it does not embed texts"
            )
        if proto.lora:
            self._check_adapter(proto.lora)
        check_embed(proto, self._config.max_stream_characters)
        for text in proto.inputs:
            call.note_text(text)

    async def embed(self, call: Call, proto: pb.EmbedRequest) -> list[Embedded]:
        """Return the embedding of each input of a checked request."""
        found = await self._embedder.embed(call.request_id, proto.inputs, proto.lora)
        call.prompt_tokens = sum(item.num_tokens for item in found)
        return found

    def _check_model(self, name: str) -> None:
        known = self.service.model
        if name != known:
            raise ModelNotFoundError(name, (known,))

    def _check_adapter(self, name: str) -> None:
        adapters = self.service.text.adapters
        if name not in adapters:
            raise AdapterNotFoundError(name, adapters)

    async def _check_schema(self, schema: str) -> None:
        if not self.service.text.takes_schemas:
            raise InvalidRequestError.of(
                "config.json_schema", "this server runs without sampling.enable_structured_output"
            )
        try:
            # Compiling a large schema takes milliseconds and would block the event loop.
            await asyncio.to_thread(check_json_schema, schema)
        except RequestError as error:
            raise InvalidRequestError.of("config.json_schema", str(error)) from error


def note_piece(call: Call, piece: TextPiece) -> None:
    """Record a piece of text in the statistics of its call."""
    call.prompt_tokens, call.output_tokens = piece.prompt_tokens, piece.output_tokens
    call.note_timings(piece.queue_s, piece.prefill_s)

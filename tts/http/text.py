"""POST /v1/chat/completions, /v1/completions and /v1/embeddings, on the path of TextService."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.routing import BaseRoute

from tts.errors import InvalidRequestError, Precondition, PreconditionError
from tts.http.endpoint import Shared
from tts.http.exchange import Exchange, data_event
from tts.http.responses import LAST_EVENT, ChatResponse, CompletionResponse, TextResponse
from tts.http.spoken_chat import speak_chat
from tts.http.text_body import (
    CHAT_NAMES,
    COMPLETION_NAMES,
    EMBEDDING_NAMES,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    GenerationBody,
    TextBody,
    chat_request,
    completion_request,
    embed_request,
)
from tts.server.text_api import note_piece
from tts.textgen.embedder import Embedded
from tts.v1 import text_pb2 as pb

Body = TypeVar("Body", bound=TextBody)


def routes(shared: Shared) -> list[BaseRoute]:
    """Return the routes of this module."""
    return [
        shared.route("POST", "/v1/chat/completions", _chat, has_body=True, names=CHAT_NAMES),
        shared.route("POST", "/v1/completions", _complete, has_body=True, names=COMPLETION_NAMES),
        shared.route("POST", "/v1/embeddings", _embed, has_body=True, names=EMBEDDING_NAMES),
    ]


async def _chat(exchange: Exchange) -> None:
    body = await _read(exchange, ChatBody)
    message = chat_request(body, exchange.host.text.service)
    host = exchange.host
    is_mute = host.service.synthesizer is None and host.config.speech_server is None
    if body.spoken is not None and is_mute:
        raise InvalidRequestError.of("modalities", "must be text; this server has no voice")
    if body.spoken is None:
        await _generate(exchange, body, message, ChatResponse(exchange, body, body.logprobs))
    else:
        exchange.name_ignored((*body.ignored, *body.spoken.ignored_by(host.speaker.names)))
        await speak_chat(exchange, body, body.spoken, message)


async def _complete(exchange: Exchange) -> None:
    body = await _read(exchange, CompletionBody)
    message = completion_request(body, exchange.host.text.service)
    scored = body.logprobs is not None
    await _generate(exchange, body, message, CompletionResponse(exchange, body, scored))


async def _read(exchange: Exchange, kind: type[Body]) -> Body:
    body = await exchange.json(kind)
    body.refuse_unsupported()
    exchange.name_ignored(body.ignored)
    return body


async def _generate(
    exchange: Exchange, body: GenerationBody, message: pb.GenerateRequest, response: TextResponse
) -> None:
    """Write a text and send it; nothing is sent before the first token."""
    host, call = exchange.host, exchange.call
    request, stops = await host.text.check(call, message), message.config.sampling.stop
    if body.stream:
        exchange.begin_events()
    async with host.enter(call), aclosing(host.text.write(request, stops)) as pieces:
        async for piece in pieces:
            note_piece(call, piece)
            if not body.stream:
                response.add(piece)
            elif events := b"".join(map(data_event, response.events(piece))):
                await exchange.write(events)
    if body.stream:
        await exchange.finish(LAST_EVENT)
    else:
        await exchange.reply(response.whole())


async def _embed(exchange: Exchange) -> None:
    host, call = exchange.host, exchange.call
    body = await _read(exchange, EmbeddingBody)
    message = embed_request(body, host.text.service)
    host.text.check_embed(call, message)
    if not host.text.service.text.pools_embeddings:
        raise PreconditionError(
            Precondition.EMBEDDING,
            "this server has a vector for each token (pool_embeddings is off); use gRPC",
        )
    async with host.enter(call):
        found = await host.text.embed(call, message)
    num_tokens = call.prompt_tokens
    await exchange.reply(
        {
            "object": "list",
            "model": body.model or host.text.service.model,
            "data": await asyncio.to_thread(_vectors, found, body.encoding_format),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _vectors(found: Sequence[Embedded], encoding: str) -> list[dict[str, Any]]:
    """Return the vectors, encoded one by one: a million numbers take a tenth of a second."""
    encode = _to_base64 if encoding == "base64" else _to_json
    return [
        {"object": "embedding", "index": index, "embedding": encode(item.vectors[0])}
        for index, item in enumerate(found)
    ]


def _to_json(vector: np.ndarray) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))


def _to_base64(vector: np.ndarray) -> str:
    return b64encode(vector.tobytes()).decode()

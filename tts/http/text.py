"""POST /v1/chat/completions, /v1/completions and /v1/embeddings, on the path of TextService."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.routing import BaseRoute

from llm import TokenLogprob
from tts.checkpoint.tokenizer import IncrementalDetokenizer, TextTokenizer
from tts.errors import Precondition, PreconditionError
from tts.http.endpoint import Shared
from tts.http.exchange import Exchange, data_event
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
from tts.textgen.generator import TextPiece
from tts.v1 import text_pb2 as pb

LAST_EVENT = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity

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
    message = chat_request(body, exchange.host.service)
    await _generate(exchange, body, message, ChatResponse(exchange, body, body.logprobs))


async def _complete(exchange: Exchange) -> None:
    body = await _read(exchange, CompletionBody)
    message = completion_request(body, exchange.host.service)
    scored = body.logprobs is not None
    await _generate(exchange, body, message, CompletionResponse(exchange, body, scored))


async def _read(exchange: Exchange, kind: type[Body]) -> Body:
    body = await exchange.json(kind)
    body.refuse_unsupported()
    exchange.name_ignored(body.ignored)
    return body


class TextResponse(ABC):
    """Response of one request for text. Every piece goes to `add` or, for a stream, to `events`."""

    prefix: str  # of the id
    kind: str
    event_kind: str

    def __init__(self, exchange: Exchange, body: GenerationBody, is_scored: bool) -> None:
        service = exchange.host.service
        self._fields = {
            "id": f"{self.prefix}-{exchange.call.request_id}",
            "created": int(time.time()),
            "model": body.model or service.model,
        }
        self._includes_usage = body.includes_usage
        self._tokenizer = service.prompts.tokenizer
        self._is_scored = is_scored
        self._is_open = False
        self._texts: list[str] = []
        self._collected: dict[str, list[Any]] = {}
        self._last = TextPiece("")

    def add(self, piece: TextPiece) -> None:
        """Collect the next piece of a whole response."""
        self._last = piece
        self._texts.append(piece.text)
        for name, values in (self._scores(piece) or {}).items():
            self._collected.setdefault(name, []).extend(values)

    def whole(self) -> dict[str, Any]:
        """Return the JSON of all pieces together."""
        choice = {
            "index": 0,
            **self._message("".join(self._texts)),
            "logprobs": self._collected if self._is_scored else None,
            "finish_reason": _reason(self._last),
        }
        usage = _usage(self._last)
        return {**self._fields, "object": self.kind, "choices": [choice], "usage": usage}

    def events(self, piece: TextPiece) -> Iterator[dict[str, Any]]:
        """Yield the JSON of the events for the next piece, without the end of the stream."""
        if not self._is_open and (opening := self._opening()):
            yield self._event(opening)
        self._is_open = True
        if piece.text or (self._is_scored and piece.logprobs):
            yield self._event(self._delta(piece.text), self._scores(piece))
        if piece.finish_reason is not None:
            yield self._event(self._delta(""), reason=_reason(piece))
            if self._includes_usage:
                yield {**self._event({}), "choices": [], "usage": _usage(piece)}

    def _event(
        self, delta: dict[str, Any], scores: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, **delta, "logprobs": scores, "finish_reason": reason}
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._fields, "object": self.event_kind, "choices": [choice], **usage}

    def _scores(self, piece: TextPiece) -> dict[str, list[Any]] | None:
        return self._logprobs(piece.logprobs) if self._is_scored else None

    @abstractmethod
    def _message(self, text: str) -> dict[str, Any]:
        """Return the fields of a choice for a whole text."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """Return the fields of a choice for a piece of text; the last one is empty."""

    def _opening(self) -> dict[str, Any]:
        """Return the fields of a choice before the first piece; none for no event."""
        return {}

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Return the log-probabilities of tokens; called with each token once, in order."""


class ChatResponse(TextResponse):
    """Response of /v1/chat/completions."""

    prefix, kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        scored = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(*top) for top in entry.top],
            }
            for entry in entries
        ]
        return {"content": scored}

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        spelling = self._tokenizer.token_bytes(token_id)
        token = {"token": _spelled(spelling), "bytes": list(spelling)}
        return {**token, "logprob": _number(logprob)}


class CompletionResponse(TextResponse):
    """Response of /v1/completions."""

    prefix, kind, event_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, exchange: Exchange, body: GenerationBody, is_scored: bool) -> None:
        super().__init__(exchange, body, is_scored)
        self._offsets = _Offsets(self._tokenizer)

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _message

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        return {
            "tokens": [self._token(entry.token_id) for entry in entries],
            "token_logprobs": [_number(entry.logprob) for entry in entries],
            "top_logprobs": [
                {
                    self._token(token_id): _number(logprob)
                    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob))
                }
                for entry in entries
            ],
            "text_offset": [self._offsets.push(entry.token_id) for entry in entries],
        }

    def _token(self, token_id: int) -> str:
        return _spelled(self._tokenizer.token_bytes(token_id))


class _Offsets:
    """Counter of characters before each token of a text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._num_characters = 0

    def push(self, token_id: int) -> int:
        """Return the number of complete characters before the next token."""
        before = self._num_characters
        self._num_characters += len(self._detokenizer.push((token_id,)))
        return before


async def _generate(
    exchange: Exchange, body: GenerationBody, message: pb.GenerateRequest, response: TextResponse
) -> None:
    """Write a text and send it; nothing is sent before the first token."""
    host, call = exchange.host, exchange.call
    request = await host.text.check(call, message)
    if body.stream:
        exchange.begin_events()
    async with host.enter(call), aclosing(host.text.write(request)) as pieces:
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
    message = embed_request(body, host.service)
    host.text.check_embed(call, message)
    if not host.service.text.pools_embeddings:
        raise PreconditionError(
            Precondition.EMBEDDING,
            "this server has a vector for each token (pool_embeddings is off); use gRPC",
        )
    async with host.enter(call):
        found = await host.text.embed(call, message)
    num_tokens = call.stats.prompt_tokens
    await exchange.reply(
        {
            "object": "list",
            "model": body.model or host.service.model,
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


def _usage(piece: TextPiece) -> dict[str, Any]:
    return {
        "prompt_tokens": piece.prompt_tokens,
        "completion_tokens": piece.output_tokens,
        "total_tokens": piece.prompt_tokens + piece.output_tokens,
        "prompt_tokens_details": {"cached_tokens": piece.cached_prompt_tokens},
    }


def _reason(piece: TextPiece) -> str:
    assert piece.finish_reason is not None
    return piece.finish_reason.value


def _spelled(spelling: bytes) -> str:
    r"""Return a token's text; bytes that are no whole character become \xNN."""
    return spelling.decode(errors="backslashreplace")


def _number(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)

"""Responses to requests for text in OpenAI's shapes, whole or as chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from llm import TokenLogprob
from tts.checkpoint.tokenizer import IncrementalDetokenizer, TextTokenizer
from tts.http.exchange import Exchange
from tts.http.text_body import GenerationBody
from tts.textgen.generator import TextPiece

LAST_EVENT = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class TextResponse(ABC):
    """Response of one request for text. Every piece goes to `add` or, for a stream, to `events`."""

    prefix: str  # of the id
    kind: str
    event_kind: str

    def __init__(self, exchange: Exchange, body: GenerationBody, is_scored: bool) -> None:
        service = exchange.host.text.service
        self._created = int(time.time())
        self._fields = {
            "id": f"{self.prefix}-{exchange.call.request_id}",
            "created": self._created,
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
            "finish_reason": self._reason(self._last),
        }
        usage = self._usage(self._last)
        return {**self._fields, "object": self.kind, "choices": [choice], "usage": usage}

    def events(self, piece: TextPiece) -> Iterator[dict[str, Any]]:
        """Yield the JSON of the events for the next piece, without the end of the stream."""
        yield from self._text_chunks(piece)
        if piece.finish_reason is not None:
            yield from self._last_chunks(piece)

    def _text_chunks(self, piece: TextPiece) -> Iterator[dict[str, Any]]:
        if not self._is_open and (opening := self._opening()):
            yield self._event(opening)
        self._is_open = True
        if piece.text or (self._is_scored and piece.logprobs):
            yield self._event(self._delta(piece.text), self._scores(piece))

    def _last_chunks(self, piece: TextPiece) -> Iterator[dict[str, Any]]:
        yield self._event(self._delta(""), reason=self._reason(piece))
        if self._includes_usage:
            yield {**self._event({}), "choices": [], "usage": self._usage(piece)}

    def _event(
        self, delta: dict[str, Any], scores: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, **delta, "logprobs": scores, "finish_reason": reason}
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._fields, "object": self.event_kind, "choices": [choice], **usage}

    def _reason(self, piece: TextPiece) -> str:
        """Return the reason of the end, from the last piece."""
        assert piece.finish_reason is not None
        return piece.finish_reason.value

    def _usage(self, piece: TextPiece) -> dict[str, Any]:
        """Return the usage, from the last piece."""
        return usage_fields(piece)

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


def usage_fields(piece: TextPiece) -> dict[str, Any]:
    """Return the JSON of the usage of a text, from its last piece."""
    return {
        "prompt_tokens": piece.prompt_tokens,
        "completion_tokens": piece.output_tokens,
        "total_tokens": piece.prompt_tokens + piece.output_tokens,
        "prompt_tokens_details": {"cached_tokens": piece.cached_prompt_tokens},
    }


def _spelled(spelling: bytes) -> str:
    r"""Return a token's text; bytes that are no whole character become \xNN."""
    return spelling.decode(errors="backslashreplace")


def _number(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)

"""Text generation: prompt ids in, pieces of text out, ended by tokens or by stop strings."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from llm import (
    FinishReason,
    Request,
    RequestError,
    TokenChunk,
    TokenLogprob,
    as_ids,
)
from tts.checkpoint.tokenizer import IncrementalDetokenizer
from tts.engine.client import EngineClient, Hold
from tts.errors import InvalidRequestError, SynthesisError
from tts.families.prompt import PromptBuilder

MAX_STOP_CHARACTERS = 1000
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Tokens and the text that became final with them.

    The beginning of a possible stop string, or of a character, is held back for a later piece.
    Only the last piece has a `finish_reason`; the counts are cumulative.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    queue_s: float | None = None  # as in `TokenChunk`
    prefill_s: float | None = None
    total_s: float = 0.0


class TextGenerator:
    """Text generation with one engine; any number of requests at once."""

    def __init__(self, client: EngineClient, prompts: PromptBuilder) -> None:
        self._client, self._prompts = client, prompts

    async def write(
        self, request: Request, stops: Sequence[str] = (), hold: Hold | None = None
    ) -> AsyncGenerator[TextPiece, None]:
        """Stream a request, which `hold` may interrupt; closing the iterator cancels it.

        From `min_tokens` on, one of the strings `stops` ends the text before its first character.
        Raises the engine's errors for invalid requests, InvalidRequestError when no token fits the
        schema, and SynthesisError.
        """
        detokenizer = IncrementalDetokenizer(self._prompts.tokenizer)
        min_tokens = request.sampling.min_tokens
        cutter = _StopCutter(detokenizer, stops, min_tokens) if stops else None
        engine_id = f"{request.request_id}#text{next(_numbers)}"  # a client may use an id twice
        sent = replace(request, request_id=engine_id)
        async with aclosing(self._client.generate(sent, hold)) as chunks:
            async for chunk in chunks:
                if chunk.is_refused:
                    raise InvalidRequestError.of("config.json_schema", chunk.error)
                if chunk.finish_reason is FinishReason.ERROR:
                    raise SynthesisError(f"request {request.request_id}: {chunk.error}")
                if cutter is None:
                    is_last = chunk.finish_reason is not None
                    text = detokenizer.push(as_ids(chunk.token_ids), is_last=is_last)
                    piece = _piece(text, chunk)
                else:
                    piece = cutter.push(chunk)
                yield piece
                if piece.finish_reason is not None:
                    return


class _StopCutter:
    """Converter of the chunks of a stream with stop strings, however its tokens are bundled."""

    def __init__(
        self, detokenizer: IncrementalDetokenizer, stops: Sequence[str], min_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, chunk: TokenChunk) -> TextPiece:
        """Return the text that is final with this chunk, cut before a stop string."""
        matcher, texts = self._matcher, []
        for place, token_id in enumerate(as_ids(chunk.token_ids), start=1):
            text = self._detokenizer.push((token_id,))
            self._num_tokens += 1
            is_matched = self._num_tokens > self._min_tokens
            texts.append(matcher.push(text) if is_matched else text)
            if matcher.is_stopped:
                return _piece("".join(texts), _cut(chunk, place))
        if chunk.finish_reason is not None:
            texts += [matcher.push(self._detokenizer.finish()), matcher.finish()]
        if matcher.is_stopped:  # by a partial character, which has become U+FFFD
            chunk = _cut(chunk, len(chunk.token_ids))
        return _piece("".join(texts), chunk)


def _cut(chunk: TokenChunk, num_tokens: int) -> TokenChunk:
    """Return the chunk up to the token that completed a stop string."""
    num_dropped = len(chunk.token_ids) - num_tokens
    return chunk._replace(
        token_ids=chunk.token_ids[:num_tokens],
        logprobs=chunk.logprobs[:num_tokens],
        output_tokens=chunk.output_tokens - num_dropped,
        finish_reason=FinishReason.STOP,
    )


def _piece(text: str, chunk: TokenChunk) -> TextPiece:
    return TextPiece(
        text=text,
        token_ids=tuple(as_ids(chunk.token_ids)),
        logprobs=chunk.logprobs,
        prompt_logprobs=chunk.prompt_logprobs,
        finish_reason=chunk.finish_reason,
        prompt_tokens=chunk.prompt_tokens,
        cached_prompt_tokens=chunk.cached_prompt_tokens,
        output_tokens=chunk.output_tokens,
        queue_s=chunk.queue_s,
        prefill_s=chunk.prefill_s,
        total_s=chunk.total_s,
    )


class StopMatcher:
    """Filter that ends a stream of text before the first stop string, however the text is cut.

    It holds back only text that could become a stop string. Of several matches the one that is
    complete first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise RequestError(f"stop strings have 1 to {MAX_STOP_CHARACTERS} characters")
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Return the text that can be sent; nothing after a stop string."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((self._partial_len(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that is still held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _partial_len(text: str, stop: str) -> int:
        """Return the length of the longest end of the text that begins the stop string."""
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

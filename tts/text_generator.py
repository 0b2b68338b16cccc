"""Text out of the engine: prompt ids in, pieces of text out, ended by tokens or by stop strings."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from llm import FinishReason, Request, RequestTimings, SamplingParams, TokenChunk, TokenLogprob
from tts.engine_client import EngineClient
from tts.errors import InvalidRequestError, SynthesisError
from tts.prompt import PromptBuilder
from tts.tokenizer import IncrementalDetokenizer, StopMatcher
from tts.utterance import closing

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt to go on from."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    priority: int = 0
    lora: str = ""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some tokens and the text that became certain with them.

    Text that could still become a stop string, or is half a character, comes with a later piece.
    The last piece, and only it, has a `finish_reason`; the counts are those so far.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    timings: RequestTimings = field(default_factory=RequestTimings)


class TextGenerator:
    """Writes text with one engine; any number of requests at once."""

    def __init__(self, client: EngineClient, prompts: PromptBuilder) -> None:
        self._client, self._prompts = client, prompts

    async def write(self, request: TextRequest) -> AsyncIterator[TextPiece]:
        """Stream a request; closing the iterator cancels it. A stop string ends it before itself,
        from `min_tokens` on.

        Raises what the engine raises for requests that do not fit, InvalidRequestError when the
        document comes to a point where nothing fits its schema, and SynthesisError.
        """
        writer = _Writer(self._prompts.detokenizer(), request)
        async with closing(self._client.generate(_engine_request(request))) as chunks:
            async for chunk in chunks:
                if chunk.is_refused:
                    raise InvalidRequestError.of("config.json_schema", chunk.error)
                if chunk.finish_reason is FinishReason.ERROR:
                    raise SynthesisError(f"request {request.request_id}: {chunk.error}")
                piece = writer.push(chunk)
                yield piece
                if piece.finish_reason is not None:
                    return


class _Writer:
    """One stream's chunks to pieces, token by token: how they come together does not show."""

    def __init__(self, detokenizer: IncrementalDetokenizer, request: TextRequest) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(request.stops)
        self._min_tokens = request.sampling.min_tokens
        self._num_tokens = 0

    def push(self, chunk: TokenChunk) -> TextPiece:
        """What is certain with this chunk; what comes after a stop string is left out."""
        matcher, texts = self._matcher, []
        for place, token_id in enumerate(chunk.token_ids, start=1):
            text = self._detokenizer.push((token_id,))
            self._num_tokens += 1
            is_matched = self._num_tokens > self._min_tokens
            texts.append(matcher.push(text) if is_matched else text)
            if matcher.is_stopped:
                return _piece("".join(texts), _cut(chunk, place))
        if chunk.finish_reason is not None:
            texts += [matcher.push(self._detokenizer.finish()), matcher.finish()]
        if matcher.is_stopped:  # by half a character, which has become U+FFFD
            chunk = _cut(chunk, len(chunk.token_ids))
        return _piece("".join(texts), chunk)


def _cut(chunk: TokenChunk, num_tokens: int) -> TokenChunk:
    """The chunk up to the token that completed a stop string."""
    num_dropped = len(chunk.token_ids) - num_tokens
    return chunk._replace(
        token_ids=chunk.token_ids[:num_tokens],
        logprobs=chunk.logprobs[:num_tokens],
        output_tokens=chunk.output_tokens - num_dropped,
        finish_reason=FinishReason.STOP,
    )


def _engine_request(request: TextRequest) -> Request:
    """With an id of our own: a client's id is not unique among those that run."""
    engine_id = f"{request.request_id}#text{next(_numbers)}"
    return Request(
        engine_id, request.prompt_ids, request.sampling, request.priority, lora=request.lora
    )


def _piece(text: str, chunk: TokenChunk) -> TextPiece:
    return TextPiece(
        text=text,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        prompt_logprobs=chunk.prompt_logprobs,
        finish_reason=chunk.finish_reason,
        prompt_tokens=chunk.prompt_tokens,
        cached_prompt_tokens=chunk.cached_prompt_tokens,
        output_tokens=chunk.output_tokens,
        timings=chunk.timings,
    )

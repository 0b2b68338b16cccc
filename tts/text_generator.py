"""Text out of the engine: prompt ids in, pieces of text out, ended by tokens or by stop strings."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from llm import FinishReason, Request, RequestTimings, SamplingParams, TokenChunk, TokenLogprob
from tts.engine_client import EngineClient
from tts.errors import SynthesisError
from tts.prompt import PromptBuilder
from tts.tokenizer import StopMatcher
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
        """Stream a request; closing the iterator cancels it. A stop string ends it before itself.

        Raises what the engine raises for requests that do not fit, and SynthesisError.
        """
        detokenizer, matcher = self._prompts.detokenizer(), StopMatcher(request.stops)
        async with closing(self._client.generate(_engine_request(request))) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is FinishReason.ERROR:
                    raise SynthesisError(f"request {request.request_id}: {chunk.error}")
                text = matcher.push(detokenizer.push(chunk.token_ids))
                if chunk.finish_reason is not None:
                    text += matcher.push(detokenizer.finish()) + matcher.finish()
                if matcher.is_stopped:
                    yield _piece(text, chunk._replace(finish_reason=FinishReason.STOP))
                    return
                yield _piece(text, chunk)


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

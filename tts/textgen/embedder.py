"""Embeddings of texts, by an engine with an embedding model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from llm import FinishReason, Request
from tts.engine.client import EngineClient
from tts.errors import SynthesisError
from tts.families.prompt import PromptBuilder, encoded

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Embedded:
    """Embedding of one text: a single vector, or one for each token."""

    token_ids: tuple[int, ...]
    vectors: tuple[np.ndarray, ...]  # float32 [H] each
    is_pooled: bool

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the text."""
        return len(self.token_ids)

    def labelled(self) -> Iterator[tuple[int | None, np.ndarray]]:
        """Iterate over (token id, vector); the id is None for the vector of the whole text."""
        if self.is_pooled:
            return zip((None,), self.vectors, strict=True)
        return zip(self.token_ids, self.vectors, strict=True)


class TextEmbedder:
    """Client that embeds any number of texts at once; the engine batches them."""

    def __init__(self, client: EngineClient, prompts: PromptBuilder, *, pools: bool = True) -> None:
        self._client, self._prompts, self._pools = client, prompts, pools

    async def embed(self, name: str, texts: Sequence[str], lora: str = "") -> list[Embedded]:
        """Return the embedding of each text. A failure or a cancellation ends all of them.

        Raises the engine's errors for invalid texts, and SynthesisError.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._embed(name, text, lora)) for text in texts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _embed(self, name: str, text: str, lora: str) -> Embedded:
        ids = await encoded(len(text), self._prompts.text_prompt, text)
        request = Request(f"{name}#embed{next(_numbers)}", ids, embeds=True, lora=lora)
        async with aclosing(self._client.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is FinishReason.ERROR:
                    raise SynthesisError(f"request {name}: {chunk.error}")
                if chunk.embeddings:
                    vectors = tuple(np.frombuffer(v, dtype="<f4") for v in chunk.embeddings)
                    return Embedded(ids, vectors, self._pools)
        raise SynthesisError(f"request {name}: the engine returned no embedding")

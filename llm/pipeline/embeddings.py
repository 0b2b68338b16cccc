"""`Embeddings`: the vectors of texts that are embedded, kept until their last chunk was fed.

A text is pooled in one piece whatever chunks it was fed in, so the chunks do not show.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm.batch import ModelInputs, ModelOutputs, ScheduledRow
from llm.errors import RequestError
from llm.models.pooling import PoolingSpec
from llm.request import Request


class Embeddings:
    """`spec` None: the model generates. `pools`: one vector for a text, else one for each token."""

    def __init__(self, spec: PoolingSpec | None, *, pools: bool) -> None:
        self._spec = spec
        self._pools = pools
        self._chunks: dict[str, list[Tensor]] = {}  # [T, H] each

    def admit(self, request: Request) -> None:
        """Raise `RequestError` for what this model is not made for. Thread-safe."""
        if request.embeds and self._spec is None:
            raise RequestError("this model generates; it does not embed")
        if not request.embeds and self._spec is not None:
            raise RequestError("this model embeds; it does not generate")

    def release(self, request_id: str) -> None:
        """Forget a request; harmless when nothing is known of it."""
        self._chunks.pop(request_id, None)

    def take(
        self, rows: Sequence[ScheduledRow], inputs: ModelInputs, outputs: ModelOutputs
    ) -> dict[str, tuple[bytes, ...]]:
        """The embeddings of every row whose text has now been fed."""
        if self._spec is None or outputs.hidden_states is None:
            return {}
        found = {}
        offsets = inputs.forward_batch.row_offsets
        for index, row in enumerate(rows):
            hidden = outputs.hidden_states[offsets[index] : offsets[index + 1]]
            if row.start == 0:
                self._chunks[row.request_id] = []
            chunks = self._chunks[row.request_id]
            chunks.append(hidden)
            if row.samples:
                found[row.request_id] = self._finish(self._spec, torch.cat(chunks))
                self.release(row.request_id)
        return found

    def _finish(self, spec: PoolingSpec, hidden: Tensor) -> tuple[bytes, ...]:
        vectors = spec.pool(hidden)[None] if self._pools else spec.finish(hidden)
        return tuple(vector.tobytes() for vector in vectors.cpu().numpy().astype("<f4"))

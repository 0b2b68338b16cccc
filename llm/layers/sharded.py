"""Layers whose vocabulary is split over ranks: each rank has the rows of its own ids."""

from __future__ import annotations

import torch
from torch import Tensor

from llm.layers.decoder import Embedding, Head
from llm.parallel.group import Group
from llm.request import IdRange


def sharded_embedding(embedding: Embedding, ids: Tensor, group: Group) -> Tensor:
    """Return rows [T, hidden] of ids [T]: one rank has a row, the others add zeros."""
    own = ids - group.rank * embedding.num_embeddings
    is_own = (own >= 0) & (own < embedding.num_embeddings)
    rows = embedding(torch.where(is_own, own, 0))
    return group.all_reduce(rows.mul_(is_own[:, None]))


class ShardedHead:
    """Gathers the logits that the ranks' heads compute, so that every rank has all of them."""

    def __init__(self, head: Head, num_columns: int, group: Group) -> None:
        """`head` computes [R, num_columns], the columns of this rank's ids."""
        self._head = head
        self._num_columns = num_columns
        self._group = group

    def limit(self, common: IdRange) -> bool:
        """See `Head`."""
        return False

    def __call__(
        self, hidden: Tensor, out: Tensor | None = None, needed: Tensor | None = None
    ) -> Tensor:
        """See `Head`."""
        num_rows = len(hidden)
        shelf = self._group.shelf(num_rows, self._num_columns) if num_rows else None
        if shelf is None:
            logits = self._group.all_gather(self._head(hidden))
            return logits if out is None else out.copy_(logits)
        from llm.kernels.peers import gather_shelves  # imports Triton

        self._head(hidden, shelf.rows)
        if out is None:
            shape = num_rows, self._group.size * self._num_columns
            out = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        gather_shelves(out, shelf)
        return out

"""`Embedding`: rows of a table by token id; the table may stay int8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.layers.weight import LinearWeight


class Embedding:
    """Maps [T] ids to [T, hidden]."""

    def __init__(
        self, weight: LinearWeight, *, dtype: torch.dtype, device: torch.device, int8: bool
    ) -> None:
        self.dtype = dtype
        self._scales: Tensor | None = None
        if int8:
            self.table, scales = weight.to_int8()
            self._scales = scales[:, None].to(dtype)
        else:
            self.table = weight.to_float(dtype).to(device)
        self.num_embeddings, self.hidden_size = self.table.shape

    def __call__(self, ids: Tensor) -> Tensor:
        """Return rows of the table."""
        if self._scales is None:
            return F.embedding(ids, self.table)
        return F.embedding(ids, self.table) * F.embedding(ids, self._scales)

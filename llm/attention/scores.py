"""`attend`: attention of queries over contiguous keys and values, by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, soft_cap: float | None
) -> Tensor:
    """Return attention of queries [.., Q, D] over keys and values [.., L, D]: [.., Q, D].

    `mask` is added to the scores. With a soft cap c, which maps scores s to c × tanh(s / c),
    everything is computed in float32. The result has the queries' format.
    """
    if soft_cap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    scores = query.float() @ keys.float().transpose(-1, -2) * query.shape[-1] ** -0.5
    capped = soft_cap * torch.tanh(scores / soft_cap)
    return ((capped + mask).softmax(-1) @ values.float()).to(query.dtype)

"""`distribution`: the distribution that the sampler draws a token from.

It equals the distribution of `Sampler.sample` for the same plan; only speculative decoding needs
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm.sampling.logits import cut_sorted, probabilities_of
from llm.sampling.sampler import Group, Method, SamplingPlan, adjusted


def distribution(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """Return float64 [B, V] probabilities for logits [B, V]; a greedy row has a single 1."""
    logits = adjusted(logits, plan)
    found = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for group in plan.groups:
        rows = torch.arange(len(logits), device=logits.device)
        if group.index is not None:
            rows = group.index
        weights = _weights(group, group.candidates.take(logits[rows]))
        columns = torch.arange(weights.shape[1], device=logits.device)
        ids = group.candidates.ids_of(columns)
        found[rows.unsqueeze(1), ids] = weights / weights.sum(1, keepdim=True)
    return found


def _weights(group: Group, allowed: Tensor) -> Tensor:
    """Return float64 [n, W] of the candidates' logits, not normalised."""
    weights = torch.zeros(allowed.shape, dtype=torch.float64, device=allowed.device)
    if group.method is Method.GREEDY:
        return weights.scatter_(1, allowed.argmax(dim=1, keepdim=True), 1.0)
    if group.method is Method.TOP_K:
        values, columns = torch.topk(allowed, min(group.top_k, allowed.shape[1]), dim=1)
        probabilities = torch.softmax(values.double() / group.draw.temperature, dim=1)
    else:
        plain = probabilities_of(allowed, group.draw)
        probabilities, columns = plain.sort(dim=1, descending=True, stable=True)
    return weights.scatter_(1, columns, cut_sorted(probabilities, group.draw).double())

"""Pure functions from logits to tokens.

Every row is computed independently, so that no result depends on the batch. Sums that decide are
float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_SIZE = 1024  # most likely tokens that are tried before a whole row is sorted


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """Parameters for drawing from B rows: float64 [B, 1] each."""

    temperature: Tensor  # > 0
    top_p: Tensor  # above 1: keep all tokens
    min_p: Tensor
    uniform: Tensor  # in [0, 1)
    cuts: bool = True  # whether top_p or min_p can drop tokens

    def of(self, rows: Tensor) -> DrawParameters:
        """Return the parameters of some rows."""
        return DrawParameters(
            self.temperature[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.uniform[rows],
            self.cuts,
        )


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of n pairs of a row and a generated id: all tensors are [n]."""

    rows: Tensor
    ids: Tensor
    counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def apply_(self, logits: Tensor) -> None:
        """Penalise logits [B, V] in place.

        Repetition divides positive logits and multiplies negative ones (Keskar et al. 2019);
        frequency is subtracted for each occurrence, presence once.
        """
        values = logits[self.rows, self.ids]
        values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        logits[self.rows, self.ids] = values - self.frequency * self.counts - self.presence


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Allowed tokens of n rows: one bit per token, lowest first."""

    rows: Tensor  # int64 [n]
    words: Tensor  # int32 [n, ⌈V / 32⌉]

    def apply_(self, logits: Tensor) -> None:
        """Set logits [B, V] of tokens that are not allowed to −∞, in place."""
        # Bytes take a quarter of the time of words; all supported devices are little-endian.
        octets = self.words.view(torch.uint8).unsqueeze(2)
        bits = 2 ** torch.arange(8, dtype=torch.uint8, device=octets.device)
        banned = (octets & bits).flatten(1)[:, : logits.shape[1]] == 0
        logits[self.rows] = logits[self.rows].masked_fill_(banned, -torch.inf)


def sample_top_k(logits: Tensor, top_k: int, draw: DrawParameters) -> Tensor:
    """Draw a column [B] of each row of logits [B, W] from its `top_k` best."""
    values, columns = torch.topk(logits, min(top_k, logits.shape[1]), dim=1)
    probabilities = torch.softmax(values.double() / draw.temperature, dim=1)
    return columns.gather(1, _pick_sorted(probabilities, draw)).flatten()


def sample_top_p(logits: Tensor, draw: DrawParameters) -> Tensor:
    """Draw a column [B] of each row from its nucleus (Holtzman et al. 2020).

    A nucleus among the `HEAD_SIZE` best is found without sorting the row.
    """
    probabilities = probabilities_of(logits, draw)
    width = logits.shape[1]
    best = torch.topk(probabilities, min(HEAD_SIZE, width), dim=1)
    columns = best.indices.gather(1, _pick_sorted(best.values, draw)).flatten()
    if width > HEAD_SIZE:
        reached = best.values.sum(1, dtype=torch.float64)
        wide = (reached < draw.top_p.flatten()).nonzero().flatten()
        if len(wide):
            values, order = probabilities[wide].sort(dim=1, descending=True, stable=True)
            picked = _pick_sorted(values, draw.of(wide))
            columns[wide] = order.gather(1, picked).flatten()
    return columns


def sample_any(logits: Tensor, draw: DrawParameters) -> Tensor:
    """Draw a column [B] of each row from all that is not below min_p times the largest."""
    probabilities = probabilities_of(logits, draw)
    if not draw.cuts:
        return pick(probabilities, draw.uniform).flatten()
    floor = probabilities.amax(1, True) * draw.min_p
    return pick(probabilities.where(probabilities >= floor, 0.0), draw.uniform).flatten()


def probabilities_of(logits: Tensor, draw: DrawParameters) -> Tensor:
    return torch.softmax(logits / draw.temperature.to(logits.dtype), dim=1)


def _pick_sorted(probabilities: Tensor, draw: DrawParameters) -> Tensor:
    """Draw a column [B, 1] of descending probabilities [B, K], after cutting to top_p and min_p."""
    return pick(cut_sorted(probabilities, draw), draw.uniform)


def cut_sorted(probabilities: Tensor, draw: DrawParameters) -> Tensor:
    """Return descending probabilities [B, K] in which those that top_p and min_p drop are 0.

    top_p keeps every token before which less than top_p has accumulated: always the first.
    """
    if not draw.cuts:
        return probabilities
    before = probabilities.cumsum(1, dtype=torch.float64) - probabilities
    kept = (before < draw.top_p) & (probabilities >= draw.min_p * probabilities[:, :1])
    return probabilities.where(kept, 0.0)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw a column [B, 1] by inverse cumulative distribution; weights [B, K] need not sum to 1."""
    cumulative = weights.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # uniform < 1, but the product may round up to the total, which no cumulative sum exceeds.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    columns = torch.searchsorted(cumulative, target, right=True)
    return columns.clamp_(max=weights.shape[1] - 1)  # a row of NaN must not affect the others

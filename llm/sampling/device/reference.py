"""Reference implementation of the device's sampling in plain torch, a row at a time.

It gives the same tokens as the kernels on every device, because no decision depends on
the order of a sum:

    deficit   t = ⌊(largest logit − logit) × log2(e) / temperature × 2¹⁸⌋   one rounding per step
    weight    w = 2⁻ᵗ/²¹⁸ as an integer, 2⁴³ for the largest                 sums are exact
    order     by deficit, then by id: logits closer than 2⁻¹⁸ octaves (a ratio of 1.0000026) tie

    top_k     the first k in that order                                      mass S
    top_p     of those, every token before which less than top_p × S lies
    min_p     every token with 2⁻ᵗ/²¹⁸ ≥ min_p
    draw      u × (kept mass), where it falls in the kept weights in order of ids

u is the number of (seed, index) in `rng`. Except for ties the kept tokens are those of `logits.py`,
so that the distribution equals the CPU's; the same u may give another token, since the CPU counts
down from the most likely one with top_k or top_p. NaN and −∞ count as the lowest number.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llm.sampling.device.history import MAX_COUNT, PenaltyHistory
from llm.sampling.device.records import END_OCTAVE, FRACTION_BITS, RECORD, Flag
from llm.sampling.rng import DROPPED_BITS, GOLDEN, MASK, mix

LOWEST, HIGHEST = -3.0e38, 3.0e38  # bounds of logits: their difference is never NaN
MAX_OCTAVES = 63.9  # fits FRACTION_BITS into 24
VALUE_BITS = 24  # bits of a weight within its octave
PLAIN_OCTAVES = 19  # shift 0: weights of smaller octaves are shifted left, others right
# 2⁻ᶠ for f in [0, 1), to 3e-7: highest power first. 1 at f = 0, and never rising.
COEFFICIENTS = (
    -0.0009449043427594006,
    0.009205799549818039,
    -0.0552973598241806,
    0.2401801496744156,
    -0.6931437253952026,
    1.0,
)


def sample_reference(
    logits: Tensor, records: Tensor, masks: Tensor, history: PenaltyHistory
) -> Tensor:
    """Return int32 [B] tokens for logits [B, V], records int32 [B, words] and bitmasks int32 [n, V
    / 32].

    Advances the records' indices and counts the tokens that penalised rows have drawn.
    """
    rows = records.numpy().view(RECORD).ravel()
    tokens = torch.zeros(len(logits), dtype=torch.int32)
    for place, record in enumerate(rows):
        if record["flags"] & Flag.ACTIVE:
            ids = _ids(record)
            adjusted = _adjusted(logits[place, ids].float(), ids, record, masks, history)
            tokens[place] = ids[_choose(adjusted, record)]
            _count(int(tokens[place]), record, history)
            record["index"] += 1
    return tokens


def _ids(record: np.void) -> Tensor:
    """Return int64 [width] ids of the candidates."""
    columns = torch.arange(int(record["width"]))
    ids = columns.clone()
    for first, shift in record["slices"][: record["num_slices"]].tolist():
        ids[first:] = columns[first:] + shift
    return ids


def _adjusted(
    logits: Tensor, ids: Tensor, record: np.void, masks: Tensor, history: PenaltyHistory
) -> Tensor:
    """Return float32 [width] logits after penalties and bitmask; only masked tokens are −∞."""
    if record["flags"] & Flag.PENALTIES:
        counts = history.counts[int(record["slot"]), ids].float()
        repetition, frequency, presence = (
            torch.tensor(record[name]) for name in ("repetition", "frequency", "presence")
        )
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        penalised = penalised - frequency * counts - presence
        logits = torch.where(counts > 0, penalised, logits)
    logits = logits.nan_to_num(LOWEST).clamp(LOWEST, HIGHEST)
    if record["flags"] & Flag.MASK:
        words = masks[int(record["mask"]), ids // 32]
        logits = torch.where((words >> (ids % 32)) & 1 == 1, logits, -torch.inf)
    return logits


def _choose(logits: Tensor, record: np.void) -> int:
    """Return the column of one row's token."""
    best = int(logits.argmax())
    if not record["flags"] & Flag.RANDOM or logits[best] == -torch.inf:
        return best
    deficits = _deficits(logits, record)
    columns = _kept(deficits, record)
    cumulative = weights(deficits[columns]).cumsum(0)
    number = _mixed(record) >> DROPPED_BITS << DROPPED_BITS
    target = number * int(cumulative[-1]) >> 64
    return int(columns[(cumulative <= target).sum()])


def _deficits(logits: Tensor, record: np.void) -> Tensor:
    octaves = (logits.max() - logits) * torch.tensor(record["scale"])
    return (octaves.clamp(max=MAX_OCTAVES) * 2.0**FRACTION_BITS).int()


def weights(deficits: Tensor) -> Tensor:
    """Return int64 weights of int32 deficits: 2⁴³ for 0, halved for each octave, 0 from 44
    octaves.
    """
    octave = deficits >> FRACTION_BITS
    fraction = (deficits & (2**FRACTION_BITS - 1)).float() * 2.0**-FRACTION_BITS
    power = torch.full_like(fraction, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        power = power * fraction + coefficient
    value = (power * 2.0**VALUE_BITS).long()
    value >>= (octave - PLAIN_OCTAVES).clamp(0, VALUE_BITS + 1)
    return value << (PLAIN_OCTAVES - octave).clamp(min=0)


def _kept(deficits: Tensor, record: np.void) -> Tensor:
    """Return the columns that can be drawn, ascending."""
    ordered, columns = deficits.sort(stable=True)
    kept = int((ordered < int(record["deficit_end"])).sum())
    mass = weights(ordered)
    if record["flags"] & Flag.TOP_K:
        mass = mass[: record["top_k"]]
        kept = min(kept, int(record["top_k"]))
    if record["flags"] & Flag.TOP_P:
        cumulative = mass.cumsum(0)
        limit = (int(record["top_p"]) * int(cumulative[-1]) >> 64) + 1
        kept = min(kept, 1 + int((cumulative < limit).sum()))
    return columns[:kept].sort().values


def _mixed(record: np.void) -> int:
    return mix((int(record["stream"]) + (int(record["index"]) + 1) * GOLDEN) & MASK)


def _count(token: int, record: np.void, history: PenaltyHistory) -> None:
    """Count a drawn token, and remove the one that leaves the window."""
    if not record["flags"] & Flag.PENALTIES:
        return
    counts, latest = history.counts[int(record["slot"])], history.latest[int(record["slot"])]
    index, window = int(record["index"]), int(record["window"])
    counts[token] = min(int(counts[token]) + 1, MAX_COUNT)
    if 0 < window <= index:
        counts[latest[(index - window) % len(latest)]] -= 1
    latest[index % len(latest)] = token


assert END_OCTAVE == PLAIN_OCTAVES + VALUE_BITS + 1

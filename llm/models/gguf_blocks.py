"""Quantised blocks of GGUF files as numbers with scales and minimums of groups, without rounding.

format        weights of a block; of a group    weight
Q4_0          32; 32                            (q - 8) × d
Q4_1, Q5_1    32; 32                            q × d + m
Q5_0, Q8_0    32; 32                            q × d, q signed
Q4_K, Q5_K    256; 32                           q × (d × s) - (m × l), s and l of 6 bits
Q6_K          256; 16                           q × (d × s), q and s signed
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from llm.layers.groups import Groups, group_bytes

_D, _M, _PAIRS = ("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)
_FACTORS, _LONG = ("factors", "u1", 12), ("q", "u1", 128)
LAYOUTS: dict[str, list[Any]] = {
    "Q4_0": [_D, _PAIRS],
    "Q4_1": [_D, _M, _PAIRS],
    "Q5_0": [_D, ("high", "<u4"), _PAIRS],
    "Q5_1": [_D, _M, ("high", "<u4"), _PAIRS],
    "Q8_0": [_D, ("q", "i1", 32)],
    "Q4_K": [_D, _M, _FACTORS, _LONG],
    "Q5_K": [_D, _M, _FACTORS, ("high", "u1", 32), _LONG],
    "Q6_K": [_LONG, ("high", "u1", 64), ("factors", "i1", 16), _D],
}
PACKED = tuple(LAYOUTS)
"""Formats that can be held as they are stored."""

Numbers = np.ndarray


def read_groups(kind: str, data: np.ndarray) -> Groups | None:
    """Return rows of blocks, uint8 [out, bytes], of a format in `PACKED`.

    None if scales are not finite.
    """
    blocks = data.view(np.dtype(LAYOUTS[kind]))
    scales = blocks["d"].astype(np.float32)
    has_minimums = "m" in (blocks.dtype.names or ())
    minimums = blocks["m"].astype(np.float32) if has_minimums else None
    if kind.endswith("_K"):
        q, scales, minimums = _read_long(kind, blocks, scales, minimums)
    else:
        q = _read_short(kind, blocks)
    found = [
        None if values is None else torch.from_numpy(values.reshape(len(data), -1))
        for values in (q, scales, minimums)
    ]
    numbers, factors, lows = found
    assert numbers is not None
    assert factors is not None
    return Groups.pack(numbers, factors, lows, numbers.shape[1] // factors.shape[1])


def num_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Return the bytes in memory of a matrix [out, in] of a format in `PACKED`."""
    return group_bytes(
        (shape[0], shape[1]),
        16 if kind == "Q6_K" else 32,
        bits=4 if kind.startswith("Q4") else 8,
        has_minimums=kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"),
    )


def _read_short(kind: str, blocks: np.ndarray) -> Numbers:
    """Return [out, blocks, 32]: uint8 of 4 bits, else int8."""
    if kind == "Q8_0":
        return np.ascontiguousarray(blocks["q"])
    q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=-1)
    if kind.startswith("Q4"):
        return q
    places = np.arange(32, dtype=np.uint32)
    high = (blocks["high"][..., None] >> places & 1).astype(np.uint8)
    return (q | high << 4).astype(np.int8) - np.int8(16 if kind == "Q5_0" else 0)


def _read_long(
    kind: str, blocks: np.ndarray, scales: np.ndarray, minimums: np.ndarray | None
) -> tuple[Numbers, np.ndarray, np.ndarray | None]:
    """Return the numbers of blocks of 256, with the scales and minimums of their groups."""
    shape, shifts = blocks.shape, np.array([0, 4], np.uint8)[:, None]
    width = 64 if kind == "Q6_K" else 32
    halves = blocks["q"].reshape(*shape, -1, 1, width) >> shifts & 15
    low = halves.reshape(*shape, 8, 32)
    if kind == "Q6_K":
        pairs = np.array([0, 2, 4, 6], np.uint8)[:, None]
        high = blocks["high"].reshape(*shape, 2, 1, 32) >> pairs & 3
        q = (low | high.reshape(low.shape) << 4).astype(np.int8) - np.int8(32)
        return q, scales[..., None] * blocks["factors"].astype(np.float32), None
    factors, lows = _six_bits(blocks["factors"])
    assert minimums is not None
    scales, minimums = scales[..., None] * factors, -(minimums[..., None] * lows)
    if kind == "Q4_K":
        return low, scales, minimums
    high = blocks["high"][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (low | high << 4).astype(np.int8), scales, minimums


def _six_bits(octets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eight scales and the eight minimums in 12 bytes, as float32."""
    first, second, third = (octets[..., at : at + 4] for at in (0, 4, 8))
    factors = [first & 63, (third & 15) | (first >> 2 & 48)]
    lows = [second & 63, (third >> 4) | (second >> 2 & 48)]
    scales, minimums = (
        np.concatenate(part, axis=-1).astype(np.float32) for part in (factors, lows)
    )
    return scales, minimums

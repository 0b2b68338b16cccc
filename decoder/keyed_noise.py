"""Normally distributed noise as a pure function of (seed, stream of numbers, absolute index).

A codec with noise renders the same sample in every window, batch and order, because the generator
is stateless: each number is a hash of its index.

Source of the hash: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014); of the distribution: Box and
Muller 1958.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_HALF_WORD, _WORD = 2**32, 2**64


def keyed_noise(seed: int, stream: int, first: Tensor, count: int) -> Tensor:
    """Return float32 [B, count]: row b has the standard normal numbers of count indices from
    first[b].

    `first` is int64 [B, 1] and may be negative; `stream` separates the numbers of different layers.
    Runs on the device of `first` without waiting.
    """
    key = noise_key(seed, stream)
    index = first + torch.arange(count, device=first.device)
    bits = _mix(_mix(index + key) ^ key)
    high, low = _shifted(bits, 32), bits & (_HALF_WORD - 1)
    radius = ((high.double() + 0.5) / _HALF_WORD).log_().mul_(-2).sqrt_()
    return radius.mul_((low.double() * (2 * math.pi / _HALF_WORD)).cos_()).float()


def noise_key(seed: int, stream: int) -> int:
    """Return the signed key of a stream of numbers."""
    return _signed(_mixed((seed * 0x100 + stream) % _WORD))


def _mix(words: Tensor) -> Tensor:
    """Mix bits so that every input bit changes about half of the output bits; int64 wraps
    around.
    """
    words = words + _signed(_GAMMA)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        words = (words ^ _shifted(words, shift)) * _signed(multiplier)
    return words ^ _shifted(words, 31)


def _mixed(word: int) -> int:
    """Mix one unsigned number."""
    word = (word + _GAMMA) % _WORD
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        word = (word ^ (word >> shift)) * multiplier % _WORD
    return word ^ (word >> 31)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros: torch's shift of signed numbers repeats the sign."""
    return (words >> count) & (2 ** (64 - count) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the same bits."""
    return word - _WORD if word >= _WORD // 2 else word

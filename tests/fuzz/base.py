"""`Target`: a part of the product under random input."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

Case = Callable[[random.Random], None]
"""Creates one input from random numbers and tries it; raises if an invariant does not hold."""


class InvariantError(AssertionError):
    """An invariant of a target does not hold."""


@dataclass(frozen=True, slots=True)
class Target:
    """One part of the product under random input.

    `open` prepares the part in an empty folder and yields the function of one input. At its end
    it checks what must hold after all inputs.
    """

    name: str
    open: Callable[[Path], AbstractContextManager[Case]]


def random_of(seed: int, target: str, index: int) -> random.Random:
    """Return the random numbers of one input, which depend on these three values only."""
    return random.Random(f"{seed}/{target}/{index}")

"""`CodebookHeads`: a head for each code of a frame, all on the language model's hidden state.

The codes of a frame do not depend on each other, but on those of earlier frames. Models with such
heads have delays (`llm.delays`), so that a frame's later codes follow its earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llm.layers.linear import Linear
from llm.request import FrameShape


@dataclass(frozen=True, slots=True)
class CodebookHeads:
    """The heads after the first, as one product from H to (K - 1) × V."""

    shape: FrameShape
    product: Linear

    def begin(self, hidden: Tensor) -> HeadLogits:
        """Begin frames at normalised hidden states [B, H]."""
        later = self.shape.num_codebooks - 1
        return HeadLogits(self.product(hidden).float().view(len(hidden), later, -1))


class HeadLogits:
    """Frames of B rows in progress: the logits of all codes after the first."""

    def __init__(self, logits: Tensor) -> None:
        """`logits` float32 [B, K - 1, V]."""
        self._codes = iter(logits.unbind(1))

    def next_logits(self, codes: Tensor) -> Tensor:
        """Return float32 [B, V] logits of the next code, whatever `codes` [B] are."""
        return next(self._codes).contiguous()

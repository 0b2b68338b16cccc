"""`AdaptedLinear`: y = x Wᵀ, plus x Aᵀ Bᵀ for the tokens of requests that use an adapter.

A layer may compute several modules of the checkpoint at once (queries, keys and values). Their A
are stacked, their B form a block diagonal, so that an adapter costs two small products per layer:

    x ─┬─ A_q ─ B_q ─┐                 ⎡B_q 0   0  ⎤
       ├─ A_k ─ B_k ─┼─ added to y  =  ⎢0   B_k 0  ⎥ [A_q; A_k; A_v] x
       └─ A_v ─ B_v ─┘                 ⎣0   0   B_v⎦
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from llm.layers.linear import Linear
from llm.layers.weight import LinearWeight, WeightSource
from llm.lora.adapter import LoRAFactors
from llm.lora.manager import LoRAManager


class AdaptedLinear:
    """Adds the manager's adapters to another layer's product; tokens without an adapter are
    unchanged.
    """

    def __init__(
        self,
        product: Linear,
        sources: Sequence[WeightSource],
        manager: LoRAManager,
        create: Callable[[LinearWeight], Linear],
    ) -> None:
        """Wrap `product`. `create` creates the layers of an adapter's matrices."""
        self.in_features, self.out_features = product.in_features, product.out_features
        self._product = product
        self._sources = tuple(sources)
        self._manager = manager
        self._create = create
        self._slots: dict[int, tuple[Linear, Linear] | None] = {}
        shapes = {source.name: (source.num_rows, self.in_features) for source in sources}
        manager.claim(self, shapes)

    def load(self, slot: int, factors: Mapping[str, LoRAFactors]) -> None:
        """See `AdapterTarget`. Replaces the slot's tensors rather than writing to them: a step may
        read them.
        """
        down, up = [], []
        for source in self._sources:
            own = factors.get(source.name)
            if own is None:
                up.append(torch.zeros(source.num_rows, 0))
                continue
            down.append(own.down.float())
            up.append(own.up if source.order is None else own.up[source.order])
        if not down:
            self._slots[slot] = None
            return
        stacked, diagonal = LinearWeight(torch.cat(down)), LinearWeight(torch.block_diag(*up))
        self._slots[slot] = (self._create(stacked), self._create(diagonal))

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = self._product(x)
        for group in self._manager.groups:
            layers = self._slots[group.slot]
            if layers is None:
                continue
            down, up = layers
            if group.tokens is None:
                y += up(down(x))
            else:
                y.index_add_(0, group.tokens, up(down(x[group.tokens])))
        return y

"""A recorded training step on a GPU: the same as the step itself, with the values of each call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from training.recorded import WARM_STEPS, Recorded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


class Fit:
    """A linear layer that learns, with a rate that is a tensor."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4).to(CUDA)
        self.rate = torch.tensor(1e-2, device=CUDA)
        self.optimiser = torch.optim.AdamW(
            self.layer.parameters(), lr=self.rate, fused=True, capturable=True
        )

    def step(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        loss = (self.layer(x) - wanted).square().mean()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        return {"loss": loss.detach()}


def test_replays_learn_as_the_step_does() -> None:
    generator = torch.Generator(CUDA).manual_seed(1)
    batches = [
        (torch.randn(16, 8, device=CUDA, generator=generator), torch.ones(16, 4, device=CUDA) * n)
        for n in range(6)
    ]
    plain, recorded = Fit(), Fit()
    replay = Recorded(recorded.step, batches[0])
    for _ in range(WARM_STEPS):
        plain.step(*batches[0])
    for number, batch in enumerate(batches):
        for fit in (plain, recorded):
            fit.rate.fill_(1e-2 / (number + 1))
        expected = plain.step(*batch)["loss"]
        assert torch.allclose(replay(*batch)["loss"], expected, rtol=1e-4)
    for one, other in zip(plain.layer.parameters(), recorded.layer.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)

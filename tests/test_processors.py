"""Equal bits with any kernels that the libraries choose: in separate processes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests import order_changing
from tests.processors import BLAS, OWN, QUICK, Settings, quick_combinations, run, title


@pytest.mark.parametrize("settings", list(quick_combinations()), ids=title)
def test_bits_do_not_depend_on_the_batch(settings: Settings) -> None:
    ended = run(settings, QUICK)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert ended.stdout.count(" passed") == len(settings.get(BLAS, OWN).split(","))


def test_the_replacement_depends_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, attention and convolutions of several rows differ from those of one."""
    generator = torch.Generator().manual_seed(0)
    weight, kernel = (torch.randn(*shape, generator=generator) for shape in ((9, 40), (5, 40, 3)))
    rows, sounds = torch.randn(3, 40, generator=generator), torch.randn(3, 40, 7)
    heads = torch.randn(3, 2, 16, 8, generator=generator)
    plain = (F.linear(rows, weight), F.conv1d(sounds, kernel))
    order_changing.install(monkeypatch)
    together = (F.linear(rows, weight), F.conv1d(sounds, kernel))
    alone = (F.linear(rows[:1], weight), F.conv1d(sounds[:1], kernel))
    for expected, some, one in zip(plain, together, alone, strict=True):
        assert torch.allclose(some, expected, atol=1e-4)
        assert not torch.equal(some[:1], one)
    some = F.scaled_dot_product_attention(heads, heads, heads)
    one = F.scaled_dot_product_attention(*[heads[:1]] * 3)
    assert torch.allclose(some[:1], one, atol=1e-5)
    assert not torch.equal(some[:1], one)

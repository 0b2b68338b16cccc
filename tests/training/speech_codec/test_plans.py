"""Plans of lines: their points, what is read between values and outside a line, their codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.training.takes import take_of, toy_coder
from training.speech_codec.coder import Coder, Sizes, points_of
from training.speech_codec.plans import (
    CURVE_GRID,
    ENERGY_MEAN,
    ENERGY_SIZE,
    MIDDLE_HZ,
    PHONE_GRID,
    SILENCE,
    SILENT,
    Plan,
    plan_at,
)
from training.speech_codec.tokenise import MARGIN, codes_of_lines

PITCH = [100.0, 200.0, 300.0, 0.0, 0.0, 120.0, 140.0, 400.0]
ENERGY = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 99.0]
TAKE = {
    "phones": torch.tensor([5, 6, 7, 8], dtype=torch.uint8),
    "pitch": torch.tensor(PITCH).half(),
    "energy": torch.tensor(ENERGY).half(),
}


def read(samples: list[int], low: int = 0, high: int = 2400) -> Plan:
    """The plan at some samples of one line."""
    bounds = (torch.tensor([[value]]) for value in (low, high))
    return Plan(*(part[0] for part in plan_at(TAKE, torch.tensor([samples]), *bounds)))


def hz(plan: Plan) -> list[float]:
    return (MIDDLE_HZ * 2**plan.octaves * plan.voiced).tolist()


def energy(plan: Plan) -> list[float]:
    return (plan.energy * ENERGY_SIZE + ENERGY_MEAN).tolist()


def test_points_are_the_middles_of_10_ms() -> None:
    found = points_of(torch.tensor([0, 960]), 2, Sizes((4,), 1, 4))
    assert found[0].tolist() == [120, 360, 600, 840, 1080, 1320, 1560, 1800]
    assert (found[1] - found[0]).tolist() == [960] * 8


def test_curves_are_read_between_their_values_but_not_where_voice_begins_or_ends() -> None:
    plan = read([0, 150, 300, 375, 600, 750, 900, 1350, 1500, 1575])
    assert hz(plan) == pytest.approx([100, 150, 200, 225, 300, 300, 0, 0, 120, 125], abs=0.1)
    assert plan.voiced.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 1, 1]
    assert energy(plan) == pytest.approx([0, 0.5, 1, 1.25, 2, 2.5, 3, 4.5, 5, 5.25], abs=1e-4)
    assert plan.phones.tolist() == [5, 5, 5, 5, 6, 6, 6, 7, 7, 7]


def test_a_lines_end_is_not_mixed_with_the_next_line() -> None:
    plan = read([1950, 2099], high=2100)
    assert hz(plan) == pytest.approx([140, 140], abs=0.1)
    assert energy(plan) == pytest.approx([6, 6], abs=1e-4)


def test_outside_a_line_is_silence() -> None:
    plan = read([-500, 599, 600, 1799, 1800, 9999], low=600, high=1800)
    assert plan.phones.tolist() == [SILENCE, SILENCE, 6, 7, SILENCE, SILENCE]
    outside = torch.tensor([0, 1, 4, 5])
    assert plan.voiced[outside].tolist() == plan.octaves[outside].tolist() == [0.0] * 4
    assert plan.energy[outside].tolist() == [SILENT] * 4
    assert plan.voiced[[2, 3]].tolist() == [1, 1]


@pytest.fixture
def coder() -> Coder:
    return toy_coder()


def take(sessions: int = 4, lines: int = 3) -> dict[str, Tensor]:
    """A take of lines that are not whole codes long, with phones that differ from line to line."""
    found = {k: torch.from_numpy(v) for k, v in take_of(sessions, 1.25, lines).items()}
    generator = torch.Generator().manual_seed(0)
    size = found["phones"].shape
    return found | {"phones": torch.randint(20, size, generator=generator, dtype=torch.uint8)}


def test_a_lines_codes_do_not_depend_on_its_neighbours(coder: Coder) -> None:
    held = take()
    first = held["lines"][:, 1]
    first = torch.cat((first[:6], first[8:]))  # the sixth line is three lines long
    codes, at = codes_of_lines(coder, held, first)
    assert len(codes.unique()) > 5
    bounds = [*first.tolist(), CURVE_GRID * len(held["pitch"])]
    ends = [*at.tolist(), len(codes)]
    for line in (0, 4, 5, 9):
        low, high = bounds[line : line + 2]
        alone = {
            name: held[name][low // grid : high // grid]
            for name, grid in (
                ("phones", PHONE_GRID),
                ("pitch", CURVE_GRID),
                ("energy", CURVE_GRID),
            )
        }
        expected, _ = codes_of_lines(coder, alone, torch.zeros(1, dtype=torch.long))
        assert torch.equal(codes[ends[line] : ends[line + 1]], expected)
        assert len(expected) == -(-(high - low) // 960)


def test_the_silence_after_a_line_is_more_than_its_last_code_sees() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        coder = Coder(Sizes((4, 4), 2, 4, dim=8, ff=8)).double().eval()
        for name, value in coder.named_parameters():
            if name.endswith("scale"):
                torch.nn.init.ones_(value)
        coder.content.even = torch.nn.Identity()  # which rounds to float32
    held, codes, ends = take(1, 1), 32, torch.tensor([[30_000]])

    def latent(silence: int) -> Tensor:
        points = points_of(torch.zeros(1, dtype=torch.long), codes + silence, coder.sizes)
        plan = plan_at(held, points, torch.tensor([[0]]), ends)
        plan = Plan(plan.phones, *(part.double() for part in plan[1:]))
        found: Tensor = coder.content(plan)[:, :codes]
        return found

    assert torch.allclose(latent(MARGIN), latent(MARGIN + 20), rtol=0, atol=1e-13)
    assert not torch.allclose(latent(0), latent(MARGIN), rtol=0, atol=1e-13)

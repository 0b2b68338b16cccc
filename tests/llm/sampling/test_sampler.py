"""Sampler: distributions, penalties, candidates, and independence of the batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llm.batch import ScheduledRow
from llm.errors import RequestError
from llm.request import SamplingParams
from llm.sampling.logits import HEAD_SIZE, candidates
from llm.sampling.rng import uniforms
from llm.sampling.sampler import Sampler, has_penalties

CPU = torch.device("cpu")
VOCAB = 50


def a_row(output_ids: tuple[int, ...] = (), **sampling: Any) -> ScheduledRow:
    return ScheduledRow("r", (1,), 0, (1,), False, True, SamplingParams(**sampling), output_ids)


def sample(logits: Tensor, rows: list[ScheduledRow], step: int = 0) -> list[int]:
    sampler = Sampler(logits.shape[1], CPU)
    token_ids = sampler.sample(logits, sampler.prepare(rows, step))
    assert token_ids.dtype == torch.int32
    return token_ids.tolist()


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def frequencies(logits: Tensor, draws: int = 20_000, **sampling: Any) -> np.ndarray:
    """Return how often each id is drawn, over seeds."""
    rows = [a_row(seed=seed, **sampling) for seed in range(draws)]
    drawn = sample(logits.expand(draws, -1), rows)
    return np.bincount(drawn, minlength=logits.numel()) / draws


def assert_drawn_from(found: np.ndarray, expected: Tensor, draws: int = 20_000) -> None:
    """Check with a chi-squared test; ids of probability 0 must never be drawn."""
    probabilities = expected.double().numpy()
    assert found[probabilities == 0].sum() == 0
    common = probabilities * draws >= 5
    wanted = np.append(probabilities[common], probabilities[~common].sum() + 1e-12) * draws
    counts = np.append(found[common], found[~common].sum()) * draws
    statistic = ((counts - wanted) ** 2 / wanted)[wanted >= 1].sum()
    assert counts[wanted < 1].sum() <= 10
    freedom = common.sum()
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = random_logits(1)[0]
    expected = torch.softmax(logits.double() / temperature, 0)
    assert_drawn_from(frequencies(logits, temperature=temperature), expected)


def cut(logits: Tensor, keep: Tensor) -> Tensor:
    kept = torch.softmax(logits.double(), 0) * keep
    return kept / kept.sum()


def test_top_k_keeps_the_k_best() -> None:
    logits = random_logits(1)[0]
    keep = torch.zeros(VOCAB).index_fill_(0, logits.topk(7).indices, 1)
    assert_drawn_from(frequencies(logits, top_k=7), cut(logits, keep))
    everything = frequencies(logits, top_k=VOCAB + 5)
    assert_drawn_from(everything, torch.softmax(logits.double(), 0))


@pytest.mark.parametrize("with_top_k", [False, True])
def test_top_p_keeps_the_smallest_set_that_reaches_it(with_top_k: bool) -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.15, 0.05]).log()
    more = {"top_k": 4} if with_top_k else {}
    # Of the four best, 0.4/0.95 + 0.3/0.95 is still below 0.75; alone, 0.4 + 0.3 is too.
    found = frequencies(logits, top_p=0.75, **more)
    assert_drawn_from(found, cut(logits, torch.tensor([1, 0, 1, 1, 0])))
    assert_drawn_from(
        frequencies(logits, top_p=0.69, **more), cut(logits, torch.tensor([1, 0, 1, 0, 0]))
    )
    assert frequencies(logits, draws=500, top_p=1e-6, **more)[0] == 1


@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.999999}])
def test_min_p_is_relative_to_the_best(more: dict[str, float]) -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.15, 0.05]).log()
    found = frequencies(logits, min_p=0.3, **more)
    assert_drawn_from(found, cut(logits, torch.tensor([1, 0, 1, 1, 0])))


def test_a_cut_that_drops_nothing_changes_no_draw() -> None:
    """Rows without a cut use a faster path, unless a row of their group has one."""
    logits = random_logits(1, vocab=4000)
    for more in ({}, {"top_k": 30}):
        for seed in range(30):
            plain = a_row(seed=seed, **more)
            cutting = a_row(seed=seed, min_p=0.2, **more)
            together = sample(logits.repeat(2, 1), [plain, cutting])
            assert together[0] == sample(logits, [plain])[0]


def test_a_wide_nucleus_is_found_too() -> None:
    """More tokens in the nucleus than are tried first, in a batch with a row with few."""
    vocab = 3 * HEAD_SIZE
    flat, peaked = torch.zeros(vocab), torch.zeros(vocab)
    peaked[5] = 20.0
    rows = [a_row(seed=seed, top_p=0.9) for seed in range(1000)]
    drawn = np.array(sample(torch.stack([flat, peaked] * 500), rows))
    assert (drawn[1::2] == 5).mean() > 0.99
    kept = np.unique(drawn[::2])
    assert kept.max() <= math.ceil(0.9 * vocab)  # ties are kept in the order of ids
    assert kept.max() > HEAD_SIZE
    assert len(kept) > 300


def test_penalties_by_hand() -> None:
    """id: logit, count → divided or multiplied by 2, less 0.5 for each, less 0.25 once."""
    logits = torch.zeros(1, 6)
    logits[0] = torch.tensor([4.0, -1.0, 3.0, 0.0, 2.0, 1.75])
    outputs = (0, 0, 1, 2, 2, 2)
    expected = [4 / 2 - 1.0 - 0.25, -1 * 2 - 0.5 - 0.25, 3 / 2 - 1.5 - 0.25, 0.0, 2.0, 1.75]
    params = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    plan = Sampler(6, CPU).prepare([a_row(outputs, **params)])
    assert plan.penalties is not None
    changed = logits.clone()
    plan.penalties.apply_(changed)
    assert changed[0].tolist() == pytest.approx(expected)
    assert sample(logits, [a_row(outputs, temperature=0, **params)]) == [4]
    assert sample(logits, [a_row(outputs, temperature=0)]) == [0]
    assert logits[0, 0] == 4.0  # the raw logits are unchanged


def test_the_window_limits_what_is_penalised() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    penalised = {"temperature": 0, "presence_penalty": 5.0}
    assert sample(logits, [a_row((0, 1, 1), **penalised)]) == [2]
    assert sample(logits, [a_row((0, 1, 1), penalty_window=2, **penalised)]) == [0]
    assert sample(logits, [a_row((), **penalised)]) == [0]


def test_tokens_of_the_running_turn_are_penalised() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    sampler = Sampler(3, CPU)
    rows = [a_row((1,), temperature=0, presence_penalty=5.0)]
    assert has_penalties(rows[0].sampling)
    assert sampler.sample(logits, sampler.prepare(rows, 1, [[0]])).tolist() == [2]
    assert sampler.sample(logits, sampler.prepare(rows, 0, [[]])).tolist() == [0]


def test_penalties_of_one_row_leave_the_others_alone() -> None:
    logits = torch.tensor([[3.0, 2.0]]).repeat(3, 1)
    rows = [
        a_row((0,), temperature=0),
        a_row((0,), temperature=0, repetition_penalty=9.0),
        a_row((0,), temperature=0, frequency_penalty=-1.0),
    ]
    assert sample(logits, rows) == [0, 1, 0]


def test_temperature_zero_is_argmax_inside_a_random_batch() -> None:
    logits = random_logits(6)
    rows = [a_row(seed=i, temperature=0.0 if i % 2 else 5.0) for i in range(6)]
    for i, token in enumerate(sample(logits, rows)):
        assert not i % 2 or token == logits[i].argmax()
    assert sample(logits, [a_row(top_k=1, temperature=9.0)] * 6) == logits.argmax(1).tolist()
    tiny = [a_row(temperature=1e-7, seed=i) for i in range(6)]
    assert sample(logits, tiny) == logits.argmax(1).tolist()


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.9},
    {"top_p": 0.8},
    {"temperature": 0.0},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
    {"allowed_ranges": ((10, 30), (40, 45)), "stop_token_ids": (3,), "top_k": 8},
    {"allowed_ranges": ((0, 25),), "min_p": 0.05},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "penalty_window": 3, "top_k": 9},
]


@settings(max_examples=60)
@given(order=st.permutations(range(16)), count=st.integers(1, 16))
def test_a_row_gets_its_token_wherever_it_is(order: list[int], count: int) -> None:
    logits = random_logits(16, seed=3)
    outputs = [tuple(range(i)) for i in range(16)]
    rows = [
        a_row(outputs[i], seed=1000 + i // 2, **PARAMETERS[i % len(PARAMETERS)]) for i in range(16)
    ]
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(16)]
    chosen = order[:count]
    together = sample(logits[chosen], [rows[i] for i in chosen])
    assert together == [alone[i] for i in chosen]


def test_seed_and_index_make_the_number() -> None:
    logits = random_logits(1).repeat(400, 1)
    by_seed = sample(logits, [a_row(seed=s) for s in range(400)])
    by_index = sample(logits, [a_row((0,) * i) for i in range(400)])
    assert len(set(by_seed)) > 10
    assert len(set(by_index)) > 10
    assert by_seed != by_index
    assert by_index[5] == sample(logits[:1], [a_row((0,) * 2)], step=3)[0]


def test_numbers_are_uniform_and_unrelated() -> None:
    grid = uniforms(np.repeat(np.arange(300), 300).tolist(), np.tile(np.arange(300), 300).tolist())
    assert grid.min() >= 0
    assert grid.max() < 1
    assert len(np.unique(grid)) == 90_000
    counts = np.histogram(grid, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 100 + 5 * math.sqrt(200)
    table = grid.reshape(300, 300)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:-1, 1:].ravel(), table[1:, :-1].ravel())[0, 1]) < 0.02
    assert uniforms([2**64 - 1], [10**6]).shape == (1,)


def test_few_numbers_are_those_of_many() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 12345678901234567890, *range(40)]
    indices = [0, 2**31, 5, 10**6, 3, *range(40)]
    many = uniforms(seeds, indices).tolist()
    pairs = zip(seeds, indices, strict=True)
    assert [uniforms([seed], [index])[0] for seed, index in pairs] == many


def test_these_numbers_never_change() -> None:
    """Saved seeds must continue to give the same speech."""
    found = uniforms([0, 0, 1, 2**64 - 1], [0, 1, 0, 7]).tolist()
    assert found == [
        0.6524484863740322,
        0.7012121095215252,
        0.36818951565166946,
        0.7238582745899125,
    ]
    golden = 0x9E3779B97F4A7C15
    by_hand = _splitmix(_splitmix(2**64 - 1 + golden) + 8 * golden)
    assert found[3] == (by_hand >> 11) / 2**53


def _splitmix(bits: int) -> int:
    bits %= 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


CYCLE: dict[str, Any] = {
    "allowed_cycle": (((10, 20),), ((20, 30),), ((5, 7), (30, 40))),
    "stop_token_ids": (3,),
}


@pytest.mark.parametrize(
    ("sampling", "generated", "ranges"),
    [
        ({}, 0, ((0, 50),)),
        ({"stop_token_ids": (3,)}, 0, ((0, 50),)),
        ({"stop_token_ids": (3,), "min_tokens": 1}, 0, ((0, 3), (4, 50))),
        ({"stop_token_ids": (3,), "min_tokens": 1}, 1, ((0, 50),)),
        ({"stop_token_ids": (0, 49), "min_tokens": 9}, 8, ((1, 49),)),
        ({"allowed_ranges": ((10, 20),)}, 0, ((10, 20),)),
        ({"allowed_ranges": ((10, 20),), "stop_token_ids": (3,)}, 0, ((3, 4), (10, 20))),
        ({"allowed_ranges": ((10, 20),), "stop_token_ids": (20,)}, 0, ((10, 21),)),
        (
            {"allowed_ranges": ((10, 20), (15, 30)), "stop_token_ids": (3, 12), "min_tokens": 1},
            0,
            ((10, 12), (13, 30)),
        ),
        ({"allowed_ranges": ((3, 4),), "stop_token_ids": (3,), "min_tokens": 1}, 0, ((3, 4),)),
        (CYCLE, 0, ((3, 4), (10, 20))),
        (CYCLE, 1, ((20, 30),)),
        (CYCLE, 2, ((5, 7), (30, 40))),
        (CYCLE, 3, ((3, 4), (10, 20))),
        (CYCLE, 7, ((20, 30),)),
        ({**CYCLE, "min_tokens": 4}, 3, ((10, 20),)),
        ({**CYCLE, "min_tokens": 4}, 6, ((3, 4), (10, 20))),
    ],
)
def test_candidates(
    sampling: dict[str, Any], generated: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    found = candidates(SamplingParams(**sampling), generated, VOCAB)
    assert found.ranges == ranges
    ids = [i for start, end in ranges for i in range(start, end)]
    assert found.width == len(ids)
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    assert found.take(logits)[0].tolist() == ids
    assert found.ids_of(torch.arange(len(ids))).tolist() == ids


@pytest.mark.parametrize("more", [{}, {"top_k": 9}, {"top_p": 0.9}, {"temperature": 0}])
def test_only_candidates_are_sampled(more: dict[str, float]) -> None:
    logits = random_logits(1, seed=4)[0]
    logits[7] += 10  # a forbidden token is the likeliest
    stopping = {"allowed_ranges": ((20, 30), (35, 37)), "stop_token_ids": (3,)}
    found = frequencies(logits, draws=3000, min_tokens=1, **stopping, **more)
    allowed = {*range(20, 30), 35, 36}
    assert set(found.nonzero()[0].tolist()) <= allowed
    logits[3] += 3
    rows = [a_row((20,), seed=s, min_tokens=1, **stopping, **more) for s in range(500)]
    drawn = set(sample(logits.expand(500, -1), rows))
    assert 3 in drawn
    assert drawn <= allowed | {3}


@given(seed=st.integers(0, 2**32), more=st.sampled_from([{}, {"top_k": 4}, {"temperature": 0}]))
@settings(max_examples=30)
def test_a_cycle_holds_every_position_to_its_ranges(seed: int, more: dict[str, float]) -> None:
    """For any logits: no token out of place, and an end only between cycles."""
    output: list[int] = []
    logits = random_logits(60, seed=seed)
    logits[:, [3, 45]] += 3  # the stop id, and a forbidden one, are likely
    for row in logits:
        output += sample(row[None], [a_row(tuple(output), seed=seed, **CYCLE, **more)])
        if output[-1] == 3:
            break
    whole = output[:-1] if output[-1] == 3 else output
    assert output[-1] != 3 or len(whole) % 3 == 0
    for place, token_id in enumerate(whole):
        ranges = CYCLE["allowed_cycle"][place % 3]
        assert any(start <= token_id < end for start, end in ranges)


def test_rows_at_different_places_of_a_cycle_share_a_batch() -> None:
    logits = random_logits(9, seed=11)
    rows = [a_row((10,) * place, seed=place, **CYCLE) for place in range(9)]
    alone = [sample(row[None], [made])[0] for row, made in zip(logits, rows, strict=True)]
    assert sample(logits, rows) == alone


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_cycle": (((1, 2),), ())},
        {"allowed_cycle": (((2, 2),),)},
        {"allowed_cycle": (((1, 2),),), "allowed_ranges": ((1, 2),)},
    ],
)
def test_cycles_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="allowed_cycle"):
        SamplingParams(**wrong)


def test_no_rows_and_wrong_rows() -> None:
    sampler = Sampler(VOCAB, CPU)
    assert sampler.sample(random_logits(0), sampler.prepare([])).tolist() == []
    with pytest.raises(ValueError, match="1 rows planned, 2 rows of logits"):
        sampler.sample(random_logits(2), sampler.prepare([a_row()]))


@pytest.mark.parametrize("more", [{}, {"top_k": 9}, {"top_p": 0.9}])
def test_a_broken_row_does_not_stop_the_others(more: dict[str, float]) -> None:
    logits = random_logits(3)
    alone = sample(logits[2:], [a_row(seed=2, **more)])[0]
    logits[1] = float("nan")
    tokens = sample(logits, [a_row(seed=i, **more) for i in range(3)])
    assert tokens[2] == alone
    assert all(0 <= token < VOCAB for token in tokens)


def test_parameters_survive_replacement() -> None:
    """The scheduler's addition of the model's stop ids changes no draw."""
    params = SamplingParams(seed=5, top_k=10)
    more = dataclasses.replace(params, stop_token_ids=(4,))
    logits = random_logits(1)
    rows = [a_row()._replace(sampling=p) for p in (params, more)]
    assert sample(logits, rows[:1]) == sample(logits, rows[1:])

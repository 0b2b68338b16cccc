"""The device sampler's reference: the CPU sampler's distributions; rows; histories."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llm.batch import columns_of
from llm.request import SamplingParams
from llm.sampling.device.records import RecordTable
from llm.sampling.device.reference import weights
from llm.sampling.device.sampler import DeviceSampler, SamplingBuffers, sampler_bytes
from llm.sampling.logits import TokenMask
from llm.sampling.rng import uniforms
from llm.sampling.sampler import Sampler, distribution
from llm.sequence import FUTURE_TOKEN
from tests.llm.sampling.device_rows import (
    CPU,
    a_row,
    coarse_logits,
    random_logits,
    random_rows,
    random_sampling,
    sample_once,
)

VOCAB = 50


def frequencies(logits: Tensor, draws: int, **sampling: Any) -> np.ndarray:
    """Return how often each id of logits [V] is drawn, over seeds."""
    sampler = DeviceSampler(len(logits), CPU, draws)
    rows = [a_row(f"r{n}", **{**sampling, "seed": n}) for n in range(draws)]
    drawn = sample_once(sampler, logits.expand(draws, -1), rows)
    return np.bincount(drawn, minlength=len(logits))


def assert_drawn_from(counts: np.ndarray, expected: np.ndarray) -> None:
    """Check with a chi-squared test; ids without probability must never be drawn."""
    assert counts[expected == 0].sum() == 0
    wanted = expected * counts.sum()
    common = wanted >= 5
    rest = wanted[~common].sum()
    statistic = ((counts - wanted) ** 2)[common] / wanted[common]
    total = statistic.sum() + (counts[~common].sum() - rest) ** 2 / max(rest, 1)
    freedom = common.sum()
    assert total < freedom + 5 * math.sqrt(2 * freedom) + 10


@settings(max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_the_distribution_is_the_cpu_samplers(seed: int) -> None:
    sampling = random_sampling(np.random.default_rng(seed), VOCAB)
    logits = random_logits(1, VOCAB, seed)
    plain = Sampler(VOCAB, CPU)
    expected = distribution(logits, plain.prepare([a_row("r", **sampling)]))[0].numpy()
    assert_drawn_from(frequencies(logits[0], 500, **sampling), expected)


def test_the_same_number_is_drawn_at_the_same_place() -> None:
    """Without cuts both count in the order of ids: the same tokens, except for rounding."""
    logits = random_logits(300, VOCAB)
    rows = [a_row(f"r{n}", (0,) * (n % 7), seed=2**64 - 1 - n) for n in range(300)]
    plain = Sampler(VOCAB, CPU)
    expected = plain.sample(logits, plain.prepare(rows)).tolist()
    found = sample_once(DeviceSampler(VOCAB, CPU, 300), logits, rows)
    assert found == expected
    number = uniforms([2**64 - 1], [0])[0]
    reached = torch.softmax(logits[0].double(), 0).cumsum(0)
    assert found[0] == int((reached <= number).sum())


@given(octaves=st.floats(0, 63.5))
def test_weights_are_powers_of_two(octaves: float) -> None:
    deficit = int(octaves * 2**18)
    found = int(weights(torch.tensor([deficit], dtype=torch.int32)))
    exact = 2 ** (43 - deficit / 2**18)
    assert abs(found - exact) <= 5e-7 * exact + 1


def test_weights_never_rise() -> None:
    found = weights(torch.arange(0, 45 << 18, 7, dtype=torch.int32))
    assert int(found[0]) == 2**43
    assert int(found[-1]) == 0
    assert bool((found.diff() <= 0).all())


def test_ties_at_the_cut_are_kept_in_the_order_of_ids() -> None:
    logits = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    assert set(frequencies(logits, 200, top_k=2).nonzero()[0]) == {1, 3}
    assert set(frequencies(logits, 300, top_k=4).nonzero()[0]) == {0, 1, 3, 4}
    # Each of the three best has 0.24 of all: the second of them reaches 0.4.
    assert set(frequencies(logits, 200, top_p=0.4).nonzero()[0]) == {1, 3}


def test_temperature_zero_is_argmax_inside_a_random_batch() -> None:
    logits = coarse_logits(40, VOCAB)
    rows = [a_row(f"r{n}", seed=n, temperature=0.0 if n % 2 else 5.0) for n in range(40)]
    found = sample_once(DeviceSampler(VOCAB, CPU, 40), logits, rows)
    assert found[1::2] == logits.argmax(1).tolist()[1::2]
    assert found[::2] != logits.argmax(1).tolist()[::2]
    for greedy in ({"top_k": 1, "temperature": 9.0}, {"temperature": 1e-7}):
        rows = [a_row(f"g{n}", seed=n, **greedy) for n in range(40)]
        tokens = sample_once(DeviceSampler(VOCAB, CPU, 40), logits, rows)
        assert tokens == logits.argmax(1).tolist()


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(12)), count=st.integers(1, 12))
def test_a_row_gets_its_token_wherever_it_is(seed: int, order: list[int], count: int) -> None:
    """Alone, in any batch, and before any number of padding rows."""
    logits, rows = coarse_logits(12, VOCAB, seed), random_rows(seed, 12, VOCAB)
    alone = [
        sample_once(DeviceSampler(VOCAB, CPU, 1), logits[n : n + 1], [rows[n]])[0]
        for n in range(12)
    ]
    chosen = order[:count]
    padded = logits[[*chosen, *[0] * (16 - count)]]
    found = sample_once(DeviceSampler(VOCAB, CPU, 16), padded, [rows[n] for n in chosen])
    assert found == [alone[n] for n in chosen] + [0] * (16 - count)


def test_fewer_rows_than_before_leave_padding_behind() -> None:
    sampler = DeviceSampler(VOCAB, CPU, 4)
    buffers, logits = sampler.create_buffers(), random_logits(4, VOCAB) + 1
    rows = [a_row(f"r{n}", seed=n, allowed_ranges=((5, 50),)) for n in range(4)]
    for count in (4, 1, 3):
        sampler.load(sampler.prepare(rows[:count]), buffers)
        tokens = sampler.sample(logits, buffers).tolist()
        assert min(tokens[:count]) >= 5
        assert tokens[count:] == [0] * (4 - count)


def test_written_records_are_those_that_are_loaded() -> None:
    """The tokens are the same for both ways of loading, also with bitmasks and histories."""
    logits = random_logits(6, VOCAB)
    rows = [a_row(f"r{n}", (1, 2), seed=n, presence_penalty=n % 2) for n in range(4)]
    rows += [a_row("many", allowed_ranges=tuple((n, n + 1) for n in range(0, VOCAB, 3)))]
    expected = [sample_once(DeviceSampler(VOCAB, CPU, 6), logits, rows[:n]) for n in (5, 2)]
    sampler = DeviceSampler(VOCAB, CPU, 6)
    buffers, found = sampler.create_buffers(), []
    for count in (5, 2):
        for row in rows:
            sampler.release(row.request_id)
        records = torch.full_like(buffers.records, 7)
        sampler.write(sampler.prepare(rows[:count]), buffers, records.numpy())
        found.append(sampler.sample(logits, buffers, records).tolist())
    assert found == expected


def test_replays_without_a_load_advance_the_index() -> None:
    logits = random_logits(1, VOCAB)
    sampler = DeviceSampler(VOCAB, CPU, 1)
    buffers = sampler.create_buffers()
    sampler.load(sampler.prepare([a_row("r", seed=5)]), buffers)
    found = [sampler.sample(logits, buffers).item() for _ in range(20)]
    again = DeviceSampler(VOCAB, CPU, 1)
    row = a_row("r", seed=5)
    assert found == [sample_once(again, logits, [row], step)[0] for step in range(20)]
    assert len(set(found)) > 2


# --- candidates and bitmasks


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_only_candidates_are_sampled(seed: int) -> None:
    rows = random_rows(seed, 8, VOCAB)
    sampler, plain = DeviceSampler(VOCAB, CPU, 8), Sampler(VOCAB, CPU)
    logits = random_logits(8, VOCAB, seed)
    tokens = sample_once(sampler, logits, rows)
    expected = distribution(logits, plain.prepare(rows))
    assert [float(expected[n, token]) > 0 for n, token in enumerate(tokens)] == [True] * 8


def test_a_bitmask_holds_its_rows_alone() -> None:
    logits = torch.zeros(3, VOCAB)
    allowed = torch.zeros(64, dtype=torch.uint8)
    allowed[[3, 31, 32, 49]] = 1
    words = torch.from_numpy(np.packbits(allowed.numpy(), bitorder="little").view(np.int32))
    mask = TokenMask(torch.tensor([1]), words[None])
    stops = tuple(range(0, 40, 2))  # more slices than a record holds: needs a bitmask
    sampler = DeviceSampler(VOCAB, CPU, 3)
    drawn: list[set[int]] = [set(), set(), set()]
    for seed in range(150):
        rows = [
            a_row("free", seed=seed),
            a_row("held", seed=seed, json_schema="{}", stop_token_ids=(3,)),
            a_row("many", seed=seed, stop_token_ids=stops, min_tokens=1),
        ]
        for found, token in zip(drawn, sample_once(sampler, logits, rows, 0, mask), strict=True):
            found.add(token)
    assert len(drawn[0]) > 35
    assert drawn[1] == {3, 31, 32, 49}
    assert drawn[2] <= {*range(1, 40, 2), *range(40, 50)}
    assert len(drawn[2]) > 20


def test_nothing_left_is_the_first_candidate() -> None:
    mask = TokenMask(torch.tensor([0]), torch.zeros(1, 2, dtype=torch.int32))
    row = a_row("held", json_schema="{}", stop_token_ids=(3,))
    assert sample_once(DeviceSampler(VOCAB, CPU, 1), torch.zeros(1, VOCAB), [row], 0, mask) == [0]


def test_broken_rows_do_not_affect_others() -> None:
    logits = random_logits(8, VOCAB)
    rows = random_rows(4, 8, VOCAB)
    alone = sample_once(DeviceSampler(VOCAB, CPU, 8), logits, rows)
    for broken in (math.nan, math.inf, -math.inf):
        logits[1] = broken
        logits[5, ::2] = broken
        found = sample_once(DeviceSampler(VOCAB, CPU, 8), logits, rows)
        assert [found[n] for n in (0, 2, 3, 4, 6, 7)] == [alone[n] for n in (0, 2, 3, 4, 6, 7)]
        assert all(0 <= token < VOCAB for token in found)
    best = torch.zeros(1, VOCAB)
    best[0, 7], best[0, 3] = math.inf, math.nan
    for sampling in ({"temperature": 0}, {}, {"top_p": 0.9}):
        assert sample_once(DeviceSampler(VOCAB, CPU, 1), best, [a_row("r", **sampling)]) == [7]


# --- penalties


def test_penalties_by_hand() -> None:
    """id: logit, count → divided or multiplied by 2, less 0.5 for each, less 0.25 once."""
    logits = torch.tensor([[4.0, -1.0, 3.0, 0.0, 0.74, 0.7]])
    outputs = (0, 0, 1, 2, 2, 2)  # 4 → 0.75, −1 → −2.75, 3 → −0.25
    params = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    sampler = DeviceSampler(6, CPU, 1)

    def best(outputs: tuple[int, ...], **more: Any) -> int:
        row = a_row(f"r{outputs}{more}", outputs, temperature=0, **params, **more)
        return sample_once(sampler, logits, [row])[0]

    assert best(outputs) == 0
    logits[0, 4] = 0.76
    assert best(outputs, seed=1) == 4
    assert best(outputs, penalty_window=4) == 0  # only 1 and 2 are in the window
    assert best((1, 2), seed=3) == 0
    assert sample_once(sampler, logits, [a_row("plain", outputs, temperature=0)]) == [0]
    assert logits[0, 0] == 4.0


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_penalised_logits_are_the_cpu_samplers(seed: int) -> None:
    rows = [
        a_row(row.request_id, row.output_ids, **{**_values(row.sampling), "temperature": 0.0})
        for row in random_rows(seed, 12, VOCAB)
    ]
    logits, plain = random_logits(12, VOCAB, seed), Sampler(VOCAB, CPU)
    expected = plain.sample(logits, plain.prepare(rows)).tolist()
    assert sample_once(DeviceSampler(VOCAB, CPU, 12), logits, rows) == expected


def _values(sampling: SamplingParams) -> dict[str, Any]:
    return {item.name: getattr(sampling, item.name) for item in dataclasses.fields(sampling)}


class Model:
    """Requests that generate, and the expected contents of their histories."""

    def __init__(self, seed: int, num_slots: int = 3) -> None:
        self.chance = np.random.default_rng(seed)
        self.sampler = DeviceSampler(VOCAB, CPU, num_slots, max_window=5)
        self.buffers = self.sampler.create_buffers()
        self.outputs: dict[str, list[int]] = {}
        self.windows: dict[str, int] = {}

    def step(self, names: list[str], *, late: bool) -> None:
        """Generate one token for each; `late`: the previous token is not known on the host."""
        rows = []
        for name in names:
            outputs = self.outputs.setdefault(name, [])
            window = self.windows.setdefault(name, int(self.chance.choice([0, 1, 2, 5])))
            known = (*outputs[:-1], FUTURE_TOKEN) if late and outputs else tuple(outputs)
            seed = int(name[1:])
            penalties = {"repetition_penalty": 1.5, "penalty_window": window}
            rows.append(a_row(name, known, seed=seed, max_tokens=500, **penalties))
        plan = self.sampler.prepare(rows)
        self.sampler.load(plan, self.buffers)
        tokens = self.sampler.sample(torch.zeros(len(names), VOCAB), self.buffers).tolist()
        for name, token in zip(names, tokens, strict=True):
            self.outputs[name].append(token)
        self.check(plan.records[:, 6].tolist(), names)

    def check(self, slots: list[int], names: list[str]) -> None:
        for slot, name in zip(slots, names, strict=True):
            expected = Counter(self.outputs[name][-self.windows[name] :])
            counts = self.sampler._history.counts[slot]
            assert {int(i): int(counts[i]) for i in counts.nonzero()} == expected


@pytest.mark.parametrize("seed", range(6))
def test_histories_follow_their_requests(seed: int) -> None:
    """More requests than slots: they start, end, and are resumed."""
    model, chance = Model(seed), np.random.default_rng(seed)
    running: list[str] = []
    names = [f"r{n}" for n in range(6)]
    for _ in range(80):
        going_on = [name for name in running if chance.random() < 0.8]
        others = [name for name in names if name not in going_on]
        joining = chance.permutation(others)[: 3 - len(going_on)].tolist()
        # A row of the previous step may be sampled again before its token is known.
        if going_on and chance.random() < 0.5:
            model.step(going_on, late=True)
        model.step(running := [*going_on, *joining], late=False)
        if chance.random() < 0.2:
            ended = running.pop()
            model.sampler.release(ended)
            model.outputs.pop(ended)
            model.windows.pop(ended)


def test_a_lost_step_is_counted_again() -> None:
    """Sampled, but never committed: the request is sampled again with the tokens it has."""
    model = Model(0)
    model.step(["r1"], late=False)
    model.step(["r1"], late=False)
    model.outputs["r1"].pop()
    model.step(["r1"], late=False)


def test_several_steps_need_no_tokens_of_the_turn() -> None:
    logits, params = torch.tensor([[3.0, 2.0, 1.0]]), {"temperature": 0, "presence_penalty": 5.0}
    sampler = DeviceSampler(3, CPU, 1)
    row = a_row("r", **params)
    assert [sample_once(sampler, logits, [row], step)[0] for step in range(4)] == [0, 1, 2, 0]


def test_a_history_without_known_tokens_is_refused() -> None:
    sampler = DeviceSampler(VOCAB, CPU, 1)
    with pytest.raises(ValueError, match="neither counted nor known"):
        sampler.prepare([a_row("r", (4, FUTURE_TOKEN), presence_penalty=1.0)])
    rows = [a_row(name, presence_penalty=1.0) for name in "ab"]
    with pytest.raises(ValueError, match="1 can be followed"):
        sampler.prepare(rows)
    small = DeviceSampler(VOCAB, CPU, 1, max_window=8)
    with pytest.raises(ValueError, match="at most 8"):
        small.prepare([a_row("r", presence_penalty=1.0, penalty_window=9)])
    small.prepare([a_row("r", presence_penalty=1.0, penalty_window=9, max_tokens=9)])
    with pytest.raises(ValueError, match="32767"):
        DeviceSampler(VOCAB, CPU, 1, max_window=2**15)
    with pytest.raises(ValueError, match="524288"):
        DeviceSampler(2**20, CPU, 1)


def test_requests_that_ended_are_forgotten() -> None:
    sampler = DeviceSampler(VOCAB, CPU, 2)
    for n in range(300):
        row = a_row(f"r{n}", presence_penalty=1.0, min_tokens=1, stop_token_ids=(1,))
        for step in range(2):
            sample_once(sampler, random_logits(1, VOCAB), [row], step)
        sampler.release(row.request_id)
        sampler.release(row.request_id)
    assert len(sampler._table) == 0
    assert len(sampler._table.take(list(range(64)))) == 64


def test_too_many_rows_are_refused() -> None:
    sampler = DeviceSampler(VOCAB, CPU, 2)
    with pytest.raises(ValueError, match="room for 2"):
        sampler.sample(random_logits(3, VOCAB), sampler.create_buffers())


def test_no_rows() -> None:
    assert sample_once(DeviceSampler(VOCAB, CPU, 2), random_logits(0, VOCAB), []) == []


# --- memory


@pytest.mark.parametrize("vocab", [5000, 151_936, 193_800, 2**19])
def test_the_kernels_memory_is_planned(vocab: int) -> None:
    pytest.importorskip("triton")
    buffers, rows = SamplingBuffers(vocab, CPU, 4), 4
    kernels = importlib.import_module("llm.sampling.device.kernels")
    parts = kernels.Scratch(vocab, CPU, rows).workspace
    taken = sum(part.nbytes for part in parts if isinstance(part, Tensor))
    taken += buffers.records.nbytes + buffers.masks.nbytes
    planned = sampler_bytes(vocab, rows, 0)
    assert 0.8 * planned < taken <= planned


# --- records


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=30))
def test_a_record_only_depends_on_its_index(asked: list[tuple[int, int]]) -> None:
    """Before and after the minimum length, in a cycle of candidates, and back again."""
    stops = {"stop_token_ids": (3, 4), "min_tokens": 4}
    cycle = {"allowed_cycle": (((0, 9),), ((9, 20),)), **stops}
    kinds: tuple[dict[str, Any], ...] = (stops, cycle, {"seed": 3})
    rows = [a_row(f"r{n}", **kind) for n, kind in enumerate(kinds)]
    table = RecordTable(VOCAB)
    for kind, index in asked:
        fresh = RecordTable(VOCAB)
        expected = fresh.take(fresh.places(columns_of([rows[kind]]), [index]))
        found = table.take(table.places(columns_of([rows[kind]]), [index]))
        assert found.tobytes() == expected.tobytes()

"""Matrices in groups: every number survives packing, and rows, columns and stacks are those of the
expanded matrix.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llm.kernels.rounding import quantize_rows
from llm.layers.groups import Groups, group_bytes, pack_pairs, unpack_pairs
from llm.layers.weight import LinearWeight

SEEDS = st.integers(0, 10_000)


def random_parts(
    seed: int, num_out: int, num_in: int, group_of: int, *, bits: int = 4, lows: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return numbers, scales and minimums, with as few bits as float16 has."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_out, -(-num_in // group_of))
    bounds, dtype = ((0, 16), torch.uint8) if bits == 4 else ((-128, 128), torch.int8)
    q = torch.randint(*bounds, (num_out, num_in), generator=generator, dtype=dtype)
    scales = torch.randn(shape, generator=generator).half()
    return q, scales, torch.randn(shape, generator=generator).half() if lows else None


def value_of(q: Tensor, scales: Tensor, minimums: Tensor | None, group_of: int) -> Tensor:
    """Return the matrix by its definition, computed in float64 and rounded once."""
    group = torch.arange(q.shape[1]) // group_of
    numbers = q.double() - (8 if minimums is None and q.dtype is torch.uint8 else 0)
    found = numbers * scales.double()[:, group]
    return (found if minimums is None else found + minimums.double()[:, group]).float()


def packed(
    seed: int, num_out: int = 5, num_in: int = 256, group_of: int = 64, **keys: bool | int
) -> Groups:
    found = Groups.pack(*random_parts(seed, num_out, num_in, group_of, **keys), group_of)
    assert found is not None
    return found


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 6))
def test_pairs_keep_every_number(seed: int, num_out: int, blocks: int) -> None:
    made = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (num_out, 32 * blocks), dtype=torch.uint8, generator=made)
    pairs = pack_pairs(q)
    assert pairs.shape == (num_out, 16 * blocks)
    assert torch.equal(unpack_pairs(pairs), q)


@settings(max_examples=60, deadline=None)
@given(
    SEEDS,
    st.sampled_from([16, 32, 48, 64, 96, 128]),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([4, 8]),
)
def test_a_matrix_keeps_its_value(
    seed: int, group_of: int, steps: int, lows: bool, bits: int
) -> None:
    """With any number of inputs of the last group."""
    parts = random_parts(seed, 3, 16 * steps, group_of, bits=bits, lows=lows)
    groups = Groups.pack(*parts, group_of)
    assert groups is not None
    assert groups.shape == (3, 16 * steps)
    assert groups.group_size & (groups.group_size - 1) == 0
    assert groups.has_pairs == (bits == 4 and groups.group_size > 16)
    assert torch.equal(groups.expand(), value_of(*parts, group_of))
    size = group_bytes(groups.shape, group_of, bits=bits, has_minimums=lows)
    assert groups.nbytes == size


@pytest.mark.parametrize("group_of", [1, 8, 24])
def test_small_groups_are_not_packed(group_of: int) -> None:
    assert Groups.pack(*random_parts(0, 3, 48, group_of), group_of) is None
    assert group_bytes((3, 48), group_of, bits=4, has_minimums=True) == 3 * 48 * 4


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_not_packed(which: int, value: float) -> None:
    parts = random_parts(0, 3, 64, 32)
    changed = parts[which]
    assert changed is not None
    changed[1, 1] = value
    assert Groups.pack(*parts, 32) is None


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.booleans(), st.sampled_from([4, 8]))
def test_rows_and_columns_are_those_of_the_matrix(seed: int, lows: bool, bits: int) -> None:
    groups = packed(seed, lows=lows, bits=bits)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(groups.rows(order).expand(), groups.expand()[order])
    some = groups.columns(64, 192)
    assert some is not None
    assert torch.equal(some.expand(), groups.expand()[:, 64:192])
    assert groups.columns(32, 192) is None


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(SEEDS, st.sampled_from([16, 32, 128]), st.booleans(), st.sampled_from([4, 8])),
        min_size=1,
        max_size=3,
    )
)
def test_a_stack_is_that_of_the_matrices(kinds: list[tuple[int, int, bool, int]]) -> None:
    """Matrices of 4 bits and 8, in any groups, with minimums and without."""
    matrices = [packed(s, group_of=size, lows=lows, bits=bits) for s, size, lows, bits in kinds]
    weights = [LinearWeight(groups.values, groups=groups) for groups in matrices]
    stacked = LinearWeight.stack(weights)
    assert stacked.groups is not None
    expected = torch.cat([groups.expand() for groups in matrices])
    assert torch.equal(stacked.to_float(torch.float32), expected)
    assert stacked.shape == tuple(expected.shape)


def test_a_stack_with_another_format_is_expanded() -> None:
    groups = packed(0)
    plain = torch.randn(3, 256)
    weight = LinearWeight(groups.values, groups=groups)
    stacked = LinearWeight.stack([weight, LinearWeight(plain)])
    assert stacked.groups is None
    assert torch.equal(stacked.values, torch.cat([groups.expand(), plain]))


def test_groups_can_be_rounded_to_other_formats() -> None:
    groups = packed(0)
    weight, plain = LinearWeight(groups.values, groups=groups), LinearWeight(groups.expand())
    assert weight.is_quantized
    for found, expected in (
        (weight.to_int8(), plain.to_int8()),
        (weight.to_float8(torch.device("cpu")), quantize_rows(plain.values)),
    ):
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.float(), theirs.float())

"""Layers against their formulas, and the rule that a row's result is its own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from llm.layers.activation import UNSPLIT_ELEMENTS, row_blocks, silu_and_multiply
from llm.layers.embedding import Embedding
from llm.layers.int8 import (
    ROW_BLOCK,
    ExactInt8Linear,
    PackedInt8Linear,
    Scratch,
    has_integer_kernels,
)
from llm.layers.linear import FloatLinear, Linear, LinearFactory
from llm.layers.norm import RMSNorm
from llm.layers.rotary import Rotary, RotaryConfig, interleaved_rows, rotate_
from llm.layers.rotary_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
)
from llm.layers.weight import LinearWeight

CPU = torch.device("cpu")
ROW_COUNTS = (1, 2, 3, 5, 8, 13, 32, 65)

needs_fbgemm = pytest.mark.skipif(not has_integer_kernels(), reason="torch without FBGEMM")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_are_their_own(layer: Linear, x: Tensor) -> None:
    """Each row gets the same bits with any number of neighbours, wherever it lies among them."""
    whole = layer(x)
    for count in ROW_COUNTS:
        for start in (0, 7, len(x) - count):
            rows = slice(start, start + count)
            assert torch.equal(layer(x[rows].clone()), whole[rows]), (count, start)


@pytest.mark.parametrize("shape", [(1024, 512), (96, 64), (512, 1536), (48, 130)])
@pytest.mark.parametrize("kind", ["exact", "packed", "float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_neighbours(kind: str, shape: tuple[int, int]) -> None:
    weight = LinearWeight(normal(*shape))
    x = normal(80, shape[1], seed=1)
    layers = {
        "exact": lambda: ExactInt8Linear(weight, Scratch()),
        "packed": lambda: PackedInt8Linear(weight),
        "float32": lambda: FloatLinear(weight, torch.float32, CPU),
        "bfloat16": lambda: FloatLinear(weight, torch.bfloat16, CPU),
    }
    if kind == "exact" and not has_integer_kernels():
        pytest.skip("torch without FBGEMM")
    assert_rows_are_their_own(layers[kind](), x.bfloat16() if kind == "bfloat16" else x)


@needs_fbgemm
@pytest.mark.parametrize(("spread", "tolerance"), [(1.0, 5e-4), (50.0, 2e-3)])
def test_integer_products_are_as_exact_as_thirteen_bits(spread: float, tolerance: float) -> None:
    weight = LinearWeight(normal(300, 256))
    values, scales = weight.to_int8()
    x = normal(40, 256, seed=1)
    x[:, 3] *= spread  # one channel far above the others
    expected = x.double() @ (values.double() * scales.double()[:, None]).T
    found = ExactInt8Linear(weight, Scratch())(x)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < tolerance


@needs_fbgemm
def test_digits_that_lie_near_a_tie_are_rounded_alike() -> None:
    """An input within float32 rounding of n + ½: the high digit must be rounded only once."""
    weight = LinearWeight(torch.eye(64))
    values, scales = weight.to_int8()
    x = (torch.arange(64) - 31.5) / 63 * (1 + torch.tensor([[-1e-7], [0.0], [1e-7]]))
    x[:, 0] = 1.0  # the row's largest
    found = ExactInt8Linear(weight, Scratch())(x)
    assert torch.allclose(found, x @ (values * scales[:, None]).T, atol=1 / 63 / 64)


@needs_fbgemm
def test_int8_survives_zero_rows_and_many_rows() -> None:
    layer = ExactInt8Linear(LinearWeight(normal(32, 64)), Scratch())
    x = normal(2 * ROW_BLOCK + 5, 64, seed=1)
    x[4] = 0
    found = layer(x)
    assert torch.equal(found[4], torch.zeros(32))
    assert torch.equal(
        found[ROW_BLOCK + 1 : ROW_BLOCK + 2], layer(x[ROW_BLOCK + 1 : ROW_BLOCK + 2])
    )
    assert found.shape == (2 * ROW_BLOCK + 5, 32)


@needs_fbgemm
def test_layers_can_share_their_scratch() -> None:
    scratch = Scratch()
    layers = [ExactInt8Linear(LinearWeight(normal(32, n, seed=n)), scratch) for n in (64, 64, 16)]
    alone = [ExactInt8Linear(LinearWeight(normal(32, n, seed=n)), Scratch()) for n in (64, 64, 16)]
    for rows in (3, 1, 9, 3):
        for shared, own in zip(layers, alone, strict=True):
            x = normal(rows, own.in_features, seed=rows)
            assert torch.equal(shared(x), own(x))


def test_both_int8_kernels_compute_the_same_matrix() -> None:
    weight = LinearWeight(normal(64, 128))
    x = normal(9, 128, seed=1)
    expected = F.linear(x, weight.values)
    packed = PackedInt8Linear(weight)(x)
    assert packed.dtype == torch.float32
    assert ((packed - expected).norm() / expected.norm()) < 0.02
    if has_integer_kernels():
        exact = ExactInt8Linear(weight, Scratch())(x)
        assert ((exact - expected).norm() / expected.norm()) < 0.015
        assert ((packed - exact).norm() / expected.norm()) < 0.01


def test_the_factory_follows_the_encoding() -> None:
    weight = LinearWeight(normal(8, 16))
    plain = LinearFactory(dtype=torch.float32, device=CPU, int8=False)
    assert isinstance(plain.linear(weight), FloatLinear)
    int8 = LinearFactory(dtype=torch.float32, device=CPU, int8=True)
    quantised = int8.linear(weight)
    assert isinstance(quantised, ExactInt8Linear if has_integer_kernels() else PackedInt8Linear)
    assert (quantised.in_features, quantised.out_features) == (16, 8)


def test_products_on_the_cpu_are_a_rows_own_already() -> None:
    weight = LinearWeight(normal(8, 16))
    factory = LinearFactory(dtype=torch.float32, device=CPU, int8=False, batch_invariant=True)
    assert isinstance(factory.linear(weight), FloatLinear)


def test_embedding_rows() -> None:
    weight = LinearWeight(normal(20, 8))
    ids = torch.tensor([3, 0, 3, 19])
    plain = Embedding(weight, dtype=torch.float32, device=CPU, int8=False)
    assert torch.equal(plain(ids), weight.values[ids])
    int8 = Embedding(weight, dtype=torch.float32, device=CPU, int8=True)
    values, scales = weight.to_int8()
    assert torch.equal(int8(ids), (values * scales[:, None])[ids])


def test_rms_norm_is_its_formula_and_row_by_row() -> None:
    x, weight = normal(70, 512) * 3, normal(512, seed=1)
    expected = F.rms_norm(x, (512,), weight, 1e-5)
    norm = RMSNorm(weight, 1e-5)
    before = x.clone()
    found = norm(x)
    assert torch.equal(x, before)
    assert torch.allclose(found, expected, atol=1e-5)
    for count in ROW_COUNTS:
        assert torch.equal(norm(x[3 : 3 + count]), found[3 : 3 + count])
    assert torch.allclose(RMSNorm(weight, 1e-5)(x * 0), x * 0)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_gated_activation_is_its_formula_and_row_by_row() -> None:
    inner = 1536
    x = normal(65, 2 * inner)
    expected = F.silu(x[:, :inner]) * x[:, inner:]
    whole = silu_and_multiply(x.clone())
    assert torch.allclose(whole, expected, atol=1e-6)
    threads = torch.get_num_threads()
    try:
        for count, num_threads in ((1, 1), (22, 3), (65, 3), (43, 5)):
            torch.set_num_threads(num_threads)
            assert torch.equal(silu_and_multiply(x[:count].clone()), whole[:count])
    finally:
        torch.set_num_threads(threads)


def test_row_blocks_cover_everything_in_pieces_that_are_not_split() -> None:
    x = normal(50, 1536)
    blocks = row_blocks(x, 1536)
    assert torch.equal(torch.cat(blocks), x)
    assert all(block.numel() <= UNSPLIT_ELEMENTS for block in blocks)
    assert len(row_blocks(x[:4], 1536)) == 1
    assert len(row_blocks(normal(2, UNSPLIT_ELEMENTS + 1), UNSPLIT_ELEMENTS + 1)) == 2


ROPES = {
    "default": (RotaryConfig(16, 500.0), {"rope_type": "default", "rope_theta": 500.0}),
    "linear": (
        RotaryConfig(16, 500.0, LinearScaling(4.0)),
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    ),
    "llama3": (
        RotaryConfig(16, 500.0, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (
        RotaryConfig(16, 500.0, YarnScaling(4.0, 64, 0.1 * math.log(4.0) + 1)),
        {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn, all of it set": (
        RotaryConfig(16, 500.0, YarnScaling(8.0, 128, 1.3, 20.0, 2.0, truncate=False)),
        {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "attention_factor": 1.3,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    ),
    "dynamic, not yet scaled": (
        RotaryConfig(16, 500.0, DynamicScaling(4.0, 512)),
        {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotation_is_that_of_transformers(kind: str) -> None:
    """Rotating reordered heads gives the reordered rotation, so all dot products agree."""
    config, parameters = ROPES[kind]
    num_heads, head_dim, num_tokens = 3, 16, 200
    twin = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=48,
            num_attention_heads=3,
            head_dim=head_dim,
            max_position_embeddings=512,
            rope_parameters=parameters,
        )
    )
    x = normal(num_tokens, num_heads, head_dim)
    positions = torch.arange(num_tokens) * 2 + 1
    cos, sin = twin(x[None], positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    order = interleaved_rows(num_heads, head_dim)
    found = x.flatten(1)[:, order].view(num_tokens, num_heads, head_dim)
    rotate_(found, Rotary(config, 512, CPU).at(positions))
    wanted = expected[0].transpose(0, 1).flatten(1)[:, order]
    assert torch.allclose(found.flatten(1), wanted, atol=1e-5)


def test_dynamic_scaling_is_that_of_transformers_token_by_token() -> None:
    """Beyond the original length each new token has a new base."""
    parameters = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    twin = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=16,
            num_attention_heads=1,
            max_position_embeddings=32,
            rope_parameters=parameters,
        )
    )
    scaling = DynamicScaling(4.0, 32)
    assert scaling.max_positions(32) == 128
    rotations = RotaryConfig(16, 500.0, scaling).rotations(128)
    for position in (0, 31, 32, 33, 60, 127):
        cos, sin = twin(torch.zeros(1), torch.tensor([[position]]))
        found = rotations[position]
        assert torch.allclose(found.real, cos[0, 0, :8], atol=1e-5), position
        assert torch.allclose(found.imag, sin[0, 0, :8], atol=1e-5), position


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    rotary = Rotary(RotaryConfig(8), 100, CPU)
    query, key = normal(1, 1, 8), normal(1, 1, 8, seed=1)

    def product(query_position: int, key_position: int) -> float:
        q, k = query.clone(), key.clone()
        rotate_(q, rotary.at(torch.tensor([query_position])))
        rotate_(k, rotary.at(torch.tensor([key_position])))
        assert math.isclose(q.norm(), query.norm(), rel_tol=1e-5)
        return (q * k).sum().item()

    assert math.isclose(product(30, 10), product(90, 70), rel_tol=1e-4)
    assert not math.isclose(product(30, 10), product(31, 10), rel_tol=1e-3)


def test_rotation_of_many_rows_is_row_by_row() -> None:
    rotations = Rotary(RotaryConfig(64), 512, CPU).at(torch.arange(300))
    x = normal(300, 12, 64)
    whole = x.clone()
    rotate_(whole, rotations)
    for count in (1, 7, 86, 171):
        part = x[:count].clone()
        rotate_(part, rotations[:count])
        assert torch.equal(part, whole[:count])
    narrow = x.bfloat16()
    rotate_(narrow, rotations)
    assert torch.allclose(narrow.float(), whole, atol=0.05)


def test_interleaving_pairs_the_halves_of_each_head() -> None:
    assert interleaved_rows(2, 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]

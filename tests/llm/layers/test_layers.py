"""Layers against their formulas, and the independence of rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.layers.decoder import (
    UNSPLIT_ELEMENTS,
    Embedding,
    RMSNorm,
    Rotary,
    interleaved_rows,
    rotate_,
    row_blocks,
    silu_and_multiply,
)
from llm.layers.factory import LinearFactory
from llm.layers.linear import FloatLinear, Linear, RowLinear
from llm.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryConfig,
    YarnScaling,
)
from llm.layers.weight import LinearWeight

CPU = torch.device("cpu")
ROW_COUNTS = (1, 2, 3, 5, 8, 13, 32, 65)
FORMATS = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_are_their_own(layer: Linear, x: Tensor) -> None:
    """Check that each row gets the same bits with any number of neighbours, at any position."""
    whole = layer(x)
    for count in ROW_COUNTS:
        for start in (0, 7, len(x) - count):
            rows = slice(start, start + count)
            assert torch.equal(layer(x[rows].clone()), whole[rows]), (count, start)


@pytest.mark.parametrize("shape", [(1024, 512), (96, 64), (512, 1536), (48, 130), (7, 3)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(name: str, shape: tuple[int, int]) -> None:
    layer = RowLinear(LinearWeight(normal(*shape)), FORMATS[name])
    x = normal(80, shape[1], seed=1)
    assert_rows_are_their_own(layer, x.bfloat16() if name == "bfloat16" else x)


@pytest.mark.parametrize(("name", "error"), [("float32", 1e-6), ("bfloat16", 4e-3), ("int8", 1e-2)])
def test_row_products_are_the_matrix(name: str, error: float) -> None:
    """Except for the rounding of weights: bfloat16 has 8 bits, int8 7 of the largest."""
    weight = LinearWeight(normal(300, 200))
    x = normal(9, 200, seed=1)
    expected = x.double() @ weight.values.double().T
    found = RowLinear(weight, FORMATS[name])(x)
    assert found.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < error


@pytest.mark.parametrize("name", FORMATS)
def test_stored_weights_are_multiplied_without_another_rounding(name: str) -> None:
    weight = LinearWeight(normal(65, 128))
    stored = weight.values.to(FORMATS[name]).double()
    if name == "int8":
        values, scales = weight.to_int8()
        stored = values.double() * scales.double()[:, None]
    x = normal(70, 128, seed=1)
    expected = x.double() @ stored.T
    found = RowLinear(weight, FORMATS[name])(x)
    assert (found - expected).norm() / expected.norm() < 1e-6


def test_a_tied_head_takes_no_memory_of_its_own() -> None:
    table = normal(50, 64)
    before = table.clone()
    layer = RowLinear(LinearWeight(table), torch.float32)
    table.zero_()
    assert torch.equal(layer(before[:3]), torch.zeros(3, 50))


def test_rows_of_zeros_and_numbers_that_are_not_finite_stay_in_their_row() -> None:
    layer = RowLinear(LinearWeight(normal(32, 70)), torch.float32)
    x = normal(6, 70, seed=1)
    whole = layer(x)
    x[2], x[4, 5] = 0, float("nan")
    found = layer(x)
    assert torch.equal(found[2], torch.zeros(32))
    assert found[4].isnan().all()
    assert torch.equal(found[[0, 1, 3, 5]], whole[[0, 1, 3, 5]])


def test_the_factory_follows_the_encoding() -> None:
    weight = LinearWeight(normal(8, 16))
    kinds = {}
    for int8 in (False, True):
        factory = LinearFactory(dtype=torch.float32, device=CPU, int8=int8)
        layer = factory.linear(weight)
        assert isinstance(layer, RowLinear)
        assert (layer.in_features, layer.out_features) == (16, 8)
        kinds[int8] = layer(normal(3, 16))
    assert not torch.equal(kinds[True], kinds[False])
    vendors = LinearFactory(dtype=torch.float32, device=CPU, int8=True, vendor_blas=True)
    assert isinstance(vendors.linear(weight), FloatLinear)


def test_products_on_the_cpu_are_a_rows_own_already() -> None:
    weight = LinearWeight(normal(8, 16))
    factory = LinearFactory(dtype=torch.float32, device=CPU, int8=False, batch_invariant=True)
    assert isinstance(factory.linear(weight), RowLinear)


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


def rotary_of_transformers(**keys: object) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(LlamaConfig(**keys))


@pytest.mark.parametrize("kind", ROPES)
def test_rotation_is_that_of_transformers(kind: str) -> None:
    """Rotating reordered heads gives the reordered rotation, so that all dot products agree."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    config, parameters = ROPES[kind]
    num_heads, head_dim, num_tokens = 3, 16, 200
    counterpart = rotary_of_transformers(
        hidden_size=48,
        num_attention_heads=3,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    x = normal(num_tokens, num_heads, head_dim)
    positions = torch.arange(num_tokens) * 2 + 1
    cos, sin = counterpart(x[None], positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    order = interleaved_rows(num_heads, head_dim)
    found = x.flatten(1)[:, order].view(num_tokens, num_heads, head_dim)
    rotate_(found, Rotary(config, 512, CPU).at(positions))
    wanted = expected[0].transpose(0, 1).flatten(1)[:, order]
    assert torch.allclose(found.flatten(1), wanted, atol=1e-5)


def test_dynamic_scaling_is_that_of_transformers_token_by_token() -> None:
    """Beyond the original length each new token has a new base."""
    parameters = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    counterpart = rotary_of_transformers(
        hidden_size=16,
        num_attention_heads=1,
        max_position_embeddings=32,
        rope_parameters=parameters,
    )
    scaling = DynamicScaling(4.0, 32)
    assert scaling.max_positions(32) == 128
    rotations = RotaryConfig(16, 500.0, scaling).rotations(128)
    for position in (0, 31, 32, 33, 60, 127):
        cos, sin = counterpart(torch.zeros(1), torch.tensor([[position]]))
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

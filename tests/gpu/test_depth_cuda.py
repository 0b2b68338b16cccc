"""A depth transformer on a GPU: nearly the logits of torch's layers, and the same at every launch
level, in graphs, and for each number of rows that its kernels take.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm.kernels.registry import KernelSet
from llm.kernels.tuning import MAX_SPLIT_ROWS
from llm.layers.decoder import (
    AttentionShape,
    AttentionWeights,
    DecoderLayer,
    GatedMLP,
    HeadNorm,
    LogitsHead,
    RMSNorm,
    Rotary,
    SelfAttention,
)
from llm.layers.depth import DepthFrames, DepthTransformer
from llm.layers.linear import FloatLinear
from llm.layers.rotary import RotaryConfig
from llm.layers.weight import LinearWeight
from llm.parallel.group import NullGroup
from llm.request import FrameShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
CODEBOOKS, FIRST, LATER = 6, 300, 200
HIDDEN, INNER, HEADS, KV_HEADS, SIZE, LAYERS = 512, 1536, 8, 4, 64, 3
MOST = 1.5  # times the rounding of torch's layers
LEVELS = [
    KernelSet.choose(vendor_blas=False, experimental=True, launch_level=level)
    for level in (0, 1, 2)
]


def depth_transformer(kernels: KernelSet, dtype: torch.dtype) -> DepthTransformer:
    """Return the same random one for any kernels."""
    made = torch.Generator().manual_seed(0)

    def linear(num_out: int, num_in: int) -> FloatLinear:
        weight = torch.randn(num_out, num_in, generator=made) * num_in**-0.5
        return FloatLinear(LinearWeight(weight), dtype, CUDA)

    def gains(*shape: int) -> Tensor:
        return (1 + 0.1 * torch.randn(*shape, generator=made)).to(CUDA, dtype)

    def layer(number: int) -> DecoderLayer:
        weights = AttentionWeights(
            linear((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
            linear(HIDDEN, HEADS * SIZE),
            HeadNorm(gains(HEADS + KV_HEADS, SIZE), 1e-6),
        )
        shape = AttentionShape(HEADS, KV_HEADS, SIZE)
        attention = SelfAttention(number, shape, weights, NullGroup())
        mlp = GatedMLP(linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER), NullGroup())
        return DecoderLayer(
            RMSNorm(gains(HIDDEN), 1e-6), attention, RMSNorm(gains(HIDDEN), 1e-6), mlp
        )

    table = torch.randn(FIRST + (CODEBOOKS - 2) * LATER, HIDDEN, generator=made)
    return DepthTransformer(
        shape=FrameShape(CODEBOOKS, FIRST, 100, (1,) + (0,) * (CODEBOOKS - 1), LATER),
        embedding=table.to(CUDA, dtype),
        projection=None,
        layers=[layer(number) for number in range(LAYERS)],
        rotary=Rotary(RotaryConfig(SIZE), CODEBOOKS, CUDA),
        heads=[
            LogitsHead(RMSNorm(gains(HIDDEN), 1e-6), linear(LATER, HIDDEN))
            for _ in range(CODEBOOKS - 1)
        ],
        kernels=kernels,
    )


def logits(model: DepthTransformer, hidden: Tensor, codes: Tensor) -> Tensor:
    """Return [B, K - 1, V] logits of frames with codes [K - 1, B]."""
    frames = model.begin(hidden)
    return torch.stack([frames.next_logits(own) for own in codes], dim=1)


@pytest.mark.parametrize("rows", [1, 3, 16, MAX_SPLIT_ROWS, MAX_SPLIT_ROWS + 1])
def test_logits_are_those_of_torch(rows: int) -> None:
    """In float32, and in bfloat16 up to about the rounding of torch's layers."""
    hidden = torch.randn(rows, HIDDEN, device=CUDA)
    codes = torch.randint(LATER, (CODEBOOKS - 1, rows), device=CUDA, dtype=torch.int32)

    def found(kernels: KernelSet, dtype: torch.dtype) -> Tensor:
        return logits(depth_transformer(kernels, dtype), hidden.to(dtype), codes)

    exact = found(KernelSet(), torch.float32)
    assert (found(LEVELS[2], torch.float32) - exact).norm() < 1e-4 * exact.norm()
    rounding = (found(KernelSet(), torch.bfloat16) - exact).norm()
    assert rounding < 0.1 * exact.norm()
    own = [found(kernels, torch.bfloat16) for kernels in LEVELS]
    assert (own[0] - exact).norm() < MOST * rounding
    for other in own[1:]:
        assert torch.equal(other, own[0])


def test_a_device_with_little_shared_memory_multiplies_with_blas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llm.layers.split_depth import SplitFrames

    hidden = torch.randn(16, HIDDEN, device=CUDA).bfloat16()
    assert isinstance(depth_transformer(LEVELS[0], torch.bfloat16).begin(hidden), SplitFrames)
    monkeypatch.setattr("llm.layers.split_depth.most_shared_bytes", lambda device: 99 * 1024)
    frames = depth_transformer(LEVELS[0], torch.bfloat16).begin(hidden)
    assert isinstance(frames, DepthFrames)


def test_a_graph_waits_for_every_key_and_code() -> None:
    """Replayed many times: a kernel that reads too early would read the last replay's numbers."""
    model = depth_transformer(LEVELS[2], torch.bfloat16)
    hidden = torch.randn(MAX_SPLIT_ROWS, HIDDEN, device=CUDA).bfloat16()
    codes = torch.zeros(CODEBOOKS - 1, MAX_SPLIT_ROWS, device=CUDA, dtype=torch.int32)
    logits(model, hidden, codes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = logits(model, hidden, codes)
    for _ in range(20):
        hidden.normal_()
        codes.random_(0, LATER)
        graph.replay()
        assert torch.equal(found, logits(model, hidden, codes))

"""Sums of two GPUs, over peer memory and by NCCL, eagerly and from a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm.parallel.process_group import ProcessGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SHAPES = [
    (1, 3072),
    (3, 3072),
    (1, 7),
    (256, 3072),
    (2048, 3072),
]  # 7: not aligned; 2048: too large


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return whole numbers, so that every order of the sum is exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-64, 64, shape, generator=generator).to(dtype)


def sums(rank: int, meeting: Path) -> None:
    device = torch.device("cuda", rank)
    group = ProcessGroup(rank, 2, meeting, device)
    assert group.shares_memory == torch.cuda.can_device_access_peer(rank, 1 - rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in SHAPES:
            expected = numbers(0, shape, dtype) + numbers(1, shape, dtype)
            found = group.all_reduce(numbers(rank, shape, dtype).to(device))
            assert torch.equal(found.cpu(), expected), (dtype, shape)
    _replay(rank, group, device)
    group.minimum(0)  # no rank ends before the others
    group.close()


def _replay(rank: int, group: ProcessGroup, device: torch.device) -> None:
    partial = torch.zeros(2, 3072, device=device)
    group.all_reduce(partial.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total = group.all_reduce(group.all_reduce(partial + 1) + rank)
    for value in range(100):
        partial.fill_(value)
        graph.replay()
        assert total.unique().tolist() == [4 * (value + 1) + 1]
    del graph, total


def test_sums_are_exact(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(sums, (tmp_path / "meeting",), nprocs=2)

"""Sums of two GPUs, over peer memory and by NCCL, and within kernels, eagerly and from a CUDA
graph.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm.kernels.blocks import Blocks
from llm.kernels.peers import add_parcels, gather_shelves
from llm.kernels.products import add_summed_product
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
    if group.shares_memory:
        for dtype in (torch.float32, torch.bfloat16):
            for level in (0, 1, 2):
                _add_within_kernels(rank, group, device, dtype, level)
        _gather_shelves(rank, group, device)
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


def _add_within_kernels(
    rank: int, group: ProcessGroup, device: torch.device, dtype: torch.dtype, level: int
) -> None:
    """Add sums to x by both kernels in turn, from graphs whose shapes alternate."""
    first, second = group.mailbox(0), group.mailbox(1)
    assert first is not None
    assert second is not None
    graphs = []
    for num_rows, size in ((1, 3072), (2, 40), (64, 4096), (3, 7), (1, 7), (256, 3072)):
        x = torch.zeros(num_rows, size, dtype=dtype, device=device)
        partial = numbers(rank, (num_rows, size), dtype).to(device)
        y = numbers(2 + rank, (num_rows, 64), dtype).to(device)
        weight = (numbers(4 + rank, (size, 64), torch.float32) % 3).to(device, dtype)

        def work(
            x: torch.Tensor = x, parts: tuple[torch.Tensor, ...] = (partial, y, weight)
        ) -> None:
            partial, y, weight = parts
            parcel = first.parcel_of(x)
            assert parcel is not None
            parcel.copy_(partial)
            add_parcels(x, first, level=level)
            if len(x) <= 2:
                blocks = Blocks(4, 64, 4)
                add_summed_product(x, y, weight, blocks, second, level=level)
            else:
                parcel = second.parcel_of(x)
                assert parcel is not None
                parcel.fill_(1)
                add_parcels(x, second, level=level)

        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        parts = [numbers(r, (num_rows, size), dtype).float() for r in range(2)]
        expected = parts[0] + parts[1]
        if num_rows <= 2:
            for r in range(2):
                wide = numbers(4 + r, (size, 64), torch.float32) % 3
                expected += numbers(2 + r, (num_rows, 64), dtype).float() @ wide.t()
        else:
            expected += 2
        graphs.append((graph, x, expected, work))  # `work` keeps its tensors
    for _ in range(50):
        for graph, x, *_ in graphs:
            x.zero_()
            graph.replay()
    for _, x, expected, _ in graphs:
        # Whole numbers: float32 is exact, bfloat16 rounds the first sum and the second.
        rtol = 0.0 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(x.cpu().float(), expected, rtol=rtol, atol=64 * rtol)
    del graphs, graph


def _gather_shelves(rank: int, group: ProcessGroup, device: torch.device) -> None:
    """Gather rows of several shapes, eagerly and from graphs that alternate."""
    graphs = []
    for num_rows, num_columns in ((64, 5000), (1, 64_128), (3, 33), (256, 4096)):
        shape = num_rows, num_columns
        parts = [numbers(r, shape, torch.float32) for r in range(2)]
        own = parts[rank].to(device)
        out = torch.zeros(num_rows, 2 * num_columns, device=device)

        def work(own: torch.Tensor = own, out: torch.Tensor = out) -> None:
            shelf = group.shelf(*own.shape)
            assert shelf is not None
            shelf.rows.copy_(own)
            gather_shelves(out, shelf)
            group.all_reduce(own[:1, :8].contiguous())  # between two gathers there is a sum

        work()
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), torch.cat(parts, dim=1))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        graphs.append((graph, out, torch.cat(parts, dim=1), work))
    for _ in range(20):
        for graph, out, *_ in graphs:
            out.zero_()
            graph.replay()
    for _, out, expected, _ in graphs:
        assert torch.equal(out.cpu(), expected)
    del graphs, graph


def test_sums_are_exact(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(sums, (tmp_path / "meeting",), nprocs=2)

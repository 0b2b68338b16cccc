"""FlashInfer's attention against dense attention in float64 on the CPU.

Inputs are rounded to bfloat16 (keys and values to float8 where pages are), so that only the
kernels' rounding differs: at most `ATOL` for outputs of about 1. Tests of kernels that are neither
compiled ahead of time nor can be compiled here are skipped.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import attention
from llm.attention.base import (
    AttentionBackend,
    AttentionOptions,
    CapturedShape,
    PlannedAttention,
)
from llm.attention.page_lists import PageLists
from llm.attention.registry import create_attention_backend
from llm.batch import ForwardBatch, ForwardMode
from llm.errors import ConfigError
from llm.kv_cache.kv_pool import KVPool
from tests.llm.attention.attention_rows import Row, forward_batch

fast_decode_plan = pytest.importorskip("flashinfer.decode").fast_decode_plan
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ATOL = 2e-2
Step = list[tuple[Row, int, int]]
GROUPS = [(8, 8), (16, 8), (24, 8), (32, 8), (10, 2), (12, 2), (14, 2), (8, 1)]  # 1 to 8


class Setting:
    """A pool on the GPU, a backend over it, and rows with pages scattered over it."""

    def __init__(
        self,
        heads: tuple[int, int],
        head_dim: int = 64,
        page_size: int = 16,
        *,
        windows: tuple[int | None, ...] = (None,),
        soft_cap: float | None = None,
        kv_dtype: torch.dtype = torch.bfloat16,
        enable_pdl: bool = False,
        batch_invariant: bool = False,
        decode_level: int | None = None,
        name: str = "flashinfer",
    ) -> None:
        self.heads, self.head_dim, self.page_size = heads, head_dim, page_size
        self.windows, self.soft_cap, self.kv_dtype = windows, soft_cap, kv_dtype
        self.free = list(range(1, 1 + 12000 // page_size))
        random.Random(heads[0]).shuffle(self.free)
        pool = KVPool(
            len(windows), len(self.free) + 1, page_size, heads[1], head_dim, kv_dtype, "cuda"
        )
        options = AttentionOptions(
            num_heads=heads[0],
            dtype=torch.bfloat16,
            windows=windows,
            soft_cap=soft_cap,
            enable_pdl=enable_pdl,
            decode_level=decode_level,
            batch_invariant=batch_invariant,
        )
        try:
            self.backend: AttentionBackend[Any] = create_attention_backend(name, pool, options)
        except ConfigError as error:
            pytest.skip(str(error)[:200])

    def row(self, length: int, seed: int) -> Row:
        """Return queries, keys and values as rounded for the kernels."""
        pages = [self.free.pop() for _ in range(-(-length // self.page_size))]
        row = Row(length, self.heads, pages, seed, self.head_dim)
        row.query = row.query.bfloat16().float()
        row.key_value = row.key_value.bfloat16().to(self.kv_dtype).float()
        return row

    def batch(self, parts: Step) -> ForwardBatch:
        """Return a batch on the device."""
        found = forward_batch(self.page_size, parts)
        tensors = {
            name: getattr(found, name).cuda() for name in ("input_ids", "positions", "slot_mapping")
        }
        is_decode = set(found.query_lens) == {1}
        return replace(found, mode=ForwardMode.DECODE if is_decode else found.mode, **tensors)

    def fed(self, parts: Step) -> tuple[Tensor, Tensor]:
        """Return queries that, as in a model, are next to their keys and values in memory."""
        num_heads, num_kv_heads = self.heads
        query = torch.cat([row.query[start:end] for row, start, end in parts])
        key_value = torch.cat([row.key_value[start:end] for row, start, end in parts])
        both = torch.cat([query, key_value.flatten(1, 2)], dim=1).bfloat16().cuda()
        own = both[:, num_heads:].unflatten(1, (2, num_kv_heads))
        return both[:, :num_heads], own

    def expected(self, parts: Step, layer: int) -> Tensor:
        """Return [T, H × D] in float64."""
        window = self.windows[layer]
        return torch.cat([row.expected(a, b, window, self.soft_cap) for row, a, b in parts])

    def check(self, *steps: Step) -> None:
        """Check every step with a new plan in every layer."""
        for parts in steps:
            planned = PlannedAttention.create(self.batch(parts), self.backend)
            for layer in range(len(self.windows)):
                found = planned.attend(layer, *self.fed(parts))
                assert_close(found, self.expected(parts, layer), f"layer {layer}")


def assert_close(found: Tensor, expected: Tensor, text: str) -> None:
    assert found.dtype == torch.bfloat16
    worst = float((found.double().cpu() - expected).abs().max())
    assert worst < ATOL, f"{text}: off by {worst:.4f}, {tuple(expected.shape)}"


def steps_of(setting: Setting) -> list[Step]:
    """Prompts, chunks, a single token after a cached prefix, decoding and mixed batches."""
    first, second, third, fourth = (
        setting.row(length, seed) for seed, length in enumerate((700, 130, 300, 64))
    )
    return [
        [(first, 0, 513), (second, 0, 64), (fourth, 0, 1)],  # prompts
        [(first, 513, 698), (second, 64, 65)],  # a chunk, a single token after a prefix
        [(second, 65, 66), (first, 698, 699), (fourth, 1, 2)],  # decoding
        [(second, 66, 67), (fourth, 2, 3), (third, 0, 200)],  # mixed
        [(second, 67, 68), (third, 200, 201), (fourth, 3, 5), (first, 699, 700)],
        [(third, 201, 202)],
    ]


@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_groups_and_page_sizes(heads: tuple[int, int], page_size: int) -> None:
    setting = Setting(heads, 64, page_size)
    setting.check(*steps_of(setting))


@pytest.mark.parametrize("heads", [(24, 8), (16, 8), (32, 8)])
def test_heads_of_128(heads: tuple[int, int]) -> None:
    setting = Setting(heads, 128, 16)
    setting.check(*steps_of(setting))


def test_dependent_launch_changes_no_bit() -> None:
    found = []
    for enable_pdl in (False, True):
        setting = Setting((24, 8), 128, 16, enable_pdl=enable_pdl)
        for parts in steps_of(setting):
            planned = PlannedAttention.create(setting.batch(parts), setting.backend)
            found.append(planned.attend(0, *setting.fed(parts)))
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))


@pytest.mark.parametrize("heads", [(16, 8), (32, 8)])
def test_windows_and_capped_scores(heads: tuple[int, int]) -> None:
    """Layers with two windows, one narrower than a page and a tile."""
    setting = Setting(heads, 64, 128, windows=(40, 400), soft_cap=20.0)
    setting.check(*steps_of(setting))


@pytest.mark.parametrize("heads", [(16, 8), (32, 8)])
def test_pages_of_float8(heads: tuple[int, int]) -> None:
    setting = Setting(heads, 64, 16, kv_dtype=torch.float8_e4m3fn)
    setting.check(*steps_of(setting))


@pytest.mark.parametrize("heads", [(16, 8), (24, 8), (32, 8), (14, 2)])
def test_invariant_decoding_does_not_depend_on_the_batch(heads: tuple[int, int]) -> None:
    """Alone, with others, and in captured plans for few and for many rows: the same bits."""
    setting = Setting(heads, batch_invariant=True)
    backend, rows = setting.backend, [setting.row(length, length) for length in (900, 40, 300)]
    setting.check([(row, 0, len(row.query)) for row in rows])
    one: Step = [(rows[0], 898, 899)]
    alone = backend.forward(backend.plan(setting.batch(one)), 0, *setting.fed(one))
    for others in (1, 2, 40):
        parts: Step = [*one, *[(rows[1 + n % 2], n, n + 1) for n in range(others)]]
        eager = backend.forward(backend.plan(setting.batch(parts)), 0, *setting.fed(parts))
        assert torch.equal(eager[0], alone[0])
        plan = backend.capture_plan(CapturedShape(len(parts)), 900)
        backend.replan(plan, setting.batch(parts))
        assert torch.equal(backend.forward(plan, 0, *setting.fed(parts))[0], alone[0])


def test_a_long_context_is_shared_by_many_blocks() -> None:
    setting = Setting((24, 8), 128, 16)
    row = setting.row(9000, 1)
    setting.check([(row, 0, 8998)], [(row, 8998, 8999)], [(row, 8999, 9000)])


def padding(setting: Setting, count: int) -> Step:
    row = setting.row(1, 99)
    row.pages = [0]
    return [(row, 0, 1)] * count


FILLED = [
    ((24, 8), 128, None),
    ((32, 8), 64, None),
    ((16, 8), 64, None),
    ((14, 2), 64, None),
    ((24, 8), 128, 0),
    ((14, 2), 64, 1),
]


@pytest.fixture(params=FILLED, ids=str)
def filled(request: pytest.FixtureRequest) -> tuple[Setting, list[Row]]:
    """Return rows whose keys and values are in the pool already; some with built-in kernels."""
    heads, head_dim, level = request.param
    setting = Setting(heads, head_dim, 16, decode_level=level)
    rows = [setting.row(length, length) for length in (500, 17, 16, 33, 1000, 250)]
    setting.check([(row, 0, len(row.query)) for row in rows])
    return setting, rows


@pytest.mark.parametrize("with_graph", [False, True])
def test_captured_plans(filled: tuple[Setting, list[Row]], with_graph: bool) -> None:
    """Plans for 20 and 2 rows in turn, updated for batches and run; by graph: captured, replayed.

    So many that no context is shared by several blocks, and so few that all are.
    """
    setting, rows = filled
    backend = setting.backend
    sizes = (20, 2)
    plans = {size: backend.capture_plan(CapturedShape(size), 1000) for size in sizes}
    buffers = {size: [t.cuda() for t in setting.fed(padding(setting, size))] for size in sizes}
    out: dict[int, Tensor] = {}
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    for size in sizes if with_graph else ():
        backend.replan(plans[size], setting.batch(padding(setting, size)))
        backend.forward(plans[size], 0, *buffers[size])
        torch.cuda.synchronize()
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size]):
            out[size] = backend.forward(plans[size], 0, *buffers[size])
    a, b, c, d, e, f = rows
    steps: list[Step] = [
        [(a, 499, 500), (b, 16, 17), (c, 15, 16), (d, 32, 33), *padding(setting, 16)],
        [(e, 999, 1000), (f, 10, 11)],
        [*[(e, 999 - 40 * n, 1000 - 40 * n) for n in range(19)], *padding(setting, 1)],
        [(row, n, n + 1) for n in (0, 5, 9, 12) for row in (a, b, c, f, e)],
        [(a, 498, 499), *padding(setting, 1)],
    ]
    for parts in steps * 2:
        size = len(parts)
        for buffer, value in zip(buffers[size], setting.fed(parts), strict=True):
            buffer.copy_(value)
        backend.replan(plans[size], setting.batch(parts))
        if with_graph:
            graphs[size].replay()
        else:
            out[size] = backend.forward(plans[size], 0, *buffers[size])
        real = [part for part in parts if part[0].pages != [0]]
        assert_close(out[size][: len(real)], setting.expected(real, 0), f"{size} rows")
        assert bool(out[size].isfinite().all())


@pytest.mark.parametrize("num_rows", [2, 20])
def test_replanning_makes_the_plan_of_the_library(
    filled: tuple[Setting, list[Row]], num_rows: int
) -> None:
    """On tensor cores and on CUDA cores: the plan's bytes are equal."""
    setting, rows = filled
    backend = setting.backend
    plan = backend.capture_plan(CapturedShape(num_rows), 1000)
    assert plan.captured is not None
    parts = [(rows[n % len(rows)], n % 15, n % 15 + 1) for n in range(num_rows)]
    lists = PageLists.of(setting.batch(parts), 0, num_rows).all_rows
    captured = plan.captured
    assert captured.few_rows is not None or captured.many_rows is not None or captured.decodes
    for call in plan.captured.decodes:
        wrapper, found = call.wrapper, []

        def library(call: Any = call) -> None:
            tables = (lists.offsets, call._buffers.ids, lists.last_lens)
            with call._workspaces.staging(call.wrapper):
                fast_decode_plan(
                    call.wrapper,
                    *tables,
                    *call._kernels.sizes,
                    **call._options,
                    global_override_indptr_cpu=lists.offsets,
                )

        for make in (library, lambda: backend.replan(plan, setting.batch(parts))):
            torch.cuda.synchronize()
            for pinned, _ in call._workspaces._stagings:
                pinned.zero_()
            wrapper._int_workspace_buffer.zero_()
            make()
            torch.cuda.synchronize()
            found.append((list(wrapper._plan_info), wrapper._int_workspace_buffer.cpu()))
        assert found[0][0] == found[1][0]
        assert torch.equal(found[0][1], found[1][1])


def test_replanning_waits_for_nothing(filled: tuple[Setting, list[Row]]) -> None:
    """While the device is busy, plans for several steps are made and queued; all are correct."""
    setting, rows = filled
    plan = setting.backend.capture_plan(CapturedShape(1), 1000)
    batches = [setting.batch([(row, 15, 16)]) for row in rows]
    inputs = [setting.fed([(row, 15, 16)]) for row in rows]

    def replanned() -> list[Tensor]:
        found = []
        for batch, fed in zip(batches, inputs, strict=True):
            setting.backend.replan(plan, batch)
            found.append(setting.backend.forward(plan, 0, *fed))
        return found

    replanned()  # compiles kernels and allocates memory, which may wait
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(600):  # most of a second: the host may be busy, too
        matrix @ matrix
    busy = torch.cuda.Event()
    busy.record()
    found = replanned()
    assert not busy.query()
    for row, out in zip(rows, found, strict=True):
        assert_close(out, setting.expected([(row, 15, 16)], 0), row.request_id)


def test_keys_stored_by_another_hand() -> None:
    """`slots` and `attend`, for kernels that store keys and values themselves."""
    setting = Setting((16, 8))
    parts: Step = [(setting.row(70, 1), 0, 70)]
    planned = PlannedAttention.create(setting.batch(parts), setting.backend)
    query, key_value = setting.fed(parts)
    target = planned.slots(0)
    assert target is not None
    pages, offsets = target.slots // 16, target.slots % 16
    target.keys[pages, offsets], target.values[pages, offsets] = key_value.unbind(1)
    assert_close(planned.attend_stored(0, query), setting.expected(parts, 0), "stored")


def test_the_reference_backends_agree_on_the_gpu() -> None:
    for name in ("sdpa", "gathered"):
        setting = Setting((16, 8), name=name)
        setting.check(*steps_of(setting))


def test_unsupported_parameters_of_flashinfer() -> None:
    for options, pool in (
        (AttentionOptions(2, torch.float32), KVPool(1, 4, 16, 1, 64, torch.float32, "cuda")),
        (AttentionOptions(2, torch.bfloat16), KVPool(1, 4, 16, 1, 80, torch.bfloat16, "cuda")),
        (AttentionOptions(2, torch.bfloat16), KVPool(1, 4, 16, 1, 64, torch.float32, "cuda")),
    ):
        with pytest.raises(ConfigError, match="flashinfer cannot be used"):
            create_attention_backend("flashinfer", pool, options)
        assert create_attention_backend("auto", pool, options).name == "gathered"


def test_a_missing_kernel_of_fa3_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from llm.attention import flashinfer_kernels

    load = flashinfer_kernels.get_batch_prefill_module

    def without_fa3(name: str, *key: Any) -> Any:
        if name == "fa3":
            raise RuntimeError("not compiled")
        return load(name, *key)

    monkeypatch.setattr(flashinfer_kernels, "get_batch_prefill_module", without_fa3)
    setting = Setting((16, 8))
    assert setting.backend.description.endswith("prompts by FA2")
    setting.check(*steps_of(setting))


def test_the_benchmark_measures() -> None:
    decode, replan = attention.decoding("qwen3-0.6b", "auto", 2, repeat=2, copy=1e12)
    assert 0 < decode.value < 1000
    assert replan.value > 0
    prompts = attention.prompting("qwen3-0.6b", "auto", (300, 200), repeat=2)
    assert 0 < prompts.value < 10_000
    assert prompts.note.endswith("TFLOP/s")


def test_auto_selects_flashinfer() -> None:
    pool = KVPool(1, 40, 16, 8, 64, torch.bfloat16, "cuda")
    backend = create_attention_backend("auto", pool, AttentionOptions(16, torch.bfloat16))
    assert backend.name == "flashinfer"

"""Decode attention of few rows and of many: equality with gathered keys, at every level, and in a
graph.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm.attention.base import AttentionOptions, PlannedAttention
from llm.attention.few_rows import FewRowsDecode
from llm.attention.gathered import GatheredBackend
from llm.attention.many_rows import ManyRowsDecode
from llm.attention.page_lists import PageLists
from llm.batch import ForwardBatch, ForwardMode, KVSlots
from llm.kernels.blocks import Blocks
from llm.kernels.projections import project_heads
from llm.kv_cache.kv_pool import KVPool
from llm.layers.decoder import Rotary
from llm.layers.rotary import RotaryConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE = 16


def decode_batch(contexts: list[int], page_size: int = PAGE) -> ForwardBatch:
    counts = [-(-context // page_size) for context in contexts]
    ids = (torch.randperm(sum(counts)) + 1).tolist()
    pages = [tuple(ids.pop() for _ in range(count)) for count in counts]
    numbers = torch.tensor(contexts, device="cuda") - 1
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        request_ids=tuple(map(str, range(len(contexts)))),
        query_lens=(1,) * len(contexts),
        context_lens=tuple(contexts),
        pages=tuple(pages),
        page_size=page_size,
        input_ids=torch.zeros_like(numbers),
        positions=numbers,
        slot_mapping=torch.zeros_like(numbers),
    )


def random_pool(batch: ForwardBatch, heads: int, size: int, form: torch.dtype) -> KVPool:
    """Return a pool of two layers with the batch's pages."""
    if form.itemsize == 1 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of compute capability 8.9")
    num_pages = sum(map(len, batch.pages)) + 1
    pool = KVPool(2, num_pages, batch.page_size, heads, size, form, "cuda")
    for storage in pool.storage:
        storage.copy_(torch.randn(storage.shape, device="cuda").to(form))
    return pool


@pytest.mark.parametrize("heads", [(32, 8, 64), (24, 8, 128), (16, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize("contexts", [[1], [300], [4001], [700, 17], [1, 64, 65, 999]])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("form", [torch.bfloat16, torch.float8_e4m3fn])
def test_decoding(
    heads: tuple[int, int, int], contexts: list[int], window: int | None, form: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, size = heads
    batch = decode_batch(contexts)
    pool = random_pool(batch, num_kv_heads, size, form)
    query = torch.randn(len(contexts), num_heads, size, device="cuda").bfloat16()
    plain = AttentionOptions(num_heads=num_heads, dtype=torch.bfloat16, windows=(window, window))
    counterpart = PlannedAttention.create(batch, GatheredBackend(pool, plain))
    expected = [counterpart.attend_stored(layer, query).double() for layer in (0, 1)]
    host = PageLists.of(batch, 0, len(contexts))
    lists = PageLists(host.numbers.cuda(), host.num_rows)
    found: dict[int, list[Tensor]] = {}
    for level in (0, 1, 2):
        options = AttentionOptions(num_heads, torch.bfloat16, (window, window), None, True, level)
        own = FewRowsDecode(pool, options, lists)
        found[level] = [own.attend(layer, query, window) for layer in (0, 1, 0, 1)]
        assert all(torch.equal(found[level][n], found[level][n + 2]) for n in (0, 1))
    for level in (1, 2):
        assert all(map(torch.equal, found[level], found[0]))
    for got, wanted in zip(found[0], expected, strict=False):
        assert ((got.double() - wanted).norm() / wanted.norm()).item() < 8e-3


@pytest.mark.parametrize("heads", [(32, 8, 64), (24, 8, 128), (16, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("form", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("is_few", [False, True])
def test_decoding_many_rows(
    heads: tuple[int, int, int],
    page_size: int,
    window: int | None,
    form: torch.dtype,
    is_few: bool,
) -> None:
    """Contexts of one split, of several, and of more keys in each than is usual; next to rows of
    prompts, and with the scratch that another layer leaves.
    """
    torch.manual_seed(0)
    num_heads, num_kv_heads, size = heads
    contexts = [9000, 1, 700, 513, 17, 64, 1025, *range(100, 3100, 100), 5, 6]
    if is_few:
        contexts = [300, 1400, 5, 6]
    batch = decode_batch(contexts, page_size)
    pool = random_pool(batch, num_kv_heads, size, form)
    query = torch.randn(len(contexts), num_heads, size, device="cuda").bfloat16()
    plain = AttentionOptions(num_heads=num_heads, dtype=torch.bfloat16, windows=(window, window))
    counterpart = PlannedAttention.create(batch, GatheredBackend(pool, plain))
    expected = [counterpart.attend_stored(layer, query).double() for layer in (0, 1)]
    host = PageLists.of(batch, 0, len(contexts))
    lists = PageLists(host.numbers.cuda(), host.num_rows)
    count, scratch = len(contexts) - 2, torch.empty(2**24, device="cuda")
    found: dict[int, list[Tensor]] = {}
    for level in (0, 1, 2):
        options = AttentionOptions(
            num_heads, torch.bfloat16, (window, window), enable_pdl=True, decode_level=level
        )
        own = ManyRowsDecode(pool, options, lists, count, scratch)
        found[level] = []
        for layer in (0, 1, 0, 1):
            out = query.new_empty(count, num_heads * size)
            own.attend(layer, query[:count], window, out)
            found[level].append(out)
        assert all(torch.equal(found[level][n], found[level][n + 2]) for n in (0, 1))
    for level in (1, 2):
        assert all(map(torch.equal, found[level], found[0]))
    for got, wanted in zip(found[0], expected, strict=False):
        assert ((got.double() - wanted[:count]).norm() / wanted[:count].norm()).item() < 8e-3


def test_the_newest_key_is_waited_for() -> None:
    """A chain of steps in one graph: each layer stores a key and attends to it at once."""
    torch.manual_seed(0)
    num_layers, contexts, hidden = 6, [200, 64], 512
    heads, kv_heads, size = 8, 2, 64
    batch = decode_batch(contexts)
    host = PageLists.of(batch, 0, len(contexts))
    lists = PageLists(host.numbers.cuda(), host.num_rows)
    places = [
        pages[(context - 1) // PAGE] * PAGE + (context - 1) % PAGE
        for pages, context in zip(batch.pages, contexts, strict=True)
    ]
    slots = torch.tensor(places, device="cuda")
    rotations = Rotary(RotaryConfig(size), 256, torch.device("cuda")).at(batch.positions)
    num_pages = sum(map(len, batch.pages)) + 1
    pool = KVPool(num_layers, num_pages, PAGE, kv_heads, size, torch.bfloat16, "cuda")
    shape = (num_layers, (heads + 2 * kv_heads) * size, hidden)
    weights = (torch.randn(shape, device="cuda") * hidden**-0.5).bfloat16()
    gain = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(len(contexts), hidden, device="cuda").bfloat16()
    found = []
    for level in (0, 1, 2):
        options = AttentionOptions(heads, torch.bfloat16, (), None, True, level)
        own = FewRowsDecode(pool, options, lists)
        hidden_states = x.clone()

        def run(
            level: int = level, own: FewRowsDecode = own, states: Tensor = hidden_states
        ) -> None:
            states.copy_(x)
            for layer in range(num_layers):
                target = KVSlots(pool.keys(layer), pool.values(layer), slots)
                query = project_heads(
                    states,
                    weights[layer],
                    rotations,
                    target,
                    Blocks(4, 512, 4),
                    gain=gain,
                    epsilon=1e-3,
                    num_heads=heads,
                    level=level,
                )
                states.add_(own.attend(layer, query, None))

        graph = torch.cuda.CUDAGraph()
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
        for _ in range(20):
            for storage in pool.storage:
                storage.normal_(generator=torch.Generator("cuda").manual_seed(1))
            graph.replay()
        torch.cuda.synchronize()
        found.append(hidden_states)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])

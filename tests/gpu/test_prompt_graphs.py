"""Captured prompts on a GPU, alone and with decode rows: the eager logits, without waiting."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks import prompts
from benchmarks.shapes import SHAPES, Shape, llama
from llm.batch import ScheduledRow
from llm.runner.graphs.capture import CudaCapture
from llm.runner.model_runner import ModelRunner
from tests.gpu.flashinfer_runner import initialized
from tests.gpu.test_cuda_graphs import no_waiting
from tests.llm.llama_checkpoints import batch, random_ids, row, write_llama
from tts.config.pipeline import AUTO_DECODER, AudioGenerationConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 512
TOLERANCE = 0.03  # relative
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.04,  # gives attention scores of a trained model's size
}
HEADS = [(8, 8), (16, 8), (24, 8), (32, 8), (12, 2), (14, 2), (8, 1)]  # groups 1 to 8
PAGES = [
    *[(heads, 16) for heads in HEADS],
    *[(HEADS[n], size) for n in (0, 3) for size in (1, 128)],
]


@pytest.mark.parametrize(("heads", "page_size"), PAGES, ids=str)
def test_prompts_are_replayed_like_eager_forwards(
    tmp_path: Path, heads: tuple[int, int], page_size: int
) -> None:
    """Prompts alone and together, chunks, single tokens behind a prefix, all with decode rows."""
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    folder = write_llama(tmp_path, **SIZES | sizes | {"hidden_size": 64 * heads[0]})
    check_mixtures(runner(folder, page_size, "float32"), *runners(folder, page_size))


@pytest.mark.parametrize("name", ["llasa-1b", "orpheus-3b", "qwen3-0.6b"])
def test_prompts_of_published_sizes(tmp_path: Path, name: str) -> None:
    """Layers of published models, two of each."""
    shape = SHAPES[name]
    values = {**shape.values, "num_hidden_layers": 2, "vocab_size": VOCAB}
    folder = Shape(name, values).write(tmp_path)
    eager, replayed = runners(folder, 16, is_random=True)
    check_mixtures(eager, eager, replayed)


def runner(
    folder: Path, page_size: int, encoding: str = "bfloat16", *, is_random: bool = False
) -> ModelRunner:
    """Create an eager runner of up to 40 rows. float32 uses torch's attention."""
    model = {
        "model_path": str(folder),
        "device_specs": ["cuda"],
        "quantization_encoding": encoding,
        "disable_cuda_graph": True,
        "attention_backend": "flashinfer" if encoding == "bfloat16" else "gathered",
        "kv_cache": {"kv_cache_page_size": page_size, "num_pages": 1 + 20480 // page_size},
    }
    settings = AudioGenerationConfig(
        model=model,
        audio_decoder=AUTO_DECODER,
        run_model_test_mode=is_random,
        max_length=900,
        max_batch_size=40,
        max_num_steps=1,
    )
    return initialized(ModelRunner(settings))


def runners(
    folder: Path, page_size: int, *, is_random: bool = False
) -> tuple[ModelRunner, ModelRunner]:
    """Return an eager runner and one that replays."""
    eager, replayed = (runner(folder, page_size, is_random=is_random) for _ in range(2))
    replayed.use_graphs(CudaCapture(replayed.device))
    return eager, replayed


class Sequences:
    """Requests that have fed so many tokens, each with room for 600."""

    def __init__(self, page_size: int, count: int) -> None:
        each = -(-600 // page_size)
        order = list(range(1, 1 + count * each))
        Random(page_size).shuffle(order)
        self.pages = [order[n * each : (n + 1) * each] for n in range(count)]
        self.fed = [0] * count

    def row(self, place: int, count: int, *, samples: bool = True) -> ScheduledRow:
        start, pages = self.fed[place], self.pages[place]
        self.fed[place] += count
        ids = random_ids(count, VOCAB, seed=1000 * place + start)
        return row(ids, pages, start, request_id=str(place), samples=samples)


def check_mixtures(exact: ModelRunner, eager: ModelRunner, replayed: ModelRunner) -> None:
    """Check that replays are as close to exact logits as eager forwards, or nearly.

    Without exact ones they are as close to eager ones as two roundings.
    """
    sequences = Sequences(eager.page_size, 26)
    take = sequences.row
    for count in range(4):
        steps = [
            [take(6 * count, 109)],
            [take(6 * count, 1), take(6 * count + 1, 33), take(6 * count + 2, 2)],
            [take(6 * count + n, 1) for n in range(3)],
            [take(6 * count, 1), take(6 * count + 3, 300, samples=False)],
            [take(6 * count + 3, 71), take(6 * count + 4, 200)],
            [*[take(n, 1) for n in range(6 * count + 5)], take(6 * count + 5, 64)],
        ]
        for number, step in enumerate(steps):
            expected, own, found = (
                r.forward(r.prepare(batch(*step))).next_token_logits.clone()
                for r in (exact, eager, replayed)
            )
            assert found.shape == expected.shape
            for line, (theirs, ours) in enumerate(zip(own, found, strict=True)):
                size = float(expected[line].norm())
                usual = float((theirs - expected[line]).norm()) / size
                error = float((ours - expected[line]).norm()) / size
                limit = TOLERANCE if exact is eager else 1.5 * usual + TOLERANCE / 2
                assert error < limit, (count, number, line, usual)
    assert replayed.graph_runner is not None
    counts = replayed.graph_runner.stats()
    assert (counts.eager_decodes, counts.eager_prompts) == (0, 0)
    assert (counts.replays, counts.prompt_replays) == (4, 20)


def test_prompts_replayed_while_the_device_is_busy(tmp_path: Path) -> None:
    """Two forwards are prepared and queued before the first one runs: each equals the eager one."""
    eager, replayed = runners(write_llama(tmp_path, **SIZES), 16)
    sequences = Sequences(16, 10)
    first = [sequences.row(n, 60 + n) for n in range(5)]
    steps = [
        first,
        [*[sequences.row(n, 1) for n in range(5)], sequences.row(5, 80)],
        [*[sequences.row(n, 1) for n in range(6)], sequences.row(6, 90)],
    ]
    expected = [eager.forward(eager.prepare(batch(*step))).logits for step in steps]
    replayed.forward(replayed.prepare(batch(*steps[0])))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    busy = torch.cuda.Event()
    busy.record()
    with no_waiting():
        found = [replayed.forward(replayed.prepare(batch(*s))).logits.clone() for s in steps[1:]]
    assert not busy.query()
    for ours, theirs in zip(found, expected[1:], strict=True):
        limit = TOLERANCE * float(theirs.abs().max())
        assert float((ours - theirs).abs().max()) < limit


def test_the_benchmark_measures() -> None:
    sizes = {"hidden": 256, "inner": 512, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64}
    shape = Shape("small", llama(**sizes, vocab=VOCAB))
    found = {f.name: f for f in prompts.measure(shape, {"model": {"device_specs": ["cuda"]}}, 1)}
    for decoding, count in prompts.MIXTURES:
        text = f"small: {decoding} rows, {count} prompts of {prompts.PROMPT}"
        for way in ("replayed", "launch by launch"):
            assert 0 < found[f"{text}, {way}: host"].value <= found[f"{text}, {way}: step"].value
            assert found[f"{text}, {way}: device"].value > 0

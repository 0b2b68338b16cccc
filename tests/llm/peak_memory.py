"""How much scratch a step takes at its peak, measured, on any device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from llm.batch import ForwardMode, ScheduledBatch
from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import pipeline_config, row, write_llama

TOKENS, MAX_ROWS, PAGE_SIZE = 2048, 64, 16
SLACK = 1.1
MODELS: dict[str, dict[str, Any]] = {
    "wide": {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 512},
    "large vocabulary": {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32_000},
    "many heads": {"hidden_size": 64, "num_attention_heads": 32, "head_dim": 32},
}
NUMS_OF_ROWS = (1, 16, MAX_ROWS)


def peak_and_estimate(folder: Path, model: str, num_rows: int, device: str) -> tuple[int, int]:
    """Bytes beside weights and pages: of the largest prefill there may be, its tokens sampled, and
    what was planned for it.
    """
    write_llama(folder, max_position_embeddings=TOKENS, **MODELS[model])
    config = pipeline_config(
        folder,
        num_pages=1 + 2 * TOKENS // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_batch_input_tokens=TOKENS,
        max_batch_size=MAX_ROWS,
        device=device,
    )
    runner = ModelRunner(config)
    runner.initialize()
    prefill(runner, num_rows)  # what is made once is not a step's
    measure = _peak_on_gpu if runner.device.type == "cuda" else _peak_on_cpu
    peak = measure(lambda: prefill(runner, num_rows))
    return peak, runner.activation_bytes(MAX_ROWS)


def prefill(runner: ModelRunner, num_rows: int) -> list[int]:
    """A step that feeds as many tokens as may be, in so many prompts of equal length."""
    each = TOKENS // num_rows
    num_pages = -(-each // PAGE_SIZE)
    rows = [
        row(
            [token % runner.vocab_size for token in range(each)],
            range(1 + n * num_pages, 1 + (n + 1) * num_pages),
            request_id=str(n),
        )
        for n in range(num_rows)
    ]
    outputs = runner.forward(runner.prepare(ScheduledBatch(tuple(rows), ForwardMode.EXTEND)))
    tokens: list[int] = runner.choose(outputs, runner.choice.prepare(rows)).tolist()
    return tokens


def _peak_on_cpu(work: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
    assert profiler.profiler is not None
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def _peak_on_gpu(work: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before

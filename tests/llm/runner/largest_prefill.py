"""Peak memory of the largest prefill, in addition to what is allocated before.

It feeds as many tokens as a step may, in prompts of equal length, and samples a token for each. All
of them write to the padding page, so that no sequence is affected. What the attention backend takes
is not included: on the CPU such prompts are copied, by the first run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow
from llm.request import SamplingParams
from llm.runner.graphs.rows import PADDING_PAGES
from llm.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of a step with so many rows."""

    num_rows: int
    num_tokens: int
    taken: int
    planned: int  # for any prefill, without the attention backend's workspaces

    @property
    def ratio(self) -> float:
        return self.taken / self.planned

    @property
    def amounts(self) -> str:
        return (
            f"{self.taken / 1e6:.1f} of {self.planned / 1e6:.1f} MB, {self.num_rows} prompts of "
            f"{self.num_tokens // self.num_rows} tokens"
        )

    def __str__(self) -> str:
        return f"{self.ratio:.3f} of the estimate: {self.amounts}"


def largest_prefill(runner: ModelRunner, num_rows: int) -> Peak:
    """Measure the second run: the first one makes one-time allocations. Call on the runner's own
    thread.

    There are more rows if the prompts would otherwise exceed the maximum length; if a batch cannot
    have those, fewer tokens are fed.
    """
    tokens = runner.server_config.max_batch_input_tokens
    num_rows = min(max(num_rows, -(-tokens // runner.context_len)), runner.max_running_requests)
    each = min(tokens // num_rows, runner.context_len)
    step = _step(num_rows, each, runner.page_size)
    _run(runner, step)
    measure = _peak_on_gpu if runner.device.type == "cuda" else peak_on_cpu
    taken = measure(lambda: _run(runner, step))
    return Peak(num_rows, step.num_tokens, taken, planned_bytes(runner))


def planned_bytes(runner: ModelRunner) -> int:
    """Return the planned scratch of a step, without the attention backend's workspaces."""
    rows = runner.max_running_requests
    return runner.activation_bytes(rows) - runner.attention_bytes(rows)


def _step(num_rows: int, each: int, page_size: int) -> ScheduledBatch:
    pages = PADDING_PAGES * -(-each // page_size)
    rows = tuple(
        ScheduledRow(f"peak-{n}", (0,) * each, 0, pages, True, True, SamplingParams(temperature=0))
        for n in range(num_rows)
    )
    return ScheduledBatch(rows, ForwardMode.EXTEND)


def _run(runner: ModelRunner, step: ScheduledBatch) -> None:
    outputs = runner.forward(runner.prepare(step))
    runner.sample_tokens(outputs, runner.token_sampler.prepare(step.rows)).tolist()
    for row in step.rows:
        runner.release(row.request_id)


def peak_on_cpu(work: Callable[[], object]) -> int:
    """Return the bytes that torch allocates on the CPU at most at once, in addition to before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the profiler
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

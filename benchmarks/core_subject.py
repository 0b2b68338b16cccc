"""Subject of `benchmarks.core`: one shape with its running engine, and the sizes of the loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.engine_load import Job, run, throughput_jobs
from benchmarks.shapes import Shape
from llm import Engine


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the measured loads."""

    prompt_len: int = 16
    num_tokens: int = 256
    requests: int = 256
    lengths: tuple[int, int] = (100, 1024)
    limit_s: float = 60.0
    trace_s: float = 0.3
    caches: tuple[str, ...] = peers.CACHES  # caches of the peer's generation of one sequence
    crowds: tuple[int, ...] = (64,)  # sizes of the peer's continuous batches, on a GPU
    crowd_tokens: int = 200  # tokens in and out
    repeat: int = 3
    vllm_python: Path | None = None  # interpreter that has vLLM; None: this one, if it has


@dataclass(frozen=True, slots=True)
class Subject:
    """One shape on one device with its running engine."""

    shape: Shape
    device: torch.device
    engine: Engine
    bandwidth: float  # of all devices: bytes per second, read and written
    sizes: Sizes
    trace_folder: Path | None = None

    @property
    def has_bars(self) -> bool:
        return self.device.type == "cuda"

    @property
    def vocab_size(self) -> int:
        return int(self.shape.values["vocab_size"])


def warm_jobs(subject: Subject) -> list[Job]:
    """Run a few short requests; return those of the throughput test."""
    run(subject.engine, throughput_jobs(4, subject.vocab_size, (4, 8)))
    return throughput_jobs(subject.sizes.requests, subject.vocab_size, subject.sizes.lengths)

"""Profiling ranges: none when off, one per batch when on, with its parts when detailed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llm.batch import ForwardMode
from llm.config import PipelineConfig
from llm.models.profiling import Profiler
from llm.pipeline.text_generation import TextGenerationPipeline
from tests.llm.llama_checkpoints import batch, row

CPU = torch.profiler.ProfilerActivity.CPU
BATCH = {"sonant.context_encoding", "sonant.token_generation"}
PARTS = {"sonant.prepare", "sonant.forward", "sonant.sample"}


def ranges_of(run: torch.profiler.profile) -> list[str]:
    """Return names of our ranges in the order of their beginnings."""
    events = sorted(run.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("sonant.")]


@pytest.mark.parametrize(
    ("level", "names"), [("off", set()), ("on", BATCH), ("detailed", BATCH | PARTS)]
)
def test_ranges_of_a_profiler(tiny_checkpoint: Path, level: str, names: set[str]) -> None:
    cache = {"kv_cache_page_size": 16, "num_pages": 8}
    config = PipelineConfig(
        model={"model_path": str(tiny_checkpoint), "kv_cache": cache},
        profiling={"gpu_profiling": level},
    )
    pipeline = TextGenerationPipeline(config)
    assert pipeline.runner.session.gpu_profiling == level
    prompt, follow = batch(row((1, 2, 3), (1,))), batch(row((4,), (1,), start=3))
    with torch.profiler.profile(activities=[CPU], acc_events=True) as run:
        pipeline.execute(prompt)
        pipeline.execute(follow)
    found = ranges_of(run)
    assert set(found) == names
    if level == "on":
        assert found == ["sonant.context_encoding", "sonant.token_generation"]
    pipeline.shutdown()


def test_some_steps_are_traced(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    config = PipelineConfig(
        model={
            "model_path": str(tiny_checkpoint),
            "kv_cache": {"kv_cache_page_size": 16, "num_pages": 8},
        },
        profiling={"gpu_profiling": "on", "trace_file": path, "trace_after": 1, "trace_steps": 2},
    )
    pipeline = TextGenerationPipeline(config)
    pipeline.execute(batch(row((1, 2, 3), (1,))))
    for start in (3, 4):
        pipeline.execute(batch(row((4,), (1,), start=start)))
    assert not path.exists()
    pipeline.execute(batch(row((4,), (1,), start=5)))
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("sonant.token_generation") == 2
    assert "sonant.context_encoding" not in names
    path.unlink()
    pipeline.execute(batch(row((4,), (1,), start=6)))
    assert not path.exists()
    pipeline.shutdown()


def test_every_kind_of_batch_has_a_name() -> None:
    with torch.profiler.profile(activities=[CPU], acc_events=True) as run:
        for mode in ForwardMode:
            with Profiler("on").step(mode):
                pass
    assert len(set(ranges_of(run))) == len(ForwardMode)


@pytest.mark.parametrize(
    ("level", "expected"), [("off", []), ("on", ["a"]), ("detailed", ["a", "b"])]
)
def test_the_level_decides_which_ranges_there_are(level: str, expected: list[str]) -> None:
    profiler = Profiler(level)
    recording = torch.profiler.profile(activities=[CPU], acc_events=True)
    with recording as run, profiler.range("a"), profiler.detail("b"):
        pass
    assert sorted(ranges_of(run)) == [f"sonant.{name}" for name in expected]

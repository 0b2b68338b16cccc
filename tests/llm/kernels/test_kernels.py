"""Built-in kernels: their selection by a session, and their results, interpreted."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from llm.config import PipelineConfig
from llm.config.report import RunningPlan
from llm.kernels.registry import KERNELS, KernelSet
from llm.layers.stack import create_stack
from llm.models.session import EngineSession
from tests.interpreted import Ended

INTERPRETED = (
    "tests/decoder/kernels/interpreted_kernels.py",
    "tests/llm/kernels/interpreted_kernels.py",
    "tests/llm/layers/interpreted_layers.py",
    "tests/llm/models/interpreted_models.py",
)
"""Tests in Triton's interpreter; tests/gpu runs kernels on a device."""


@pytest.mark.skipif(not find_spec("triton"), reason="torch brings Triton where there may be a GPU")
@pytest.mark.interpreted("pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *INTERPRETED)
def test_kernels_equal_their_references(interpreted: Ended) -> None:
    """In one process for all: the imports take as long as the tests."""
    assert interpreted.status == 0, interpreted.output[-4000:]


def test_every_kernel_names_its_reference() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
    for kernel in KERNELS:
        module, name = kernel.reference.rsplit(".", 1)
        assert hasattr(import_module(module), name)


def test_switches_choose_kernels() -> None:
    def chosen(*, vendor_blas: bool, experimental: bool) -> set[str]:
        kernels = KernelSet.choose(
            vendor_blas=vendor_blas, experimental=experimental, launch_level=0
        )
        return {kernel.name for kernel in kernels}

    assert chosen(vendor_blas=False, experimental=True) == {kernel.name for kernel in KERNELS}
    assert chosen(vendor_blas=True, experimental=False) == {
        "attend_float8_pages",
        "attend_frame",
        "gate",
        "normalise",
        "rotate_heads",
    }
    stable = chosen(vendor_blas=False, experimental=False)
    assert stable == {kernel.name for kernel in KERNELS if not kernel.is_experimental}
    assert "project_heads" not in stable


def test_there_are_none_on_the_cpu() -> None:
    session = EngineSession(torch.device("cpu"), use_experimental_kernels=True, pdl_level=2)
    assert not session.kernels()
    stack = create_stack([], None, session.kernels())
    assert (stack.layers, stack.head, stack.num_kernel_products) == ((), None, 0)


def test_the_log_names_kernels_and_the_level_in_effect(
    text_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = PipelineConfig(model={"model_path": str(text_checkpoint)})
    plan = RunningPlan("Pipeline", "bfloat16", max_batch_size=1, max_seq_len=64, kv_bytes=1024)
    lines = []
    for kernels, level in (((), 0), (("gate", "product"), 2)):
        config.note_plan(replace(plan, kernels=kernels, launch_level=level))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            config.log_pipeline_info()
        lines.append(caplog.messages)
    for line in ("built-in kernels: none", "dependent launch: off"):
        assert line in lines[0]
    for line in ("built-in kernels: gate, product", "dependent launch: 2"):
        assert line in lines[1]

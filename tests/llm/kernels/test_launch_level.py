"""`pdl_level` as an argument of FlashInfer, which is replaced by recording modules here, and of the
sampler.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llm import attention
from llm.attention.base import AttentionBackend, AttentionOptions
from llm.kv_cache.kv_pool import KVPool
from llm.runner import model_runner
from llm.runner.model_runner import ModelRunner
from llm.sampling.device.sampler import DeviceSampler
from tests.llm.llama_checkpoints import pipeline_config, write_llama

OURS = ("flashinfer_kernels", "flashinfer")
NAMES = {
    "flashinfer.decode": ("BatchDecodeWithPagedKVCacheWrapper", "get_batch_decode_module"),
    "flashinfer.prefill": ("BatchPrefillWithPagedKVCacheWrapper", "get_batch_prefill_module"),
}


class Wrapper:
    """Records its arguments."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor], **options: Any) -> None:
        options["out"].copy_(query)
        self.runs.append(options)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module that calls FlashInfer, with replacements of the modules that it imports."""
    for name in ("flashinfer", *NAMES):
        module = ModuleType(name)
        for member in NAMES.get(name, ()):
            setattr(module, member, Wrapper)
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"llm.attention.{name}", raising=False)
        monkeypatch.setattr(attention, name, None, raising=False)  # restored afterwards
    yield importlib.import_module("llm.attention.flashinfer")
    for name in OURS:
        del sys.modules[f"llm.attention.{name}"]


@pytest.mark.parametrize("enable_pdl", [False, True])
def test_every_call_of_flashinfer_gets_the_level(flashinfer: Any, enable_pdl: bool) -> None:
    class OnTheHost(flashinfer.FlashInferBackend):
        """Kernels need a device; these do nothing."""

        def __init__(self, pool: KVPool, options: AttentionOptions) -> None:
            AttentionBackend.__init__(self, pool, options)
            self._pages = [(pool.keys(n), pool.values(n)) for n in range(pool.num_layers)]

    pool = KVPool(
        num_pages=4,
        page_size=16,
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    backend = OnTheHost(pool, AttentionOptions(4, torch.float32, enable_pdl=enable_pdl))
    rows, prompts = Wrapper(), Wrapper()
    calls = (
        flashinfer.PlannedCall(0, 2, {None: rows}),
        flashinfer.PlannedCall(2, 5, {None: prompts}),
    )
    query = torch.randn(5, 4, 8)
    for layer in range(2):
        found = backend.attend(flashinfer.FlashInferPlan(torch.arange(5), calls), layer, query)
        assert torch.equal(found, query.flatten(1))
    told = [run["enable_pdl"] for wrapper in (rows, prompts) for run in wrapper.runs]
    assert told == [enable_pdl] * 4


@pytest.mark.parametrize(("level", "enable_pdl"), [(0, False), (1, True), (2, True)])
def test_the_level_becomes_the_attentions_and_the_samplers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int, enable_pdl: bool
) -> None:
    """With the session as on a device: on the host its level is 0."""
    asked: list[AttentionOptions] = []
    create = model_runner.create_attention_backend

    def recording(name: str, pool: KVPool, options: AttentionOptions) -> AttentionBackend[Any]:
        asked.append(options)
        return create(name, pool, options)

    class Sampler(DeviceSampler):
        """Records its level."""

        def __init__(self, *args: Any, level: int, **options: Any) -> None:
            super().__init__(*args, level=level, **options)
            levels.append(level)

    levels: list[int] = []
    monkeypatch.setattr(model_runner, "DeviceSampler", Sampler)
    monkeypatch.setattr(model_runner, "create_attention_backend", recording)
    runner = ModelRunner(pipeline_config(write_llama(tmp_path / "llama")))
    runner.initialize()
    runner.session.pdl_level = level
    runner.init_attention_backend()
    assert [options.enable_pdl for options in asked] == [False, enable_pdl]
    runner.sample_on_device()
    assert levels == [level]
    runner.shutdown()

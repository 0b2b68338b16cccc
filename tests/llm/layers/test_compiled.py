"""Layers through torch.compile: the same tokens, and the fallback when compilation fails."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm.layers.compiled import CompiledLayer, Compiler
from llm.layers.decoder import UNSPLIT_ELEMENTS
from tests.llm.llama_checkpoints import (
    SMALL,
    batch,
    create_runner,
    pipeline_config,
    random_ids,
    row,
    write_llama,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as for a compiler, without graph breaks, and leave out the C++ compiler."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def logits(checkpoint: Path, encoding: str, *, compiled: bool) -> Tensor:
    config = pipeline_config(checkpoint, encoding=encoding, use_legacy_module=not compiled)
    runner = create_runner(config)
    ids = random_ids(14, 96)
    return torch.cat(
        [
            runner.forward(runner.prepare(batch(row(ids[a:b], [1], a)))).next_token_logits.clone()
            for a, b in ((0, 12), (12, 13), (13, 14))
        ]
    )


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_logits_are_the_same(
    checkpoint: Path, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = logits(checkpoint, encoding, compiled=True)
    assert torch.equal(found, logits(checkpoint, encoding, compiled=False))
    assert "torch.compile failed" not in caplog.text


def test_one_compilation_serves_every_number_of_rows_above_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also numbers of rows for which torch's own kernels would split the MLP over threads."""
    size = UNSPLIT_ELEMENTS // 64
    folder = write_llama(tmp_path / "wide", num_hidden_layers=1, intermediate_size=size)
    model = create_runner(pipeline_config(folder, use_legacy_module=False)).loaded_model
    (layer,) = model._layers
    torch.compiler.reset()
    with caplog.at_level(logging.WARNING), torch._dynamo.config.patch(recompile_limit=2):
        for rows in range(1, 1025, 64):
            x = torch.randn(rows, SMALL["hidden_size"])
            layer._project(x)
            layer._finish(x, torch.randn(rows, SMALL["hidden_size"]))
    assert "torch.compile failed" not in caplog.text


def test_the_fallback_without_compilation(caplog: pytest.LogCaptureFixture) -> None:
    """If one function fails, the others are not compiled either; one log line reports it."""

    def double(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2

    compiler = Compiler()
    run, other = compiler.compiled(double), compiler.compiled(torch.neg)
    with caplog.at_level(logging.WARNING):
        assert [run(torch.ones(1)).item(), other(torch.ones(1)).item()] == [2, -1]
    assert compiler.has_failed
    assert caplog.text.count("torch.compile failed, modules run uncompiled") == 1


def test_the_switch_chooses(checkpoint: Path) -> None:
    config = pipeline_config(checkpoint, use_legacy_module=False)
    model = create_runner(config).loaded_model
    assert {type(layer) for layer in model._layers} == {CompiledLayer}
    assert not model.session.kernels()


def test_errors_of_the_computation_itself_are_passed_on() -> None:
    compiler = Compiler()
    with pytest.raises(RuntimeError):
        compiler.compiled(torch.add)(torch.zeros(2), torch.zeros(3))

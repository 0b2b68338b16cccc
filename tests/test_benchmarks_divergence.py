"""The comparison of weight formats, on given logits and on a small random checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import divergence
from benchmarks.divergence import Continuation, Prompts, compare, measure, up_to_the_end
from benchmarks.report import lines_of
from llm.config import QuantizationEncoding
from tests.fakes import build_text_checkpoint, build_tiny_checkpoint

INT8, FLOAT32 = QuantizationEncoding.INT8, QuantizationEncoding.FLOAT32


def continuation(*rows: list[list[float]]) -> Continuation:
    logits = torch.tensor(rows)
    return Continuation(logits.argmax(-1), logits)


def test_what_is_counted() -> None:
    """Two prompts, three tokens; the second text ends with its second token."""
    reference = continuation(
        [[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]], [[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]]
    )
    counts = torch.tensor([[True, True, True], [True, True, False]])
    assert torch.equal(up_to_the_end(reference.ids, [1]), counts & torch.tensor([1, 1, 0]).bool())
    assert up_to_the_end(reference.ids, []).all()
    fed = continuation([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]], [[0.0, 2.0], [0.0, 2.0], [9.0, 0.0]])
    free = continuation([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [0.0, 2.0], [0.0, 9.0]])
    found = compare(reference, fed, free, counts)
    assert found.agreement == 4 / 5
    assert found.logprob_error == pytest.approx(2 / 5)
    assert (found.logit_error, found.worst_logit) == (pytest.approx(4 / 10), 2.0)
    assert found.first_others == (1, None)
    assert found.identical == 0.5
    high, low = 1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(2.0))
    # One of five distributions is the reversed one.
    assert found.divergence == pytest.approx((high - low) * math.log(high / low) / 5)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = build_text_checkpoint(tmp_path_factory.mktemp("text"))
    return Prompts.read(folder, ["hello", "a longer prompt than a page"], 20)


def test_the_same_format_does_not_diverge(prompts: Prompts) -> None:
    ((encoding, found),) = measure(prompts, [FLOAT32])
    assert encoding is FLOAT32
    assert (found.agreement, found.worst_logit, found.identical) == (1.0, 0.0, 1.0)


def test_a_model_that_is_fed_its_own_tokens_writes_them_again(prompts: Prompts) -> None:
    (free,) = prompts.continued(INT8, None)
    (fed,) = prompts.continued(INT8, free.ids)
    assert free.ids.shape == (2, 20)
    assert torch.equal(fed.ids, free.ids)
    assert torch.equal(fed.logits, free.logits)


@pytest.mark.parametrize("encoding", ["int8", "float8_e4m3fn"])
def test_narrow_weights_are_measured(
    prompts: Prompts, tmp_path: Path, capsys: pytest.CaptureFixture[str], encoding: str
) -> None:
    """Random weights have flat logits: the bars may be missed, which sets the exit status."""
    texts = tmp_path / "prompts.txt"
    texts.write_text("hello\n\na longer prompt than a page\n")
    options = ["--prompts", str(texts), "--tokens", "20", "--encoding", encoding]
    status = divergence.main(["--model", str(prompts.folder), *options])
    report = json.loads(capsys.readouterr().out)
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert status == (0 if report["reached"] else 1)
    assert 50 < figures[f"{encoding}: same likeliest token"]["value"] <= 100
    assert 0 < figures[f"{encoding}: log-probability"]["value"] < math.log(2)
    assert 0 < figures[f"{encoding}: divergence"]["value"] < math.log(2)
    largest = figures[f"{encoding}: logits, largest |difference|"]["value"]
    assert 0 < figures[f"{encoding}: logits, mean |difference|"]["value"] < largest


def test_models_of_random_weights_and_speech(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speech = build_tiny_checkpoint(tmp_path / "speech")
    for options in (["--shape", "toy"], ["--model", str(speech), "--speech"]):
        divergence.main([*options, "--tokens", "3", "--encoding", "bfloat16"])
        report = json.loads(capsys.readouterr().out)
        figures = {figure["name"]: figure for figure in report["figures"]}
        assert 0 < figures["bfloat16: divergence"]["value"] < math.log(2)


def test_there_are_twenty_prompts() -> None:
    texts = lines_of(divergence.PROMPTS)
    assert len(set(texts)) == 20

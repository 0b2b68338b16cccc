"""Log-probabilities: values, selected rows, echo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm.batch import ModelOutputs, ReturnLogits
from llm.models.session import EngineSession
from llm.sampling.log_probabilities import LogProbabilities, log_probabilities
from tests.closeness import error
from tests.llm.llama_checkpoints import batch, create_runner, pipeline_config, row, write_llama

SESSION = EngineSession(torch.device("cpu"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def test_values_are_those_of_log_softmax() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(1)) * 4
    tokens = torch.tensor([5, 0, 29], dtype=torch.int32)
    found = log_probabilities(logits, tokens, 4)
    expected = torch.log_softmax(logits.double(), dim=1)
    for place, token in enumerate(tokens.tolist()):
        own = found.token_log_probabilities[place]
        top = found.top_log_probabilities[place]
        assert top is not None
        best = expected[place].topk(4)
        assert list(top) == best.indices.tolist()
        # Relative to the largest: float32 against float64 differs by 1e-7.
        numbers = [expected[place, token], *best.values]
        assert error([own, *top.values()], numbers) < 1e-6
        assert sum(torch.tensor(list(top.values())).exp()) <= 1 + 1e-6


def test_requests_without_log_probabilities_get_none(checkpoint: Path) -> None:
    runner = create_runner(pipeline_config(checkpoint))
    rows = [row([1, 2, 3], [1]), row([4, 5], [2], request_id="b")]
    inputs = runner.prepare(batch(*rows))
    outputs = runner.forward(inputs)
    tokens = torch.tensor([7, 8], dtype=torch.int32)
    model = runner.loaded_model
    found = model.compute_log_probabilities(
        SESSION, inputs, outputs, tokens, [0, 3], [False, False]
    )
    assert found[0] is None
    assert found[1] == log_probabilities(outputs.next_token_logits[1:], tokens[1:], 3)


def test_echo_adds_the_prompt(checkpoint: Path) -> None:
    """Five prompt tokens give five entries and the sampled one; the first has no prediction.

    A later chunk has an entry for each of its tokens except the first, which the previous chunk
    predicts.
    """
    runner = create_runner(pipeline_config(checkpoint), ReturnLogits.ALL)
    model = runner.loaded_model
    prompt = [9, 8, 7, 6, 5]
    inputs = runner.prepare(batch(row(prompt, [1]), row([3, 4], [2], request_id="b")))
    outputs = runner.forward(inputs)
    tokens = torch.tensor([11, 12], dtype=torch.int32)
    first, second = model.compute_log_probabilities(
        SESSION, inputs, outputs, tokens, [2, 1], [True, False]
    )
    assert first is not None
    assert second is not None
    assert len(first.token_log_probabilities) == len(prompt) + 1
    assert first.token_log_probabilities[0] is first.top_log_probabilities[0] is None
    expected = log_probabilities(outputs.logits[:5], torch.tensor([*prompt[1:], 11]), 2)
    assert first.token_log_probabilities[1:] == expected.token_log_probabilities
    assert second == log_probabilities(outputs.next_token_logits[1:], tokens[1:], 1)
    inputs = runner.prepare(batch(row([2, 1], [1], start=5)))
    outputs = runner.forward(inputs)
    (later,) = model.compute_log_probabilities(SESSION, inputs, outputs, tokens[:1], [1], [True])
    assert later is not None
    assert len(later.token_log_probabilities) == 2
    assert None not in later.token_log_probabilities


def test_pairs_that_do_not_belong_together_are_errors(checkpoint: Path) -> None:
    runner = create_runner(pipeline_config(checkpoint))
    model = runner.loaded_model
    inputs = runner.prepare(batch(row([1, 2], [1]), row([1], [2], request_id="b")))
    outputs = runner.forward(inputs)
    tokens = torch.tensor([1, 2])

    def compute(
        outputs: ModelOutputs, tokens: torch.Tensor, top_n: list[int], echo: list[bool]
    ) -> list[LogProbabilities | None]:
        return model.compute_log_probabilities(SESSION, inputs, outputs, tokens, top_n, echo)

    fewer = ModelOutputs(outputs.logits[:1], outputs.next_token_logits[:1], (0, 1))
    with pytest.raises(ValueError, match="2 sampling rows, but 1 rows of logits"):
        compute(fewer, tokens, [1, 1], [False] * 2)
    with pytest.raises(ValueError, match="1 tokens"):
        compute(outputs, tokens[:1], [1, 1], [False] * 2)
    with pytest.raises(ValueError, match="1 top_n"):
        compute(outputs, tokens, [1], [False] * 2)
    for top_n in (-1, 97):
        with pytest.raises(ValueError, match=rf"top_n={top_n} must be in \[0, 96\]"):
            compute(outputs, tokens, [1, top_n], [False] * 2)
    with pytest.raises(ValueError, match="echo needs a model that returns the logits of all"):
        compute(outputs, tokens, [1, 1], [False, True])


def test_models_need_not_have_them(checkpoint: Path) -> None:
    from llm.models.base import PipelineModel

    runner = create_runner(pipeline_config(checkpoint))
    inputs = runner.prepare(batch(row([1, 2], [1])))
    outputs = runner.forward(inputs)
    with pytest.raises(NotImplementedError, match="LlamaModel does not compute"):
        PipelineModel.compute_log_probabilities(
            runner.loaded_model, SESSION, inputs, outputs, torch.tensor([1]), [1], [False]
        )

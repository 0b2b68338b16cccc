"""Real pipelines under random events: overlap on a late device, and drafts.

Requests arrive, end and pause at any time, in a pool that is too small for them; each must get the
tokens that it gets alone from the plain pipeline.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm.pipeline.base import TextGenerationPipelineInterface
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import FinishReason, Request, SamplingParams
from llm.scheduler import SchedulerLimits
from tests.llm.lfm2_checkpoints import write_lfm2
from tests.llm.llama_checkpoints import pipeline_config, write_llama
from tests.llm.runner.late_stream import LateStream
from tests.llm.scheduler.shadow import Harness

NUM_EVENTS = 130
MAX_LENGTH = 60
NUM_DRAFTED = 3

WAYS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 12},
    {"top_p": 0.7},
    {"repetition_penalty": 1.4},
    {"min_tokens": 6, "stop_token_ids": (3, 7, 11, 19, 23)},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model, and the same with some noise on its weights, as a good draft model."""
    folder = tmp_path_factory.mktemp("models")
    target = write_llama(folder / "a", num_hidden_layers=1, max_position_embeddings=128)
    draft = Path(shutil.copytree(target, folder / "b"))
    path = draft / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: weight + 0.015 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(path).items()
    }
    save_file(noisy, path, {"format": "pt"})
    return target, draft


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with recurrent states."""
    kinds = ["conv", "full_attention", "conv"]
    folder = tmp_path_factory.mktemp("models") / "hybrid"
    return write_lfm2(folder, num_hidden_layers=3, layer_types=kinds)


Create = Callable[[], TextGenerationPipelineInterface]


@pytest.fixture(scope="module")
def create(models: tuple[Path, Path], hybrid: Path) -> dict[str, Create]:
    config = {"num_pages": 10, "page_size": 8, "max_length": MAX_LENGTH, "max_batch_size": 8}

    def drafting(draft: Path) -> TextGenerationPipelineInterface:
        more = {
            "draft_model": {"model_path": str(draft)},
            "speculative": {"num_speculative_tokens": NUM_DRAFTED},
            "sampling": {"enable_penalties": True},
        }
        return TextGenerationPipeline(pipeline_config(models[0], **config, **more))

    return {
        "plain": lambda: TextGenerationPipeline(pipeline_config(models[0], **config)),
        "overlap": lambda: OverlapTextGenerationPipeline(
            pipeline_config(models[0], **config), stream=LateStream()
        ),
        "hybrid": lambda: TextGenerationPipeline(pipeline_config(hybrid, **config)),
        "hybrid overlap": lambda: OverlapTextGenerationPipeline(
            pipeline_config(hybrid, **config), stream=LateStream()
        ),
        "drafting": lambda: drafting(models[1]),
        "drafting perfectly": lambda: drafting(models[0]),
    }


Alone = Callable[[Request], tuple[list[int], FinishReason | None]]


@pytest.fixture(scope="module")
def alone(create: dict[str, Create]) -> dict[bool, Alone]:
    """Return functions that run a request alone, by whether the model is hybrid."""
    return {False: runs_alone(create["plain"]()), True: runs_alone(create["hybrid"]())}


def runs_alone(pipeline: TextGenerationPipelineInterface) -> Alone:
    """Return a function that returns the result of a request alone."""

    @cache
    def generate(
        prompt: tuple[int, ...], sampling: SamplingParams
    ) -> tuple[list[int], FinishReason | None]:
        harness = Harness(SchedulerLimits(max_length=MAX_LENGTH), pipeline)  # type: ignore[arg-type]
        harness.add_request(Request("alone", prompt, sampling))
        harness.run_all()
        return harness.tokens("alone"), harness.reason("alone")

    return lambda request: generate(request.prompt_ids, request.sampling)


class Storm:
    """Random events on a harness."""

    def __init__(self, pipeline: TextGenerationPipelineInterface, seed: int) -> None:
        self.random = Random(seed)
        limits = SchedulerLimits(
            max_length=MAX_LENGTH,
            max_batch_size=self.random.randint(2, 6),
            max_batch_input_tokens=self.random.randint(8, 40),
            enable_in_flight_batching=seed % 2 > 0,
            kvcache_ce_watermark=1.0,
            max_num_steps=1 + NUM_DRAFTED if pipeline.speculation else 1,
        )
        self.harness = Harness(limits, pipeline)  # type: ignore[arg-type]
        self.paused: set[str] = set()
        self.cancelled: set[str] = set()

    def run(self) -> None:
        for _ in range(NUM_EVENTS):
            verb = self.random.choice(["add"] * 2 + ["pause", "resume", "cancel"] + ["step"] * 7)
            if verb == "step" or (verb != "add" and not self.harness.requests):
                self.harness.step()
            elif verb == "add":
                self.add()
            else:
                self.disturb(verb)
        for name in self.paused:
            self.harness.scheduler.resume(name)
        self.harness.run_all()

    def add(self) -> None:
        if self.harness.scheduler.num_live > 8:
            return
        number = self.random.randrange(25)  # some requests are repeated
        chance = Random(number)
        prompt = [5] * 10 + [chance.randrange(96) for _ in range(chance.randint(1, 20))]
        way = {"max_tokens": 6 + number % 20, "seed": number, **WAYS[number % len(WAYS)]}
        name = f"r{len(self.harness.requests)}"
        self.harness.add_request(Request(name, tuple(prompt), SamplingParams(**way)))

    def disturb(self, verb: str) -> None:
        name = self.random.choice(list(self.harness.requests)[-6:])
        scheduler = self.harness.scheduler
        if verb == "cancel":
            if self.harness.reason(name) is None:
                self.cancelled.add(name)
            self.harness.take(scheduler.cancel(name))
            self.paused.discard(name)
        elif verb == "pause":
            scheduler.pause(name)
            self.paused.add(name)
        else:
            scheduler.resume(name)
            self.paused.discard(name)


@pytest.mark.parametrize(
    "kind", ["overlap", "hybrid", "hybrid overlap", "drafting", "drafting perfectly"]
)
def test_storms(create: dict[str, Create], alone: dict[bool, Alone], kind: str) -> None:
    pipeline = create[kind]()
    num_preemptions = num_ended = 0
    for seed in range(2):
        storm = Storm(pipeline, seed)
        storm.run()
        harness = storm.harness
        for name, request in harness.requests.items():
            tokens, reason = alone[kind.startswith("hybrid")](request)
            if harness.reason(name) is FinishReason.CANCELLED:
                assert name in storm.cancelled
                assert harness.tokens(name) == tokens[: len(harness.tokens(name))]
            else:
                assert (harness.tokens(name), harness.reason(name)) == (tokens, reason)
                num_ended += 1
        assert harness.kv.num_claims == 0
        harness.kv.check_integrity()
        num_preemptions += harness.scheduler.num_preemptions
    assert num_preemptions > 0
    assert num_ended > 12
    metrics = pipeline.spec_decode_metrics()
    if metrics is None:
        assert not kind.startswith("drafting")
    elif kind == "drafting":
        assert 0.1 < metrics.acceptance_rates[0] < 0.95
    else:  # no KV of the draft model was lost or stale
        assert metrics.acceptance_rates == (1.0,) * NUM_DRAFTED

"""Qwen2-VL and Qwen2.5-VL: texts have the logits and greedy tokens of transformers' whole model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from llm.batch import ReturnLogits
from llm.engine.engine import Engine, create_engine
from llm.errors import CheckpointError, RequestError
from llm.layers.decoder import Rotary
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama_config import LlamaConfig
from llm.models.qwen2_vl import Qwen2VLModel
from llm.request import FinishReason, Request, SamplingParams, TokenChunk
from tests.llm.engine.running import running
from tests.llm.llama_checkpoints import (
    PAGES,
    SMALL,
    batch,
    create_runner,
    pipeline_config,
    random_ids,
    row,
)
from tests.llm.models.engine_kinds import ENGINES, tokens_of
from tests.llm.parallel.rank_threads import on_ranks
from tests.llm.parallel.test_sharded_models import run

SECTIONS = [2, 3, 3]
IMAGE, VIDEO = 90, 91
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": SECTIONS}
MODELS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "2.5": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
        | {"out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
    "2": (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    ),
}
NUM_TOKENS = 12
PROMPTS = [random_ids(count, 90, seed=count) for count in (5, 1, 40, 23)]


def build(kind: str, *, is_tied: bool) -> PreTrainedModel:
    config_class, model_class, vision = MODELS[kind]
    text = SMALL | {"rope_parameters": dict(ROPE), "tie_word_embeddings": is_tied}
    config = config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=92,
        vision_end_token_id=93,
        tie_word_embeddings=is_tied,
        eos_token_id=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(kind))
        model: PreTrainedModel = model_class(config)
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith(".bias"):
            weight.data.uniform_(0.5, 1.5)
        elif "visual" not in name:
            weight.data.normal_(0.0, 0.2)
    return model.eval()


def as_published(folder: Path) -> None:
    """Write the layout of the published files: a flat configuration, and the first names."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps(text | values))
    rename(folder, lambda name: name.replace("model.language_model.", "model."))
    rename(folder, lambda name: name.removeprefix("model.") if ".visual." in name else name)


def as_nested(folder: Path) -> None:
    """Write the names of transformers' modules."""
    rename(folder, lambda name: f"model.{name}" if name.startswith("visual.") else name)

    def named(name: str) -> str:
        rest = name.removeprefix("model.")
        is_new = rest == name or rest.startswith(("visual.", "language_model."))
        return name if is_new else f"model.language_model.{rest}"

    rename(folder, named)


def rename(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): value for name, value in load_file(path).items()}, path)


@dataclasses.dataclass(frozen=True)
class Written:
    folder: Path
    model: PreTrainedModel


@pytest.fixture(scope="module", params=["2.5 published", "2.5 nested", "2 published"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    kind, _, layout = request.param.partition(" ")
    model = build(kind, is_tied=layout == "nested")
    folder = tmp_path_factory.mktemp("qwen2_vl")
    model.save_pretrained(folder)
    as_published(folder) if layout == "published" else as_nested(folder)
    names = set(load_file(folder / "model.safetensors"))
    prefix = "model." if layout == "published" else "model.language_model."
    assert f"{prefix}embed_tokens.weight" in names
    assert any("visual." in name for name in names)
    return Written(folder, model)


def test_logits_of_a_text_are_those_of_transformers(written: Written) -> None:
    """Whole and in parts."""
    ids = random_ids(60, 90)
    with torch.no_grad():
        expected = written.model(torch.tensor([ids])).logits[0]
    runner = create_runner(pipeline_config(written.folder), ReturnLogits.ALL)
    for cuts in ((0, 60), (0, 25, 26, 60)):
        parts = [
            runner.forward(runner.prepare(batch(row(ids[a:b], PAGES, a)))).logits
            for a, b in pairwise(cuts)
        ]
        assert float((torch.cat(parts) - expected).abs().max()) < 1e-4
    assert expected.std() > 0.3


def test_positions_by_section_are_those_of_transformers(written: Written) -> None:
    """An image of 3 × 4 between two texts, as far as its positions go."""
    ids = random_ids(40, 90)
    grid = torch.tensor([[10, 10 + n // 4, 10 + n % 4] for n in range(12)]).T
    text = torch.arange(40)
    positions = torch.cat([text[:10].expand(3, -1), grid, (text[14:32]).expand(3, -1)], dim=1)
    with torch.no_grad():
        given = {"position_ids": positions[:, None], "attention_mask": torch.ones(1, 40).long()}
        expected = written.model(torch.tensor([ids]), **given).logits[0]
    runner = create_runner(pipeline_config(written.folder), ReturnLogits.ALL)
    inputs = runner.prepare(batch(row(ids, PAGES)))
    plain = runner.forward(inputs).logits
    own = dataclasses.replace(inputs.forward_batch, positions=positions)
    inputs = dataclasses.replace(inputs, forward_batch=own)
    found = runner.forward(inputs).logits
    assert float((found - expected).abs().max()) < 1e-4
    assert float((found - plain).abs().max()) > 0.1


def test_a_rotation_without_sections_refuses_positions_by_section(written: Written) -> None:
    rotary = Qwen2VLModel.read_config(HuggingFaceConfig.read(written.folder)).rotary
    assert rotary.sections == tuple(SECTIONS)
    plain = Rotary(dataclasses.replace(rotary, sections=None), 8, torch.device("cpu"))
    with pytest.raises(ValueError, match="has no sections: a token has one position"):
        plain.at(torch.zeros(3, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="zip"):
        Rotary(rotary, 8, torch.device("cpu")).at(torch.zeros(2, 4, dtype=torch.long))


def ask(engine: Engine, name: str, prompt: list[int], **values: Any) -> Iterator[TokenChunk]:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS} | values)
    return engine.submit(Request(name, tuple(prompt), sampling))


@pytest.fixture(scope="module")
def expected(written: Written) -> list[list[int]]:
    """Return what transformers generates for each prompt."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": 3}
        made = written.model.generate(ids, **options, pad_token_id=0)[0, len(prompt) :].tolist()
        found.append(made[: made.index(3)] if 3 in made else made)
    return found


@pytest.mark.parametrize("kind", ENGINES)
def test_greedy_tokens_in_a_batch(written: Written, expected: list[list[int]], kind: str) -> None:
    with running(ENGINES[kind](written.folder)) as engine:
        for turn in range(2):  # the second time from the prefix cache
            streams = [ask(engine, f"{turn}.{n}", prompt) for n, prompt in enumerate(PROMPTS)]
            assert [tokens_of(stream) for stream in streams] == expected
        assert engine.stats().failed_steps == 0


def test_logits_of_ranks_are_those_of_one(written: Written, tmp_path: Path) -> None:
    expected = run(written.folder)
    for logits in on_ranks(2, lambda group: run(written.folder, group)):
        for own, one in zip(logits, expected, strict=True):
            assert float((own - one).abs().max()) < 1e-4


def test_a_prompt_with_an_image_is_refused(written: Written) -> None:
    with running(create_engine(pipeline_config(written.folder))) as engine:
        for number, token in enumerate((IMAGE, VIDEO)):
            with pytest.raises(RequestError, match="an image or a video; the model reads text"):
                ask(engine, f"seen{number}", [1, token, 2])
        doomed = ask(engine, "doomed", PROMPTS[0], max_tokens=200, ignore_eos=True)
        next(doomed)
        doomed.cancel()  # type: ignore[attr-defined]
        assert list(doomed)[-1].finish_reason is FinishReason.CANCELLED
        assert engine.stats().used_pages == 0


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "mrope"}, "rotary scaling 'mrope' is not supported"),
        ({"type": "mrope", "mrope_section": [2, 3]}, r"mrope_section=\[2, 3\] must be 3 numbers"),
        ({"type": "mrope", "mrope_section": [2, 3, 4]}, "must add up to 8, the pairs of a head"),
        ({"type": "mrope", "mrope_section": [8, 1, -1]}, "must be 3 numbers above 0"),
        ({"rope_type": "default", "mrope_section": "x"}, "mrope_section='x' must be 3 numbers"),
    ],
)
def test_wrong_sections_are_an_error(rope: dict[str, Any], message: str) -> None:
    config = HuggingFaceConfig(Path("config.json"), SMALL | {"rope_scaling": rope})
    with pytest.raises(CheckpointError, match=message):
        LlamaConfig.read(config)


def test_sections_of_a_stretched_context(tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    rope |= {"mrope_section": SECTIONS}
    config = HuggingFaceConfig(tmp_path, SMALL | {"rope_scaling": rope})
    read = LlamaConfig.read(config)
    assert read.max_positions == 2048
    assert read.rotary.sections == tuple(SECTIONS)


def test_alternating_sections_have_one_position(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "mrope_section": SECTIONS, "interleaved": True}
    config = HuggingFaceConfig(tmp_path, SMALL | {"rope_scaling": rope})
    assert LlamaConfig.read(config).rotary.sections is None

"""LFM2: short convolutions with a state next to the pages; logits and tokens of transformers."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from llm.batch import ReturnLogits
from llm.engine.engine import Engine, create_engine
from llm.errors import CheckpointError, ConfigError
from llm.kv_cache.state_slots import FIRST_STATE, StatePages
from llm.models.hf_config import HuggingFaceConfig
from llm.models.lfm2 import Lfm2Model
from llm.request import FinishReason, Request, SamplingParams, TokenChunk
from llm.runner.model_runner import ModelRunner
from tests.llm.engine.running import running
from tests.llm.lfm2_checkpoints import LFM2, write_lfm2
from tests.llm.llama_checkpoints import (
    PAGES,
    batch,
    create_runner,
    pipeline_config,
    quantize_checkpoint,
    random_ids,
    reference,
    row,
)
from tests.llm.lora.adapters import merge, write_adapter
from tests.llm.models import engine_kinds
from tests.llm.models.engine_kinds import tokens_of

NUM_TOKENS = 12
END = LFM2["eos_token_id"]  # counted, but not delivered
PROMPTS = [tuple(random_ids(length, 96, seed=length)) for length in (5, 1, 40, 2, 17, 33)]
OTHER = {
    "conv_bias": True,
    "conv_L_cache": 5,
    "tie_word_embeddings": False,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["full_attention", "conv", "conv", "full_attention", "conv"],
}
MODULES = ("q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lfm2(tmp_path_factory.mktemp("lfm2") / "model")


def greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Return what transformers generates with its own cache, without the ids that end a text."""
    ids = torch.tensor([list(prompt)])
    options: Any = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
    found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    return [token for token in found[0, len(prompt) :].tolist() if token != END]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = reference(folder)
    found = [greedy(model, prompt) for prompt in PROMPTS]
    assert len(set(itertools.chain(*found))) > 30
    return found


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with running(create_engine(pipeline_config(folder, max_batch_size=8))) as made:
        yield made


def ask(
    engine: Engine, name: str, prompt: Sequence[int], lora: str = "", **values: Any
) -> Iterator[TokenChunk]:
    defaults = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return engine.submit(
        Request(name, tuple(prompt), SamplingParams(**defaults | values), lora=lora)
    )


def with_states(runner: ModelRunner) -> ModelRunner:
    """Give the model of `create_runner` the states of its runner."""
    runner.loaded_model.states = runner.gdn_pool
    return runner


@pytest.mark.parametrize("keys", [{}, OTHER], ids=["plain", "other"])
def test_logits_are_those_of_transformers(tmp_path: Path, keys: dict[str, Any]) -> None:
    folder = write_lfm2(tmp_path / "model", seed=1, **keys)
    runner = with_states(create_runner(pipeline_config(folder), ReturnLogits.ALL))
    ids = random_ids(40, 96)
    found = runner.forward(runner.prepare(batch(row(ids, StatePages.of(PAGES, FIRST_STATE)))))
    with torch.inference_mode():
        wanted = reference(folder)(torch.tensor([ids])).logits[0]
    assert float(wanted.abs().max()) > 3
    assert float((found.logits - wanted).abs().max()) < 1e-4


def test_logits_do_not_change_a_bit(folder: Path) -> None:
    """Prompt whole, in chunks, token by token; alone and with neighbours; in a used state."""
    runner = ModelRunner(pipeline_config(folder))
    runner.initialize()
    ids = random_ids(40, 96, seed=9)

    def logits(state: int, cuts: list[int], neighbours: int = 0) -> torch.Tensor:
        pages = StatePages.of(PAGES[: 1 + state % 3 + 2], state)
        for start, end in itertools.pairwise(cuts):
            beside = [
                row([5 + n], StatePages.of([30 + n], 10 + n), request_id=str(n))
                for n in range(neighbours)
            ]
            rows = [*beside, row(ids[start:end], pages, start)]
            outputs = runner.forward(runner.prepare(batch(*rows)))
        return outputs.logits[-1]

    whole = logits(2, [0, 40])
    assert torch.equal(logits(3, [0, 1, 2, 17, 18, 40]), whole)
    assert torch.equal(logits(3, [0, 25, *range(26, 41)]), whole)
    assert torch.equal(logits(2, list(range(41)), neighbours=7), whole)
    assert torch.equal(logits(5, [0, 33, 40], neighbours=20), whole)
    assert not torch.equal(logits(5, [0, 33, 39]), whole)


def test_greedy_tokens_alone_and_streamed(engine: Engine, expected: list[list[int]]) -> None:
    for place, prompt in enumerate(PROMPTS):
        chunks = list(ask(engine, f"alone{place}", prompt))
        assert [token for chunk in chunks for token in chunk.token_ids] == expected[place]
        assert max(len(chunk.token_ids) for chunk in chunks) == 1
        assert chunks[-1].finish_reason is FinishReason.LENGTH


ENGINES: dict[str, Callable[[Path], Engine]] = {
    **engine_kinds.ENGINES,
    "prompts in chunks": lambda f: create_engine(
        pipeline_config(f, max_batch_size=3, max_batch_input_tokens=7)
    ),
    "few pages": lambda f: create_engine(
        pipeline_config(f, num_pages=25, page_size=4, max_length=64, kvcache_ce_watermark=1.0)
    ),
    "few states": lambda f: create_engine(pipeline_config(f, max_batch_size=2)),
    "compiled": lambda f: create_engine(pipeline_config(f, use_legacy_module=False)),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_greedy_tokens_in_a_batch(folder: Path, expected: list[list[int]], kind: str) -> None:
    with running(ENGINES[kind](folder)) as engine:
        num_states = engine.pipeline.kv_manager.available_states
        for turn in range(2):  # the second time in states that were used
            streams = [ask(engine, f"{turn}.{n}", prompt) for n, prompt in enumerate(PROMPTS)]
            assert [tokens_of(stream) for stream in streams] == expected
        assert engine.drain(60)
        stats = engine.stats()
        assert (stats.used_pages, stats.failed_steps) == (0, 0)
        assert stats.preemptions > 0 or kind != "few pages"
        if kind.startswith("replayed"):
            assert stats.graphs is not None
            assert stats.graphs.replays > NUM_TOKENS
            assert (stats.graphs.prompt_replays, stats.graphs.eager_decodes) == (0, 0)
        manager = engine.pipeline.kv_manager
        manager.check_integrity()
        assert manager.available_states == num_states


def test_a_seed_gives_the_same_tokens_in_any_batch(engine: Engine) -> None:
    values = {"temperature": 1.3, "top_k": 20, "top_logprobs": 2}

    def told(chunks: Iterator[TokenChunk]) -> object:
        return [(chunk.token_ids, chunk.logprobs) for chunk in chunks if chunk.token_ids]

    alone = [told(ask(engine, f"a{n}", p, seed=n, **values)) for n, p in enumerate(PROMPTS)]
    streams = [ask(engine, f"b{n}", p, seed=n, **values) for n, p in enumerate(PROMPTS)]
    assert [told(stream) for stream in streams] == alone


def test_a_cancelled_request_leaves_the_others_alone(
    engine: Engine, expected: list[list[int]]
) -> None:
    doomed = ask(engine, "doomed", PROMPTS[2], max_tokens=300)
    others = [ask(engine, f"kept{n}", prompt) for n, prompt in enumerate(PROMPTS)]
    assert next(doomed).finish_reason is None
    doomed.cancel()  # type: ignore[attr-defined]
    assert [tokens_of(stream) for stream in others] == expected
    assert list(doomed)[-1].finish_reason is FinishReason.CANCELLED
    assert engine.drain(60)
    assert engine.pipeline.kv_manager.available_states == 8


def test_states_are_part_of_the_memory_plan(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="llm")
    runner = ModelRunner(pipeline_config(folder, max_batch_size=6))
    runner.initialize()
    pool, plan = runner.gdn_pool, runner.memory_plan
    assert pool is not None
    assert plan is not None
    # three convolutions that each keep two inputs of 48 numbers
    assert plan.state_bytes == pool.nbytes == (FIRST_STATE + 6) * 3 * 2 * 48 * 4
    assert runner.token_to_kv_pool is not None
    assert runner.token_to_kv_pool.num_layers == 2
    assert plan.page_bytes == 2 * 2 * 16 * 2 * 12 * 4
    assert "recurrent states next to the pages, no prefix cache: StatePool(8 states" in caplog.text
    assert "enable_prefix_caching=True becomes False: Lfm2ForCausalLM needs it" in caplog.text
    runner.shutdown()
    assert runner.gdn_pool is None


def test_the_prefix_cache_stays_off_by_force(folder: Path, expected: list[list[int]]) -> None:
    with running(create_engine(pipeline_config(folder, force=True))) as engine:
        assert engine.pipeline.pipeline_config.model.kv_cache.enable_prefix_caching
        for turn in range(2):
            assert tokens_of(ask(engine, str(turn), PROMPTS[2])) == expected[2]
        assert engine.pipeline.kv_manager.prefix_hit_tokens == 0


def test_adapters_change_attention_and_convolutions(
    folder: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """Requests with and without an adapter in one batch; those with it as if it were merged."""
    adapter = write_adapter(tmp_path / "adapter", folder, modules=MODULES, gain=0.2)
    lora = {"enable_lora": True, "lora_paths": [f"mine={adapter}"]}
    model = reference(merge(folder, adapter, tmp_path / "merged"))
    with running(create_engine(pipeline_config(folder, lora=lora))) as engine:
        plain = [ask(engine, f"plain{n}", prompt) for n, prompt in enumerate(PROMPTS)]
        adapted = [ask(engine, f"mine{n}", prompt, "mine") for n, prompt in enumerate(PROMPTS)]
        assert [tokens_of(stream) for stream in plain] == expected
        found = [tokens_of(stream) for stream in adapted]
    assert found == [greedy(model, prompt) for prompt in PROMPTS]
    assert found != expected


def test_int8_weights_are_read_and_made(folder: Path, tmp_path: Path) -> None:
    """A checkpoint of int8 weights, and one quantised when it is read, give the same tokens."""
    stored = quantize_checkpoint(folder, tmp_path / "int8")
    found = []
    for config in (pipeline_config(stored), pipeline_config(folder, encoding="int8")):
        with running(create_engine(config)) as engine:
            assert engine.pipeline.runner.loaded_model.encoding.int8  # type: ignore[attr-defined]
            found.append([tokens_of(ask(engine, str(n), p)) for n, p in enumerate(PROMPTS)])
    assert found[0] == found[1]


def test_drafts_and_swapping_are_refused_before_weights_are_read(folder: Path) -> None:
    (folder.parent / "bare").mkdir(exist_ok=True)
    bare = folder.parent / "bare"  # no weights
    (bare / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="draft_model: Lfm2ForCausalLM cannot verify"):
        pipeline_config(bare, draft_model={"model_path": str(bare)})
    config = pipeline_config(bare)
    with pytest.raises(ConfigError, match="cannot go back behind a rejected draft"):
        ModelRunner(config).initialize(ModelRunner(config, is_draft=True))
    cache = config.model.kv_cache.model_dump() | {"enable_kvcache_swapping_to_host": True}
    values = config.model.model_dump() | {"kv_cache": cache}
    with pytest.raises(ConfigError, match="swapping_to_host=True needs enable_prefix_caching"):
        type(config)(model=values)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["conv"] * 5}, "both must occur"),
        ({"layer_types": ["conv", "full_attention"]}, "must be 5 of"),
        ({"layer_types": ["conv", "full_attention", "mamba", "conv", "conv"]}, "mamba"),
        ({"conv_L_cache": 1}, r"conv_L_cache=1 must be in \[2, 64\]"),
        ({"intermediate_size": "wide"}, "intermediate_size='wide' must be"),
    ],
)
def test_bad_configurations_are_errors(folder: Path, keys: dict[str, Any], message: str) -> None:
    read = HuggingFaceConfig.read(folder)
    with pytest.raises(CheckpointError, match=message):
        Lfm2Model.read_config(HuggingFaceConfig(read.path, {**read.keys, **keys}))


def test_names_of_the_first_published_checkpoints(folder: Path) -> None:
    """Before transformers 5: other keys for the same sizes, and the numbers of the layers."""
    read = HuggingFaceConfig.read(folder)
    keys = json.loads(json.dumps(dict(read.keys)))
    for name in ("layer_types", "intermediate_size", "rope_parameters", "tie_word_embeddings"):
        del keys[name]
    old = {"full_attn_idxs": [2, 4], "block_ff_dim": 90, "tie_embedding": True, "rope_theta": 1e6}
    config = HuggingFaceConfig(read.path, {**keys, **old})
    assert Lfm2Model.read_config(config) == Lfm2Model.read_config(read)


def test_requests_driven_by_tensors(folder: Path, expected: list[list[int]]) -> None:
    """Extend in two parts, then decode; two requests, and another in the first one's row."""
    runner = ModelRunner(pipeline_config(folder))
    runner.initialize()
    rows, allocator = runner.req_to_token_pool, runner.token_to_kv_pool_allocator
    assert rows is not None
    assert allocator is not None
    assert runner.gdn_pool is not None

    def feed(place: int, slots: list[int], ids: Sequence[int], *, decodes: bool) -> int:
        before = len(slots)
        taken = allocator.alloc(len(ids), slots[-1] if slots else None)
        assert taken is not None
        slots += taken.tolist()
        if decodes:
            forward = runner.prepare_forward_batch_decode(ids, [place], [len(slots)], taken)
        else:
            lengths = ([len(slots)], [len(ids)], [before])
            forward = runner.prepare_forward_batch_extend(ids, [place], *lengths, taken)
        return int(runner.forward(forward).next_token_logits.argmax())

    def generate(place: int, prompt: Sequence[int]) -> list[int]:
        slots: list[int] = []
        feed(place, slots, prompt[:3], decodes=False)
        found = [feed(place, slots, prompt[3:], decodes=False)]
        while len(found) < NUM_TOKENS:
            found.append(feed(place, slots, found[-1:], decodes=True))
        allocator.free(slots)
        return [token for token in found if token != END]

    first, second = rows.alloc(), rows.alloc()
    assert first is not None
    assert second is not None
    for place, number in ((first, 2), (second, 4), (first, 5)):
        assert generate(place, PROMPTS[number]) == expected[number]

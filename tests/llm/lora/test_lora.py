"""Adapters: equality with merged weights, independence of rows, waiting for slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm import (
    CheckpointError,
    ConfigError,
    Engine,
    LoRAConfig,
    Request,
    RequestError,
    SamplingParams,
    TokenChunk,
)
from llm.engine.engine import create_engine
from llm.layers.factory import LinearFactory
from llm.layers.linear import RowLinear
from llm.layers.weight import LinearWeight, WeightSource
from llm.lora.adapter import LoRAAdapter
from llm.lora.manager import LoRAManager, reserved_bytes
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.runner.model_runner import ModelRunner
from llm.scheduler import Scheduler
from tests.fakes import LlamaShape, StepLog, build_text_checkpoint
from tests.llm.llama_checkpoints import pipeline_config, random_ids, write_llama
from tests.llm.lora.adapters import merge, write_adapter

PROMPT = tuple(random_ids(40, 96, seed=2))
NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = LlamaShape(layers=3, intermediate=112)
    return build_text_checkpoint(tmp_path_factory.mktemp("base"), shape=shape)


@pytest.fixture(scope="module")
def paths(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return three adapters: all modules, attention only, queries and down projections only."""
    root = tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [
        {"rank": 4},
        {"rank": 8, "modules": ("q_proj", "k_proj", "v_proj", "o_proj"), "use_rslora": True},
        {"rank": 2, "modules": ("q_proj", "down_proj"), "alpha_pattern": {"down_proj": 9}},
    ]
    for seed, (name, kind) in enumerate(zip(NAMES, kinds, strict=True)):
        write_adapter(root / name, base, seed=seed, **kind)
    return [str(root / name) for name in NAMES]


def lora(paths: list[str], **values: Any) -> LoRAConfig:
    return LoRAConfig(enable_lora=True, lora_paths=paths, **({"max_num_loras": 3} | values))


def request(name: str = "", seed: int = 5, prompt: tuple[int, ...] = PROMPT) -> Request:
    sampling = SamplingParams(seed=seed, max_tokens=20, ignore_eos=True, top_logprobs=0)
    return Request(f"{name or 'base'}{seed}", prompt, sampling, lora=name)


def run(engine: Engine, *requests: Request) -> dict[str, list[TokenChunk]]:
    streams = [engine.submit(request) for request in requests]
    if not engine.is_running:
        engine.start()
    return {stream.request_id: list(stream) for stream in streams}


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs(chunks: list[TokenChunk]) -> list[float]:
    return [entry.logprob or 0.0 for chunk in chunks for entry in chunk.logprobs]


@pytest.mark.parametrize("index", range(3))
def test_output_equals_that_of_merged_weights(
    base: Path, paths: list[str], index: int, tmp_path: Path
) -> None:
    adapted = create_engine(pipeline_config(base, lora=lora(paths)))
    merged = create_engine(pipeline_config(merge(base, Path(paths[index]), tmp_path / "merged")))
    asked = request(NAMES[index])
    found = run(adapted, asked)[asked.request_id]
    expected = run(merged, request())["base5"]
    assert tokens(found) == tokens(expected)
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-4)
    plain = run(adapted, request())["base5"]
    assert tokens(plain) != tokens(found)
    adapted.shutdown()
    merged.shutdown()


def test_adapters_share_a_batch_and_change_no_bit_of_each_other(
    base: Path, paths: list[str]
) -> None:
    """Alone and together, in prompt chunks, short of pages; the base as without adapters."""
    asked = [request(name, seed) for seed, name in enumerate(("", *NAMES, "red", ""))]
    engine = create_engine(pipeline_config(base, lora=lora(paths)))
    together = run(engine, *asked)
    for one in asked:
        alone = run(engine, one)[one.request_id]
        assert (tokens(alone), logprobs(alone)) == (
            tokens(together[one.request_id]),
            logprobs(together[one.request_id]),
        )
    engine.shutdown()
    small = pipeline_config(
        base,
        lora=lora(paths),
        num_pages=30,
        page_size=8,
        max_batch_input_tokens=33,
        kvcache_ce_watermark=1.0,
    )
    engine = create_engine(small)
    found = run(engine, *asked)
    assert {name: tokens(c) for name, c in found.items()} == {
        name: tokens(c) for name, c in together.items()
    }
    assert engine.stats().preemptions > 0
    engine.shutdown()
    without = create_engine(pipeline_config(base))
    for one in (asked[0], asked[5]):
        plain = run(without, one)[one.request_id]
        assert logprobs(plain) == logprobs(together[one.request_id])
    without.shutdown()


def test_the_prefix_cache_is_keyed_by_adapter(base: Path, paths: list[str]) -> None:
    engine = create_engine(pipeline_config(base, lora=lora(paths)))
    cold = {name: run(engine, request(name))[f"{name or 'base'}5"] for name in ("", *NAMES)}
    assert [chunks[-1].cached_prompt_tokens for chunks in cold.values()] == [0] * 4
    for name, chunks in cold.items():
        warm = run(engine, request(name))[f"{name or 'base'}5"]
        assert warm[-1].cached_prompt_tokens == 32
        assert logprobs(warm) == logprobs(chunks)
    engine.shutdown()


def watched(config: Any) -> tuple[Engine, StepLog, LoRAManager]:
    log = StepLog()
    pipeline = TextGenerationPipeline(config)
    manager = pipeline.runner.loaded_model.lora_manager
    assert manager is not None
    scheduler = Scheduler(config, pipeline.kv_manager, max_seq_len=pipeline.max_seq_len)
    return Engine(log.watch(pipeline), scheduler, admit=pipeline.admit), log, manager


@pytest.mark.parametrize("slots", [1, 2])
def test_more_adapters_than_slots_wait_and_are_not_thrown_out(
    base: Path, paths: list[str], slots: int
) -> None:
    config = pipeline_config(base, lora=lora(paths, max_num_loras=slots))
    engine, log, manager = watched(config)
    order = ("red", "green", "", "red", "blue", "green", "", "blue")
    asked = [request(name, seed) for seed, name in enumerate(order)]
    found = run(engine, *asked)
    assert all(chunks[-1].output_tokens == 20 for chunks in found.values())
    owner = {one.request_id: one.lora for one in asked}
    adapters = [{owner[name] for name in step} - {""} for step in log.steps]
    assert max(len(step) for step in adapters) == slots
    for one in asked:  # once started, a request is in every step until it has its tokens
        steps = [index for index, step in enumerate(log.steps) if one.request_id in step]
        assert steps == list(range(steps[0], steps[0] + 20))
    starts = {name: min(i for i, s in enumerate(log.steps) if name in s) for name in owner}
    assert starts["base2"] == starts["base6"] == 0, "the base model needs no slot"
    assert len(manager.resident) == slots
    engine.shutdown()
    roomy = create_engine(pipeline_config(base, lora=lora(paths)))
    everything = run(roomy, *asked)
    assert {n: tokens(c) for n, c in everything.items()} == {n: tokens(c) for n, c in found.items()}
    roomy.shutdown()


def test_requests_join_an_adapter_that_runs(base: Path, paths: list[str]) -> None:
    engine, log, _ = watched(pipeline_config(base, lora=lora(paths, max_num_loras=1)))
    asked = [request("red", 0), request("green", 1), request("red", 2), request("green", 3)]
    run(engine, *asked)
    starts = [min(i for i, s in enumerate(log.steps) if one.request_id in s) for one in asked]
    assert starts == [0, 20, 0, 20]
    engine.shutdown()


def test_the_slot_used_longest_ago_is_taken(base: Path, paths: list[str]) -> None:
    engine, _, manager = watched(pipeline_config(base, lora=lora(paths, max_num_loras=2)))
    for name in ("red", "green", "red", "blue"):
        run(engine, request(name))
    assert manager.resident == ("red", "blue")
    assert manager.num_loads == 3
    run(engine, request("red"))
    assert manager.num_loads == 3
    run(engine, request("green"))
    assert manager.resident == ("red", "green")
    with pytest.raises(RuntimeError, match="3 adapters in one batch, 2 slots"):
        manager.begin(NAMES, (1, 1, 1))
    engine.shutdown()


def test_rows_of_an_adapted_layer_do_not_see_each_other(base: Path, paths: list[str]) -> None:
    """Any number of tokens, in any order of adapters: the same bits."""
    manager = LoRAManager(lora(paths), torch.device("cpu"))
    name = "model.layers.1.self_attn.q_proj"
    factory = LinearFactory(
        dtype=torch.float32, device=torch.device("cpu"), int8=False, lora=manager
    )
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator)
    layer = factory.linear(LinearWeight(weight, sources=(WeightSource(name, 64),)))
    x = torch.randn(70, 64, generator=generator)
    expected = {}
    for adapter in ("", *NAMES):
        manager.begin((adapter,), (70,))
        expected[adapter] = layer(x)
    plain = x @ weight.T
    # Another order of 64 sums: a few float32 roundings of the products' size.
    assert (expected[""] - plain).norm() / plain.norm() < 1e-6
    for seed in range(20):
        owners = [("", *NAMES)[i] for i in random_ids(1 + 3 * seed, 4, seed=seed)]
        manager.begin(owners, (1,) * len(owners))
        found = layer(x[: len(owners)])
        for place, owner in enumerate(owners):
            assert torch.equal(found[place], expected[owner][place])


def test_layers_that_no_adapter_changes_are_plain(base: Path, paths: list[str]) -> None:
    manager = LoRAManager(lora(paths[2:]), torch.device("cpu"))
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "int8": False,
    }
    weight = LinearWeight(
        torch.ones(64, 64), sources=(WeightSource("model.layers.0.self_attn.o_proj", 64),)
    )
    assert type(LinearFactory(**options, lora=manager).linear(weight)) is RowLinear
    assert type(LinearFactory(**options).linear(weight)) is RowLinear
    pipeline = TextGenerationPipeline(pipeline_config(base))
    assert pipeline.runner.loaded_model.lora_manager is None
    with pytest.raises(RequestError, match="enable_lora"):
        pipeline.admit(request("red"))


@pytest.mark.parametrize("encoding", ["int8", "bfloat16", "float8_e4m3fn"])
def test_every_encoding_takes_adapters(base: Path, paths: list[str], encoding: str) -> None:
    engine = create_engine(pipeline_config(base, encoding=encoding, lora=lora(paths)))
    together = run(engine, request("red"), request(), request("blue"))
    for name in ("red", "", "blue"):
        alone = run(engine, request(name))[f"{name or 'base'}5"]
        assert tokens(alone) == tokens(together[f"{name or 'base'}5"])
    assert tokens(together["red5"]) != tokens(together["base5"])
    engine.shutdown()


def test_unknown_adapters_are_the_requests_fault(base: Path, paths: list[str]) -> None:
    engine = create_engine(pipeline_config(base, lora=lora(paths)))
    with pytest.raises(RequestError, match="no adapter 'pink'; there are: red, green, blue"):
        engine.submit(request("pink"))
    engine.shutdown()


def test_names_and_folders(paths: list[str]) -> None:
    config = lora([f"crimson={paths[0]}", paths[1]])
    assert config.adapters() == {"crimson": Path(paths[0]), "green": Path(paths[1])}
    for wrong, message in (
        ([paths[0], paths[0]], "given twice"),
        ([f"a b={paths[0]}"], "no name"),
        (["x=/nowhere"], "not a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            lora(wrong).adapters()
    assert reserved_bytes(None) == reserved_bytes(LoRAConfig(lora_paths=paths)) == 0
    one = LoRAAdapter.read("red", Path(paths[0]), 16)
    assert reserved_bytes(lora(paths, max_num_loras=1)) >= one.nbytes


def test_memory_is_set_aside_for_the_slots(base: Path, paths: list[str]) -> None:
    plain = ModelRunner(pipeline_config(base)).weights_bytes
    sizes = [LoRAAdapter.read(n, Path(p), 16).nbytes for n, p in zip(NAMES, paths, strict=True)]
    for slots in (1, 2, 9):
        config = pipeline_config(base, lora=lora(paths, max_num_loras=slots))
        found = ModelRunner(config).weights_bytes - plain
        assert found >= min(slots, 3) * max(sizes)


def test_a_rank_above_the_limit(base: Path, paths: list[str]) -> None:
    with pytest.raises(ConfigError, match="max_lora_rank=6: adapter 'green' has rank 8"):
        create_engine(pipeline_config(base, lora=lora(paths, max_lora_rank=6)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": "many"}, "must be numbers"),
        ({"r": None}, "must be numbers"),
    ],
)
def test_unsupported_adapters(
    base: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path / "a", base, **values)
    with pytest.raises(CheckpointError, match=message):
        LoRAAdapter.read("a", folder, 16)


def test_files_that_are_broken(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(key for key in tensors if "lora_A" in key)
    cases = [
        ({k: v for k, v in tensors.items() if k != first}, "do not pair up"),
        ({**tensors, "base_model.model.lm_head.weight": torch.ones(2, 2)}, "not supported"),
        ({**tensors, first: torch.ones(3, 64)}, "factors of ranks"),
        ({}, "no module at all"),
    ]
    for broken, message in cases:
        save_file(broken, file)
        with pytest.raises(CheckpointError, match=message):
            LoRAAdapter.read("a", folder, 16)
    file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot read"):
        LoRAAdapter.read("a", folder, 16)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        LoRAAdapter.read("a", folder, 16)


def test_the_head_cannot_be_adapted(tmp_path: Path) -> None:
    untied = write_llama(tmp_path / "untied", tie_word_embeddings=False)
    folder = write_adapter(tmp_path / "a", untied, modules=("q_proj", "lm_head"))
    with pytest.raises(CheckpointError, match="cannot be adapted: lm_head"):
        create_engine(pipeline_config(untied, lora=lora([str(folder)])))


def test_adapters_of_another_model(base: Path, tmp_path: Path) -> None:
    wide = write_llama(tmp_path / "wide", hidden_size=128)
    config = pipeline_config(base, lora=lora([str(write_adapter(tmp_path / "a", wide))]))
    with pytest.raises(CheckpointError, match=r"\(.*128.*\), the model as"):
        create_engine(config)
    deep = write_llama(tmp_path / "deep", num_hidden_layers=4)
    config = pipeline_config(base, lora=lora([str(write_adapter(tmp_path / "b", deep))]))
    with pytest.raises(CheckpointError, match=r"cannot be adapted: model\.layers\.3"):
        create_engine(config)


def test_adapter_config_is_read_from_any_json(base: Path, tmp_path: Path) -> None:
    """Ranks are those of the tensors; alpha_pattern and use_rslora set the scale."""
    folder = write_adapter(
        tmp_path / "a",
        base,
        modules=("q_proj", "v_proj"),
        alpha_pattern={"layers.1.self_attn.v_proj": 40},
        rank_pattern={"q_proj": 4},
    )
    found = LoRAAdapter.read("a", folder, 4)
    stored = load_file(folder / "adapter_model.safetensors")
    for module, factors in found.factors.items():
        scale = 10.0 if module == "model.layers.1.self_attn.v_proj" else 2.0
        torch.testing.assert_close(
            factors.up, scale * stored[f"base_model.model.{module}.lora_B.weight"]
        )
    assert (found.rank, len(found.factors)) == (4, 6)
    values = json.loads((folder / "adapter_config.json").read_text())
    assert values["r"] == 4

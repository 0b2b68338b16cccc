"""Logits and tokens of a model that is split over ranks are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from llm.config import ModelConfig, PipelineConfig
from llm.errors import ConfigError
from llm.models.llama import LlamaModel
from llm.models.qwen3_moe import Qwen3MoeModel
from llm.models.weights import SafetensorsWeights
from llm.parallel.group import Group
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.registry import create_pipeline
from llm.request import SamplingParams
from llm.runner import model_runner
from llm.runner.model_runner import ModelRunner
from tests.llm.csm_checkpoints import write_csm
from tests.llm.gguf_files import quantised
from tests.llm.lfm2_checkpoints import write_lfm2
from tests.llm.llama_checkpoints import (
    PAGES,
    SMALL,
    batch,
    float8_checkpoint,
    pipeline_config,
    quantize_checkpoint,
    random_ids,
    row,
    write_llama,
    write_random,
)
from tests.llm.models.test_embeddings import write_bare, write_modules
from tests.llm.parallel.rank_threads import on_ranks
from tests.llm.pipeline.test_overlap import EMPTY, next_row, prompt_row
from tests.llm.qwen3_moe_checkpoints import qwen3_moe, write_qwen3_moe
from tests.llm.qwen3_next_checkpoints import write_qwen3_next
from tests.llm.runner.host_graphs import use_gathered, use_graphs
from tests.llm.runner.late_stream import LateStream
from tests.llm.runner.test_cuda_graphs import Decoding

MAX_DIFFERENCE = 1e-4

MOE_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
EIGHT_HEADS = SMALL | {"num_attention_heads": 8, "num_key_value_heads": 4}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**EIGHT_HEADS),
    "llama biased, replicated heads, own head": LlamaConfig(
        **SMALL | {"tie_word_embeddings": False}, attention_bias=True, mlp_bias=True
    ),
    "one head of keys": LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
    "mistral": MistralConfig(**EIGHT_HEADS | {"sliding_window": 16}),
    "qwen2": Qwen2Config(**EIGHT_HEADS),
    "qwen3": Qwen3Config(**EIGHT_HEADS, head_dim=16),
    "qwen3 moe, each expert cut": qwen3_moe(**MOE_HEADS),
    "qwen3 moe, some dense layers": qwen3_moe(**MOE_HEADS, decoder_sparse_step=2),
}


def split_config(folder: Path, num_ranks: int, *, ep_size: int = 1, **keys: Any) -> PipelineConfig:
    """Return the configuration of a model on several CPU ranks."""
    plain = pipeline_config(folder, **keys)
    fields = plain.model.model_dump(exclude_unset=True) | {"device_specs": ["cpu"] * num_ranks}
    kept = plain.model_dump(exclude_unset=True, exclude={"model"})
    return PipelineConfig(model=ModelConfig(**fields), ep_size=ep_size, **kept)


def run(folder: Path, group: Group | None = None, ep_size: int = 1) -> tuple[Tensor, Tensor]:
    """Return the logits of a mixed batch after a prompt, and of the step after it."""
    config = split_config(folder, 1 if group is None else group.size, ep_size=ep_size)
    runner = ModelRunner(config, group=group)
    runner.initialize()
    first, second = random_ids(40, 96), random_ids(21, 96, seed=1)
    runner.forward(runner.prepare(batch(row(first[:30], PAGES[:3]))))
    rows = (
        row(first[30:31], PAGES[:3], 30),
        row(second, PAGES[3:5], request_id="b"),
    )
    mixed = runner.forward(runner.prepare(batch(*rows))).logits
    last = batch(row([5], PAGES[3:5], 21, request_id="b"))
    return mixed, runner.forward(runner.prepare(last)).logits


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_logits_of_ranks_are_those_of_one(tmp_path: Path, name: str, num_ranks: int) -> None:
    folder = write_random(tmp_path, CONFIGS[name])
    expected = run(folder)
    for logits in on_ranks(num_ranks, lambda group: run(folder, group)):
        for own, reference in zip(logits, expected, strict=True):
            assert torch.allclose(own, reference, rtol=0, atol=MAX_DIFFERENCE)
            assert own.shape == reference.shape


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_int8", [False, True])
def test_ranks_with_whole_experts(tmp_path: Path, num_ranks: int, is_int8: bool) -> None:
    folder = write_qwen3_moe(tmp_path / "float", **MOE_HEADS, decoder_sparse_step=2)
    if is_int8:
        folder = quantize_checkpoint(folder, tmp_path / "int8")
    expected = run(folder)
    for logits in on_ranks(num_ranks, lambda group: run(folder, group, num_ranks)):
        for own, reference in zip(logits, expected, strict=True):
            assert torch.allclose(own, reference, rtol=0, atol=MAX_DIFFERENCE)
            assert own.shape == reference.shape


def test_an_int8_checkpoint_is_split_with_its_scales(tmp_path: Path) -> None:
    source = write_random(tmp_path / "float", CONFIGS["llama"])
    folder = quantize_checkpoint(source, tmp_path / "int8")
    expected, _ = run(folder)
    for logits, _ in on_ranks(2, lambda group: run(folder, group)):
        assert torch.allclose(logits, expected, rtol=0, atol=MAX_DIFFERENCE)


def test_a_float8_checkpoint_is_split_with_its_scales(tmp_path: Path) -> None:
    """A rank rounds its own part of a row, so that ranks differ from one by float8's rounding."""
    source = write_random(tmp_path / "float", CONFIGS["llama"])
    folder = float8_checkpoint(source, tmp_path / "float8", "channel")
    expected, _ = run(folder)
    exact, _ = run(source)
    found = [logits for logits, _ in on_ranks(2, lambda group: run(folder, group))]
    assert torch.equal(found[0], found[1])
    error = (found[0] - exact).norm()
    assert error < 1.3 * (expected - exact).norm()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_packed_checkpoint_is_split_between_groups(tmp_path: Path, kind: str) -> None:
    """With 4 ranks a part of the inputs of `o_proj` is half a group, and is expanded."""
    plain, packed = quantised(tmp_path, lambda name: kind, intermediate_size=128)
    expected = run(packed)
    assert torch.equal(expected[0], run(plain)[0])
    for num_ranks in (2, 4):
        for logits in on_ranks(num_ranks, lambda group: run(packed, group)):
            for own, reference in zip(logits, expected, strict=True):
                assert torch.allclose(own, reference, rtol=0, atol=MAX_DIFFERENCE)


def test_hidden_states_of_an_embedding_model(tmp_path: Path) -> None:
    write_modules(write_bare(tmp_path), "mean_tokens")
    prompt = random_ids(20, 96)

    def states(group: Group | None = None) -> Tensor:
        runner = ModelRunner(split_config(tmp_path, group.size if group else 1), group=group)
        runner.initialize()
        embedded = row(prompt, PAGES[:2])._replace(embeds=True)
        hidden = runner.forward(runner.prepare(batch(embedded))).hidden_states
        assert hidden is not None
        return hidden

    for found in on_ranks(2, states):
        assert torch.allclose(found, states(), rtol=0, atol=MAX_DIFFERENCE)


@pytest.mark.parametrize(
    ("name", "ep_size"),
    [("llama", 1), ("qwen3 moe, each expert cut", 1), ("qwen3 moe, each expert cut", 4)],
)
def test_a_row_on_four_ranks_does_not_depend_on_its_batch(
    tmp_path: Path, name: str, ep_size: int
) -> None:
    folder = write_random(tmp_path, CONFIGS[name])

    def logits(group: Group) -> tuple[Tensor, Tensor]:
        runner = ModelRunner(split_config(folder, 4, ep_size=ep_size), group=group)
        runner.initialize()
        own = row(random_ids(33, 96), PAGES[:3])
        others = [
            row(random_ids(length, 96, seed=length), pages, request_id=f"{length}")
            for length, pages in ((17, PAGES[3:5]), (40, PAGES[5:8]))
        ]
        alone = runner.forward(runner.prepare(batch(own))).logits
        return alone[0], runner.forward(runner.prepare(batch(*others, own))).logits[2]

    for alone, together in on_ranks(4, logits):
        assert torch.equal(alone, together)


def test_a_replay_on_ranks_is_their_eager_forward(tmp_path: Path) -> None:
    folder = write_random(tmp_path, CONFIGS["llama"])

    def replayed(group: Group) -> tuple[int, int]:
        config = split_config(folder, 2, max_batch_size=4)
        eager, other = (ModelRunner(config, group=group) for _ in range(2))
        for runner in (eager, other):
            runner.initialize()
        use_gathered(eager)
        use_graphs(other)
        decoding = Decoding(eager, other)
        for count in (1, 3, 2):
            decoding.decode(list(range(count)), random_ids(count, 96, seed=count))
        decoding.check_pages()
        assert other.graph_runner is not None
        stats = other.graph_runner.stats()
        return stats.replays, stats.eager_decodes

    assert on_ranks(2, replayed) == [(3, 0)] * 2


def test_ranks_overlap_their_steps(tmp_path: Path) -> None:
    """Each rank feeds the tokens that it has sampled itself."""
    folder = write_random(tmp_path, CONFIGS["llama"])
    sampling = SamplingParams(seed=8)
    rows = [next_row("a", number, sampling=sampling) for number in range(1, 5)]
    steps = [batch(prompt_row("a", sampling=sampling)), *map(batch, rows), EMPTY]

    def sampled(group: Group | None = None) -> list[tuple[int, ...]]:
        config = split_config(folder, group.size if group else 1)
        pipeline = OverlapTextGenerationPipeline(config, stream=LateStream(), group=group)
        outputs = [dict(pipeline.run(step).token_ids) for step in steps]
        assert outputs[0] == {}
        return [output["a"] for output in outputs[1:]]

    assert on_ranks(2, sampled) == [sampled()] * 2


class CountedWeights(SafetensorsWeights):
    """Counts the values that are read."""

    num_read = 0

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        found = super()._read(name, read)
        self.num_read += found.numel()
        return found


def test_a_rank_reads_its_part_of_each_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(**EIGHT_HEADS | {"tie_word_embeddings": False})
    folder = write_random(tmp_path, config)
    opened: list[CountedWeights] = []

    def counted(_: PipelineConfig) -> CountedWeights:
        opened.append(CountedWeights.find(folder))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(model_runner, "open_weights", counted)
    on_ranks(4, lambda group: run(folder, group)[0])
    sizes = [info.num_values for info in opened[0].info().values() if len(info.shape) == 2]
    norms = [info.num_values for info in opened[0].info().values() if len(info.shape) == 1]
    assert [weights.num_read for weights in opened] == [sum(sizes) // 4 + sum(norms)] * 4


@pytest.mark.parametrize("ep_size", [1, 4])
def test_a_rank_reads_its_part_of_the_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ep_size: int
) -> None:
    """And all routers and norms. The memory plan counts the same."""
    folder = write_qwen3_moe(tmp_path, **MOE_HEADS)
    opened: list[CountedWeights] = []

    def counted(_: PipelineConfig) -> CountedWeights:
        opened.append(CountedWeights.find(folder))
        return opened[-1]

    monkeypatch.setattr(model_runner, "open_weights", counted)
    on_ranks(4, lambda group: run(folder, group, ep_size)[0])
    infos = opened[0].info()
    whole = {
        n for n, info in infos.items() if n.endswith("mlp.gate.weight") or len(info.shape) == 1
    }
    shared = sum(infos[name].num_values for name in whole)
    divided = sum(info.num_values for name, info in infos.items() if name not in whole)
    assert [weights.num_read for weights in opened] == [divided // 4 + shared] * 4
    planned = Qwen3MoeModel.estimate_weights_size(split_config(folder, 4, ep_size=ep_size))
    assert planned == pytest.approx(4 * (divided // 4 + shared), rel=0.02)


def test_the_memory_plan_counts_the_part_of_a_rank(tmp_path: Path) -> None:
    folder = write_random(tmp_path, CONFIGS["llama"])
    sizes = [LlamaModel.estimate_weights_size(split_config(folder, count)) for count in (1, 2, 8)]
    tensors = load_file(folder / "model.safetensors")
    norms = 4 * sum(tensor.numel() for name, tensor in tensors.items() if "norm" in name)
    copies = 3 * 4 * 2 * 4 * 8 * 64  # layers, bytes, keys and values, heads, head_dim, hidden
    assert sizes[1] - norms == pytest.approx(sizes[0] / 2, abs=norms)
    assert sizes[2] - norms == pytest.approx((sizes[0] + copies) / 8, abs=norms)


@pytest.mark.parametrize(
    ("keys", "num_ranks", "message"),
    [
        ({}, 3, "num_attention_heads=4, num_key_value_heads=2, intermediate_size=112 cannot"),
        ({"num_key_value_heads": 1, "vocab_size": 97}, 4, "vocab_size=97 cannot be divided by 4"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, 4, "num_attention_heads=2 cannot"),
    ],
)
def test_sizes_that_cannot_be_divided(
    tmp_path: Path, keys: dict[str, int], num_ranks: int, message: str
) -> None:
    """The error comes before weights are read: there are none."""
    write_llama(tmp_path, **keys)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=message):
        create_pipeline(split_config(tmp_path, num_ranks))


@pytest.mark.parametrize(
    ("keys", "num_ranks", "ep_size", "message"),
    [
        ({}, 4, 2, "ep_size=2 must be 1 or the number of devices of one model, which is 4"),
        ({}, 1, 2, "ep_size=2 must be 1 or the number of devices of one model, which is 1"),
        ({"num_experts": 6}, 4, 4, "num_experts=6 cannot be divided by 4"),
        ({"moe_intermediate_size": 25}, 2, 1, "moe_intermediate_size=25 cannot be divided by 2"),
        ({"mlp_only_layers": [0, 1, 2]}, 2, 2, "ep_size=2: no layer of this model has experts"),
    ],
)
def test_experts_that_cannot_be_spread(
    tmp_path: Path, keys: dict[str, Any], num_ranks: int, ep_size: int, message: str
) -> None:
    """The error comes before weights are read."""
    write_qwen3_moe(tmp_path, **MOE_HEADS, **keys)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=message):
        create_pipeline(split_config(tmp_path, num_ranks, ep_size=ep_size))


def test_experts_are_spread_over_the_devices_of_a_replica() -> None:
    model = {"device_specs": ["cpu"] * 4, "data_parallel_degree": 2}
    assert PipelineConfig(model=model, ep_size=2).of_replica(1).ep_size == 2
    with pytest.raises(ConfigError, match=r"ep_size=4 must be 1 or .* which is 2"):
        PipelineConfig(model=model, ep_size=4)


def test_a_model_without_experts_has_none_to_spread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ep_size=2: LlamaForCausalLM has no experts"):
        split_config(write_llama(tmp_path), 2, ep_size=2)


def test_all_ranks_take_part_in_idle_forwards(tmp_path: Path) -> None:
    """They reach the collectives of all layers and of the head, and change nothing."""
    folder = write_qwen3_moe(tmp_path, **MOE_HEADS)
    prompt = batch(row(random_ids(20, 96), PAGES[:2]))
    following = batch(row([5], PAGES[:2], 20))

    def logits(group: Group) -> tuple[Tensor, Tensor, int]:
        runner = ModelRunner(split_config(folder, 2, ep_size=2), group=group)
        runner.initialize()
        runner.forward(runner.prepare(prompt))
        plain = runner.forward(runner.prepare(following)).logits
        sums: list[torch.Size] = []
        all_reduce = group.all_reduce

        def counted(partial: Tensor) -> Tensor:
            sums.append(partial.shape)
            return all_reduce(partial)

        group.all_reduce = counted  # type: ignore[method-assign]
        assert runner.forward_idle().logits.shape == (0, 96)
        group.all_reduce = all_reduce  # type: ignore[method-assign]
        assert set(sums) == {(1, 48)}
        return plain, runner.forward(runner.prepare(following)).logits, len(sums)

    for plain, after, num_sums in on_ranks(2, logits):
        assert torch.equal(plain, after)
        assert num_sums == 1 + 2 * 3  # the embedding, attention and experts of three layers


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    missing = [f"cuda:{64 + index}" for index in range(2)]
    model = {"model_path": str(write_llama(tmp_path)), "device_specs": missing}
    config = PipelineConfig(model=model | {"quantization_encoding": "float32"})
    with pytest.raises(ConfigError, match=r"device cuda:64 requested, \d+ CUDA devices found"):
        create_pipeline(config)


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_csm, "CsmModel"), (write_lfm2, "Lfm2Model"), (write_qwen3_next, "Qwen3NextModel")],
)
def test_models_that_run_on_one_device(
    write: Callable[[Path], Path], name: str, tmp_path: Path
) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=f"names 2 devices, and {name} runs on one"):
        create_pipeline(split_config(tmp_path, 2))

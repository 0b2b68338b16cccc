"""ModelRunner: the life cycle, memory, batches, and attention planning before each pass."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm.attention.sdpa import SdpaBackend, SdpaPlan
from llm.batch import ForwardBatch, ForwardMode
from llm.errors import CapacityError, ConfigError, RequestError
from llm.models.llama import LlamaModel
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import Request, SamplingParams
from llm.runner import device_memory
from llm.runner.device_memory import (
    available_bytes,
    get_available_gpu_memory,
    get_total_gpu_memory,
    usable_bytes,
)
from llm.runner.memory_planning import MAX_CPU_KV_BYTES
from llm.runner.model_runner import ModelRunner
from tests.closeness import error
from tests.llm.csm_checkpoints import write_csm
from tests.llm.lfm2_checkpoints import write_lfm2
from tests.llm.llama_checkpoints import batch, pipeline_config, row, write_llama
from tests.llm.models.test_embeddings import write_bare
from tests.llm.qwen3_moe_checkpoints import write_qwen3_moe
from tests.llm.qwen3_next_checkpoints import write_qwen3_next
from tests.llm.qwen3_tts_checkpoints import write_qwen3_tts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


class RecordingBackend(SdpaBackend):
    """Records the order of plans and forwards."""

    def __init__(self, other: SdpaBackend, calls: list[str]) -> None:
        super().__init__(other.pool, other.options)
        self.calls = calls

    def plan(self, batch: ForwardBatch) -> SdpaPlan:
        self.calls.append("plan")
        return super().plan(batch)

    def forward(self, plan: SdpaPlan, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        self.calls.append(f"layer {layer}")
        return super().forward(plan, layer, query, key_value)


def test_the_life_cycle(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = ModelRunner(pipeline_config(checkpoint))
    assert runner.model is runner.token_to_kv_pool is runner.attn_backend is None
    assert runner.graph_runner is None
    assert runner.max_total_num_tokens == 0
    for use in (lambda: runner.prepare(batch(row([1], [1]))), runner.init_memory_pool):
        with pytest.raises(RuntimeError, match=r"initialize|plan the memory"):
            use()
    with pytest.raises(RuntimeError, match="allocate the pool"):
        runner.init_attention_backend()
    with pytest.raises(RuntimeError, match="initialize the runner"):
        _ = runner.loaded_model
    with caplog.at_level(logging.INFO, logger="llm.runner.model_runner"):
        runner.initialize()
    assert "LlamaForCausalLM on cpu" in caplog.text
    assert "1008 tokens, 32 requests" in caplog.text
    with pytest.raises(RuntimeError, match="initialized already"):
        runner.initialize()
    assert isinstance(runner.model, LlamaModel)
    runner.shutdown()
    runner.shutdown()
    assert runner.model is runner.token_to_kv_pool is runner.attn_backend is None
    with pytest.raises(RuntimeError, match="initialize"):
        runner.prepare(batch(row([1], [1])))


def test_values_of_the_checkpoint(checkpoint: Path) -> None:
    runner = ModelRunner(pipeline_config(checkpoint, max_length=200))
    found = (
        runner.num_hidden_layers,
        runner.num_attention_heads,
        runner.num_kv_heads,
        runner.head_dim,
        runner.hidden_size,
        runner.vocab_size,
        runner.context_len,
    )
    assert found == (3, 4, 2, 16, 64, 96, 200)
    assert runner.server_config.model is runner.model_config
    assert (runner.device, runner.gpu_id) == (torch.device("cpu"), 0)
    assert runner.is_generation
    assert runner.sliding_window_size is None


def test_attention_is_planned_once_before_each_pass(checkpoint: Path) -> None:
    runner = ModelRunner(pipeline_config(checkpoint))
    runner.initialize()
    calls: list[str] = []
    assert isinstance(runner.attn_backend, SdpaBackend)
    runner.attn_backend = RecordingBackend(runner.attn_backend, calls)
    layers = ["layer 0", "layer 1", "layer 2"]
    inputs = runner.prepare(batch(row([1, 2], [1])))
    assert calls == ["plan"]
    outputs = runner.forward(inputs)
    assert calls == ["plan", *layers]
    plan = runner.token_sampler.prepare([row([1, 2], [1])])
    token = runner.sample_tokens(outputs, plan)
    runner.forward(runner.loaded_model.prepare_next_token_inputs(token, inputs))
    assert calls == ["plan", *layers, "plan", *layers]
    assert runner.forward_pass_id == 2


@pytest.mark.parametrize(
    "write",
    [
        write_llama,
        write_lfm2,
        write_qwen3_next,
        write_qwen3_moe,
        write_csm,
        write_qwen3_tts,
        write_bare,
    ],
)
def test_an_idle_pass_runs_the_layers_for_no_rows(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    """In the padding page and the padding state."""
    runner = ModelRunner(pipeline_config(write(tmp_path)))
    runner.initialize()
    pool, states = runner.token_to_kv_pool, runner.gdn_pool
    assert pool is not None
    found = runner.forward_idle()
    assert found.next_token_logits.shape == (0, runner.vocab_size)
    assert runner.forward_pass_id == 1
    written = [{*pool.keys(layer).nonzero()[:, 0].tolist()} for layer in range(pool.num_layers)]
    assert written == [{0}] * pool.num_layers
    if states is not None:
        assert states.layer(0, 0)[0].any()
        assert not states.layer(0, 0)[1:].any()


def test_a_decode_pass_is_one_longer_extend(checkpoint: Path) -> None:
    """Positions are context lengths − 1, and the slot of a token is where it is read later."""
    runner = ModelRunner(pipeline_config(checkpoint))
    runner.initialize()
    pages = [5, 9]
    whole = runner.forward(runner.prepare(batch(row(range(1, 19), pages))))
    runner.forward(runner.prepare(batch(row(range(1, 18), pages))))
    inputs = runner.prepare(batch(row([18], pages, 17)))
    forward_batch = inputs.forward_batch
    assert forward_batch.mode is ForwardMode.DECODE
    assert forward_batch.positions.tolist() == [17]
    assert forward_batch.slot_mapping.tolist() == [9 * 16 + 1]
    assert forward_batch.context_lens == (18,)
    assert torch.equal(runner.forward(inputs).logits, whole.logits)
    pool = runner.token_to_kv_pool
    assert pool is not None
    assert bool((pool.keys(0)[9, 1] != 0).all())
    assert bool((pool.keys(0)[9, 2] == 0).all())
    assert bool((pool.keys(0)[0] == 0).all())


def test_permuting_a_batch_permutes_its_logits(checkpoint: Path) -> None:
    runner = ModelRunner(pipeline_config(checkpoint))
    runner.initialize()
    rows = [row(range(n, 2 * n + 2), [2 * n, 2 * n + 1], request_id=str(n)) for n in range(1, 8)]
    in_order = runner.forward(runner.prepare(batch(*rows))).next_token_logits
    order = [3, 0, 6, 1, 5, 2, 4]
    permuted = runner.forward(runner.prepare(batch(*[rows[i] for i in order])))
    assert torch.equal(permuted.next_token_logits, in_order[order])


def test_memory_is_planned_from_what_there_is(checkpoint: Path) -> None:
    runner = ModelRunner(pipeline_config(checkpoint, num_pages=None, max_batch_size=4))
    plan = runner.plan_memory()
    assert plan.num_pages == 1 + 4 * 512 // 16  # four sequences of full length, no more
    assert plan.page_bytes == 16 * 2 * 3 * 2 * 16 * 4
    assert plan.weights_bytes == LlamaModel.estimate_weights_size(runner.server_config)
    assert plan.activation_bytes > 0
    assert 0 < plan.available_bytes <= available_bytes(runner.device) * 2
    assert runner.max_total_num_tokens == 4 * 512
    runner.initialize()
    assert runner.token_to_kv_pool is not None
    assert runner.token_to_kv_pool.nbytes == plan.kv_bytes
    half = ModelRunner(pipeline_config(checkpoint, num_pages=9, kv_format="bfloat16"))
    assert half.plan_memory().kv_bytes == 9 * plan.page_bytes // 2
    assert half.kv_cache_dtype == torch.bfloat16
    quarter = ModelRunner(pipeline_config(checkpoint, num_pages=9, kv_format="float8_e4m3fn"))
    assert quarter.plan_memory().kv_bytes == 9 * plan.page_bytes // 4


@pytest.mark.parametrize(
    ("kv_format", "most"), [("float16", 0.002), ("bfloat16", 0.01), ("float8_e4m3fn", 0.25)]
)
def test_coarser_pages_change_the_logits_a_little(
    checkpoint: Path, kv_format: str, most: float
) -> None:
    """The result is also the same in one prefill as in a prefill and a decode step."""
    logits = []
    for chosen in (None, kv_format):
        runner = ModelRunner(pipeline_config(checkpoint, kv_format=chosen))
        runner.initialize()
        whole = runner.forward(runner.prepare(batch(row(range(1, 19), [5, 9])))).logits
        runner.forward(runner.prepare(batch(row(range(1, 18), [4, 2]))))
        last = runner.forward(runner.prepare(batch(row([18], [4, 2], 17)))).logits
        assert torch.equal(last, whole)
        logits.append(whole)
    exact, coarse = logits
    assert 0 < float((exact - coarse).norm() / exact.norm()) < most


def test_the_attention_backend_is_chosen(checkpoint: Path) -> None:
    """By the configuration, whose default depends on the device; the results agree."""
    logits = {}
    for name in ("auto", "sdpa", "gathered"):
        config = pipeline_config(checkpoint, attention_backend=name)
        runner = ModelRunner(config)
        runner.initialize()
        assert runner.attn_backend is not None
        assert runner.attn_backend.name == ("sdpa" if name == "auto" else name)
        assert runner.attn_backend.options.num_heads == runner.num_attention_heads
        inputs = runner.prepare(batch(row(range(1, 40), [5, 9, 2])))
        logits[name] = runner.forward(inputs).logits
    assert torch.equal(logits["auto"], logits["sdpa"])
    # Two orders of float32 sums: some rounding errors of 1e-7 each.
    assert error(logits["gathered"], logits["sdpa"]) < 1e-5


def test_the_pool_stays_modest_on_a_cpu(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, max_position_embeddings=100_000)
    runner = ModelRunner(pipeline_config(folder, num_pages=None, page_size=128))
    plan = runner.plan_memory()
    assert MAX_CPU_KV_BYTES - plan.page_bytes < plan.kv_bytes <= MAX_CPU_KV_BYTES
    assert plan.max_tokens > 100_000


@pytest.mark.parametrize(
    ("num_pages", "page_size", "limits", "expected"),
    [
        (65, 16, {}, 2),  # 64 pages, and 512 tokens, which is the model's limit, are 32 of them
        (64, 16, {}, 1),
        (65, 16, {"max_length": 100}, 64 // 7),
        (65, 16, {"max_length": 100, "max_batch_input_tokens": 5}, 5),
        (2, 16, {"max_length": 100}, 1),
        (9000, 16, {"max_length": 17}, 1024),
        (9000, 16, {"max_length": 17, "max_batch_size": 4000}, 4000),
        (65, 16, {"max_batch_size": 40}, 40),
    ],
)
def test_an_open_batch_size_is_what_the_pages_have_room_for(
    checkpoint: Path, num_pages: int, page_size: int, limits: dict[str, int], expected: int
) -> None:
    runner = ModelRunner(
        pipeline_config(
            checkpoint,
            num_pages=num_pages,
            page_size=page_size,
            **({"max_batch_size": None} | limits),
        )
    )
    assert runner.max_running_requests == 0
    plan = runner.plan_memory()
    assert runner.max_running_requests == runner.server_config.max_batch_size == expected
    assert plan.activation_bytes == runner.activation_bytes(expected)


def test_an_open_batch_size_on_a_large_model(tmp_path: Path) -> None:
    """The expected length of requests is 1,024 tokens, regardless of the maximum."""
    folder = write_llama(tmp_path, max_position_embeddings=100_000)
    runner = ModelRunner(
        pipeline_config(folder, num_pages=None, page_size=128, max_batch_size=None)
    )
    plan = runner.plan_memory()
    assert runner.max_running_requests == (plan.num_pages - 1) // 8 > 100


def test_too_little_memory_is_an_error_with_the_numbers(checkpoint: Path) -> None:
    with pytest.raises(CapacityError, match=r"weights .* activations .* KV pages"):
        ModelRunner(pipeline_config(checkpoint, num_pages=10**9)).plan_memory()


def test_memory_getters() -> None:
    assert get_available_gpu_memory("cpu") == 0.0
    assert 0.0 <= get_available_gpu_memory() <= get_total_gpu_memory()
    assert available_bytes(torch.device("cpu")) > 2**20


@pytest.mark.parametrize(
    ("free", "share", "usable"),
    [
        (100, 0.9, 90),
        (100, 0.45, 45),  # two engines that share a GPU, before the other one has its memory
        (55, 0.45, 45),  # and behind it
        (40, 0.9, 36),
        (40, 0.45, 36),
        (100, 0.97, 97),
    ],
)
def test_a_share_of_a_gpu_is_the_same_next_to_other_programs(
    free: int, share: float, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_gpu_memory", lambda device, number: (free, 100))
    assert usable_bytes(torch.device("cuda:0"), share) == usable


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(checkpoint: Path) -> None:
    from llm.config import ModelConfig, PipelineConfig

    model = ModelConfig(model_path=str(checkpoint), device_specs=["cuda:7"])
    model.quantization_encoding = "float32"
    with pytest.raises(ConfigError, match="device cuda:7 requested, 0 CUDA devices found"):
        ModelRunner(PipelineConfig(model=model)).initialize()


def test_warming_up_leaves_no_trace(checkpoint: Path) -> None:
    """Except in the padding page."""
    runner = ModelRunner(pipeline_config(checkpoint))
    runner.initialize()
    runner.warm_up()
    pool = runner.token_to_kv_pool
    assert pool is not None
    for layer in range(3):
        assert bool((pool.keys(layer)[0] != 0).any())
        assert not bool(pool.keys(layer)[1:].any())
        assert not bool(pool.values(layer)[1:].any())
    assert runner.forward_pass_id == 0


def test_a_penalty_window_that_the_device_cannot_hold_is_refused(checkpoint: Path) -> None:
    """The request is refused before it is in a batch with others."""
    pipeline = TextGenerationPipeline(pipeline_config(checkpoint))
    wide = SamplingParams(repetition_penalty=1.1, penalty_window=9000, max_tokens=10_000)
    pipeline.admit(Request("a", (1,), wide))
    pipeline.runner.sample_on_device()
    with pytest.raises(RequestError, match="penalty_window=9000 must be at most 8192"):
        pipeline.admit(Request("a", (1,), wide))
    for fine in (
        dataclasses.replace(wide, max_tokens=500),  # no output outgrows it
        dataclasses.replace(wide, repetition_penalty=1.0),
        dataclasses.replace(wide, penalty_window=8192),
    ):
        pipeline.admit(Request("a", (1,), fine))

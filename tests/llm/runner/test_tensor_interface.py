"""A runner driven by tensors: rows of slots, extend, decode, idle, sampling with parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llm.attention.sdpa import SdpaBackend
from llm.batch import ForwardBatch, ForwardMode, ReturnHiddenStates
from llm.config import ModelConfig, default_config, set_default_config
from llm.request import SamplingParams
from llm.runner.model_runner import ModelRunner
from llm.runner.tensor_api.interface import LogitsProcessorOutput
from tests.llm.llama_checkpoints import (
    batch,
    create_runner,
    pipeline_config,
    random_ids,
    row,
    write_llama,
)
from tests.llm.runner.test_model_runner import RecordingBackend

IDS = random_ids(40, 96, seed=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    made = ModelRunner(pipeline_config(checkpoint))
    made.initialize()
    return made


class Client:
    """One request on a runner: its row, its slots, its progress."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        assert runner.req_to_token_pool is not None
        self.pool = runner.req_to_token_pool
        found = self.pool.alloc()
        assert found is not None
        self.row = found
        self.slots: list[int] = []

    def take(self, num_tokens: int) -> list[int]:
        allocator = self.runner.token_to_kv_pool_allocator
        assert allocator is not None
        found = allocator.alloc(num_tokens, self.slots[-1] if self.slots else None)
        assert found is not None
        self.slots += found.tolist()
        return found.tolist()

    def extend(self, ids: list[int], **options: object) -> ForwardBatch:
        prefix = len(self.slots)
        lengths = ([prefix + len(ids)], [len(ids)], [prefix], self.take(len(ids)))
        return self.runner.prepare_forward_batch_extend(ids, [self.row], *lengths, **options)  # type: ignore[arg-type]

    def decode(self, token: int, **options: object) -> ForwardBatch:
        slot = self.take(1)
        return self.runner.prepare_forward_batch_decode(
            [token],
            [self.row],
            [len(self.slots)],
            slot,
            **options,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        allocator = self.runner.token_to_kv_pool_allocator
        assert allocator is not None
        allocator.free(self.slots)
        self.pool.free(self.row)


@pytest.fixture
def client(runner: ModelRunner) -> Iterator[Client]:
    made = Client(runner)
    yield made
    made.close()


def logits(runner: ModelRunner, forward_batch: ForwardBatch) -> Tensor:
    found = runner.forward(forward_batch)
    assert isinstance(found, LogitsProcessorOutput)
    assert (found.hidden_states, found.next_token_logprobs, found.top_logprobs) == (None,) * 3
    return found.next_token_logits


def test_construct_initialize_prepare_forward_sample(checkpoint: Path) -> None:
    runner = ModelRunner(pipeline_config(checkpoint))
    assert runner.req_to_token_pool is runner.token_to_kv_pool_allocator is None
    with pytest.raises(RuntimeError, match="initialize the runner"):
        runner.prepare_forward_batch_decode([1], [0], [1], [16])
    runner.initialize()
    runner.init_cuda_graphs()
    assert runner.graph_runner is runner.gdn_pool is None
    client = Client(runner)
    assert client.pool.table.shape == (runner.max_running_requests, runner.context_len)
    expected = runner.forward(runner.prepare(batch(row(IDS[:20], [30, 31]))))
    outputs = runner.forward(client.extend(IDS[:20]))
    assert torch.equal(outputs.next_token_logits, expected.next_token_logits)
    assert runner.forward_pass_id == 2
    token = runner.sample(outputs, client.extend(IDS[20:21]), temperatures=[0.0])
    assert token.dtype is torch.int32
    assert token.tolist() == expected.next_token_logits.argmax(1).tolist()
    runner.shutdown()
    assert runner.req_to_token_pool is runner.token_to_kv_pool_allocator is None


def test_an_extend_batch(runner: ModelRunner) -> None:
    """Ragged, behind cached prefixes; with every number checked."""
    first, second = Client(runner), Client(runner)
    runner.forward(first.extend(IDS[:5]))
    slots = [*first.take(3), *second.take(2)]
    made = runner.prepare_forward_batch_extend(
        torch.tensor(IDS[5:10]), [first.row, second.row], [8, 2], [3, 2], [5, 0], slots
    )
    assert made.mode is ForwardMode.EXTEND
    assert made.positions.tolist() == [5, 6, 7, 0, 1]
    assert made.row_offsets[:-1] == (0, 3)  # offset of each row: the sum of those before
    assert made.context_lens == (8, 2)
    assert made.slot_mapping.tolist() == slots
    assert made.input_ids.dtype is made.slot_mapping.dtype is torch.int64
    table = first.pool.table
    assert table.dtype is torch.int32
    assert table[first.row, :8].tolist() == first.slots
    together = logits(runner, made)
    swapped = runner.prepare_forward_batch_extend(
        [*IDS[8:10], *IDS[5:8]],
        [second.row, first.row],
        [2, 8],
        [2, 3],
        [0, 5],
        [*slots[3:], *slots[:3]],
    )
    assert torch.equal(logits(runner, swapped), together[[1, 0]])
    first.close()
    second.close()


@pytest.mark.parametrize("prefix", [1, 15, 16, 17, 32, 38, 39])
def test_a_cached_prefix_changes_nothing(runner: ModelRunner, client: Client, prefix: int) -> None:
    """Also when a single token is left to feed."""
    whole = logits(runner, runner_batch := client.extend(IDS))
    assert runner_batch.query_lens == (40,)
    other = Client(runner)
    runner.forward(other.extend(IDS[:prefix]))
    assert torch.equal(logits(runner, other.extend(IDS[prefix:])), whole)
    other.close()


def test_decoding_is_extending_by_one(runner: ModelRunner, client: Client) -> None:
    whole = logits(runner, client.extend(IDS[:12]))
    other = Client(runner)
    runner.forward(other.extend(IDS[:8]))
    for token in IDS[8:12]:
        made = other.decode(token)
        assert made.mode is ForwardMode.DECODE
        assert made.positions.tolist() == [made.context_lens[0] - 1]
        last = logits(runner, made)
    assert torch.equal(last, whole)
    # The key of the last token is in its slot, and the table has the slot.
    pool = runner.token_to_kv_pool
    assert pool is not None
    assert other.pool.table[other.row, 11] == other.slots[11]
    keys = pool.keys(0).flatten(0, 1)
    assert torch.equal(keys[other.slots[:12]], keys[client.slots[:12]])
    other.close()


def test_attention_is_planned_once_before_the_model(checkpoint: Path) -> None:
    runner = ModelRunner(pipeline_config(checkpoint))
    runner.initialize()
    calls: list[str] = []
    assert isinstance(runner.attn_backend, SdpaBackend)
    runner.attn_backend = RecordingBackend(runner.attn_backend, calls)
    client = Client(runner)
    layers = ["layer 0", "layer 1", "layer 2"]
    runner.forward(client.extend(IDS[:4]))
    runner.forward(client.decode(IDS[4]))
    assert calls == ["plan", *layers] * 2


def test_positions_of_a_decode_can_be_moved(runner: ModelRunner, client: Client) -> None:
    runner.forward(client.extend(IDS[:8]))
    made = client.decode(IDS[8])
    plain = logits(runner, made)

    def moved(delta: int) -> Tensor:
        again = runner.prepare_forward_batch_decode(
            [IDS[8]], [client.row], [9], client.slots[8:], mrope_position_deltas=[delta]
        )
        assert again.context_lens == (9,)
        assert again.positions.tolist() == [8 + delta]
        return logits(runner, again)

    assert torch.equal(moved(0), plain)
    shifted = dataclasses.replace(made, positions=made.positions + 5)
    assert torch.equal(moved(5), logits(runner, shifted))
    assert not torch.equal(moved(5), plain)


def test_log_probabilities_come_when_asked_for(runner: ModelRunner) -> None:
    first, second = Client(runner), Client(runner)
    runner.forward(first.extend(IDS[:5]))
    runner.forward(second.extend(IDS[:9]))
    made = runner.prepare_forward_batch_decode(
        [1, 2], [first.row, second.row], [6, 10], [*first.take(1), *second.take(1)], True, [0, 3]
    )
    found = runner.forward(made)
    expected = torch.log_softmax(found.next_token_logits, dim=-1)
    assert found.next_token_logprobs is not None
    assert torch.equal(found.next_token_logprobs, expected)
    assert found.top_logprobs is not None
    none, best = found.top_logprobs
    assert none == ()
    assert [token for token, _ in best] == expected[1].topk(3).indices.tolist()
    first.close()
    second.close()


def test_numbers_that_do_not_fit(runner: ModelRunner, client: Client) -> None:
    extend = runner.prepare_forward_batch_extend
    slots = client.take(3)
    with pytest.raises(ValueError, match="seq_lens"):
        extend([1, 2, 3], [client.row], [4], [3], [0], slots)
    with pytest.raises(ValueError, match="3 tokens are to be fed, but there are 2 ids"):
        extend([1, 2], [client.row], [3], [3], [0], slots)
    with pytest.raises(ValueError, match="name a row twice"):
        extend([1, 2, 3], [client.row] * 2, [2, 1], [2, 1], [0, 0], slots)
    with pytest.raises(ValueError, match="do not fill pages"):
        extend([1, 2, 3], [client.row], [3], [3], [0], [slots[0], slots[2], slots[1]])
    with pytest.raises(ValueError, match="2 top_logprobs_nums for 1 rows"):
        extend([1, 2, 3], [client.row], [3], [3], [0], slots, True, [1, 2])
    made = extend([1, 2, 3], [client.row], [3], [3], [0], slots)
    with pytest.raises(ValueError, match="no mode"):
        runner.forward(dataclasses.replace(made, mode="sideways"))  # type: ignore[arg-type]


def test_an_idle_pass(runner: ModelRunner, client: Client) -> None:
    before = runner.forward_pass_id
    made = client.extend(IDS[:1])
    idle = dataclasses.replace(made, mode=ForwardMode.IDLE)
    assert logits(runner, idle).shape == (0, 96)
    assert runner.forward_pass_id == before + 1
    table = {mode: (mode.is_extend, mode.is_decode, mode.is_idle) for mode in ForwardMode}
    assert table == {
        ForwardMode.EXTEND: (True, False, False),
        ForwardMode.MIXED: (True, False, False),
        ForwardMode.DECODE: (False, True, False),
        ForwardMode.IDLE: (False, False, True),
    }


def test_slot_zero_is_only_for_padding(runner: ModelRunner, client: Client) -> None:
    """Values that padding writes there have no effect."""
    plain = logits(runner, client.extend(IDS[:20]))
    pool = runner.token_to_kv_pool
    assert pool is not None
    for layer in range(pool.num_layers):
        pool.write(layer, torch.tensor([0]), torch.full((1, 2, 2, 16), 1e4))
    other = Client(runner)
    assert torch.equal(logits(runner, other.extend(IDS[:20])), plain)
    assert 0 not in client.slots + other.slots
    other.close()


def test_hidden_states_when_asked_for(checkpoint: Path) -> None:
    runner = create_runner(
        pipeline_config(checkpoint), return_hidden_states=ReturnHiddenStates.LAST
    )
    client = Client(runner)
    found = runner.forward(client.extend(IDS[:7]))
    assert found.hidden_states is not None
    assert found.hidden_states.shape == (1, 64)


# --- sampling


def sampled(runner: ModelRunner, values: Tensor, **options: object) -> list[int]:
    """Return next tokens of B rows of length 10."""
    clients = [Client(runner) for _ in values]
    for made in clients:
        made.take(9)
    rows, slots = [c.row for c in clients], [s for c in clients for s in c.take(1)]
    for made in clients:
        made.pool.table[made.row, :10] = torch.tensor(made.slots)
    asked = runner.prepare_forward_batch_decode([1] * len(values), rows, [10] * len(values), slots)
    found = runner.sample(LogitsProcessorOutput(values), asked, **options)  # type: ignore[arg-type]
    for made in clients:
        made.close()
    assert found.dtype is torch.int32
    return found.tolist()


def test_greedy_rows_in_a_random_batch(runner: ModelRunner) -> None:
    values = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))
    best = values.argmax(1).tolist()
    mixed = sampled(runner, values, temperatures=[0.0, 5.0] * 3, seeds=range(6))
    assert mixed[::2] == best[::2]
    assert mixed[1::2] != best[1::2]
    assert sampled(runner, values, top_ks=[1] * 6) == best
    assert sampled(runner, values, top_ps=torch.full((6,), 1e-9)) == best
    assert sampled(runner, values, top_ks=[-1] * 6, seeds=range(6)) == sampled(
        runner, values, seeds=range(6)
    )


def test_a_seed_means_the_same_in_every_batch(runner: ModelRunner) -> None:
    values = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    together = sampled(runner, values, seeds=range(8))
    alone = [sampled(runner, values[n : n + 1], seeds=[n])[0] for n in range(8)]
    assert together == alone
    assert len(set(together)) > 3


def test_penalties(runner: ModelRunner) -> None:
    values = torch.zeros(1, 96)
    values[0, :4] = torch.tensor([4.0, 3.9, 3.8, 3.7])

    def best(history: list[int], **changed: float) -> int:
        given = {"repetition_penalties": 1.0, "frequency_penalties": 0.0, "presence_penalties": 0.0}
        given |= changed
        params = {name: [value] for name, value in given.items()}
        (token,) = sampled(
            runner,
            values,
            temperatures=[0.0],
            penalty_params=params | {"token_histories": [history]},
        )
        return token

    assert best([0, 1, 1]) == 0
    assert best([0, 1], repetition_penalties=2.0) == 2
    assert best([0, 1, 1], frequency_penalties=0.15) == 0  # 3.85, 3.6, 3.8
    assert best([0, 0, 1], frequency_penalties=0.15) == 2  # 3.7, 3.75, 3.8
    assert best([0, 0, 0], presence_penalties=0.15) == 1
    with pytest.raises(ValueError, match="lacks presence_penalties, token_histories"):
        sampled(
            runner,
            values,
            penalty_params={"repetition_penalties": [1.0], "frequency_penalties": [0.0]},
        )
    with pytest.raises(ValueError, match="2 numbers for 1 rows"):
        sampled(runner, values, temperatures=[1.0, 1.0])


def test_no_rows_are_no_tokens(runner: ModelRunner, client: Client) -> None:
    nothing = dataclasses.replace(client.extend(IDS[:1]), request_ids=(), context_lens=())
    found = runner.sample(LogitsProcessorOutput(torch.zeros(0, 96)), nothing)
    assert (found.dtype, found.tolist()) == (torch.int32, [])


# --- the source of a runner's configuration


def test_the_default_configuration(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="set_default_config"):
        ModelRunner()
    own = pipeline_config(checkpoint, max_length=100)
    set_default_config(own)
    try:
        assert ModelRunner().server_config is own
        explicit = [pipeline_config(checkpoint, max_length=length) for length in (50, 60)]
        assert [ModelRunner(config).context_len for config in explicit] == [50, 60]
        assert default_config() is own
        other = write_llama(tmp_path, num_hidden_layers=1)
        runner = ModelRunner(None, ModelConfig(model_path=str(other)))
        assert (runner.num_hidden_layers, runner.context_len) == (1, 100)
        assert runner.model_config.model_path == str(other)
        assert ModelRunner(own, own.model).server_config is own
        assert ModelRunner(own, gpu_id=0).gpu_id == 0
    finally:
        set_default_config(None)


def test_sampling_params_are_checked_as_anywhere(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="temperature"):
        sampled(runner, torch.zeros(1, 96), temperatures=[-1.0])
    assert SamplingParams().temperature == 1.0

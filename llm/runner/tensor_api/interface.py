"""`TensorInterface`: a runner driven by tensors, with no scheduler and no pipeline around it.

row = runner.req_to_token_pool.alloc()
slots = runner.token_to_kv_pool_allocator.alloc(num_tokens)
batch = runner.prepare_forward_batch_extend(input_ids, [row], …, slots)
outputs = runner.forward(batch)              # LogitsProcessorOutput
token_ids = runner.sample(outputs, batch, temperatures)

Lists are accepted in place of tensors; both are host values, read when a batch is prepared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm.attention.base import AttentionBackend, PlannedAttention
from llm.batch import ForwardBatch, ForwardMode, ModelInputs, ScheduledRow
from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.state_pool import StatePool
from llm.kv_cache.state_slots import FIRST_STATE, StatePages
from llm.kv_cache.token_pools import ReqToTokenPool, TokenToKVPoolAllocator
from llm.memory.transfer import to_device
from llm.models.base import PipelineModel
from llm.runner.graphs.cuda_graphs import GraphRunner
from llm.runner.tensor_api.row_parameters import Numbers, RowParameters, integers
from llm.sampling.sampler import Sampler, TokenSampler


@dataclass(frozen=True, slots=True)
class LogitsProcessorOutput:
    """Results of a forward for the last token of each row."""

    next_token_logits: Tensor  # float32 [B, V], raw: without temperature and penalties
    hidden_states: Tensor | None = None
    next_token_logprobs: Tensor | None = None  # float32 [B, V], if the batch requests them
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None  # [B], best first


class TensorInterface:
    """Base class of `ModelRunner`, which sets the attributes declared here."""

    device: torch.device
    context_len: int
    max_running_requests: int
    forward_pass_id: int
    token_to_kv_pool: KVPool | None
    gdn_pool: StatePool | None
    attn_backend: AttentionBackend[Any] | None
    graph_runner: GraphRunner | None
    token_sampler: TokenSampler[Any]
    sampler: Sampler
    _req_to_token_pool: ReqToTokenPool | None = None
    _allocator: TokenToKVPoolAllocator | None = None

    @property
    def loaded_model(self) -> PipelineModel[ScheduledRow]:
        """Return the model. Raises `RuntimeError` without one."""
        raise NotImplementedError

    @property
    def page_size(self) -> int:
        """Number of tokens of a KV page."""
        raise NotImplementedError

    @property
    def req_to_token_pool(self) -> ReqToTokenPool | None:
        """Return the table of slots by request; None without a KV pool."""
        if self._req_to_token_pool is None and self.token_to_kv_pool is not None:
            self._req_to_token_pool = ReqToTokenPool(self.max_running_requests, self.context_len)
        return self._req_to_token_pool

    @property
    def token_to_kv_pool_allocator(self) -> TokenToKVPoolAllocator | None:
        """Return the allocator of the pool's slots; None without a KV pool."""
        pool = self.token_to_kv_pool
        if self._allocator is None and pool is not None:
            self._allocator = TokenToKVPoolAllocator(pool.num_pages, pool.page_size)
        return self._allocator

    def prepare_forward_batch_extend(  # noqa: PLR0913, PLR0917 - one parameter per tensor
        self,
        input_ids: Numbers,
        req_pool_indices: Numbers,
        seq_lens: Numbers,
        extend_seq_lens: Numbers,
        extend_prefix_lens: Numbers,
        out_cache_loc: Numbers,
        return_logprob: bool = False,
        top_logprobs_nums: Sequence[int] | None = None,
    ) -> ForwardBatch:
        """Prepare a ragged prefill: row b feeds `extend_seq_lens[b]` tokens behind a cached prefix.

        `out_cache_loc` [T] are the slots of the new tokens, which are stored in the request's row.
        Raises `ValueError` for lengths that do not add up.
        """
        rows, totals, news, prefixes = (
            integers(values)
            for values in (req_pool_indices, seq_lens, extend_seq_lens, extend_prefix_lens)
        )
        sums = [prefix + new for prefix, new in zip(prefixes, news, strict=True)]
        if sums != totals:
            raise ValueError(f"seq_lens={totals} must be the prefix and the new tokens, {sums}")
        positions = [
            position
            for prefix, total in zip(prefixes, totals, strict=True)
            for position in range(prefix, total)
        ]
        return self._batch(
            ForwardMode.EXTEND,
            _Fed(integers(input_ids), positions, integers(out_cache_loc)),
            rows,
            news,
            totals,
            _logprobs_asked(return_logprob, top_logprobs_nums, len(rows)),
        )

    def prepare_forward_batch_decode(
        self,
        input_ids: Numbers,
        req_pool_indices: Numbers,
        seq_lens: Numbers,
        out_cache_loc: Numbers,
        return_logprob: bool = False,
        top_logprobs_nums: Sequence[int] | None = None,
        mrope_position_deltas: Numbers | None = None,
    ) -> ForwardBatch:
        """Prepare a forward of one token per row. `seq_lens` include the fed token.

        `mrope_position_deltas` [B] are added to the positions for rotary embeddings.
        """
        rows, totals = integers(req_pool_indices), integers(seq_lens)
        deltas = [0] * len(rows)
        if mrope_position_deltas is not None:
            deltas = integers(mrope_position_deltas)
        positions = [total - 1 + delta for total, delta in zip(totals, deltas, strict=True)]
        return self._batch(
            ForwardMode.DECODE,
            _Fed(integers(input_ids), positions, integers(out_cache_loc)),
            rows,
            [1] * len(rows),
            totals,
            _logprobs_asked(return_logprob, top_logprobs_nums, len(rows)),
        )

    def _batch(
        self,
        mode: ForwardMode,
        fed: _Fed,
        rows: list[int],
        news: list[int],
        totals: list[int],
        asked: tuple[int, ...] | None,
    ) -> ForwardBatch:
        pool, page_size = self.req_to_token_pool, self.page_size
        if pool is None:
            raise RuntimeError("initialize the runner before its first forward")
        if len(set(rows)) != len(rows):
            raise ValueError(f"req_pool_indices={rows} name a row twice")
        if not sum(news) == len(fed.token_ids) == len(fed.slots):
            raise ValueError(
                f"{sum(news)} tokens are to be fed, but there are {len(fed.token_ids)} ids and "
                f"{len(fed.slots)} slots"
            )
        first = 0
        for row, new, total in zip(rows, news, totals, strict=True):
            slots = torch.tensor(fed.slots[first : first + new], dtype=torch.int32)
            pool.table[row, total - new : total] = slots
            first += new
        fed_numbers = torch.tensor([fed.token_ids, fed.positions, fed.slots])
        numbers = to_device(fed_numbers, self.device)
        input_ids, positions, slot_mapping = numbers.unbind(0)
        return ForwardBatch(
            mode=mode,
            request_ids=tuple(map(pool.name, rows)),
            query_lens=tuple(news),
            context_lens=tuple(totals),
            pages=tuple(
                self._with_state(row, _pages(pool.table[row, :total], page_size))
                for row, total in zip(rows, totals, strict=True)
            ),
            page_size=page_size,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            top_logprobs_nums=asked,
        )

    def _with_state(self, row: int, pages: tuple[int, ...]) -> Sequence[int]:
        """Return a page table with the recurrent state of its row, if the model has states."""
        return pages if self.gdn_pool is None else StatePages.of(pages, FIRST_STATE + row)

    def _dispatch(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run a prepared batch by its mode. Raises `ValueError` for an unknown mode."""
        if batch.mode is ForwardMode.IDLE:
            return self._forward_nothing()
        if batch.mode is ForwardMode.DECODE:
            return self.forward_decode(batch)
        if batch.mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return self.forward_extend(batch)
        raise ValueError(f"a batch has no mode {batch.mode!r}")

    def forward_decode(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Plan attention and run the model on one token per row, by a captured graph if one fits.

        The caller owns the result.
        """
        graphs = self.graph_runner
        if graphs is None or not graphs.fits(len(batch.query_lens)):
            return self._forward_rows(batch)
        self.forward_pass_id += 1
        outputs = graphs.replay(graphs.prepare_tensors(batch))
        return _with_logprobs(batch, outputs.next_token_logits.clone(), None)

    def forward_extend(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Plan attention and run the model on rows of any lengths."""
        return self._forward_rows(batch)

    def _forward_nothing(self) -> LogitsProcessorOutput:
        self.forward_pass_id += 1
        size = self.sampler.vocab_size
        return LogitsProcessorOutput(torch.empty(0, size, device=self.device))

    def _forward_rows(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        model = self.loaded_model
        if self.attn_backend is None:
            raise RuntimeError("initialize the runner before its first forward")
        planned = PlannedAttention.create(batch, self.attn_backend)
        num_rows = len(batch.query_lens)
        ends = [end - 1 for end in batch.row_offsets[1:]]
        inputs = ModelInputs(
            forward_batch=batch,
            kv_cache_inputs=planned,
            sampling_rows=tuple(range(num_rows)),
            logit_rows=to_device(torch.tensor(ends), self.device),
            logit_offsets=tuple(range(num_rows + 1)),
            adapters=("",) * num_rows,
        )
        self.forward_pass_id += 1
        outputs = model.execute(inputs)
        return _with_logprobs(batch, outputs.next_token_logits, outputs.hidden_states)

    def sample(
        self,
        logits_output: LogitsProcessorOutput,
        forward_batch: ForwardBatch,
        temperatures: Numbers | None = None,
        top_ps: Numbers | None = None,
        top_ks: Numbers | None = None,
        penalty_params: Mapping[str, Any] | None = None,
        *,
        seeds: Sequence[int] | None = None,
    ) -> Tensor:
        """Sample int32 [B] next tokens.

        Defaults: temperature 1, no top-p, no top-k (also for values ≤ 0), no penalties, seed 0. A
        row with temperature 0 gets its most likely token. A token depends on its row's logits, seed
        and length, never on its position in the batch. `penalty_params` must have all of
        `PENALTIES`, else `ValueError` is raised; histories are lists of the ids generated so far.
        """
        lengths = forward_batch.context_lens
        parameters = RowParameters.read(len(lengths), temperatures, top_ps, top_ks, penalty_params)
        rows = []
        for place, (name, length) in enumerate(
            zip(forward_batch.request_ids, lengths, strict=True)
        ):
            history = parameters.histories[place] if parameters.histories else range(length)
            sampling = parameters.of(place, seeds[place] if seeds is not None else 0)
            rows.append(
                ScheduledRow(
                    request_id=name,
                    token_ids=(0,),
                    start=length - 1,
                    pages=(),
                    is_extend=False,
                    samples=True,
                    sampling=sampling,
                    output_ids=history,
                )
            )
        with torch.inference_mode():
            plan = self.sampler.prepare(rows)
            return self.sampler.sample(logits_output.next_token_logits, plan)


@dataclass(frozen=True, slots=True)
class _Fed:
    """Tokens of a forward: three tensors [T]."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]


def _pages(slots: Tensor, page_size: int) -> tuple[int, ...]:
    """Return the page table of a row of slots. Raises `ValueError` unless they fill page after
    page.
    """
    firsts = slots[::page_size]
    filled = (
        firsts.repeat_interleave(page_size)[: len(slots)]
        + torch.arange(len(slots), dtype=torch.int32) % page_size
    )
    if bool((firsts % page_size).any()) or not torch.equal(filled, slots):
        raise ValueError(f"slots {slots.tolist()} do not fill pages of {page_size} in order")
    return tuple((firsts // page_size).tolist())


def _logprobs_asked(
    return_logprob: bool, top_logprobs_nums: Sequence[int] | None, num_rows: int
) -> tuple[int, ...] | None:
    if not return_logprob:
        return None
    nums = tuple(top_logprobs_nums or (0,) * num_rows)
    if len(nums) != num_rows:
        raise ValueError(f"{len(nums)} top_logprobs_nums for {num_rows} rows")
    return nums


def _with_logprobs(
    batch: ForwardBatch, logits: Tensor, hidden_states: Tensor | None
) -> LogitsProcessorOutput:
    if batch.top_logprobs_nums is None:
        return LogitsProcessorOutput(logits, hidden_states)
    logprobs = torch.log_softmax(logits, dim=-1)
    best = torch.topk(logprobs, max(batch.top_logprobs_nums), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), batch.top_logprobs_nums, strict=True)
    top = tuple(tuple(zip(ids[:n], values[:n], strict=True)) for ids, values, n in pairs)
    return LogitsProcessorOutput(logits, hidden_states, logprobs, top)

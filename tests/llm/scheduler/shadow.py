"""A pipeline whose KV memory is a list of token ids: it reads back its slots.

The next token is a hash of the context *as found in memory through the page table*, so that a wrong
page, a page assigned to two requests, a slot never written or a token fed twice changes the output.
"""

from __future__ import annotations

import dataclasses
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow, StepOutput
from llm.errors import CapacityError
from llm.kv_cache.manager import KVCacheManager
from llm.kv_cache.state_slots import FIRST_STATE, state_of
from llm.request import (
    FinishReason,
    Request,
    SamplingParams,
    TokenBuffer,
    TokenChunk,
    TokenLogprob,
)
from llm.scheduler import Scheduler, SchedulerLimits
from llm.sequence import FUTURE_TOKEN
from llm.sequence import Sequence as LiveSequence

VOCAB_SIZE = 64
EOS = 0


def next_token(context: Sequence[int], seed: int, num_outputs: int) -> int:
    """Return a stop id one time in sixteen, else any id."""
    digest = zlib.crc32(array("q", [seed, num_outputs, *context]).tobytes())
    return EOS if digest % 16 == 0 else 1 + (digest >> 8) % (VOCAB_SIZE - 1)


def expected_output(
    request: Request, max_length: int = 10**9
) -> tuple[list[int], FinishReason, int]:
    """Return tokens, reason and output count of a request, generated alone and without a cache."""
    if request.embeds:
        return [], FinishReason.STOP, 0
    sampling, tokens, outputs = request.sampling, list(request.prompt_ids), []
    stops, reason = set(sampling.stop_token_ids), None
    while reason is None:
        token = next_token(tokens, sampling.seed, len(outputs))
        may_stop = len(outputs) >= sampling.min_tokens and not sampling.ignore_eos
        if token in stops and may_stop:
            reason = FinishReason.STOP
            break
        tokens.append(token)
        outputs.append(token)
        if len(outputs) >= sampling.max_tokens or len(tokens) >= max_length:
            reason = FinishReason.LENGTH
    return [token for token in outputs if token not in stops], reason, len(outputs)


class ShadowPipeline:
    """Implements the engine's `Pipeline` and checks every batch."""

    def __init__(
        self,
        num_pages: int = 33,
        page_size: int = 4,
        *,
        prefix_caching: bool = True,
        max_seq_len: int = 1000,
        num_slots: int = 0,
        num_states: int = 0,
    ) -> None:
        self.num_slots = num_slots
        host = self if num_slots else None
        self.kv_manager = KVCacheManager(
            num_pages, page_size, prefix_caching, host=host, num_states=num_states
        )
        self._states: list[list[int]] | None = [[] for _ in range(num_states)] or None
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = (EOS,)
        self.frames = None
        self.media_ids: frozenset[int] = frozenset()
        self.max_seq_len = max_seq_len
        self.batches: list[ScheduledBatch] = []
        self.released: list[str] = []
        self.while_waiting: Callable[[Callable[[], bool]], object] | None = None
        self.fail_next = False
        self.dies = False  # after the step that fails
        self._memory: list[int | None] = [None] * (num_pages * page_size)
        self._host: dict[int, list[int | None]] = {}

    def save(self, page: int, slot: int, /) -> None:
        """Store like a `HostStore`: the page may be overwritten afterwards."""
        assert 0 <= slot < self.num_slots
        self._host[slot] = self._memory[self._page(page)]
        self._memory[self._page(page)] = [None] * self.kv_manager.page_size

    def load(self, slot: int, page: int, /) -> None:
        """Load like a `HostStore`: each slot is read once."""
        self._memory[self._page(page)] = self._host.pop(slot)

    def _page(self, page: int) -> slice:
        size = self.kv_manager.page_size
        return slice(page * size, (page + 1) * size)

    def execute(self, batch: ScheduledBatch, /) -> StepOutput:
        """Write the fed tokens, read the contexts back, hash them."""
        assert batch, "an empty batch is not worth a step"
        self.batches.append(batch)
        self._check(batch)
        for row in batch.rows:
            mark, end = _mark(row), row.start + len(row.token_ids)
            for slot, token in zip(self._slots(row, row.start, end), row.token_ids, strict=True):
                self._memory[slot] = token + mark
            self._advance_state(row, row.start, row.token_ids)
        if self.fail_next:
            self.fail_next = False
            raise CapacityError("the device is out of memory")
        sampling = [row for row in batch.rows if row.generates]
        vectors = {
            row.request_id: (bytes(row.context_len),)
            for row in batch.rows
            if row.embeds and row.samples
        }
        tokens = {row.request_id: self._sample(row, batch.num_steps) for row in sampling}
        logprobs = {
            row.request_id: tuple(TokenLogprob(t, -0.5) for t in tokens[row.request_id])
            for row in sampling
            if row.sampling.top_logprobs is not None
        }
        echo = {
            row.request_id: tuple(TokenLogprob(token, -0.25) for token in row.token_ids)
            for row in batch.rows
            if row.echoes
        }
        return StepOutput(tokens, logprobs, prompt_logprobs=echo, embeddings=vectors)

    def _advance_state(
        self, row: ScheduledRow, start: int, token_ids: Sequence[Any]
    ) -> list[int] | None:
        """Add tokens to the row's recurrent state, which is all tokens before; return the state."""
        if self._states is None:
            return None
        slot = state_of(row.pages)
        assert slot >= FIRST_STATE, "the slot for padding or for zeros was handed out"
        before = self._states[slot] if start else []
        assert len(before) == start, "the state is that of another position or sequence"
        self._states[slot] = [*before, *token_ids]
        return self._states[slot]

    @property
    def overlap_active(self) -> bool:
        """False: every batch is finished at once."""
        return False

    def has_pending_outputs(self) -> bool:
        """False."""
        return False

    def graph_stats(self) -> None:
        return None

    def spec_decode_metrics(self) -> None:
        """None: nothing is drafted."""

    def hold(self, *, is_held: bool) -> None:
        pass

    def use_device(self) -> None:
        pass

    def is_alive(self) -> bool:
        """True unless `dies` is set."""
        return not self.dies

    def release(self, request_id: str, /) -> None:
        """Record that the request was released."""
        self.released.append(request_id)

    def _sample(self, row: ScheduledRow, num_steps: int) -> tuple[int, ...]:
        memory, mark = self._memory, _mark(row)
        context = [memory[slot] for slot in self._slots(row, 0, row.context_len)]
        assert None not in context, "a slot was read that was never written"
        context = [token - mark for token in context if token is not None]
        assert all(0 <= token < VOCAB_SIZE for token in context), "another adapter wrote this"
        assert self._advance_state(row, row.context_len, ()) in (None, context)
        tokens: list[int] = []
        for step in range(num_steps):
            if step:
                position = row.context_len + step - 1
                self._advance_state(row, position, tokens[-1:])
                (slot,) = self._slots(row, position, position + 1)
                memory[slot] = tokens[-1] + mark
            num_outputs = len(row.output_ids) + step
            tokens.append(next_token(context + tokens, row.sampling.seed, num_outputs))
        return tuple(tokens)

    def _slots(self, row: ScheduledRow, start: int, end: int) -> list[int]:
        """Return the slots of the positions [start, end)."""
        size, pages = self.kv_manager.page_size, row.pages
        return [pages[position // size] * size + position % size for position in range(start, end)]

    def _check(self, batch: ScheduledBatch) -> None:
        size, written = self.kv_manager.page_size, set()
        kinds = {row.is_extend for row in batch.rows}
        both = kinds == {True, False}
        extend = ForwardMode.MIXED if both else ForwardMode.EXTEND
        assert batch.mode is (extend if True in kinds else ForwardMode.DECODE)
        assert batch.num_steps == 1 or batch.mode is ForwardMode.DECODE
        for row in batch.rows:
            end = row.context_len + batch.num_steps - 1
            assert row.token_ids
            assert len(row.pages) * size >= end, "the page table is too short"
            assert 0 not in row.pages, "the padding page was handed out"
            assert row.is_extend or len(row.token_ids) == 1
        if self._states is not None:
            held = [state_of(row.pages) for row in batch.rows]
            assert len(set(held)) == len(held), "two rows have the same state"
        for row in batch.rows:
            end = row.context_len + batch.num_steps - 1
            slots = set(self._slots(row, row.start, end))
            assert len(slots) == end - row.start
            assert not slots & written, "two rows write to the same slot"
            written |= slots


def _mark(row: ScheduledRow) -> int:
    """Return a mark that distinguishes the keys and values of adapters."""
    return VOCAB_SIZE * zlib.crc32(row.lora.encode())


class LateShadowPipeline(ShadowPipeline):
    """The same one call later: a call returns the results of the previous batch."""

    def __init__(self, num_pages: int = 33, page_size: int = 4, **options: Any) -> None:
        super().__init__(num_pages, page_size, **options)
        self._late: StepOutput | None = None
        self.has_arrived: Callable[[], bool] = lambda: True

    @property
    def overlap_active(self) -> bool:
        return True

    def has_pending_outputs(self) -> bool:
        return self._late is not None

    def execute(self, batch: ScheduledBatch, /) -> StepOutput:
        """Run the batch on the last one's tokens; return those."""
        late, current = self._late, None
        if batch:
            known = dict(late.token_ids) if late is not None else {}
            rows = tuple(self._filled(row, known) for row in batch.rows)
            current = super().execute(dataclasses.replace(batch, rows=rows))
        self._late = current
        if late is not None and self.while_waiting is not None:
            self.while_waiting(self.has_arrived)
        return late or StepOutput({})

    def _filled(self, row: ScheduledRow, known: Mapping[str, tuple[int, ...]]) -> ScheduledRow:
        """Return the row with the tokens it awaits, which only the previous batch may provide."""
        if FUTURE_TOKEN not in row.token_ids:
            assert FUTURE_TOKEN not in row.output_ids
            return row
        (token,) = known[row.request_id]
        assert row.token_ids == (FUTURE_TOKEN,)
        return row._replace(token_ids=(token,))


class Harness:
    """A scheduler on a shadow pipeline, stepped by hand, with everything it delivered."""

    def __init__(
        self, limits: SchedulerLimits, pipeline: ShadowPipeline, clock_step: float = 0.001
    ) -> None:
        self.now = 0.0
        self._clock_step = clock_step
        self.pipeline = pipeline
        self.kv = pipeline.kv_manager
        self._limits = limits
        self.scheduler = Scheduler(
            limits, self.kv, plan_ahead=pipeline.overlap_active, clock=lambda: self.now
        )
        self._in_flight: deque[ScheduledBatch] = deque()
        self.requests: dict[str, Request] = {}
        self.buffer: TokenBuffer | None = None  # of the next request
        self.chunks: dict[str, list[TokenChunk]] = {}

    def add(
        self,
        request_id: str,
        prompt: int | Sequence[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        lora: str = "",
        embeds: bool = False,
        **sampling: object,
    ) -> Request:
        """Queue a request; an integer stands for a unique prompt of that length."""
        if isinstance(prompt, int):
            seed = zlib.crc32(request_id.encode())
            prompt = [1 + (seed + 7 * i * i + i) % (VOCAB_SIZE - 1) for i in range(prompt)]
        options = {"stop_token_ids": (EOS,), "max_tokens": 16} | sampling
        params = SamplingParams(**options)  # type: ignore[arg-type]
        return self.add_request(
            Request(request_id, tuple(prompt), params, priority, cache_salt, embeds, lora)
        )

    def add_request(self, request: Request) -> Request:
        """Queue a request unchanged."""
        sequence = LiveSequence(request, self.now)
        sequence.buffer, self.buffer = self.buffer, None
        self.scheduler.add(sequence)
        self.requests[request.request_id] = request
        self.chunks[request.request_id] = []
        self.now += self._clock_step
        return request

    def take(self, chunks: Sequence[TokenChunk]) -> None:
        """Record delivered chunks; none may follow a last one."""
        for chunk in chunks:
            before = self.chunks[chunk.request_id]
            assert not before or before[-1].finish_reason is None
            before.append(chunk)

    def schedule(self) -> ScheduledBatch:
        """Plan the next batch and record requests that can never run."""
        batch = self.scheduler.schedule()
        self.take(self.scheduler.take_ended())
        assert len(batch.rows) <= (self._limits.max_batch_size or len(batch.rows))
        adapters = {row.lora for row in batch.rows} - {""}
        assert len(adapters) <= (self._limits.max_active_adapters or len(adapters))
        if self._limits.enable_chunked_prefill:
            assert batch.num_tokens <= self._limits.max_batch_input_tokens
        assert all(row.samples for row in batch.rows[:-1]), "only the last can be a chunk"
        return batch

    def run(self, batch: ScheduledBatch) -> None:
        """Execute a batch and commit due results, or fail it when the pipeline raises."""
        self.now += self._clock_step
        if batch:
            self._in_flight.append(batch)
        try:
            output = self.pipeline.execute(batch)
        except CapacityError as error:
            self.take(self.scheduler.fail(self._in_flight.pop(), str(error), self.now))
            return
        while len(self._in_flight) > int(self.pipeline.has_pending_outputs()):
            self.take(self.scheduler.commit(self._in_flight.popleft(), output, self.now))
        if self._in_flight:
            self.scheduler.launched(batch)

    def step(self) -> ScheduledBatch:
        """One schedule, execute, commit."""
        batch = self.schedule()
        if batch or self._in_flight:
            self.run(batch)
        self.scheduler.check_integrity()
        return batch

    @property
    def has_in_flight(self) -> bool:
        """Whether a batch's results are still to come."""
        return bool(self._in_flight)

    def run_all(self, max_steps: int = 10_000) -> list[ScheduledBatch]:
        """Step until all requests have ended."""
        batches = []
        for _ in range(max_steps):
            if not self.scheduler.num_live and not self._in_flight:
                return batches
            batches.append(self.step())
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler!r}")

    def tokens(self, request_id: str) -> list[int]:
        """All tokens delivered to a request."""
        return [token for chunk in self.chunks[request_id] for token in chunk.token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        """Return the finish reason of a request."""
        chunks = self.chunks[request_id]
        return chunks[-1].finish_reason if chunks else None

    def result(self, request_id: str) -> tuple[list[int], FinishReason | None, int]:
        """Return the delivered output in the form of `expected_output`."""
        last = self.chunks[request_id][-1]
        return self.tokens(request_id), last.finish_reason, last.output_tokens

    def sizes(self, batch: ScheduledBatch) -> list[tuple[str, int]]:
        """Return (request, tokens fed) of each row."""
        return [(row.request_id, len(row.token_ids)) for row in batch.rows]

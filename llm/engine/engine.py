"""`Engine`: the loop on one thread that owns the scheduler and the pipeline.

    inbox ──> schedule ──> execute ──> commit ──> deliver ──> hook.after_step ──┐
      ^──────────────────── sleep when there was nothing to do <────────────────┘

Other threads only put commands into the inbox and read streams.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceABC
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, overload

from llm.batch import ForwardMode, ScheduledBatch
from llm.config.report import RunningPlan
from llm.engine.types import EngineStats, Pipeline, Sink, StepHook
from llm.errors import EngineStoppedError, QueueFullError, RequestError
from llm.request import FinishReason, Request, RequestRules, TokenBuffer, TokenChunk
from llm.scheduler import Scheduler
from llm.sequence import ReceivedPrompt, Sequence
from llm.stats import StepCounters

if TYPE_CHECKING:
    from llm.config import PipelineConfig
    from llm.kv_cache.transfer import PageTransfer
    from llm.pipeline.base import TextGenerationPipelineInterface
    from llm.structured.grammar import TokenSpelling

logger = logging.getLogger(__name__)

T = TypeVar("T")

BATCHES_PER_TURN = 2  # requests admitted per turn, in batches
EMPTY_BATCH_INTERVAL_S = 0.005  # interval of empty batches while the engine is idle
NO_ROWS = ScheduledBatch((), ForwardMode.IDLE)


class Engine:
    """Runs requests until they end. All public methods are thread-safe.

    `max_waiting` bounds the number of requests that have not started yet (None: no bound). `admit`
    is called for each request before it is queued, on the caller's thread; it raises `RequestError`
    to refuse the request. With `execute_empty_batches` the model also runs while there are no
    requests, because other ranks wait for it in a collective operation.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        scheduler: Scheduler,
        hook: StepHook | None = None,
        *,
        max_waiting: int | None = None,
        admit: Callable[[Request], None] | None = None,
        execute_empty_batches: bool = False,
        transfer: PageTransfer | None = None,
    ) -> None:
        self.transfer = transfer
        """Transfers of the prompts' pages to and from other engines; None: there are none."""
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._hook = hook
        self._max_waiting = max_waiting
        self._admit = admit
        self._rules = RequestRules(
            vocab_size=pipeline.vocab_size,
            max_length=min(pipeline.max_seq_len, scheduler.max_length),
            eos_token_ids=frozenset(pipeline.eos_token_ids),
            frames=pipeline.frames,
            media_ids=pipeline.media_ids,
        )
        # Guards those of the fields below that other threads access.
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._intake = IntakeQueue(scheduler)
        self._sinks: dict[str, Sink] = {}
        self._is_accepting = True
        self._is_stopping = False
        self._is_idle = True
        self._is_awake = False  # `wake` was called since the last cycle
        # start time of the current turn; None while the engine sleeps
        self._turn_s: float | None = None
        self._thread: threading.Thread | None = None
        self._steps = EngineSteps(
            pipeline, scheduler, self._deliver, runs_empty=execute_empty_batches
        )

    @property
    def pipeline(self) -> Pipeline:
        """Return the model that runs the steps. Use it on the engine thread only."""
        return self._pipeline

    @property
    def is_running(self) -> bool:
        """Whether the loop is running."""
        return self._thread is not None and self._thread.is_alive()

    def set_hook(self, hook: StepHook | None) -> None:
        """Set the hook, before `start`."""
        if self._thread is not None:
            raise RuntimeError("set the hook before the engine starts")
        self._hook = hook

    def start(self) -> None:
        """Start the loop. Requests that were submitted earlier run now."""
        with self._condition:
            if self._thread is not None:
                raise RuntimeError("the engine was started already")
            if self._is_stopping:
                raise EngineStoppedError("the engine was shut down; create a new one")
            self._is_idle = False
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @overload
    def submit(
        self,
        request: Request,
        sink: None = None,
        arrival_s: float | None = None,
        *,
        received: ReceivedPrompt | None = None,
        kept_as: str = "",
        on_launched: Callable[[SequenceABC[int]], None] | None = None,
        buffer: TokenBuffer | None = None,
    ) -> TokenStream: ...

    @overload
    def submit(
        self,
        request: Request,
        sink: Sink,
        arrival_s: float | None = None,
        *,
        received: ReceivedPrompt | None = None,
        kept_as: str = "",
        on_launched: Callable[[SequenceABC[int]], None] | None = None,
        buffer: TokenBuffer | None = None,
    ) -> None: ...

    def submit(
        self,
        request: Request,
        sink: Sink | None = None,
        arrival_s: float | None = None,
        *,
        received: ReceivedPrompt | None = None,
        kept_as: str = "",
        on_launched: Callable[[SequenceABC[int]], None] | None = None,
        buffer: TokenBuffer | None = None,
    ) -> TokenStream | None:
        """Queue a request. Its chunks go to `sink`, on the engine thread; without one a stream of
        them is returned.

        `arrival_s`: the time of `time.monotonic` from which it has waited (None: now). `received`:
        pages of its prompt that other engines have written. `kept_as`: a name under which the
        claim of its pages outlives it, unless it is cancelled or fails, see `PageTransfer.kept`.
        `on_launched` is called with these pages, on the engine thread, when the step that completes
        the prompt has been launched; not where each step is awaited at once. It must not raise.
        `buffer`: where tokens wait for others, see `TokenBuffer`; None: each step has a chunk.
        Raises `RequestError` for a request that can never run here, `QueueFullError` when too
        many wait, `EngineStoppedError` when draining or stopped.
        """
        request = self._rules.apply(request)
        if self._admit is not None:
            self._admit(request)
        sequence = Sequence(request, time.monotonic() if arrival_s is None else arrival_s)
        sequence.received, sequence.kept_as = received, kept_as
        sequence.on_launched, sequence.buffer = on_launched, buffer
        stream = None
        if sink is None:
            stream = TokenStream(request.request_id, self.cancel)
            sink = stream.put
        with self._condition:
            if not self._is_accepting:
                raise EngineStoppedError("the engine is draining or has stopped")
            if request.request_id in self._sinks:
                raise RequestError(f"request_id {request.request_id} is in use already")
            if self._max_waiting is not None and self._num_waiting() >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests wait already; try again later")
            self._sinks[request.request_id] = sink
            if received is not None:
                received.is_taken = True
            self._post(lambda: self._intake.add(sequence))
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request within one step; unknown ids are ignored (the request may have just
        ended).
        """
        asked_s = time.monotonic()

        def end() -> None:
            self._deliver(self._scheduler.cancel(request_id, asked_s))

        self._command_for(request_id, end)

    def hold(self, *, is_held: bool) -> None:
        """Have the step that is running wait between its layers, or let it continue.

        A step of a CPU then leaves the processors to other programs at once. It waits at most
        `LONGEST_HOLD_S`. Callable from any thread.
        """
        self._pipeline.hold(is_held=is_held)

    def pause(self, request_id: str) -> None:
        """Stop generating for a request; it keeps its pages until other requests need them."""
        self._command_for(request_id, lambda: self._scheduler.pause(request_id))

    def resume(self, request_id: str) -> None:
        """Resume a paused request."""
        self._command_for(request_id, lambda: self._scheduler.resume(request_id))

    def wake(self) -> None:
        """Call the hook soon, even when no request is running."""
        with self._condition:
            self._is_awake = True
            self._condition.notify_all()

    def fail(self, reason: str) -> None:
        """Stop the loop with an error that every request gets. Callable from any thread."""

        def raise_error() -> None:
            raise RuntimeError(reason)

        with self._condition:
            if not self._is_stopping:
                self._post(raise_error)

    def run_on_engine(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two steps, on the engine thread."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._condition:
            if self._is_stopping:
                raise EngineStoppedError("the engine has stopped")
            self._post(run)
        return future

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait until the others have ended; the hook is not awaited.

        Returns False when the timeout has passed.
        """
        with self._condition:
            self._is_accepting = False
            return self._condition.wait_for(self._is_drained, timeout_s)

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Cancel all requests, deliver their last chunks and end the loop. Idempotent.

        Returns False when the loop has not ended within the timeout (None: no limit); it still
        ends when its current step returns.
        """
        with self._condition:
            self._is_accepting, self._is_stopping = False, True
            self._condition.notify_all()
            thread = self._thread
        if thread is None:
            self._stop()
        elif thread is not threading.current_thread():
            thread.join(timeout_s)
            return not thread.is_alive()
        return True

    def stats(self) -> EngineStats:
        """Return a snapshot of the statistics; can be called while a step runs."""
        scheduler, kv, counters = self._scheduler, self._pipeline.kv_manager, self._steps.counters
        turn_s = self._turn_s
        return EngineStats(
            turn_s=0.0 if turn_s is None else time.monotonic() - turn_s,
            running=scheduler.num_running,
            decoding=scheduler.num_decoding,
            waiting=self._num_waiting(),
            paused=scheduler.num_paused,
            used_pages=kv.used_pages,
            cached_pages=kv.cached_pages,
            total_pages=kv.total_pages,
            host_pages=kv.host_pages,
            pages_to_host=kv.num_pages_to_host,
            pages_from_host=kv.num_pages_from_host,
            pages_received=kv.num_received,
            pages_sent=kv.num_sent,
            preemptions=scheduler.num_preemptions,
            prefix_hit_tokens=kv.prefix_hit_tokens,
            prefix_miss_tokens=kv.prefix_miss_tokens,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            input_tokens=counters.input_tokens,
            empty_steps=counters.empty_steps,
            batches=counters.snapshot(),
            sequences=scheduler.stats(),
            speculative=self._pipeline.spec_decode_metrics(),
            graphs=self._pipeline.graph_stats(),
        )

    def __repr__(self) -> str:
        state = "running" if self.is_running else "stopped" if self._is_stopping else "not started"
        return f"Engine({state}, {self._scheduler!r})"

    def _command_for(self, request_id: str, command: Callable[[], None]) -> None:
        def run() -> None:
            self._intake.admit(request_id)
            command()

        with self._condition:
            if not self._is_stopping:
                self._post(run)

    def _post(self, command: Callable[[], None]) -> None:
        """Put a command into the inbox; the caller holds the condition."""
        self._inbox.append(command)
        self._condition.notify_all()

    def _num_waiting(self) -> int:
        """Number of requests that wait for prefill, in the scheduler and in the inbox."""
        return self._scheduler.num_waiting + len(self._sinks) - self._scheduler.num_live

    def _run(self) -> None:
        error = ""
        try:
            self._pipeline.use_device()
            self._pipeline.while_waiting = self._work_while_waiting
            while self._run_commands():
                hook, waits = self._hook, False
                if hook is not None:
                    num_live, has_step = self._scheduler.num_live, self._steps.is_running
                    waits = self._guard(hook.may_wait, num_live, has_step) is True
                did_step = self._steps.step(waits=waits)
                hook_works = hook is not None and self._after_step(hook)
                if did_step or (waits and not hook_works):
                    continue  # what the model has waited for is done
                sleep_s = hook.poll_s if hook is not None and hook_works else self._steps.idle_s
                if sleep_s != 0:
                    self._sleep(sleep_s)
        except Exception as failure:
            logger.exception("the engine failed and has stopped: %r", self._scheduler)
            error = f"the engine failed: {failure!r}"
        self._stop(error)

    def _after_step(self, hook: StepHook) -> bool:
        return self._guard(hook.after_step, self._steps.num_tokens) is True

    def _work_while_waiting(self, is_done: Callable[[], bool]) -> None:
        if self._hook is not None:
            self._guard(self._hook.while_waiting, is_done)

    def _run_commands(self) -> bool:
        """Run the commands of other threads; return False when one of them requested shutdown."""
        with self._condition:
            if self._is_stopping:
                return False
            self._is_awake = False
            self._turn_s = time.monotonic()
        self._intake.begin_turn()
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        return True

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        sinks = self._sinks
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._deliver_last(chunk)
                continue
            try:
                sinks[chunk.request_id](chunk)
            except Exception:
                logger.exception("%r raised on the engine thread", sinks[chunk.request_id])
                sinks[chunk.request_id] = lambda _: None
                self.cancel(chunk.request_id)

    def _deliver_last(self, chunk: TokenChunk) -> None:
        """Remove the stream, then deliver its last chunk: the reader of that chunk may use the id
        again.
        """
        self._guard(self._pipeline.release, chunk.request_id)
        with self._condition:
            sink = self._sinks.pop(chunk.request_id)
        self._guard(sink, chunk)

    def _guard(self, function: Callable[..., object], *args: object) -> object:
        """Call external code on this thread: an exception is logged and the loop continues."""
        try:
            return function(*args)
        except Exception:
            logger.exception("%r raised on the engine thread", function)
            return None

    def _sleep(self, seconds: float | None) -> None:
        """Sleep until a command arrives, for at most `seconds` (None: no limit)."""
        with self._condition:
            self._is_idle, self._turn_s = True, None
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._inbox or self._intake or self._is_awake or self._is_stopping,
                seconds,
            )
            self._is_idle = False

    def _is_drained(self) -> bool:
        return self._is_idle and not (self._sinks or self._inbox or self._is_awake)

    def _stop(self, error: str = "") -> None:
        """End every request and the hook. A non-empty `error` means that the loop and the scheduler
        failed.
        """
        with self._condition:
            self._is_accepting, self._is_stopping = False, True
        while self._inbox:
            self._guard(self._inbox.popleft())
        if error:
            reason = FinishReason.ERROR
            self._deliver([TokenChunk(i, (), (), reason, error) for i in list(self._sinks)])
        else:
            self._intake.admit_all()
            self._steps.flush()
            self._deliver(self._scheduler.take_ended() + self._scheduler.cancel_all())
        hook, self._hook = self._hook, None
        if hook is not None:
            self._guard(hook.on_stop)
        with self._condition:
            self._is_idle, self._is_awake, self._turn_s = True, False, None
            self._condition.notify_all()


class EngineSteps:
    """The steps of the loop: schedule, execute, commit, one step after the other.

        schedule(n + 1) ─> execute(n + 1) ─> results of n + 1, or n (overlap) ─> commit ─> deliver

    Used on the engine thread; `counters` can be read on any thread.

    `deliver` passes chunks to the callers. With `runs_empty` the model also runs while there are no
    requests, because other ranks wait for it in a collective operation.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        scheduler: Scheduler,
        deliver: Callable[[list[TokenChunk]], None],
        *,
        runs_empty: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._deliver = deliver
        self._runs_empty = runs_empty
        self._in_flight: deque[ScheduledBatch] = deque()  # executed, not yet committed
        self.counters = StepCounters()
        self.num_tokens = 0
        """Number of tokens of a sequence at most, in the results of the last call; 0: none."""

    @property
    def is_running(self) -> bool:
        """Whether the results of a step have not arrived yet."""
        return bool(self._in_flight)

    def step(self, *, waits: bool = False) -> bool:
        """Run one step, which may commit the previous batch. Returns False when there was no work.

        With `waits` no step starts. Raises `RuntimeError` when a step failed and the device can no
        longer be used.
        """
        self.num_tokens = 0
        started_s = time.perf_counter()
        batch = NO_ROWS if waits else self._scheduler.schedule()
        schedule_s = time.perf_counter() - started_s
        ended = self._scheduler.take_ended()
        self._deliver(ended)
        if not batch.rows and not self._in_flight:
            if self._runs_empty and not ended:
                self._run_empty(batch)
            return bool(ended)
        if batch.rows:
            self.counters.scheduled(batch, schedule_s)
            self._in_flight.append(batch)
        self._deliver(self._execute(batch))
        return True

    def flush(self) -> None:
        """Wait for the batches in flight: the device writes to their pages until then."""
        if self._in_flight:
            self._deliver(self._execute(NO_ROWS))

    @property
    def idle_s(self) -> float | None:
        """Return the seconds until the next attempt after a step without work.

        None: wait for a command.
        """
        delay_s = self._scheduler.delay_s or None
        if not self._runs_empty:
            return delay_s
        return min(delay_s or EMPTY_BATCH_INTERVAL_S, EMPTY_BATCH_INTERVAL_S)

    def _run_empty(self, batch: ScheduledBatch) -> None:
        self.counters.empty_steps += 1
        try:
            self._pipeline.execute(batch)
        except Exception:
            self._runs_empty = False
            logger.exception("a step without rows failed; empty batches are switched off")

    def _execute(self, batch: ScheduledBatch) -> list[TokenChunk]:
        """Run a batch, commit the results that have arrived and let the scheduler continue."""
        chunks: list[TokenChunk] = []
        started_s = time.perf_counter()
        try:
            output = self._pipeline.execute(batch)
        except Exception as error:
            self._deliver(self._fail(f"the model failed: {error!r}"))
            if not self._pipeline.is_alive():
                raise RuntimeError("the device is lost") from error
            return chunks
        execute_s = time.perf_counter() - started_s
        while len(self._in_flight) > int(self._pipeline.has_pending_outputs()):
            done = self._in_flight.popleft()
            self.counters.executed(done, execute_s)
            chunks += self._scheduler.commit(done, output)
            self.num_tokens = done.num_steps if output.token_ids else 0
        if batch.rows and self._in_flight:
            self._scheduler.launched(batch)
        return chunks

    def _fail(self, message: str) -> list[TokenChunk]:
        """Fail the last batch, and the one before it when its results are lost too."""
        self.counters.failed_steps += 1
        num_lost = len(self._in_flight) - int(self._pipeline.has_pending_outputs())
        kept = [self._in_flight.popleft() for _ in range(len(self._in_flight) - max(num_lost, 1))]
        chunks: list[TokenChunk] = []
        for batch in self._in_flight:
            logger.exception(
                "a step failed: %d rows, %d tokens fed, %d in context",
                len(batch.rows),
                batch.num_tokens,
                sum(row.context_len for row in batch.rows),
                extra={"fields": (("request_ids", [row.request_id for row in batch.rows]),)},
            )
            chunks += self._scheduler.fail(batch, message)
        self._in_flight = deque(kept)
        return chunks


class IntakeQueue:
    """New requests that the scheduler has not received yet, in order of arrival.

    A bound per turn keeps a burst of requests from delaying the turn. Used on the engine thread
    only.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._per_turn = BATCHES_PER_TURN * scheduler.max_batch_size
        self._num_admissible = 0  # requests that can still be admitted in this turn
        self._queue: dict[str, Sequence] = {}

    def begin_turn(self) -> None:
        """Begin a turn and reset the number of requests that it may admit."""
        self._num_admissible = self._per_turn
        while self._queue and self._num_admissible:
            self.admit(next(iter(self._queue)))

    def add(self, sequence: Sequence) -> None:
        """Add a request whose id is not in use; it is admitted at once if the turn allows it."""
        if self._num_admissible:
            self._num_admissible -= 1
            self._scheduler.add(sequence)
        else:
            self._queue[sequence.request_id] = sequence

    def admit(self, request_id: str) -> None:
        """Admit one request, if it is in the queue, because a command refers to it."""
        sequence = self._queue.pop(request_id, None)
        if sequence is not None:
            self._num_admissible = max(self._num_admissible - 1, 0)
            self._scheduler.add(sequence)

    def admit_all(self) -> None:
        """Admit all queued requests."""
        while self._queue:
            self.begin_turn()

    def __len__(self) -> int:
        return len(self._queue)


class TokenStream:
    """Handle of a submitted request and blocking iterator over its chunks."""

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._chunks: queue.SimpleQueue[TokenChunk] = queue.SimpleQueue()
        self._has_ended = False

    def put(self, chunk: TokenChunk) -> None:
        """Add a chunk; called by the engine."""
        self._chunks.put(chunk)

    def cancel(self) -> None:
        """Cancel the request; its last chunk is still delivered."""
        self._cancel(self.request_id)

    def __iter__(self) -> Iterator[TokenChunk]:
        return self

    def __next__(self) -> TokenChunk:
        if self._has_ended:
            raise StopIteration
        chunk = self._chunks.get()
        self._has_ended = chunk.finish_reason is not None
        return chunk


def create_engine(
    config: PipelineConfig,
    tokenizer: TokenSpelling | None = None,
    on_ranks_lost: Callable[[str], None] | None = None,
) -> Engine:
    """Create an engine for the model of `config`; the model is loaded, the engine is not started.

    `tokenizer` spells the tokens for structured output; it is not used before the first request
    with a schema. In-flight batching is on unless the configuration disables it explicitly, so that
    a long prompt never delays running streams. `on_ranks_lost` is called, from any thread, with the
    reason when a model on several devices has lost one of its processes, before its requests fail;
    by default the engine stops. Raises the errors of `create_pipeline`.
    """
    if not config.is_resolved:
        raise RuntimeError("resolve the configuration before an engine is made from it")
    config.load_architectures()  # the configuration may have been resolved in another process
    from llm.pipeline.registry import create_pipeline

    pipeline = create_pipeline(config, tokenizer)
    engine = assemble_engine(pipeline, config)
    if pipeline.leader is not None:
        pipeline.leader.notify(on_ranks_lost or engine.fail)
    return engine


def assemble_engine(pipeline: TextGenerationPipelineInterface, config: PipelineConfig) -> Engine:
    """Create an engine from a pipeline; see `create_engine`."""
    max_seq_len, kv = pipeline.max_seq_len, pipeline.kv_manager
    most = min(kv.total_pages * kv.page_size, config.max_batch_total_tokens or max_seq_len)
    if max_seq_len > most:
        text = "max_length is cut from %d to %d tokens: no more fit %r or max_batch_total_tokens"
        logger.warning(text, max_seq_len, most, kv)
        max_seq_len = most
    in_flight_batching = config.enable_in_flight_batching
    config.note_plan(replace(_plan(pipeline, max_seq_len), in_flight_batching=in_flight_batching))
    config.log_pipeline_info()
    scheduler = Scheduler(
        pipeline.runner.server_config,
        kv,
        max_seq_len=max_seq_len,
        plan_ahead=pipeline.overlap_active,
    )
    return Engine(
        pipeline,
        scheduler,
        admit=pipeline.admit,
        execute_empty_batches=config.execute_empty_batches,
        transfer=pipeline.page_transfer(),
    )


def _plan(pipeline: TextGenerationPipelineInterface, max_seq_len: int) -> RunningPlan:
    model = pipeline.runner.loaded_model
    backend = pipeline.runner.attn_backend
    return RunningPlan(
        pipeline=type(pipeline).__name__,
        encoding=model.encoding.name,
        max_seq_len=max_seq_len,
        max_batch_size=pipeline.runner.max_running_requests,
        kv_bytes=pipeline.memory_plan.kv_bytes,
        draft_kv_bytes=sum(pool.nbytes for pool in pipeline.draft_kv_blocks or ()),
        linear_layers=tuple(sorted(model.linear_backends.items())),
        attention=backend.description if backend is not None else "the model's own",
        kernels=tuple(kernel.name for kernel in model.session.kernels()),
        launch_level=model.session.pdl_level,
    )

"""`Team`: threads that share one job, a block at a time.

    leader (the caller)   post job ─ compute blocks ──────────────── close ─ wait ─ return
    helper                          └ wake ─ enter ─ compute blocks ─ leave ┘

Each free thread takes the next block, so that a helper that the operating system runs late,
or not at all, delays no job: the leader computes what is left and waits only for blocks that were
begun. What a block contains does not depend on the thread that computes it.

A helper that finds no job for some microseconds sleeps on a condition variable. Helpers never run
Python code between jobs: waking up does not need the interpreter's lock.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable

from llvmlite import ir

from llm.kernels.cpu.jit import (
    I32,
    I64,
    POINTER,
    VOID,
    Compiled,
    FunctionBuilder,
    external,
    function,
    this_machine,
)

WORD = I64.as_pointer()
JOB_TYPE = ir.FunctionType(VOID, [WORD, I64])
"""A job's function: computes one block, given the job and the block's number."""

SPINS = 2000
"""Number of checks for the next job before a helper sleeps: about 20 microseconds."""

# Words of the state that all threads share, each on its own cache line.
EPOCH, NEXT, IS_OPEN, ACTIVE, SLEEPING, IS_ENDING, JOB, MUTEX, CONDITION, SIZE = range(0, 160, 16)

# Words of a job in front of the data that its function reads.
JOB_FUNCTION, JOB_BLOCKS, JOB_HEADER = range(3)


def _word(body: FunctionBuilder, state: ir.Value, index: int) -> ir.Value:
    return body.gep(state, [I64(index)])


def _get(body: FunctionBuilder, state: ir.Value, index: int) -> ir.Value:
    return body.load_atomic(_word(body, state, index), "seq_cst", 8)


def _set(body: FunctionBuilder, state: ir.Value, index: int, value: ir.Value) -> None:
    body.store_atomic(value, _word(body, state, index), "seq_cst", 8)


def _add(body: FunctionBuilder, state: ir.Value, index: int, amount: int) -> ir.Value:
    """Emit an atomic addition to a word; return its previous value."""
    return body.atomic_rmw("add", _word(body, state, index), I64(amount), "seq_cst")


def _call(body: FunctionBuilder, name: str, *arguments: ir.Value) -> None:
    types = [argument.type for argument in arguments]
    body.call(external(body.module, name, I32, *types), arguments)


def _lock(body: FunctionBuilder, state: ir.Value) -> ir.Value:
    mutex = body.bitcast(_word(body, state, MUTEX), POINTER)
    _call(body, "pthread_mutex_lock", mutex)
    return mutex


def _compute_blocks(body: FunctionBuilder, state: ir.Value) -> None:
    """Emit a loop that computes blocks of the posted job until none is left."""
    job = body.inttoptr(_get(body, state, JOB), WORD)
    compute = body.inttoptr(body.load(_word(body, job, JOB_FUNCTION)), JOB_TYPE.as_pointer())
    num_blocks = body.load(_word(body, job, JOB_BLOCKS))

    def take() -> ir.Value:
        block = _add(body, state, NEXT, 1)
        is_left = body.icmp_signed("<", block, num_blocks)
        with body.if_then(is_left):
            body.call(compute, [job, block])
        return is_left

    body.repeat_while(take)


def define_lead(module: ir.Module) -> ir.Function:
    """Add `lead(state, job)` to a module: computes a job with the team of `state`."""
    body, (state, job) = function(module, "lead", VOID, WORD, WORD)
    _set(body, state, JOB, body.ptrtoint(job, I64))
    _set(body, state, NEXT, I64(0))
    _set(body, state, IS_OPEN, I64(1))
    _add(body, state, EPOCH, 1)
    _wake(body, state)
    _compute_blocks(body, state)
    _set(body, state, IS_OPEN, I64(0))

    def is_computing() -> ir.Value:
        body.pause()
        return body.icmp_signed(">", _get(body, state, ACTIVE), I64(0))

    body.repeat_while(is_computing)
    body.ret_void()
    return body.function


def _define_help(module: ir.Module) -> None:
    """Add `help(state)`: the main function of a helper's thread, which runs until the team ends."""
    body, (state,) = function(module, "help", VOID, WORD)
    seen, spins = body.alloca(I64), body.alloca(I64)
    body.store(I64(0), seen)  # a helper that starts late must not miss the end of the team

    def has_no_new_job() -> ir.Value:
        return body.icmp_signed("==", _get(body, state, EPOCH), body.load(seen))

    def next_job() -> ir.Value:
        body.store(I64(0), spins)

        def spin() -> ir.Value:
            body.pause()
            body.store(body.add(body.load(spins), I64(1)), spins)
            is_early = body.icmp_signed("<", body.load(spins), I64(SPINS))
            return body.and_(has_no_new_job(), is_early)

        body.repeat_while(spin)
        with body.if_then(has_no_new_job()):
            _sleep(body, state, has_no_new_job)
        body.store(_get(body, state, EPOCH), seen)
        _add(body, state, ACTIVE, 1)
        is_open = body.icmp_signed("!=", _get(body, state, IS_OPEN), I64(0))
        with body.if_then(is_open):
            _compute_blocks(body, state)
        _add(body, state, ACTIVE, -1)
        return body.icmp_signed("==", _get(body, state, IS_ENDING), I64(0))

    body.repeat_while(next_job)
    body.ret_void()


def _define_end(module: ir.Module) -> None:
    """Add `end(state)`: ends all helpers."""
    body, (state,) = function(module, "end", VOID, WORD)
    _set(body, state, IS_ENDING, I64(1))
    _add(body, state, EPOCH, 1)
    _wake(body, state)
    body.ret_void()


def _wake(body: FunctionBuilder, state: ir.Value) -> None:
    """Emit code that wakes sleeping helpers, after the epoch has changed."""
    with body.if_then(body.icmp_signed(">", _get(body, state, SLEEPING), I64(0))):
        mutex = _lock(body, state)
        _call(body, "pthread_cond_broadcast", body.bitcast(_word(body, state, CONDITION), POINTER))
        _call(body, "pthread_mutex_unlock", mutex)


def _sleep(body: FunctionBuilder, state: ir.Value, has_no_new_job: Callable[[], ir.Value]) -> None:
    mutex = _lock(body, state)
    _add(body, state, SLEEPING, 1)
    condition = body.bitcast(_word(body, state, CONDITION), POINTER)
    again, wait, after = (body.append_basic_block(name) for name in ("look", "wait", "awake"))
    body.branch(again)
    body.position_at_end(again)
    body.cbranch(has_no_new_job(), wait, after)
    body.position_at_end(wait)
    _call(body, "pthread_cond_wait", condition, mutex)
    body.branch(again)
    body.position_at_end(after)
    _add(body, state, SLEEPING, -1)
    _call(body, "pthread_mutex_unlock", mutex)


class Team:
    """Helpers of one process, and the state that they share with the leader."""

    def __init__(self, num_helpers: int) -> None:
        self.num_helpers = num_helpers
        self.lock = threading.Lock()
        """Held by the leader: a team computes one job at a time."""
        self._memory = (ctypes.c_int64 * (SIZE + 16))()
        self.state = -(-ctypes.addressof(self._memory) // 128) * 128
        libc = ctypes.CDLL(None)
        for name, word in (("pthread_mutex_init", MUTEX), ("pthread_cond_init", CONDITION)):
            if getattr(libc, name)(ctypes.c_void_p(self.state + 8 * word), None):
                raise OSError(f"{name} failed")
        module = ir.Module("team")
        _define_help(module)
        _define_end(module)
        self._code = Compiled(module, this_machine())
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._end = run(self._code.address("end"))
        help_out = run(self._code.address("help"))
        self._threads = [
            threading.Thread(target=help_out, args=(self.state,), name=f"product-{i}", daemon=True)
            for i in range(num_helpers)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the helpers' threads; the team cannot be used afterwards."""
        with self.lock:
            self._end(self.state)
        for thread in self._threads:
            thread.join()


class Teams:
    """The team of this process, created at the first use."""

    def __init__(self) -> None:
        self._num_threads = 1
        self._team: Team | None = None
        self._changing = threading.Lock()
        atexit.register(self.set_num_threads, 1)
        if hasattr(os, "register_at_fork"):  # a child process has the memory, but not the threads
            os.register_at_fork(after_in_child=self._forget)

    @property
    def num_threads(self) -> int:
        """Maximum number of threads for a product, with the caller's."""
        return self._num_threads

    def set_num_threads(self, count: int) -> None:
        """Set the number of threads for products. Results do not depend on it."""
        if count < 1:
            raise ValueError(f"the number of threads must be at least 1, not {count}")
        with self._changing:
            self._num_threads = 1 if sys.platform == "win32" else count
            team, self._team = self._team, None
        if team is not None:
            team.end()

    def find(self) -> Team | None:
        """Return the team, or None when the caller is to compute alone."""
        if self._num_threads > 1 and self._team is None:
            with self._changing:
                if self._num_threads > 1 and self._team is None:
                    self._team = Team(self._num_threads - 1)
        return self._team

    def _forget(self) -> None:
        self._team, self._changing = None, threading.Lock()


teams = Teams()


def set_product_threads(count: int) -> None:
    """Set the number of threads for large products of language models on a CPU, with the caller's.

    Results do not depend on it. The default is 1. Raises ValueError for a count below 1.
    """
    teams.set_num_threads(count)

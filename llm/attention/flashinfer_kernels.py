"""FlashInfer's kernels and wrappers: their selection, and the transfer of their plans.

    rows of one query    few query heads for each KV head   CUDA cores
                         few rows, captured                 CUDA cores
                         else                               FA2; when there are many rows, captured,
                                                            no context is shared by several blocks
    rows of several      FA3 on Hopper, FA2 elsewhere and where FA3 has no kernel
                         captured: FA2, whose plans have one form for any lengths; no context is
                         shared by several blocks

Captured work keeps the form of its plan: a plan that may share contexts always merges
partial results, which many rows do not need. Written for flashinfer 0.7; `benchmarks.attention`
measures the selected kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, get_batch_decode_module
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, get_batch_prefill_module
from torch import Tensor

from llm.attention.base import AttentionOptions
from llm.attention.page_lists import RowLists
from llm.attention.workspaces import Workspaces, count_processors
from llm.errors import ConfigError
from llm.kv_cache.kv_pool import KVPool

logger = logging.getLogger(__name__)

LAYOUT = "NHD"  # layout of `KVPool.keys` and `KVPool.values`
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
CUDA_CORE_GROUP = 2  # query heads per KV head up to which CUDA cores are as fast, at any size
MAX_CUDA_CORE_GROUP = 4  # query heads per KV head up to which they are faster for few rows
HOPPER = 9  # the major compute capability that FA3 is written for


@dataclass(frozen=True, slots=True)
class Kernels:
    """Properties that the kernels of one pool share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype
    soft_cap: float
    can_split: bool  # whether one context may be split among several programs
    device: torch.device
    num_processors: int

    @classmethod
    def of(cls, pool: KVPool, options: AttentionOptions) -> Kernels:
        """Create for a pool. Raises `ConfigError` when no kernel supports it."""
        wrong = None
        if pool.device.type != "cuda":
            wrong = f"it needs a CUDA device, not {pool.device}"
        elif options.dtype not in DTYPES:
            wrong = f"it computes in bfloat16 or float16, not {options.dtype}"
        elif pool.head_dim not in HEAD_DIMS:
            wrong = f"it has heads of {HEAD_DIMS}, not of {pool.head_dim}"
        elif pool.dtype not in (options.dtype, torch.float8_e4m3fn):
            wrong = f"it reads keys of {options.dtype} or float8_e4m3fn, not {pool.dtype}"
        if wrong is not None:
            raise ConfigError(f"the attention backend flashinfer cannot be used: {wrong}")
        return cls(
            num_heads=options.num_heads,
            num_kv_heads=pool.num_kv_heads,
            head_dim=pool.head_dim,
            page_size=pool.page_size,
            dtype=options.dtype,
            kv_dtype=pool.dtype,
            soft_cap=options.soft_cap or 0.0,
            can_split=not options.batch_invariant,
            device=pool.device,
            num_processors=count_processors(pool.device),
        )

    def fills_device(self, num_rows: int) -> bool:
        """Whether blocks of one row and one KV head each occupy all processors."""
        return num_rows * self.num_kv_heads >= self.num_processors

    def uses_tensor_cores(self, captured_rows: int | None) -> bool:
        """Whether rows of one query, captured or not, are computed by the FA2 kernel."""
        group = self.num_heads // self.num_kv_heads
        if not self.can_split:
            return True  # the splits of the other kernel depend on the number of rows
        if group <= CUDA_CORE_GROUP:
            return False
        is_small = captured_rows is not None and not self.fills_device(captured_rows)
        return group > MAX_CUDA_CORE_GROUP or not is_small

    def load_decode(self, window: int | None, on_tensor_cores: bool) -> None:
        """Load the kernel for rows of one query, in layers with a window.

        A kernel that was not compiled ahead of time is compiled now, which takes minutes. Raises
        `ConfigError` where that is not possible.
        """
        try:
            if on_tensor_cores:
                self._load_prefill("fa2", window)
            else:
                get_batch_decode_module(*self._module_key(window))
        except (OSError, RuntimeError) as error:
            raise self._missing(error) from error

    def load_extend(self, window: int | None) -> str:
        """Load the kernel for rows of several queries; return its name."""
        try:
            if self._is_fa3_possible and self._has_fa3(window):
                return "fa3"
            self._load_prefill("fa2", window)
        except (OSError, RuntimeError) as error:
            raise self._missing(error) from error
        return "fa2"

    def has_captured_extend(self, windows: Iterable[int | None]) -> bool:
        """Whether rows of several queries can be captured, in layers with these windows."""
        if not self.can_split:
            return False  # eager launches may use another kernel
        try:
            for window in windows:
                self._load_prefill("fa2", window)
        except (OSError, RuntimeError) as error:
            text = "FlashInfer has no FA2 kernel for %s, prompts are not captured: %s"
            logger.warning(text, self, _first_line(error))
            return False
        return True

    @property
    def _is_fa3_possible(self) -> bool:
        major, _ = torch.cuda.get_device_capability(self.device)
        return major == HOPPER and self.kv_dtype == self.dtype

    def _has_fa3(self, window: int | None) -> bool:
        try:
            self._load_prefill("fa3", window)
        except (OSError, RuntimeError) as error:
            text = "FlashInfer has no FA3 kernel for %s, FA2 is used: %s"
            logger.warning(text, self, _first_line(error))
            return False
        return True

    def _load_prefill(self, name: str, window: int | None) -> None:
        get_batch_prefill_module(name, *self._module_key(window), False)

    def _missing(self, error: Exception) -> ConfigError:
        return ConfigError(f"FlashInfer has no kernel for {self}: {_first_line(error)}")

    def _module_key(self, window: int | None) -> tuple[Any, ...]:
        dim, no_rotation = self.head_dim, 0
        types = (self.dtype, self.kv_dtype, self.dtype, torch.int32)
        return (*types, dim, dim, no_rotation, window is not None, self.soft_cap > 0)

    def plan_options(self, window: int | None) -> dict[str, Any]:
        """Return the arguments of every plan."""
        return {
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self.soft_cap,
            "q_data_type": self.dtype,
            "kv_data_type": self.kv_dtype,
            "disable_split_kv": not self.can_split,
        }

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the sizes in the order of plans."""
        return (self.num_heads, self.num_kv_heads, self.head_dim, self.page_size)


class ExtendCall:
    """Call for rows of several queries each, in layers with one window."""

    def __init__(self, kernels: Kernels, workspaces: Workspaces, window: int | None) -> None:
        self._kernels = kernels
        self._workspaces = workspaces
        self._options = kernels.plan_options(window)
        self.kernel = kernels.load_extend(window)
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspaces.floats, LAYOUT, backend=self.kernel
        )
        workspaces.give(self.wrapper, ("extend", window, True))

    def plan(self, query_offsets: Tensor, lists: RowLists, context_lens: Tensor) -> None:
        """Plan the call; all tensors are pinned. `query_offsets` [B + 1]: first query of each row,
        then the total. `context_lens` [B]: the library would compute them in memory from which it
        cannot copy without waiting for the device.
        """
        with self._workspaces.staging(self.wrapper):
            self.wrapper.plan(
                query_offsets,
                lists.offsets,
                lists.ids,
                lists.last_lens,
                *self._kernels.sizes,
                causal=True,
                seq_lens=context_lens,
                **self._options,
            )


class CapturedExtendCall:
    """Call of a captured plan: up to `num_queries` queries of the rows of `buffers`.

    `offsets` [B + 1] are those of the queries, `buffers` the page tables: both are on the device,
    and their owner fills them.
    """

    def __init__(
        self,
        kernels: Kernels,
        workspaces: Workspaces,
        window: int | None,
        buffers: RowLists,
        offsets: Tensor,
        num_queries: int,
    ) -> None:
        self._kernels = kernels
        self._workspaces = workspaces
        self._options = {**kernels.plan_options(window), "disable_split_kv": True}
        self._num_queries = num_queries
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspaces.floats,
            LAYOUT,
            use_cuda_graph=True,
            qo_indptr_buf=offsets,
            paged_kv_indptr_buf=buffers.offsets,
            paged_kv_indices_buf=buffers.ids,
            paged_kv_last_page_len_buf=buffers.last_lens,
            backend="fa2",
        )
        workspaces.give(self.wrapper, ("extend", window, False))

    def plan(self, lists: RowLists) -> None:
        """Plan for the first time: the first row has all queries. `lists` are pinned."""
        offsets = torch.full_like(lists.offsets, self._num_queries)
        offsets[0] = 0
        with self._workspaces.staging(self.wrapper):
            self.wrapper.plan(
                offsets.pin_memory(),
                lists.offsets,
                lists.ids,
                lists.last_lens,
                *self._kernels.sizes,
                causal=True,
                **self._options,
            )
        _keep_interpreter(self.wrapper)

    def replan(self, query_offsets: Tensor, offsets: Tensor, context_lens: Tensor) -> None:
        """Plan again; all arguments are on the host: first queries [B + 1], first pages [B + 1] as
        in `RowLists`, contexts [B].

        Does the same as the wrapper, which would also copy page tables and wait for that.
        """
        rows = _Fa2Rows(query_offsets, offsets, context_lens, self._num_queries)
        with self._workspaces.staging(self.wrapper):
            memory = _plan_memory(self.wrapper, self._workspaces)
            plan = self.wrapper._cached_module.plan
            plan(*memory, *rows.arguments(self._kernels, self._options, is_causal=True))


class DecodeCall:
    """Call for rows of one query each, in layers with one window; for captured plans over
    `buffers`.
    """

    def __init__(
        self,
        kernels: Kernels,
        workspaces: Workspaces,
        window: int | None,
        buffers: RowLists | None = None,
    ) -> None:
        self._kernels = kernels
        self._workspaces = workspaces
        self._options = kernels.plan_options(window)
        self._buffers = buffers
        rows = None if buffers is None else len(buffers.last_lens)
        on_tensor_cores = kernels.uses_tensor_cores(rows)
        if rows is not None and on_tensor_cores and kernels.fills_device(rows):
            self._options["disable_split_kv"] = True
        kernels.load_decode(window, on_tensor_cores)
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspaces.floats,
            LAYOUT,
            use_cuda_graph=buffers is not None,
            use_tensor_cores=on_tensor_cores,
            paged_kv_indptr_buffer=None if buffers is None else buffers.offsets,
            paged_kv_indices_buffer=None if buffers is None else buffers.ids,
            paged_kv_last_page_len_buffer=None if buffers is None else buffers.last_lens,
            backend="fa2",
        )
        workspaces.give(self.wrapper, ("decode", window, buffers is None))
        self._on_tensor_cores = on_tensor_cores
        # Each row has one query.
        self._query_offsets = torch.arange(1 + (rows or 0), dtype=torch.int32)
        types = (kernels.dtype, kernels.kv_dtype)
        self._empty = tuple(torch.empty(0, dtype=dtype, device=kernels.device) for dtype in types)

    def plan(self, lists: RowLists) -> None:
        """Plan a captured call for the first time, or any other call; `lists` are pinned."""
        tables = (lists.offsets, lists.ids, lists.last_lens)
        with self._workspaces.staging(self.wrapper):
            self.wrapper.plan(*tables, *self._kernels.sizes, **self._options)
        if self._buffers is not None:
            _keep_interpreter(self.wrapper)

    def replan(self, offsets: Tensor, context_lens: Tensor) -> None:
        """Plan a captured call again; its buffers are filled by their owner. On the host: first
        pages [B + 1] as in `RowLists`, contexts [B].

        Does the same as `fast_decode_plan`, which would compute the contexts from page lists and
        check values that do not change.
        """
        with self._workspaces.staging(self.wrapper):
            memory = _plan_memory(self.wrapper, self._workspaces)
            if self._on_tensor_cores:
                rows = _Fa2Rows(self._query_offsets, offsets, context_lens, len(context_lens))
                arguments = rows.arguments(self._kernels, self._options, is_causal=False)
            else:
                arguments = self._on_cuda_cores(offsets, len(context_lens))
            self.wrapper._plan_info = self.wrapper._cached_module.plan(*memory, *arguments)

    def _on_cuda_cores(self, offsets: Tensor, num_rows: int) -> tuple[Any, ...]:
        """Return the arguments of the library's plan behind its memory."""
        num_heads, num_kv_heads, head_dim, page_size = self._kernels.sizes
        is_captured = True
        return (
            offsets,
            num_rows,
            num_heads,
            num_kv_heads,
            page_size,
            is_captured,
            self._options["window_left"],
            self._options["logits_soft_cap"],
            head_dim,
            head_dim,
            *self._empty,  # only for their types
        )


class _Fa2Rows(NamedTuple):
    """Rows of a captured call, on the host, for a plan of FA2."""

    query_offsets: Tensor  # int32 [B + 1]
    page_offsets: Tensor  # int32 [B + 1]
    context_lens: Tensor  # int32 [B]
    num_queries: int  # maximum number of queries

    def arguments(
        self, kernels: Kernels, options: Mapping[str, Any], *, is_causal: bool
    ) -> tuple[Any, ...]:
        """Return the arguments of the library's plan behind its memory."""
        num_heads, num_kv_heads, head_dim, page_size = kernels.sizes
        is_captured = True
        return (
            self.query_offsets,
            self.page_offsets,
            self.context_lens,
            self.num_queries,
            len(self.context_lens),
            num_heads,
            num_kv_heads,
            page_size,
            is_captured,
            head_dim,
            head_dim,
            is_causal,
            options["window_left"],
            -1,  # no fixed size of a split
            options["disable_split_kv"],
            0,  # no other work on the device
            0,  # rows of any lengths
        )


def _plan_memory(wrapper: Any, workspaces: Workspaces) -> tuple[Tensor, Tensor, Tensor]:
    """Return the memory that every plan of the library writes to."""
    pinned = wrapper._pin_memory_int_workspace_buffer
    return workspaces.floats, wrapper._int_workspace_buffer, pinned


def _keep_interpreter(wrapper: Any) -> None:
    """Keep the interpreter lock during plans: they take microseconds, and another thread may hold
    the lock for longer.
    """
    plan = wrapper._cached_module.plan
    if hasattr(plan, "release_gil"):
        plan.release_gil = False


def _first_line(error: Exception) -> str:
    """Return the first line of a compiler's errors, which names the kernel."""
    return str(error).partition("\n")[0][:300]

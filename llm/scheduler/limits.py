"""`SchedulerLimits`: the limits of a batch; `ResolvedLimits`: the same checked and without gaps."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from llm.errors import ConfigError

DEFAULT_MAX_BATCH_SIZE = 32


class SchedulerConfig(Protocol):
    """Configuration that the scheduler reads; `PipelineConfig` implements it."""

    @property
    def max_length(self) -> int | None: ...
    @property
    def max_batch_size(self) -> int | None: ...
    @property
    def max_queue_size_tg(self) -> int | None: ...
    @property
    def min_batch_size_tg(self) -> int | None: ...
    @property
    def ce_delay_ms(self) -> float: ...
    @property
    def enable_prioritize_first_decode(self) -> bool: ...
    @property
    def max_batch_input_tokens(self) -> int: ...
    @property
    def max_batch_total_tokens(self) -> int | None: ...
    @property
    def enable_chunked_prefill(self) -> bool: ...
    @property
    def enable_in_flight_batching(self) -> bool: ...
    @property
    def kvcache_ce_watermark(self) -> float: ...
    @property
    def max_num_steps(self) -> int: ...
    @property
    def max_active_adapters(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """A `SchedulerConfig` of plain values, for use without a complete `PipelineConfig`."""

    max_length: int | None = None  # tokens of one sequence; None: no limit but the pool
    max_batch_size: int | None = None  # maximum number of rows of a batch; None: 32
    # maximum number of decoding sequences; None: max_batch_size
    max_queue_size_tg: int | None = None
    # decode without prompts while so many decode; None: max_queue_size_tg
    min_batch_size_tg: int | None = None
    ce_delay_ms: float = 0.0  # how long a prefill waits for later requests to join it
    enable_prioritize_first_decode: bool = False  # decode the sequences of a prefill right after it
    max_batch_input_tokens: int = 8192  # tokens fed in a step
    max_batch_total_tokens: int | None = None  # resident tokens of a batch with prompts
    enable_chunked_prefill: bool = True
    enable_in_flight_batching: bool = True
    kvcache_ce_watermark: float = 0.95
    max_num_steps: int = 1  # decode forwards per step; -1: one
    # maximum number that run at once; None: requests have none
    max_active_adapters: int | None = None


@dataclass(frozen=True, slots=True)
class ResolvedLimits:
    """Limits that the scheduler applies."""

    max_length: int
    max_batch_size: int
    max_decoding: int
    min_decoding: int
    prefill_delay_s: float
    first_decode: bool
    max_input_tokens: int
    max_total_tokens: int | None
    chunked_prefill: bool
    in_flight_batching: bool
    watermark: float
    max_num_steps: int
    max_adapters: int | None

    @classmethod
    def create(
        cls,
        config: SchedulerConfig,
        *,
        max_seq_len: int | None = None,
        in_flight_batching: bool | None = None,
    ) -> ResolvedLimits:
        """Fill the gaps of `config`. Raises `ConfigError` for contradicting values."""
        lengths = [n for n in (config.max_length, max_seq_len) if n is not None]
        max_batch_size = config.max_batch_size
        if max_batch_size is None:
            max_batch_size = min(DEFAULT_MAX_BATCH_SIZE, config.max_batch_input_tokens)
        if in_flight_batching is None:
            in_flight_batching = config.enable_in_flight_batching
        max_decoding = config.max_queue_size_tg or max_batch_size
        min_decoding = config.min_batch_size_tg
        limits = cls(
            max_length=min(lengths, default=sys.maxsize),
            max_batch_size=max_batch_size,
            max_decoding=max_decoding,
            min_decoding=max_decoding if min_decoding is None else min_decoding,
            prefill_delay_s=config.ce_delay_ms / 1000,
            first_decode=config.enable_prioritize_first_decode,
            max_input_tokens=config.max_batch_input_tokens,
            max_total_tokens=config.max_batch_total_tokens,
            chunked_prefill=config.enable_chunked_prefill,
            in_flight_batching=in_flight_batching,
            watermark=config.kvcache_ce_watermark,
            max_num_steps=max(config.max_num_steps, 1),
            max_adapters=config.max_active_adapters,
        )
        limits._check()
        return limits

    def _check(self) -> None:
        checks = (
            (self.max_batch_size >= 1, f"max_batch_size={self.max_batch_size} must be ≥ 1"),
            (
                self.max_batch_size <= self.max_input_tokens,
                f"max_batch_input_tokens={self.max_input_tokens} must be at least "
                f"max_batch_size={self.max_batch_size}: every row feeds a token",
            ),
            (
                0 < self.watermark <= 1,
                f"kvcache_ce_watermark={self.watermark} must be in (0, 1]",
            ),
            (self.min_decoding >= 0, f"min_batch_size_tg={self.min_decoding} must be ≥ 0"),
            (self.prefill_delay_s >= 0, "ce_delay_ms must be ≥ 0"),
            (self.max_length >= 2, f"max_length={self.max_length} leaves no room to generate"),
        )
        for holds, message in checks:
            if not holds:
                raise ConfigError(message)

"""Status of an engine, for health, metrics and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm import EngineStats, Histogram


@dataclass(frozen=True, slots=True)
class AudioStats:
    """Statistics of the audio decoder since the start."""

    decode_s: Histogram  # seconds per call, which renders blocks of one or several streams
    blocks: Histogram  # blocks per call
    audio_s: float  # seconds rendered, over all streams
    buffered: int  # number of blocks and text chunks that wait for their readers


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Snapshot of an engine's status."""

    running: int
    waiting: int
    used_pages: int
    total_pages: int
    audio_streams: int  # number of live decoder states
    preemptions: int
    prefix_hit_tokens: int
    is_alive: bool = True  # False when the engine has stopped, failed or hangs
    is_loaded: bool = True  # False when its model is unloaded until the next request
    is_draining: bool = False  # True when it finishes its requests and should get no more
    stats: EngineStats | None = None
    audio: AudioStats | None = None
    linear_layers: tuple[tuple[str, int], ...] = ()  # (kernel, number of layers)


@dataclass(frozen=True, slots=True)
class ReplicatedStatus(EngineStatus):
    """Snapshot of all replicas of a model: sums, and alive if one is."""

    replicas: tuple[EngineStatus, ...] = ()

    @classmethod
    def of(cls, replicas: Sequence[EngineStatus]) -> ReplicatedStatus:
        """Return the status of replicas, in their order."""
        return cls(
            running=sum(status.running for status in replicas),
            waiting=sum(status.waiting for status in replicas),
            used_pages=sum(status.used_pages for status in replicas),
            total_pages=sum(status.total_pages for status in replicas),
            audio_streams=sum(status.audio_streams for status in replicas),
            preemptions=sum(status.preemptions for status in replicas),
            prefix_hit_tokens=sum(status.prefix_hit_tokens for status in replicas),
            is_alive=any(status.is_alive for status in replicas),
            replicas=tuple(replicas),
        )

"""Status of an engine, for health, metrics and tests."""

from __future__ import annotations

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
    stats: EngineStats | None = None
    audio: AudioStats | None = None
    linear_layers: tuple[tuple[str, int], ...] = ()  # (kernel, number of layers)

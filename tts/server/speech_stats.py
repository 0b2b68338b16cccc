"""Statistics of a call that speaks, recorded in the same way for every protocol."""

from __future__ import annotations

import time

from tts.observe.metrics import Metrics
from tts.server.call import Call
from tts.speech.types import (
    AudioChunk,
    Done,
    SessionEvent,
    SpeechEvent,
    Started,
    SynthesisResult,
)


def note_input(call: Call, text: str) -> None:
    """Record streamed text in the call's statistics, and the time of the first message."""
    if call.first_input is None:
        call.first_input = time.monotonic()
    call.note_text(text)


def note_event(call: Call, metrics: Metrics, event: SessionEvent | SpeechEvent) -> None:
    """Record an event that is about to be sent in the call's statistics."""
    stats = call.stats
    match event:
        case Started():
            stats.sample_rate = event.audio_format.sample_rate
        case AudioChunk():
            duration_s = event.sample_count / stats.sample_rate
            stats.audio_s += duration_s
            stats.underrun_s += _underrun_s(call, event, duration_s)
            if stats.first_audio_s is None:
                stats.first_audio_s = time.monotonic() - (call.first_input or call.started)
                metrics.first_audio.observe(stats.first_audio_s)
        case Done(result):
            metrics.underrun.observe(stats.underrun_s)
            note_result(call, result)


def note_result(call: Call, result: SynthesisResult) -> None:
    """Record the result of a synthesis in the call's statistics."""
    call.stats.prompt_tokens = result.usage.prompt_tokens
    call.stats.output_tokens = result.usage.output_tokens
    call.stats.warnings = len(result.warnings)
    call.stats.checks = tuple(tuple(r.value for r in results) for results in result.checks)
    call.note_timings(result.timings.queue_s, result.timings.prefill_s)


def _underrun_s(call: Call, chunk: AudioChunk, duration_s: float) -> float:
    """Return the seconds for which a player has nothing to play before this chunk is sent.

    The player begins with the first audio and never runs ahead of it. The time that the client
    took to read is not counted, nor a pause between segments of a text that is still being written.
    """
    stats, now = call.stats, time.monotonic()
    waits_for_text = call.first_input is not None and chunk.segment_index != stats.last_segment
    is_counted = stats.last_segment >= 0 and not waits_for_text
    late_s = max(0.0, now - max(stats.playback_end, call.last_write)) if is_counted else 0.0
    stats.last_segment = chunk.segment_index
    stats.playback_end = max(stats.playback_end, now) + duration_s
    return late_s

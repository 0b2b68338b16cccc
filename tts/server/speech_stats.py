"""Statistics of a call that speaks, recorded in the same way for every protocol."""

from __future__ import annotations

import time

from tts.observe.metrics import Metrics
from tts.server.call import Call
from tts.speech.types import AudioChunk, Done, SessionEvent, Started, SynthesisResult


def note_input(call: Call, text: str) -> None:
    """Record streamed text in the call's statistics, and the time of the first message."""
    if call.first_input is None:
        call.first_input = time.monotonic()
    call.note_text(text)


def note_event(call: Call, metrics: Metrics, event: SessionEvent) -> None:
    """Record an event that is about to be sent in the call's statistics."""
    stats = call.stats
    match event:
        case Started():
            stats.sample_rate = event.audio_format.sample_rate
        case AudioChunk():
            stats.audio_s += event.sample_count / stats.sample_rate
            if stats.first_audio_s is None:
                stats.first_audio_s = time.monotonic() - (call.first_input or call.started)
                metrics.first_audio.observe(stats.first_audio_s)
        case Done(result):
            note_result(call, result)


def note_result(call: Call, result: SynthesisResult) -> None:
    """Record the result of a synthesis in the call's statistics."""
    call.stats.prompt_tokens = result.usage.prompt_tokens
    call.stats.output_tokens = result.usage.output_tokens
    call.stats.warnings = len(result.warnings)
    call.note_timings(result.timings.queue_s, result.timings.prefill_s)

"""What synthesis answers, as proto messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration

from decoder import AudioFormat, PrependPromptSpeechTokens, StreamingOptions
from llm import FinishReason, RequestTimings
from tts.proto_values import ENCODINGS
from tts.speech import (
    AudioChunk,
    Done,
    FlushDone,
    SegmentTime,
    SessionEvent,
    SpeechEvent,
    SpeechTimings,
    SpeechUsage,
    Started,
    SynthesisResult,
    UtteranceCancelled,
    WordTime,
    WordTimes,
)
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb
from tts.voices import Voice

ENCODING_NUMBERS = {encoding: number for number, encoding in ENCODINGS.items() if number}
FINISH_REASONS: Mapping[FinishReason, common_pb2.FinishReason] = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}
PREPEND_NUMBERS = {
    PrependPromptSpeechTokens.NEVER: pb.PREPEND_PROMPT_SPEECH_TOKENS_NEVER,
    PrependPromptSpeechTokens.ONCE: pb.PREPEND_PROMPT_SPEECH_TOKENS_ONCE,
    PrependPromptSpeechTokens.ROLLING: pb.PREPEND_PROMPT_SPEECH_TOKENS_ROLLING,
}


def to_duration(seconds: float | None) -> Duration | None:
    """Seconds as a Duration; None stays unset."""
    if seconds is None:
        return None
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


def to_format(audio_format: AudioFormat) -> pb.AudioFormat:
    """An output format; always mono."""
    number = ENCODING_NUMBERS[audio_format.encoding]
    return pb.AudioFormat(
        encoding=number, sample_rate_hertz=audio_format.sample_rate, channel_count=1
    )


def to_started(event: Started) -> pb.SynthesisStarted:
    """The first event."""
    return pb.SynthesisStarted(
        request_id=event.request_id,
        model=event.model,
        audio_format=to_format(event.audio_format),
        seed=event.seed,
    )


def to_audio(chunk: AudioChunk) -> pb.AudioChunk:
    """One piece of audio."""
    carry = pb.SpeechTokens(tokens=chunk.carry) if chunk.carry else None
    return pb.AudioChunk(
        data=chunk.data,
        sequence=chunk.sequence,
        sample_offset=chunk.sample_offset,
        sample_count=chunk.sample_count,
        segment_index=chunk.segment_index,
        text_start=chunk.text_start,
        text_end=chunk.text_end,
        token_offset=chunk.token_offset,
        token_count=chunk.token_count,
        buffer_speech_tokens=carry,
        stream_token_offset=chunk.next_token_offset,
    )


def to_words(words: Iterable[WordTime]) -> pb.WordTimings:
    """When words are spoken."""
    return pb.WordTimings(
        words=[
            pb.WordTiming(
                word=word.word,
                start=to_duration(word.start_s),
                end=to_duration(word.end_s),
                text_start=word.text_start,
                text_end=word.text_end,
            )
            for word in words
        ]
    )


def to_segment(segment: SegmentTime) -> pb.SegmentTiming:
    """When a segment is spoken."""
    return pb.SegmentTiming(
        segment_index=segment.index,
        start=to_duration(segment.start_s),
        end=to_duration(segment.end_s),
        text_start=segment.text_start,
        text_end=segment.text_end,
    )


def to_usage(usage: SpeechUsage) -> common_pb2.Usage:
    """What a synthesis cost."""
    return common_pb2.Usage(
        input_characters=usage.input_characters,
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        output_tokens=usage.output_tokens,
        audio_duration=to_duration(usage.audio_s),
    )


def to_timings(timings: SpeechTimings | RequestTimings) -> common_pb2.Timings:
    """When things happened; text has no first audio."""
    return common_pb2.Timings(
        queue=to_duration(timings.queue_s),
        prefill=to_duration(timings.prefill_s),
        time_to_first_audio=to_duration(getattr(timings, "first_audio_s", None)),
        total=to_duration(timings.total_s),
    )


def to_done(result: SynthesisResult) -> pb.SynthesisDone:
    """The last event."""
    return pb.SynthesisDone(
        finish_reason=FINISH_REASONS[result.finish_reason],
        usage=to_usage(result.usage),
        timings=to_timings(result.timings),
        warnings=result.warnings,
    )


def to_session_response(event: SessionEvent) -> pb.StreamingSynthesizeResponse:
    """Any event of a session, in its envelope."""
    match event:
        case FlushDone(flush_id, offset):
            done = pb.FlushDone(flush_id=flush_id, sample_offset=offset)
            return pb.StreamingSynthesizeResponse(flush_done=done)
        case UtteranceCancelled(offset):
            cancelled = pb.UtteranceCancelled(sample_offset=offset)
            return pb.StreamingSynthesizeResponse(cancelled=cancelled)
        case _:
            return pb.StreamingSynthesizeResponse(**_event(event))


def to_stream_response(event: SpeechEvent) -> pb.SynthesizeStreamResponse:
    """Any event of a streamed request, in its envelope."""
    return pb.SynthesizeStreamResponse(**_event(event))


def _event(event: SpeechEvent) -> dict[str, Any]:
    """What both envelopes hold, by its name in them."""
    match event:
        case Started():
            return {"started": to_started(event)}
        case AudioChunk():
            return {"audio": to_audio(event)}
        case WordTimes(words):
            return {"words": to_words(words)}
        case SegmentTime():
            return {"segment": to_segment(event)}
        case Done(result):
            return {"done": to_done(result)}


def to_voice(voice: Voice, model: str) -> pb.Voice:
    """A voice as it is listed; never its recording."""
    return pb.Voice(
        name=voice.name,
        display_name=voice.display_name,
        language_codes=voice.language_codes,
        model=model,
        builtin=voice.is_builtin,
    )


def to_chunking(options: StreamingOptions) -> pb.ChunkingConfig:
    """How streams are cut, in the wire's words (causal = does not see)."""
    return pb.ChunkingConfig(
        chunk_sizes=options.chunk_sizes or (),
        buffer=options.buffer,
        block_causal=not options.masks.buffer_sees_current,
        prepend_prompt_speech_tokens=PREPEND_NUMBERS[options.prepend],
        prepend_prompt_speech_tokens_causal=not options.masks.prompt_sees_current,
    )

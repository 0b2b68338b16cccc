"""Conversion of `SayOptions` to messages of the wire contract, for both clients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from tts.cli.options import Chunking, SayOptions
from tts.cli.script import ScriptTurn
from tts.cli.timestamps import MarkTime, SegmentTimes
from tts.v1 import speech_pb2

Event = speech_pb2.SynthesizeStreamResponse | speech_pb2.StreamingSynthesizeResponse

ENCODINGS: Mapping[str, speech_pb2.AudioEncoding] = MappingProxyType(
    {
        "s16le": speech_pb2.AUDIO_ENCODING_PCM_S16LE,
        "f32le": speech_pb2.AUDIO_ENCODING_PCM_F32LE,
        "mulaw": speech_pb2.AUDIO_ENCODING_MULAW,
        "alaw": speech_pb2.AUDIO_ENCODING_ALAW,
        "wav": speech_pb2.AUDIO_ENCODING_WAV,
        "flac": speech_pb2.AUDIO_ENCODING_FLAC,
        "opus": speech_pb2.AUDIO_ENCODING_OGG_OPUS,
        "mp3": speech_pb2.AUDIO_ENCODING_MP3,
    }
)
PREPEND: Mapping[str, speech_pb2.PrependPromptSpeechTokens] = MappingProxyType(
    {
        "never": speech_pb2.PREPEND_PROMPT_SPEECH_TOKENS_NEVER,
        "once": speech_pb2.PREPEND_PROMPT_SPEECH_TOKENS_ONCE,
        "rolling": speech_pb2.PREPEND_PROMPT_SPEECH_TOKENS_ROLLING,
    }
)
FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "audio_format": "--format, --sample-rate",
        "audio_format.encoding": "--format",
        "audio_format.sample_rate_hertz": "--sample-rate",
        "chunking.buffer": "--buffer",
        "chunking.chunk_sizes": "--chunk-size",
        "sampling.temperature": "--temperature",
        "pitch": "--pitch",
        "instructions": "--instructions",
        "speaking_rate": "--rate",
        "voice.language_code": "--language",
        "voice.name": "--voice",
        "voice.prompt": "--ref-audio",
        "voice.prompt.audio": "--ref-audio",
        "voice.prompt.transcript": "--ref-text",
    }
)
_FIELD = re.compile(
    rf"\bconfig\.(?:synthesis\.)?({'|'.join(sorted(map(re.escape, FLAGS), reverse=True))})(?=: )"
)


def in_flags(message: str) -> str:
    """Replace names of message fields in an error message by the options that set them."""
    return _FIELD.sub(lambda found: FLAGS[found[1]], message)


def synthesis_config(
    options: SayOptions, *, has_word_times: bool = False
) -> speech_pb2.SynthesisConfig:
    """Return the request's configuration; options that were not given stay unset.

    `has_word_times`: the model has them; subtitles get them, and files are checked.
    """
    config = speech_pb2.SynthesisConfig(
        voice=_voice(options),
        audio_format=speech_pb2.AudioFormat(
            encoding=ENCODINGS[options.encoding], sample_rate_hertz=options.sample_rate
        ),
        chunking=_chunking(options.chunking),
        trim_silence=options.trim_silence,
        instructions=options.instructions,
        speech_check=_check(options, has_word_times=has_word_times),
    )
    if options.rate is not None:
        config.speaking_rate = options.rate
    if options.pitch is not None:
        config.pitch = options.pitch
    if options.seed is not None:
        config.sampling.seed = options.seed
    if options.temperature is not None:
        config.sampling.temperature = options.temperature
    if options.timestamps is not None:
        is_cued = has_word_times and options.has_subtitles
        config.timestamps = (
            speech_pb2.TIMESTAMP_GRANULARITY_WORD
            if options.word_timestamps or is_cued
            else speech_pb2.TIMESTAMP_GRANULARITY_SEGMENT
        )
    return config


def _check(options: SayOptions, *, has_word_times: bool) -> speech_pb2.SpeechCheck:
    """Return whether segments are checked; in a file that delays nothing."""
    if options.check is None:
        is_checked = has_word_times and options.writes_files
        return speech_pb2.SPEECH_CHECK_ON if is_checked else speech_pb2.SPEECH_CHECK_UNSPECIFIED
    return speech_pb2.SPEECH_CHECK_ON if options.check else speech_pb2.SPEECH_CHECK_OFF


def dialogue(script: Iterable[ScriptTurn]) -> speech_pb2.Dialogue:
    """Return the dialogue of a script."""
    return speech_pb2.Dialogue(
        turns=[
            speech_pb2.DialogueTurn(
                voice=speech_pb2.VoiceSelection(name=turn.voice), text=turn.text
            )
            for turn in script
        ]
    )


def note_times(times: SegmentTimes, event: Event, sample_rate: int) -> None:
    """Add the times in an event; `sample_rate` in Hz is that of the audio."""
    match event.WhichOneof("event"):
        case "audio":
            chunk = event.audio
            end = chunk.sample_offset + chunk.sample_count
            span_s = chunk.sample_offset / sample_rate, end / sample_rate
            times.add(chunk.segment_index, span_s, (chunk.text_start, chunk.text_end))
        case "words":
            for word in event.words.words:
                times.add_word(_span_s(word), (word.text_start, word.text_end))
        case "segment":
            segment = event.segment
            text_span = segment.text_start, segment.text_end
            times.settle(segment.segment_index, _span_s(segment), text_span)
        case "mark" if isinstance(event, speech_pb2.SynthesizeStreamResponse):
            times.marks.append(_mark(event.mark))


def _mark(mark: speech_pb2.MarkTiming) -> MarkTime:
    kind = speech_pb2.MarkKind.Name(mark.kind).removeprefix("MARK_KIND_").lower()
    time_s = mark.time.ToTimedelta().total_seconds()
    return MarkTime(kind, mark.name, time_s, mark.text_start, mark.text_end)


def _span_s(timing: speech_pb2.WordTiming | speech_pb2.SegmentTiming) -> tuple[float, float]:
    start, end = timing.start.ToTimedelta(), timing.end.ToTimedelta()
    return start.total_seconds(), end.total_seconds()


def _voice(options: SayOptions) -> speech_pb2.VoiceSelection:
    voice = speech_pb2.VoiceSelection(language_code=options.language)
    if options.reference:
        voice.prompt.audio = options.reference
        voice.prompt.transcript = options.reference_text
    elif options.voice:
        voice.name = options.voice
    return voice


def _chunking(chunking: Chunking) -> speech_pb2.ChunkingConfig:
    config = speech_pb2.ChunkingConfig(chunk_sizes=chunking.chunk_sizes)
    if chunking.buffer is not None:
        config.buffer = chunking.buffer
    if chunking.block_causal is not None:
        config.block_causal = chunking.block_causal
    if chunking.prepend is not None:
        config.prepend_prompt_speech_tokens = PREPEND[chunking.prepend]
    if chunking.prepend_prompt_speech_tokens_causal is not None:
        config.prepend_prompt_speech_tokens_causal = chunking.prepend_prompt_speech_tokens_causal
    return config

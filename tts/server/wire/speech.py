"""Conversion between messages of SpeechService and the values of `tts.speech.types`.

A request is checked and converted once, before it enters the queue. What depends on the model is
checked later: the audio of a voice prompt by `VoiceCloner.ready`, the rest by `Synthesizer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from decoder import (
    AudioEncoding,
    AudioFormat,
    CodecSpec,
    PrependPromptSpeechTokens,
    StreamingOptions,
)
from tts.errors import InvalidRequestError
from tts.server.wire.common import (
    FINISH_REASONS,
    Violations,
    given_sampling,
    optional,
    to_duration,
    to_timings,
)
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    ChunkingOverrides,
    Done,
    FlushDone,
    MarkTime,
    SamplingOverrides,
    SegmentTime,
    SessionEvent,
    SpeechEvent,
    SpeechRequest,
    SpeechTimings,
    SpeechUsage,
    Started,
    SynthesisResult,
    TimestampGranularity,
    UtteranceCancelled,
    WordTime,
    WordTimes,
)
from tts.text.lexicon.entries import MAX_PHRASE_CHARACTERS, Alphabet, Pronunciation
from tts.text.markup.document import Document, MarkKind
from tts.text.markup.ssml import read_ssml
from tts.text.markup.tags import read_tags
from tts.text.segmenter import SegmentMode, TextNormalization
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb
from tts.voices.blends import is_blend
from tts.voices.types import VOICE_ID, Voice, VoiceClip

SAMPLE_RATES = (8_000, 48_000)
PROMPT_RATES = (8_000, 192_000)
MAX_CHUNK_SIZES = 64
MAX_CODES_PER_CHUNK = 10_000
MAX_BUFFER_CODES = 500
MAX_TOKEN_OFFSET = 2**31 - 1
MAX_SPEECH_TOKENS = 100_000  # of a voice's prompt, or of an earlier request
MAX_PRONUNCIATIONS = 200

ENCODINGS: Mapping[pb.AudioEncoding, AudioEncoding] = {
    pb.AUDIO_ENCODING_UNSPECIFIED: AudioEncoding.PCM_S16LE,
    pb.AUDIO_ENCODING_PCM_S16LE: AudioEncoding.PCM_S16LE,
    pb.AUDIO_ENCODING_PCM_F32LE: AudioEncoding.PCM_F32LE,
    pb.AUDIO_ENCODING_MULAW: AudioEncoding.MULAW,
    pb.AUDIO_ENCODING_ALAW: AudioEncoding.ALAW,
    pb.AUDIO_ENCODING_WAV: AudioEncoding.WAV,
    pb.AUDIO_ENCODING_FLAC: AudioEncoding.FLAC,
    pb.AUDIO_ENCODING_OGG_OPUS: AudioEncoding.OGG_OPUS,
    pb.AUDIO_ENCODING_MP3: AudioEncoding.MP3,
}
ENCODING_NUMBERS = {encoding: number for number, encoding in ENCODINGS.items() if number}
PREPENDS: Mapping[pb.PrependPromptSpeechTokens, PrependPromptSpeechTokens | None] = {
    pb.PREPEND_PROMPT_SPEECH_TOKENS_UNSPECIFIED: None,
    pb.PREPEND_PROMPT_SPEECH_TOKENS_NEVER: PrependPromptSpeechTokens.NEVER,
    pb.PREPEND_PROMPT_SPEECH_TOKENS_ONCE: PrependPromptSpeechTokens.ONCE,
    pb.PREPEND_PROMPT_SPEECH_TOKENS_ROLLING: PrependPromptSpeechTokens.ROLLING,
}
PREPEND_NUMBERS = {mode: number for number, mode in PREPENDS.items() if mode}
TIMESTAMPS: Mapping[int, TimestampGranularity] = {
    pb.TIMESTAMP_GRANULARITY_UNSPECIFIED: TimestampGranularity.NONE,
    pb.TIMESTAMP_GRANULARITY_SEGMENT: TimestampGranularity.SEGMENT,
    pb.TIMESTAMP_GRANULARITY_WORD: TimestampGranularity.WORD,
}
NORMALIZATIONS: Mapping[int, TextNormalization | None] = {
    pb.TEXT_NORMALIZATION_UNSPECIFIED: None,
    pb.TEXT_NORMALIZATION_OFF: TextNormalization.OFF,
    pb.TEXT_NORMALIZATION_ON: TextNormalization.ON,
}
CHECKS: Mapping[int, bool | None] = {
    pb.SPEECH_CHECK_UNSPECIFIED: None,
    pb.SPEECH_CHECK_OFF: False,
    pb.SPEECH_CHECK_ON: True,
}
SEGMENT_MODES: Mapping[int, SegmentMode] = {
    pb.SEGMENT_MODE_UNSPECIFIED: SegmentMode.SENTENCE,
    pb.SEGMENT_MODE_NONE: SegmentMode.NONE,
    pb.SEGMENT_MODE_SENTENCE: SegmentMode.SENTENCE,
    pb.SEGMENT_MODE_CLAUSE: SegmentMode.CLAUSE,
}
MARK_KINDS: Mapping[MarkKind, pb.MarkKind] = {
    MarkKind.MARK: pb.MARK_KIND_MARK,
    MarkKind.SENTENCE: pb.MARK_KIND_SENTENCE,
    MarkKind.TURN: pb.MARK_KIND_TURN,
}
ALPHABETS: Mapping[pb.PronunciationAlphabet, Alphabet] = {
    pb.PRONUNCIATION_ALPHABET_UNSPECIFIED: Alphabet.LETTERS,
    pb.PRONUNCIATION_ALPHABET_IPA: Alphabet.IPA,
    pb.PRONUNCIATION_ALPHABET_ARPABET: Alphabet.ARPABET,
}
ALPHABET_NUMBERS = {alphabet: number for number, alphabet in ALPHABETS.items()}


def read_input(
    proto: pb.SynthesisInput, max_characters: int, wrong: Violations
) -> tuple[str, Document | None]:
    """Return the text to speak, and its parts if it has markup; "" and None when it is too long.

    Raises InvalidRequestError for wrong markup. Markup inside plain text is not detected.
    """
    kind = proto.WhichOneof("input") or "text"
    field, text = f"input.{kind}", getattr(proto, kind)
    limit = f"has {len(text)} characters, the limit is {max_characters}"
    if not wrong.require(len(text) <= max_characters, field, limit):
        return "", None
    if not wrong.require(bool(text.strip()), field, "is empty"):
        return text, None
    match kind:
        case "ssml":
            return text, read_ssml(text, lenient=proto.lenient, field=field)
        case "tags":
            return text, replace(read_tags(text, field=field), lenient=proto.lenient)
    return text, None


def read_config(
    proto: pb.SynthesisConfig,
    codec: CodecSpec,
    path: str,
    wrong: Violations,
    *,
    text: str = "",
    default_id: str = "",
) -> SpeechRequest:
    """Return a synthesis config as a request without its voice.

    `path` is the config's field path in its message; `default_id` is used for a request without
    an id. Raises InvalidRequestError for more speech tokens than a request may have; other values
    out of range are added to `wrong`.
    """
    if proto.request_id:
        wrong.request_id(proto.request_id, f"{path}.request_id")
    if proto.voice.language_code:
        wrong.language(proto.voice.language_code, f"{path}.voice.language_code")
    encoding, sample_rate = None, 0
    if proto.HasField("audio_format"):
        encoding, sample_rate = _read_format(proto.audio_format, f"{path}.audio_format", wrong)
    for field in ("stop", "stop_token_ids", "ignore_eos"):
        is_unset = not getattr(proto.sampling, field)
        wrong.require(is_unset, f"{path}.sampling.{field}", "is for text generation only")
    chunking = carry = None
    if proto.chunking.ListFields():
        chunking = _read_chunking(proto.chunking, f"{path}.chunking", wrong)
    if proto.HasField("buffer_speech_tokens"):
        field = f"{path}.buffer_speech_tokens"
        carry = _read_carry(proto.buffer_speech_tokens, codec, field, wrong)
    if proto.stream_token_offset:
        _check_offset(proto, codec, f"{path}.stream_token_offset", wrong)
    return SpeechRequest(
        text=text,
        encoding=encoding,
        sample_rate=sample_rate,
        speaking_rate=optional(proto, "speaking_rate", 1.0),
        gain_db=optional(proto, "volume_gain_db", 0.0),
        pitch=proto.pitch,
        trim_silence=proto.trim_silence,
        sampling=SamplingOverrides(**given_sampling(proto.sampling)),
        chunking=chunking,
        segment_mode=wrong.member(proto.segment_mode, SEGMENT_MODES, f"{path}.segment_mode"),
        normalization=wrong.member(
            proto.text_normalization, NORMALIZATIONS, f"{path}.text_normalization"
        ),
        timestamps=wrong.member(proto.timestamps, TIMESTAMPS, f"{path}.timestamps"),
        pronunciations=read_pronunciations(proto.pronunciations, f"{path}.pronunciations", wrong)
        if proto.pronunciations
        else (),
        max_audio_s=optional(proto, "max_audio_duration"),
        request_id=proto.request_id or default_id,
        priority=proto.priority,
        carry=carry,
        token_offset=proto.stream_token_offset,
        lora=proto.lora,
        check=wrong.member(proto.speech_check, CHECKS, f"{path}.speech_check"),
        path=path,
    )


def _read_format(
    proto: pb.AudioFormat, path: str, wrong: Violations
) -> tuple[AudioEncoding | None, int]:
    low, high = SAMPLE_RATES
    rate = proto.sample_rate_hertz
    rate_text = f"must be 0 (the codec's rate) or in [{low}, {high}]"
    wrong.require(rate == 0 or low <= rate <= high, f"{path}.sample_rate_hertz", rate_text)
    channels = proto.channel_count in (0, 1)
    wrong.require(channels, f"{path}.channel_count", "must be 0 or 1: speech is mono")
    encoding = wrong.member(proto.encoding, ENCODINGS, f"{path}.encoding")
    return encoding if proto.encoding else None, rate


def _read_chunking(proto: pb.ChunkingConfig, path: str, wrong: Violations) -> ChunkingOverrides:
    sizes = tuple(proto.chunk_sizes)
    wrong.require(
        len(sizes) <= MAX_CHUNK_SIZES and all(1 <= n <= MAX_CODES_PER_CHUNK for n in sizes),
        f"{path}.chunk_sizes",
        f"must be at most {MAX_CHUNK_SIZES} numbers in [1, {MAX_CODES_PER_CHUNK}]",
    )
    buffer_text = f"must be in [0, {MAX_BUFFER_CODES}]"
    wrong.require(0 <= proto.buffer <= MAX_BUFFER_CODES, f"{path}.buffer", buffer_text)
    prepend = "prepend_prompt_speech_tokens"
    return ChunkingOverrides(
        chunk_sizes=sizes or None,
        buffer=optional(proto, "buffer"),
        block_causal=optional(proto, "block_causal"),
        prepend=wrong.member(proto.prepend_prompt_speech_tokens, PREPENDS, f"{path}.{prepend}"),
        prepend_prompt_speech_tokens_causal=optional(proto, f"{prepend}_causal"),
    )


def read_pronunciations(
    protos: Sequence[pb.Pronunciation], path: str, wrong: Violations
) -> tuple[Pronunciation, ...]:
    """Return the pronunciations of a request or a voice; `path` is their field path."""
    fits = len(protos) <= MAX_PRONUNCIATIONS
    wrong.require(fits, path, f"has more than {MAX_PRONUNCIATIONS} entries")
    entries = []
    for index, proto in enumerate(protos[:MAX_PRONUNCIATIONS]):
        for name in ("phrase", "pronunciation"):
            value = getattr(proto, name)
            length_text = f"must have 1 to {MAX_PHRASE_CHARACTERS} characters"
            ok = bool(value.strip()) and len(value) <= MAX_PHRASE_CHARACTERS
            wrong.require(ok, f"{path}[{index}].{name}", length_text)
        alphabet = wrong.member(proto.alphabet, ALPHABETS, f"{path}[{index}].alphabet")
        entries.append(Pronunciation(proto.phrase, proto.pronunciation, alphabet))
    return tuple(entries)


def _read_carry(
    proto: pb.SpeechTokens, codec: CodecSpec, path: str, wrong: Violations
) -> tuple[int, ...]:
    codes = _read_codes(proto, codec, path, wrong)
    return codes[-(MAX_BUFFER_CODES - MAX_BUFFER_CODES % codec.codes_per_frame) :]


def _read_codes(
    proto: pb.SpeechTokens, codec: CodecSpec, path: str, wrong: Violations
) -> tuple[int, ...]:
    """Return the codes; raise InvalidRequestError for more than MAX_SPEECH_TOKENS."""
    if len(proto.tokens) > MAX_SPEECH_TOKENS:
        raise InvalidRequestError.of(path, f"has more than {MAX_SPEECH_TOKENS} tokens")
    codes, size, per_frame = tuple(proto.tokens), codec.codebook_size, codec.codes_per_frame
    known = all(0 <= code < size for code in codes)
    wrong.require(known, path, f"must be speech tokens in [0, {size})")
    is_whole = len(codes) % per_frame == 0
    wrong.require(is_whole, path, f"must be whole frames of {per_frame} speech tokens")
    return codes


def _check_offset(
    proto: pb.SynthesisConfig, codec: CodecSpec, path: str, wrong: Violations
) -> None:
    offset, per_frame, most = proto.stream_token_offset, codec.codes_per_frame, MAX_TOKEN_OFFSET
    wrong.require(0 <= offset <= most, path, f"must be in [0, {most}]")
    is_whole = offset % per_frame == 0
    wrong.require(is_whole, path, f"must be whole frames of {per_frame} speech tokens")
    continues = proto.HasField("buffer_speech_tokens")
    wrong.require(continues, path, "requires buffer_speech_tokens")


def check_voice_name(name: str, field: str) -> None:
    """Raise InvalidRequestError for a malformed voice name, such as a path or an address."""
    if VOICE_ID.fullmatch(name) is None:
        text = "is no voice name: 1 to 64 of a-z, 0-9, '_', '-'; ListVoices lists the voices"
        raise InvalidRequestError.of(field, text)


def read_voice(proto: pb.VoiceSelection, synthesizer: Synthesizer, path: str) -> Voice:
    """Return the voice that a request selects; its clip, if any, is not encoded yet.

    Raises VoiceNotFoundError, InvalidRequestError, PreconditionError.
    """
    kind = proto.WhichOneof("voice")
    if kind == "prompt":
        clip = read_clip(proto.prompt, f"{path}.prompt")
        return Voice("prompt", clip=clip, language=proto.language_code)
    if kind == "prompt_tokens":
        field = f"{path}.prompt_tokens"
        with Violations() as wrong:
            codes = _read_codes(proto.prompt_tokens, synthesizer.codec, field, wrong)
        prompt = synthesizer.cloner.from_codes(codes, field)
        return Voice("prompt", prompt=prompt, language=proto.language_code)
    if proto.name and not is_blend(proto.name):
        check_voice_name(proto.name, f"{path}.name")
    fields = f"{path}.language_code", f"{path}.name"
    return synthesizer.voices.choose(proto.name, proto.language_code, *fields)


def read_clip(proto: pb.VoicePrompt, path: str) -> VoiceClip:
    """Return a clip; its limits are checked when its audio is read."""
    if not proto.HasField("format"):
        return VoiceClip(proto.audio, proto.transcript, field=path)
    audio_format, field = proto.format, f"{path}.format"
    with Violations() as wrong:
        encoding = wrong.member(audio_format.encoding, ENCODINGS, f"{field}.encoding")
        channels = audio_format.channel_count
        wrong.require(0 <= channels <= 2, f"{field}.channel_count", "must be 1 or 2")
        low, high = PROMPT_RATES
        rate, rate_text = audio_format.sample_rate_hertz, f"must be in [{low}, {high}]"
        known = audio_format.encoding in ENCODINGS
        ok = not known or not encoding.is_raw or low <= rate <= high
        wrong.require(ok, f"{field}.sample_rate_hertz", rate_text)
    read = AudioFormat(encoding, rate, channels or 1)
    return VoiceClip(proto.audio, proto.transcript, read, path)


def to_started(event: Started) -> pb.SynthesisStarted:
    """Return the message of the first event; audio is always mono."""
    return pb.SynthesisStarted(
        request_id=event.request_id,
        model=event.model,
        audio_format=pb.AudioFormat(
            encoding=ENCODING_NUMBERS[event.audio_format.encoding],
            sample_rate_hertz=event.audio_format.sample_rate,
            channel_count=1,
        ),
        seed=event.seed,
    )


def to_audio(chunk: AudioChunk) -> pb.AudioChunk:
    """Return the message of an audio chunk."""
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
    """Return the message of word timings."""
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
    """Return the message of a segment's timing."""
    return pb.SegmentTiming(
        segment_index=segment.index,
        start=to_duration(segment.start_s),
        end=to_duration(segment.end_s),
        text_start=segment.text_start,
        text_end=segment.text_end,
    )


def to_mark(mark: MarkTime) -> pb.MarkTiming:
    """Return the message of a mark's time."""
    return pb.MarkTiming(
        kind=MARK_KINDS[mark.kind],
        name=mark.name,
        time=to_duration(mark.time_s),
        text_start=mark.text_start,
        text_end=mark.text_end,
    )


def to_usage(usage: SpeechUsage) -> common_pb2.Usage:
    """Return the message of a synthesis's usage."""
    return common_pb2.Usage(
        input_characters=usage.input_characters,
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        output_tokens=usage.output_tokens,
        audio_duration=to_duration(usage.audio_s),
    )


def to_done(result: SynthesisResult) -> pb.SynthesisDone:
    """Return the message of the last event."""
    took = result.timings
    return pb.SynthesisDone(
        finish_reason=FINISH_REASONS[result.finish_reason],
        usage=to_usage(result.usage),
        timings=to_timings(took.queue_s, took.prefill_s, took.total_s, took.first_audio_s),
        warnings=result.warnings,
        pronunciations=[
            pb.AppliedPronunciation(
                phrase=said.phrase, spoken=said.spoken, alphabet=ALPHABET_NUMBERS[said.alphabet]
            )
            for said in result.pronunciations
        ],
        num_retried_segments=result.num_retried_segments,
    )


def to_session_response(event: SessionEvent) -> pb.StreamingSynthesizeResponse:
    """Return the response message for any event of a session."""
    match event:
        case FlushDone(flush_id, offset):
            done = pb.FlushDone(flush_id=flush_id, sample_offset=offset)
            return pb.StreamingSynthesizeResponse(flush_done=done)
        case UtteranceCancelled(offset):
            cancelled = pb.UtteranceCancelled(sample_offset=offset)
            return pb.StreamingSynthesizeResponse(cancelled=cancelled)
        case _:
            return pb.StreamingSynthesizeResponse(**to_fields(event))


def read_event(proto: pb.StreamingSynthesizeResponse) -> SessionEvent:
    """Return the event of another server's response: the inverse of `to_session_response`.

    Header patches, the spoken text and the results of checks are not sent. Raises ValueError for
    an event that no session has without flushes and cancellations.
    """
    match proto.WhichOneof("event"):
        case "started":
            output = proto.started.audio_format
            encoding = ENCODINGS[output.encoding]
            return Started(
                proto.started.request_id,
                proto.started.model,
                AudioFormat(encoding, output.sample_rate_hertz, output.channel_count),
                proto.started.seed,
            )
        case "audio":
            return _read_audio(proto.audio)
        case "words":
            return WordTimes(tuple(WordTime(w.word, *_read_span(w)) for w in proto.words.words))
        case "segment":
            return SegmentTime(proto.segment.segment_index, *_read_span(proto.segment))
        case "done":
            return Done(_read_result(proto.done))
        case kind:
            raise ValueError(f"unexpected event {kind}")


def _read_audio(proto: pb.AudioChunk) -> AudioChunk:
    return AudioChunk(
        data=proto.data,
        sequence=proto.sequence,
        sample_offset=proto.sample_offset,
        sample_count=proto.sample_count,
        segment_index=proto.segment_index,
        text_start=proto.text_start,
        text_end=proto.text_end,
        token_offset=proto.token_offset,
        token_count=proto.token_count,
        carry=tuple(proto.buffer_speech_tokens.tokens),
        next_token_offset=proto.stream_token_offset,
    )


def _read_span(proto: pb.WordTiming | pb.SegmentTiming) -> tuple[float, float, int, int]:
    start_s, end_s = (optional(proto, name) or 0.0 for name in ("start", "end"))
    return start_s, end_s, proto.text_start, proto.text_end


def _read_result(proto: pb.SynthesisDone) -> SynthesisResult:
    usage, took = proto.usage, proto.timings
    reasons = {number: reason for reason, number in FINISH_REASONS.items()}
    return SynthesisResult(
        finish_reason=reasons[proto.finish_reason],
        usage=SpeechUsage(
            input_characters=usage.input_characters,
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            output_tokens=usage.output_tokens,
            audio_s=optional(usage, "audio_duration") or 0.0,
        ),
        timings=SpeechTimings(
            queue_s=optional(took, "queue"),
            prefill_s=optional(took, "prefill"),
            first_audio_s=optional(took, "time_to_first_audio"),
            total_s=optional(took, "total") or 0.0,
        ),
        warnings=tuple(proto.warnings),
        pronunciations=tuple(
            Pronunciation(said.phrase, said.spoken, ALPHABETS[said.alphabet])
            for said in proto.pronunciations
        ),
        num_retried_segments=proto.num_retried_segments,
    )


def to_fields(event: SpeechEvent) -> dict[str, Any]:
    """Return the response field of an event by name; the response messages share these fields.

    A session has no marks.
    """
    match event:
        case Started():
            return {"started": to_started(event)}
        case AudioChunk():
            return {"audio": to_audio(event)}
        case WordTimes(words):
            return {"words": to_words(words)}
        case SegmentTime():
            return {"segment": to_segment(event)}
        case MarkTime():
            return {"mark": to_mark(event)}
        case Done(result):
            return {"done": to_done(result)}


def to_voice(voice: Voice, model: str) -> pb.Voice:
    """Return the message of a voice, without its recording."""
    return pb.Voice(
        name=voice.name,
        display_name=voice.display_name,
        language_codes=voice.language_codes,
        model=model,
        builtin=voice.is_builtin,
    )


def to_chunking(options: StreamingOptions) -> pb.ChunkingConfig:
    """Return the message of a stream's chunking options."""
    return pb.ChunkingConfig(
        chunk_sizes=options.chunk_sizes or (),
        buffer=options.buffer,
        block_causal=options.masks.block_causal,
        prepend_prompt_speech_tokens=PREPEND_NUMBERS[options.prepend],
        prepend_prompt_speech_tokens_causal=options.masks.prepend_prompt_speech_tokens_causal,
    )

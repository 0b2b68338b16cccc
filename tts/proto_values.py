"""Speech requests as they come over the wire → checked values of `tts.speech`.

Everything cheap is checked here, before a request takes a place in the queue; voices that need
work (reading a clip) are made afterwards, by `voice_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decoder import AudioEncoding, AudioFormat, CodecSpec, PrependPromptSpeechTokens
from tts.errors import InvalidRequestError, NotAvailableError, Precondition, PreconditionError
from tts.proto_checks import (
    Violations,
    fields_renamed,
    optional_float,
    read_sampling,
    seconds,
)
from tts.speech import (
    ChunkingOverrides,
    SamplingOverrides,
    SpeechRequest,
    TimestampGranularity,
)
from tts.synthesizer import Synthesizer
from tts.text import SegmentMode, TextNormalization, check_text
from tts.v1 import speech_pb2 as pb
from tts.voices import VOICE_ID, Voice, VoicePrompt

SAMPLE_RATES = (8_000, 48_000)
PROMPT_RATES = (8_000, 192_000)
MAX_CHUNK_SIZES = 64
MAX_CODES_PER_CHUNK = 10_000
MAX_BUFFER_CODES = 500
MAX_TOKEN_OFFSET = 2**31 - 1
MAX_SPEECH_TOKENS = 100_000  # of a voice's prompt, or of an earlier request
MAX_PRONUNCIATIONS = 200
MAX_PHRASE_CHARACTERS = 200

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
PREPENDS: Mapping[int, PrependPromptSpeechTokens | None] = {
    pb.PREPEND_PROMPT_SPEECH_TOKENS_UNSPECIFIED: None,
    pb.PREPEND_PROMPT_SPEECH_TOKENS_NEVER: PrependPromptSpeechTokens.NEVER,
    pb.PREPEND_PROMPT_SPEECH_TOKENS_ONCE: PrependPromptSpeechTokens.ONCE,
    pb.PREPEND_PROMPT_SPEECH_TOKENS_ROLLING: PrependPromptSpeechTokens.ROLLING,
}
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
SEGMENT_MODES: Mapping[int, SegmentMode] = {
    pb.SEGMENT_MODE_UNSPECIFIED: SegmentMode.SENTENCE,
    pb.SEGMENT_MODE_NONE: SegmentMode.NONE,
    pb.SEGMENT_MODE_SENTENCE: SegmentMode.SENTENCE,
    pb.SEGMENT_MODE_CLAUSE: SegmentMode.CLAUSE,
}
ALPHABETS: Mapping[int, bool] = {
    pb.PRONUNCIATION_ALPHABET_UNSPECIFIED: True,
    pb.PRONUNCIATION_ALPHABET_IPA: False,
}
FIELD_PATHS = {
    "text": "input.text",
    "voice": "config.voice",
    "pronunciations": "config.pronunciations",
    "buffer_speech_tokens": "config.buffer_speech_tokens",
}
"""Where the synthesizer's names of fields are in a unary or streamed request."""


@dataclass(frozen=True, slots=True)
class WireRules:
    """What a request's config is checked against besides its own ranges."""

    codec: CodecSpec
    path: str = "config"  # of the SynthesisConfig in its message


def read_text(proto: pb.SynthesisInput, max_characters: int) -> str:
    """The text to speak. NotAvailableError for SSML; nothing is guessed from the text itself."""
    if proto.WhichOneof("input") == "ssml":
        raise NotAvailableError("SSML is not available in this release; send plain text")
    text = proto.text
    with Violations() as wrong:
        wrong.require(bool(text.strip()), "input.text", "is empty")
        limit = f"has {len(text)} characters, the limit is {max_characters}"
        if wrong.require(len(text) <= max_characters, "input.text", limit):
            with fields_renamed(FIELD_PATHS):
                check_text(text)
    return text


def read_config(proto: pb.SynthesisConfig, rules: WireRules, text: str = "") -> SpeechRequest:
    """A synthesis config as a request without its voice.

    Raises InvalidRequestError with every wrong field, and PreconditionError for what this model
    cannot do at all.
    """
    path = rules.path
    with Violations() as wrong, fields_renamed({"config": path}):
        wrong.request_id(proto.request_id, f"{path}.request_id")
        wrong.language(proto.voice.language_code, f"{path}.voice.language_code")
        encoding, sample_rate = _read_format(proto.audio_format, f"{path}.audio_format", wrong)
        sampling = _read_sampling(proto, path, wrong)
        chunking = _read_chunking(proto.chunking, f"{path}.chunking", wrong)
        has_modes = _check_modes(proto, path, wrong)
        pronunciations = _read_pronunciations(proto, f"{path}.pronunciations", wrong)
        carry = _read_carry(proto, rules, wrong)
        rate, gain = optional_float(proto, "speaking_rate"), optional_float(proto, "volume_gain_db")
        request = SpeechRequest(
            text=text,
            encoding=encoding,
            sample_rate=sample_rate,
            speaking_rate=1.0 if rate is None else rate,
            gain_db=0.0 if gain is None else gain,
            trim_silence=proto.trim_silence,
            sampling=sampling,
            chunking=chunking,
            segment_mode=SEGMENT_MODES[proto.segment_mode if has_modes else 0],
            normalization=NORMALIZATIONS[proto.text_normalization if has_modes else 0],
            timestamps=TIMESTAMPS[proto.timestamps if has_modes else 0],
            pronunciations=pronunciations,
            max_audio_s=seconds(proto, "max_audio_duration"),
            request_id=proto.request_id,
            priority=proto.priority,
            carry=carry,
            token_offset=_read_offset(proto, rules, wrong),
            lora=proto.lora,
        )
    _check_abilities(proto)
    return request


def _check_abilities(proto: pb.SynthesisConfig) -> None:
    if proto.instructions:
        raise PreconditionError(
            Precondition.INSTRUCTIONS, "this model takes no instructions; leave them out"
        )
    if not all(ALPHABETS[p.alphabet] for p in proto.pronunciations):
        raise PreconditionError(
            Precondition.PRONUNCIATION_ALPHABET,
            "this model reads letters, not IPA; respell the phrase in plain letters",
        )


def _check_modes(proto: pb.SynthesisConfig, path: str, wrong: Violations) -> bool:
    known = (
        wrong.one_of(proto.segment_mode, SEGMENT_MODES, f"{path}.segment_mode"),
        wrong.one_of(proto.text_normalization, NORMALIZATIONS, f"{path}.text_normalization"),
        wrong.one_of(proto.timestamps, TIMESTAMPS, f"{path}.timestamps"),
    )
    return all(known)


def _read_sampling(proto: pb.SynthesisConfig, path: str, wrong: Violations) -> SamplingOverrides:
    for field in ("stop", "stop_token_ids", "ignore_eos"):
        is_unset = not getattr(proto.sampling, field)
        wrong.require(is_unset, f"{path}.sampling.{field}", "is for text generation only")
    return read_sampling(proto.sampling)


def _read_format(
    proto: pb.AudioFormat, path: str, wrong: Violations
) -> tuple[AudioEncoding | None, int]:
    low, high = SAMPLE_RATES
    rate = proto.sample_rate_hertz
    rate_text = f"must be 0 (the codec's own) or in [{low}, {high}]"
    wrong.require(rate == 0 or low <= rate <= high, f"{path}.sample_rate_hertz", rate_text)
    channels = proto.channel_count in (0, 1)
    wrong.require(channels, f"{path}.channel_count", "must be 0 or 1: speech is mono")
    wrong.one_of(proto.encoding, ENCODINGS, f"{path}.encoding")
    return ENCODINGS.get(proto.encoding) if proto.encoding else None, rate


def _read_chunking(proto: pb.ChunkingConfig, path: str, wrong: Violations) -> ChunkingOverrides:
    sizes = tuple(proto.chunk_sizes)
    wrong.require(
        len(sizes) <= MAX_CHUNK_SIZES and all(1 <= n <= MAX_CODES_PER_CHUNK for n in sizes),
        f"{path}.chunk_sizes",
        f"must be at most {MAX_CHUNK_SIZES} numbers in [1, {MAX_CODES_PER_CHUNK}]",
    )
    buffer_text = f"must be in [0, {MAX_BUFFER_CODES}]"
    wrong.require(0 <= proto.buffer <= MAX_BUFFER_CODES, f"{path}.buffer", buffer_text)
    prepend = f"{path}.prepend_prompt_speech_tokens"
    known = wrong.one_of(proto.prepend_prompt_speech_tokens, PREPENDS, prepend)
    causal = "prepend_prompt_speech_tokens_causal"
    return ChunkingOverrides(
        chunk_sizes=sizes or None,
        buffer=proto.buffer if proto.HasField("buffer") else None,
        block_causal=proto.block_causal if proto.HasField("block_causal") else None,
        prepend=PREPENDS[proto.prepend_prompt_speech_tokens if known else 0],
        prompt_causal=getattr(proto, causal) if proto.HasField(causal) else None,
    )


def _read_pronunciations(
    proto: pb.SynthesisConfig, path: str, wrong: Violations
) -> tuple[tuple[str, str], ...]:
    fits = len(proto.pronunciations) <= MAX_PRONUNCIATIONS
    wrong.require(fits, path, f"has more than {MAX_PRONUNCIATIONS} entries")
    entries = proto.pronunciations[:MAX_PRONUNCIATIONS]
    for index, entry in enumerate(entries):
        for name in ("phrase", "pronunciation"):
            value = getattr(entry, name)
            length_text = f"must have 1 to {MAX_PHRASE_CHARACTERS} characters"
            ok = bool(value.strip()) and len(value) <= MAX_PHRASE_CHARACTERS
            wrong.require(ok, f"{path}[{index}].{name}", length_text)
        wrong.one_of(entry.alphabet, ALPHABETS, f"{path}[{index}].alphabet")
    return tuple((entry.phrase, entry.pronunciation) for entry in entries)


def _read_carry(
    proto: pb.SynthesisConfig, rules: WireRules, wrong: Violations
) -> tuple[int, ...] | None:
    if not proto.HasField("buffer_speech_tokens"):
        return None
    size, path = rules.codec.codebook_size, f"{rules.path}.buffer_speech_tokens"
    codes, per_frame = _read_codes(proto.buffer_speech_tokens, path), rules.codec.codes_per_frame
    known = all(0 <= code < size for code in codes)
    wrong.require(known, path, f"must be speech tokens in [0, {size})")
    is_whole = len(codes) % per_frame == 0
    wrong.require(is_whole, path, f"must be whole frames of {per_frame} speech tokens")
    return codes[-(MAX_BUFFER_CODES - MAX_BUFFER_CODES % per_frame) :]


def _read_codes(proto: pb.SpeechTokens, field: str) -> tuple[int, ...]:
    """Raises InvalidRequestError for more than any voice or continuation takes, unread."""
    if len(proto.tokens) > MAX_SPEECH_TOKENS:
        raise InvalidRequestError.of(field, f"has more than {MAX_SPEECH_TOKENS} tokens")
    return tuple(proto.tokens)


def _read_offset(proto: pb.SynthesisConfig, rules: WireRules, wrong: Violations) -> int:
    offset, per_frame = proto.stream_token_offset, rules.codec.codes_per_frame
    path, most = f"{rules.path}.stream_token_offset", MAX_TOKEN_OFFSET
    wrong.require(0 <= offset <= most, path, f"must be in [0, {most}]")
    is_whole = offset % per_frame == 0
    wrong.require(is_whole, path, f"must be whole frames of {per_frame} speech tokens")
    continues = not offset or proto.HasField("buffer_speech_tokens")
    wrong.require(continues, path, "is for a request that sends buffer_speech_tokens")
    return offset


def check_voice_name(name: str, field: str) -> None:
    """Raise unless the text can be a voice's name at all; paths and addresses never can."""
    with Violations() as wrong:
        text = "is no voice name: 1 to 64 of a-z, 0-9, '_', '-'; ListVoices tells what there is"
        wrong.require(VOICE_ID.fullmatch(name) is not None, field, text)


async def voice_of(
    proto: pb.VoiceSelection, synthesizer: Synthesizer, path: str = "config.voice"
) -> Voice:
    """The voice that a request selects; a clip is read and encoded, on other threads.

    Raises VoiceNotFoundError, InvalidRequestError, PreconditionError, PromptTimeoutError.
    """
    kind = proto.WhichOneof("voice")
    with fields_renamed({"voice": path}):
        if kind == "prompt":
            return Voice(
                "prompt", prompt=await read_prompt(proto.prompt, synthesizer, f"{path}.prompt")
            )
        if kind == "prompt_tokens":
            field, codec = "voice.prompt_tokens", synthesizer.codec
            codes = _read_codes(proto.prompt_tokens, field)
            with Violations() as wrong:
                known = all(0 <= code < codec.codebook_size for code in codes)
                wrong.require(known, field, f"must be in [0, {codec.codebook_size})")
                is_whole = len(codes) % codec.codes_per_frame == 0
                wrong.require(is_whole, field, f"must be whole frames of {codec.codes_per_frame}")
            return Voice("prompt", prompt=synthesizer.cloner.from_codes(codes))
    if kind == "name" and proto.name:
        check_voice_name(proto.name, f"{path}.name")
    voice = synthesizer.voices.choose(proto.name, proto.language_code)
    _check_language(voice, proto.language_code, f"{path}.language_code")
    return await synthesizer.cloner.ready(voice)


def _check_language(voice: Voice, language_code: str, field: str) -> None:
    """Raise InvalidRequestError when a voice is known to speak other languages alone."""
    languages = voice.language_codes
    with Violations() as wrong:
        fits = not (language_code and languages) or voice.speaks(language_code)
        wrong.require(fits, field, f"voice '{voice.name}' speaks {', '.join(languages)}")


async def read_prompt(proto: pb.VoicePrompt, synthesizer: Synthesizer, path: str) -> VoicePrompt:
    """A clip's codes; the clip's limits are checked before anything of it is decoded."""
    audio_format = _read_prompt_format(proto, f"{path}.format")
    with fields_renamed({"voice.prompt": path}):
        return await synthesizer.cloner.from_clip(proto.audio, audio_format, proto.transcript)


def _read_prompt_format(proto: pb.VoicePrompt, path: str) -> AudioFormat | None:
    if not proto.HasField("format"):
        return None
    audio_format = proto.format
    with Violations() as wrong:
        known = wrong.one_of(audio_format.encoding, ENCODINGS, f"{path}.encoding")
        encoding = ENCODINGS[audio_format.encoding if known else pb.AUDIO_ENCODING_UNSPECIFIED]
        channels = audio_format.channel_count
        wrong.require(0 <= channels <= 2, f"{path}.channel_count", "must be 1 or 2")
        low, high = PROMPT_RATES
        rate, rate_text = audio_format.sample_rate_hertz, f"must be in [{low}, {high}]"
        ok = not known or not encoding.is_raw or low <= rate <= high
        wrong.require(ok, f"{path}.sample_rate_hertz", rate_text)
    return AudioFormat(encoding, rate, channels or 1)

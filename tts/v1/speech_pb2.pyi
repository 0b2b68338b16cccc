import datetime

from tts.v1 import common_pb2 as _common_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AudioEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUDIO_ENCODING_UNSPECIFIED: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_PCM_S16LE: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_PCM_F32LE: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_MULAW: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_ALAW: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_WAV: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_FLAC: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_OGG_OPUS: _ClassVar[AudioEncoding]
    AUDIO_ENCODING_MP3: _ClassVar[AudioEncoding]

class PrependPromptSpeechTokens(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREPEND_PROMPT_SPEECH_TOKENS_UNSPECIFIED: _ClassVar[PrependPromptSpeechTokens]
    PREPEND_PROMPT_SPEECH_TOKENS_NEVER: _ClassVar[PrependPromptSpeechTokens]
    PREPEND_PROMPT_SPEECH_TOKENS_ONCE: _ClassVar[PrependPromptSpeechTokens]
    PREPEND_PROMPT_SPEECH_TOKENS_ROLLING: _ClassVar[PrependPromptSpeechTokens]

class TimestampGranularity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIMESTAMP_GRANULARITY_UNSPECIFIED: _ClassVar[TimestampGranularity]
    TIMESTAMP_GRANULARITY_SEGMENT: _ClassVar[TimestampGranularity]
    TIMESTAMP_GRANULARITY_WORD: _ClassVar[TimestampGranularity]

class TextNormalization(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TEXT_NORMALIZATION_UNSPECIFIED: _ClassVar[TextNormalization]
    TEXT_NORMALIZATION_OFF: _ClassVar[TextNormalization]
    TEXT_NORMALIZATION_ON: _ClassVar[TextNormalization]

class SegmentMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEGMENT_MODE_UNSPECIFIED: _ClassVar[SegmentMode]
    SEGMENT_MODE_NONE: _ClassVar[SegmentMode]
    SEGMENT_MODE_SENTENCE: _ClassVar[SegmentMode]
    SEGMENT_MODE_CLAUSE: _ClassVar[SegmentMode]

class SpeechCheck(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPEECH_CHECK_UNSPECIFIED: _ClassVar[SpeechCheck]
    SPEECH_CHECK_OFF: _ClassVar[SpeechCheck]
    SPEECH_CHECK_ON: _ClassVar[SpeechCheck]

class PronunciationAlphabet(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRONUNCIATION_ALPHABET_UNSPECIFIED: _ClassVar[PronunciationAlphabet]
    PRONUNCIATION_ALPHABET_IPA: _ClassVar[PronunciationAlphabet]
    PRONUNCIATION_ALPHABET_ARPABET: _ClassVar[PronunciationAlphabet]

class MarkKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MARK_KIND_UNSPECIFIED: _ClassVar[MarkKind]
    MARK_KIND_MARK: _ClassVar[MarkKind]
    MARK_KIND_SENTENCE: _ClassVar[MarkKind]
    MARK_KIND_TURN: _ClassVar[MarkKind]
AUDIO_ENCODING_UNSPECIFIED: AudioEncoding
AUDIO_ENCODING_PCM_S16LE: AudioEncoding
AUDIO_ENCODING_PCM_F32LE: AudioEncoding
AUDIO_ENCODING_MULAW: AudioEncoding
AUDIO_ENCODING_ALAW: AudioEncoding
AUDIO_ENCODING_WAV: AudioEncoding
AUDIO_ENCODING_FLAC: AudioEncoding
AUDIO_ENCODING_OGG_OPUS: AudioEncoding
AUDIO_ENCODING_MP3: AudioEncoding
PREPEND_PROMPT_SPEECH_TOKENS_UNSPECIFIED: PrependPromptSpeechTokens
PREPEND_PROMPT_SPEECH_TOKENS_NEVER: PrependPromptSpeechTokens
PREPEND_PROMPT_SPEECH_TOKENS_ONCE: PrependPromptSpeechTokens
PREPEND_PROMPT_SPEECH_TOKENS_ROLLING: PrependPromptSpeechTokens
TIMESTAMP_GRANULARITY_UNSPECIFIED: TimestampGranularity
TIMESTAMP_GRANULARITY_SEGMENT: TimestampGranularity
TIMESTAMP_GRANULARITY_WORD: TimestampGranularity
TEXT_NORMALIZATION_UNSPECIFIED: TextNormalization
TEXT_NORMALIZATION_OFF: TextNormalization
TEXT_NORMALIZATION_ON: TextNormalization
SEGMENT_MODE_UNSPECIFIED: SegmentMode
SEGMENT_MODE_NONE: SegmentMode
SEGMENT_MODE_SENTENCE: SegmentMode
SEGMENT_MODE_CLAUSE: SegmentMode
SPEECH_CHECK_UNSPECIFIED: SpeechCheck
SPEECH_CHECK_OFF: SpeechCheck
SPEECH_CHECK_ON: SpeechCheck
PRONUNCIATION_ALPHABET_UNSPECIFIED: PronunciationAlphabet
PRONUNCIATION_ALPHABET_IPA: PronunciationAlphabet
PRONUNCIATION_ALPHABET_ARPABET: PronunciationAlphabet
MARK_KIND_UNSPECIFIED: MarkKind
MARK_KIND_MARK: MarkKind
MARK_KIND_SENTENCE: MarkKind
MARK_KIND_TURN: MarkKind

class AudioFormat(_message.Message):
    __slots__ = ("encoding", "sample_rate_hertz", "channel_count")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_HERTZ_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_COUNT_FIELD_NUMBER: _ClassVar[int]
    encoding: AudioEncoding
    sample_rate_hertz: int
    channel_count: int
    def __init__(self, encoding: _Optional[_Union[AudioEncoding, str]] = ..., sample_rate_hertz: _Optional[int] = ..., channel_count: _Optional[int] = ...) -> None: ...

class VoicePrompt(_message.Message):
    __slots__ = ("audio", "format", "transcript")
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    audio: bytes
    format: AudioFormat
    transcript: str
    def __init__(self, audio: _Optional[bytes] = ..., format: _Optional[_Union[AudioFormat, _Mapping]] = ..., transcript: _Optional[str] = ...) -> None: ...

class SpeechTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class VoiceSelection(_message.Message):
    __slots__ = ("name", "prompt", "prompt_tokens", "language_code")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_CODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    prompt: VoicePrompt
    prompt_tokens: SpeechTokens
    language_code: str
    def __init__(self, name: _Optional[str] = ..., prompt: _Optional[_Union[VoicePrompt, _Mapping]] = ..., prompt_tokens: _Optional[_Union[SpeechTokens, _Mapping]] = ..., language_code: _Optional[str] = ...) -> None: ...

class ChunkingConfig(_message.Message):
    __slots__ = ("chunk_sizes", "buffer", "block_causal", "prepend_prompt_speech_tokens", "prepend_prompt_speech_tokens_causal")
    CHUNK_SIZES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CAUSAL_FIELD_NUMBER: _ClassVar[int]
    PREPEND_PROMPT_SPEECH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREPEND_PROMPT_SPEECH_TOKENS_CAUSAL_FIELD_NUMBER: _ClassVar[int]
    chunk_sizes: _containers.RepeatedScalarFieldContainer[int]
    buffer: int
    block_causal: bool
    prepend_prompt_speech_tokens: PrependPromptSpeechTokens
    prepend_prompt_speech_tokens_causal: bool
    def __init__(self, chunk_sizes: _Optional[_Iterable[int]] = ..., buffer: _Optional[int] = ..., block_causal: _Optional[bool] = ..., prepend_prompt_speech_tokens: _Optional[_Union[PrependPromptSpeechTokens, str]] = ..., prepend_prompt_speech_tokens_causal: _Optional[bool] = ...) -> None: ...

class Pronunciation(_message.Message):
    __slots__ = ("phrase", "pronunciation", "alphabet")
    PHRASE_FIELD_NUMBER: _ClassVar[int]
    PRONUNCIATION_FIELD_NUMBER: _ClassVar[int]
    ALPHABET_FIELD_NUMBER: _ClassVar[int]
    phrase: str
    pronunciation: str
    alphabet: PronunciationAlphabet
    def __init__(self, phrase: _Optional[str] = ..., pronunciation: _Optional[str] = ..., alphabet: _Optional[_Union[PronunciationAlphabet, str]] = ...) -> None: ...

class SynthesisConfig(_message.Message):
    __slots__ = ("model", "voice", "audio_format", "speaking_rate", "volume_gain_db", "sampling", "chunking", "timestamps", "text_normalization", "segment_mode", "pronunciations", "instructions", "max_audio_duration", "request_id", "priority", "buffer_speech_tokens", "trim_silence", "lora", "stream_token_offset", "speech_check", "pitch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOICE_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SPEAKING_RATE_FIELD_NUMBER: _ClassVar[int]
    VOLUME_GAIN_DB_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHUNKING_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    TEXT_NORMALIZATION_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_MODE_FIELD_NUMBER: _ClassVar[int]
    PRONUNCIATIONS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_AUDIO_DURATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    BUFFER_SPEECH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRIM_SILENCE_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    STREAM_TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SPEECH_CHECK_FIELD_NUMBER: _ClassVar[int]
    PITCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    voice: VoiceSelection
    audio_format: AudioFormat
    speaking_rate: float
    volume_gain_db: float
    sampling: _common_pb2.SamplingParams
    chunking: ChunkingConfig
    timestamps: TimestampGranularity
    text_normalization: TextNormalization
    segment_mode: SegmentMode
    pronunciations: _containers.RepeatedCompositeFieldContainer[Pronunciation]
    instructions: str
    max_audio_duration: _duration_pb2.Duration
    request_id: str
    priority: int
    buffer_speech_tokens: SpeechTokens
    trim_silence: bool
    lora: str
    stream_token_offset: int
    speech_check: SpeechCheck
    pitch: float
    def __init__(self, model: _Optional[str] = ..., voice: _Optional[_Union[VoiceSelection, _Mapping]] = ..., audio_format: _Optional[_Union[AudioFormat, _Mapping]] = ..., speaking_rate: _Optional[float] = ..., volume_gain_db: _Optional[float] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., chunking: _Optional[_Union[ChunkingConfig, _Mapping]] = ..., timestamps: _Optional[_Union[TimestampGranularity, str]] = ..., text_normalization: _Optional[_Union[TextNormalization, str]] = ..., segment_mode: _Optional[_Union[SegmentMode, str]] = ..., pronunciations: _Optional[_Iterable[_Union[Pronunciation, _Mapping]]] = ..., instructions: _Optional[str] = ..., max_audio_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., buffer_speech_tokens: _Optional[_Union[SpeechTokens, _Mapping]] = ..., trim_silence: _Optional[bool] = ..., lora: _Optional[str] = ..., stream_token_offset: _Optional[int] = ..., speech_check: _Optional[_Union[SpeechCheck, str]] = ..., pitch: _Optional[float] = ...) -> None: ...

class Dialogue(_message.Message):
    __slots__ = ("turns", "pause")
    TURNS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    turns: _containers.RepeatedCompositeFieldContainer[DialogueTurn]
    pause: _duration_pb2.Duration
    def __init__(self, turns: _Optional[_Iterable[_Union[DialogueTurn, _Mapping]]] = ..., pause: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DialogueTurn(_message.Message):
    __slots__ = ("voice", "text", "instructions")
    VOICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    voice: VoiceSelection
    text: str
    instructions: str
    def __init__(self, voice: _Optional[_Union[VoiceSelection, _Mapping]] = ..., text: _Optional[str] = ..., instructions: _Optional[str] = ...) -> None: ...

class SynthesisInput(_message.Message):
    __slots__ = ("text", "ssml", "tags", "dialogue", "lenient")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SSML_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    DIALOGUE_FIELD_NUMBER: _ClassVar[int]
    LENIENT_FIELD_NUMBER: _ClassVar[int]
    text: str
    ssml: str
    tags: str
    dialogue: Dialogue
    lenient: bool
    def __init__(self, text: _Optional[str] = ..., ssml: _Optional[str] = ..., tags: _Optional[str] = ..., dialogue: _Optional[_Union[Dialogue, _Mapping]] = ..., lenient: _Optional[bool] = ...) -> None: ...

class SynthesizeRequest(_message.Message):
    __slots__ = ("config", "input")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    config: SynthesisConfig
    input: SynthesisInput
    def __init__(self, config: _Optional[_Union[SynthesisConfig, _Mapping]] = ..., input: _Optional[_Union[SynthesisInput, _Mapping]] = ...) -> None: ...

class SynthesizeResponse(_message.Message):
    __slots__ = ("audio", "started", "words", "done", "segments", "marks")
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    audio: bytes
    started: SynthesisStarted
    words: _containers.RepeatedCompositeFieldContainer[WordTiming]
    done: SynthesisDone
    segments: _containers.RepeatedCompositeFieldContainer[SegmentTiming]
    marks: _containers.RepeatedCompositeFieldContainer[MarkTiming]
    def __init__(self, audio: _Optional[bytes] = ..., started: _Optional[_Union[SynthesisStarted, _Mapping]] = ..., words: _Optional[_Iterable[_Union[WordTiming, _Mapping]]] = ..., done: _Optional[_Union[SynthesisDone, _Mapping]] = ..., segments: _Optional[_Iterable[_Union[SegmentTiming, _Mapping]]] = ..., marks: _Optional[_Iterable[_Union[MarkTiming, _Mapping]]] = ...) -> None: ...

class SynthesizeStreamRequest(_message.Message):
    __slots__ = ("config", "input")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    config: SynthesisConfig
    input: SynthesisInput
    def __init__(self, config: _Optional[_Union[SynthesisConfig, _Mapping]] = ..., input: _Optional[_Union[SynthesisInput, _Mapping]] = ...) -> None: ...

class SynthesizeStreamResponse(_message.Message):
    __slots__ = ("started", "audio", "words", "done", "segment", "mark")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    started: SynthesisStarted
    audio: AudioChunk
    words: WordTimings
    done: SynthesisDone
    segment: SegmentTiming
    mark: MarkTiming
    def __init__(self, started: _Optional[_Union[SynthesisStarted, _Mapping]] = ..., audio: _Optional[_Union[AudioChunk, _Mapping]] = ..., words: _Optional[_Union[WordTimings, _Mapping]] = ..., done: _Optional[_Union[SynthesisDone, _Mapping]] = ..., segment: _Optional[_Union[SegmentTiming, _Mapping]] = ..., mark: _Optional[_Union[MarkTiming, _Mapping]] = ...) -> None: ...

class Flush(_message.Message):
    __slots__ = ("flush_id",)
    FLUSH_ID_FIELD_NUMBER: _ClassVar[int]
    flush_id: str
    def __init__(self, flush_id: _Optional[str] = ...) -> None: ...

class CancelUtterance(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamingSynthesizeRequest(_message.Message):
    __slots__ = ("config", "text", "flush", "cancel")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    config: StreamingSynthesizeConfig
    text: str
    flush: Flush
    cancel: CancelUtterance
    def __init__(self, config: _Optional[_Union[StreamingSynthesizeConfig, _Mapping]] = ..., text: _Optional[str] = ..., flush: _Optional[_Union[Flush, _Mapping]] = ..., cancel: _Optional[_Union[CancelUtterance, _Mapping]] = ...) -> None: ...

class StreamingSynthesizeConfig(_message.Message):
    __slots__ = ("synthesis", "max_text_delay", "idle_timeout", "eager")
    SYNTHESIS_FIELD_NUMBER: _ClassVar[int]
    MAX_TEXT_DELAY_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    EAGER_FIELD_NUMBER: _ClassVar[int]
    synthesis: SynthesisConfig
    max_text_delay: _duration_pb2.Duration
    idle_timeout: _duration_pb2.Duration
    eager: int
    def __init__(self, synthesis: _Optional[_Union[SynthesisConfig, _Mapping]] = ..., max_text_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., idle_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., eager: _Optional[int] = ...) -> None: ...

class StreamingSynthesizeResponse(_message.Message):
    __slots__ = ("started", "audio", "words", "flush_done", "cancelled", "done", "segment")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    FLUSH_DONE_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    started: SynthesisStarted
    audio: AudioChunk
    words: WordTimings
    flush_done: FlushDone
    cancelled: UtteranceCancelled
    done: SynthesisDone
    segment: SegmentTiming
    def __init__(self, started: _Optional[_Union[SynthesisStarted, _Mapping]] = ..., audio: _Optional[_Union[AudioChunk, _Mapping]] = ..., words: _Optional[_Union[WordTimings, _Mapping]] = ..., flush_done: _Optional[_Union[FlushDone, _Mapping]] = ..., cancelled: _Optional[_Union[UtteranceCancelled, _Mapping]] = ..., done: _Optional[_Union[SynthesisDone, _Mapping]] = ..., segment: _Optional[_Union[SegmentTiming, _Mapping]] = ...) -> None: ...

class SynthesisStarted(_message.Message):
    __slots__ = ("request_id", "model", "audio_format", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    audio_format: AudioFormat
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., audio_format: _Optional[_Union[AudioFormat, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class AudioChunk(_message.Message):
    __slots__ = ("data", "sequence", "sample_offset", "sample_count", "segment_index", "text_start", "text_end", "token_offset", "token_count", "buffer_speech_tokens", "stream_token_offset")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_START_FIELD_NUMBER: _ClassVar[int]
    TEXT_END_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BUFFER_SPEECH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAM_TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    sequence: int
    sample_offset: int
    sample_count: int
    segment_index: int
    text_start: int
    text_end: int
    token_offset: int
    token_count: int
    buffer_speech_tokens: SpeechTokens
    stream_token_offset: int
    def __init__(self, data: _Optional[bytes] = ..., sequence: _Optional[int] = ..., sample_offset: _Optional[int] = ..., sample_count: _Optional[int] = ..., segment_index: _Optional[int] = ..., text_start: _Optional[int] = ..., text_end: _Optional[int] = ..., token_offset: _Optional[int] = ..., token_count: _Optional[int] = ..., buffer_speech_tokens: _Optional[_Union[SpeechTokens, _Mapping]] = ..., stream_token_offset: _Optional[int] = ...) -> None: ...

class WordTiming(_message.Message):
    __slots__ = ("word", "start", "end", "text_start", "text_end")
    WORD_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TEXT_START_FIELD_NUMBER: _ClassVar[int]
    TEXT_END_FIELD_NUMBER: _ClassVar[int]
    word: str
    start: _duration_pb2.Duration
    end: _duration_pb2.Duration
    text_start: int
    text_end: int
    def __init__(self, word: _Optional[str] = ..., start: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., end: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., text_start: _Optional[int] = ..., text_end: _Optional[int] = ...) -> None: ...

class WordTimings(_message.Message):
    __slots__ = ("words",)
    WORDS_FIELD_NUMBER: _ClassVar[int]
    words: _containers.RepeatedCompositeFieldContainer[WordTiming]
    def __init__(self, words: _Optional[_Iterable[_Union[WordTiming, _Mapping]]] = ...) -> None: ...

class SegmentTiming(_message.Message):
    __slots__ = ("segment_index", "start", "end", "text_start", "text_end")
    SEGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TEXT_START_FIELD_NUMBER: _ClassVar[int]
    TEXT_END_FIELD_NUMBER: _ClassVar[int]
    segment_index: int
    start: _duration_pb2.Duration
    end: _duration_pb2.Duration
    text_start: int
    text_end: int
    def __init__(self, segment_index: _Optional[int] = ..., start: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., end: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., text_start: _Optional[int] = ..., text_end: _Optional[int] = ...) -> None: ...

class MarkTiming(_message.Message):
    __slots__ = ("kind", "name", "time", "text_start", "text_end")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TEXT_START_FIELD_NUMBER: _ClassVar[int]
    TEXT_END_FIELD_NUMBER: _ClassVar[int]
    kind: MarkKind
    name: str
    time: _duration_pb2.Duration
    text_start: int
    text_end: int
    def __init__(self, kind: _Optional[_Union[MarkKind, str]] = ..., name: _Optional[str] = ..., time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., text_start: _Optional[int] = ..., text_end: _Optional[int] = ...) -> None: ...

class FlushDone(_message.Message):
    __slots__ = ("flush_id", "sample_offset")
    FLUSH_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    flush_id: str
    sample_offset: int
    def __init__(self, flush_id: _Optional[str] = ..., sample_offset: _Optional[int] = ...) -> None: ...

class UtteranceCancelled(_message.Message):
    __slots__ = ("sample_offset",)
    SAMPLE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    sample_offset: int
    def __init__(self, sample_offset: _Optional[int] = ...) -> None: ...

class SynthesisDone(_message.Message):
    __slots__ = ("finish_reason", "usage", "timings", "warnings", "pronunciations", "num_retried_segments")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    PRONUNCIATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIED_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    timings: _common_pb2.Timings
    warnings: _containers.RepeatedScalarFieldContainer[str]
    pronunciations: _containers.RepeatedCompositeFieldContainer[AppliedPronunciation]
    num_retried_segments: int
    def __init__(self, finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ..., pronunciations: _Optional[_Iterable[_Union[AppliedPronunciation, _Mapping]]] = ..., num_retried_segments: _Optional[int] = ...) -> None: ...

class AppliedPronunciation(_message.Message):
    __slots__ = ("phrase", "spoken", "alphabet")
    PHRASE_FIELD_NUMBER: _ClassVar[int]
    SPOKEN_FIELD_NUMBER: _ClassVar[int]
    ALPHABET_FIELD_NUMBER: _ClassVar[int]
    phrase: str
    spoken: str
    alphabet: PronunciationAlphabet
    def __init__(self, phrase: _Optional[str] = ..., spoken: _Optional[str] = ..., alphabet: _Optional[_Union[PronunciationAlphabet, str]] = ...) -> None: ...

class Voice(_message.Message):
    __slots__ = ("name", "display_name", "language_codes", "model", "builtin")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_CODES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BUILTIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    display_name: str
    language_codes: _containers.RepeatedScalarFieldContainer[str]
    model: str
    builtin: bool
    def __init__(self, name: _Optional[str] = ..., display_name: _Optional[str] = ..., language_codes: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., builtin: _Optional[bool] = ...) -> None: ...

class ListVoicesRequest(_message.Message):
    __slots__ = ("language_code", "page_size", "page_token")
    LANGUAGE_CODE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    language_code: str
    page_size: int
    page_token: str
    def __init__(self, language_code: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListVoicesResponse(_message.Message):
    __slots__ = ("voices", "next_page_token")
    VOICES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    voices: _containers.RepeatedCompositeFieldContainer[Voice]
    next_page_token: str
    def __init__(self, voices: _Optional[_Iterable[_Union[Voice, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateVoiceRequest(_message.Message):
    __slots__ = ("voice_id", "prompt", "display_name", "language_code", "consent", "pronunciations", "blend")
    VOICE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_CODE_FIELD_NUMBER: _ClassVar[int]
    CONSENT_FIELD_NUMBER: _ClassVar[int]
    PRONUNCIATIONS_FIELD_NUMBER: _ClassVar[int]
    BLEND_FIELD_NUMBER: _ClassVar[int]
    voice_id: str
    prompt: VoicePrompt
    display_name: str
    language_code: str
    consent: str
    pronunciations: _containers.RepeatedCompositeFieldContainer[Pronunciation]
    blend: str
    def __init__(self, voice_id: _Optional[str] = ..., prompt: _Optional[_Union[VoicePrompt, _Mapping]] = ..., display_name: _Optional[str] = ..., language_code: _Optional[str] = ..., consent: _Optional[str] = ..., pronunciations: _Optional[_Iterable[_Union[Pronunciation, _Mapping]]] = ..., blend: _Optional[str] = ...) -> None: ...

class CreateVoiceResponse(_message.Message):
    __slots__ = ("voice",)
    VOICE_FIELD_NUMBER: _ClassVar[int]
    voice: Voice
    def __init__(self, voice: _Optional[_Union[Voice, _Mapping]] = ...) -> None: ...

class DeleteVoiceRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteVoiceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerLimits(_message.Message):
    __slots__ = ("max_text_characters", "max_prompt_audio_bytes", "min_prompt_duration", "max_prompt_duration", "max_audio_duration", "max_concurrent_requests", "max_queued_requests", "max_streams_per_client")
    MAX_TEXT_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_AUDIO_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_PROMPT_DURATION_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_DURATION_FIELD_NUMBER: _ClassVar[int]
    MAX_AUDIO_DURATION_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_PER_CLIENT_FIELD_NUMBER: _ClassVar[int]
    max_text_characters: int
    max_prompt_audio_bytes: int
    min_prompt_duration: _duration_pb2.Duration
    max_prompt_duration: _duration_pb2.Duration
    max_audio_duration: _duration_pb2.Duration
    max_concurrent_requests: int
    max_queued_requests: int
    max_streams_per_client: int
    def __init__(self, max_text_characters: _Optional[int] = ..., max_prompt_audio_bytes: _Optional[int] = ..., min_prompt_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_prompt_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_audio_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_concurrent_requests: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_streams_per_client: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "family", "codec", "native_sample_rate_hertz", "speech_tokens_per_second", "voice_cloning", "word_timestamps", "text_generation", "default_chunking", "embeddings", "echo", "structured_output", "adapters", "instructions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NATIVE_SAMPLE_RATE_HERTZ_FIELD_NUMBER: _ClassVar[int]
    SPEECH_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    VOICE_CLONING_FIELD_NUMBER: _ClassVar[int]
    WORD_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    TEXT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_CHUNKING_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    codec: str
    native_sample_rate_hertz: int
    speech_tokens_per_second: float
    voice_cloning: bool
    word_timestamps: bool
    text_generation: bool
    default_chunking: ChunkingConfig
    embeddings: bool
    echo: bool
    structured_output: bool
    adapters: _containers.RepeatedScalarFieldContainer[str]
    instructions: bool
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., codec: _Optional[str] = ..., native_sample_rate_hertz: _Optional[int] = ..., speech_tokens_per_second: _Optional[float] = ..., voice_cloning: _Optional[bool] = ..., word_timestamps: _Optional[bool] = ..., text_generation: _Optional[bool] = ..., default_chunking: _Optional[_Union[ChunkingConfig, _Mapping]] = ..., embeddings: _Optional[bool] = ..., echo: _Optional[bool] = ..., structured_output: _Optional[bool] = ..., adapters: _Optional[_Iterable[str]] = ..., instructions: _Optional[bool] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "models", "limits", "encodings")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    version: str
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    limits: ServerLimits
    encodings: _containers.RepeatedScalarFieldContainer[AudioEncoding]
    def __init__(self, version: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ..., limits: _Optional[_Union[ServerLimits, _Mapping]] = ..., encodings: _Optional[_Iterable[_Union[AudioEncoding, str]]] = ...) -> None: ...

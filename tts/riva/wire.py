"""Conversion of Riva's messages to those of SpeechService and back, and of the fields in errors.

Limits and defaults are those of SpeechService, whose checks run on the converted request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from google.protobuf.json_format import ParseDict, ParseError

from tts.errors import (
    FieldViolation,
    InvalidRequestError,
    NotAvailableError,
    Precondition,
    PreconditionError,
    VoiceNotFoundError,
)
from tts.riva.stubs import common_pb2
from tts.riva.stubs import tts_pb2 as pb
from tts.server.wire.common import SAMPLING_FIELDS, Violations
from tts.server.wire.speech import MAX_PRONUNCIATIONS
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import WordTime
from tts.text.lexicon.alphabets import is_arpabet
from tts.v1 import speech_pb2
from tts.voices.blends import is_blend
from tts.voices.types import VOICE_ID, Voice

ENCODINGS: Mapping[int, speech_pb2.AudioEncoding] = {
    common_pb2.ENCODING_UNSPECIFIED: speech_pb2.AUDIO_ENCODING_PCM_S16LE,
    common_pb2.LINEAR_PCM: speech_pb2.AUDIO_ENCODING_PCM_S16LE,
    common_pb2.FLAC: speech_pb2.AUDIO_ENCODING_FLAC,
    common_pb2.MULAW: speech_pb2.AUDIO_ENCODING_MULAW,
    common_pb2.OGGOPUS: speech_pb2.AUDIO_ENCODING_OGG_OPUS,
    common_pb2.ALAW: speech_pb2.AUDIO_ENCODING_ALAW,
}
HEADERLESS = (common_pb2.LINEAR_PCM, common_pb2.MULAW, common_pb2.ALAW)
FILE_STARTS = (b"RIFF", b"fLaC", b"OggS")
PROMPT_RATE = 22_050  # Hz; Riva's default

CONFIG_OPTIONS = ("speaking_rate", "volume_gain_db", "pitch")
OPTIONS = (*CONFIG_OPTIONS, *sorted(SAMPLING_FIELDS))
"""Keys of `custom_configuration`: the fields of SynthesisConfig and SamplingParams."""

FIELDS: Mapping[str, str] = {
    "input.text": "text",
    "input.ssml": "text",
    "config.request_id": "id.value",
    "config.voice.name": "voice_name",
    "config.voice.language_code": "language_code",
    "config.voice.prompt": "zero_shot_data",
    "config.voice.prompt.audio": "zero_shot_data.audio_prompt",
    "config.voice.prompt.transcript": "zero_shot_data.transcript",
    "config.voice.prompt.format.encoding": "zero_shot_data.encoding",
    "config.voice.prompt.format.sample_rate_hertz": "zero_shot_data.sample_rate_hz",
    "config.audio_format": "sample_rate_hz",  # a rate that the encoding lacks
    "config.audio_format.encoding": "encoding",
    "config.audio_format.sample_rate_hertz": "sample_rate_hz",
    "config.pronunciations": "custom_dictionary",
    "config.pronunciations.phrase": "custom_dictionary",
    "config.pronunciations.pronunciation": "custom_dictionary",
    **{f"config.{name}": f"custom_configuration[{name}]" for name in CONFIG_OPTIONS},
    **{f"config.sampling.{name}": f"custom_configuration[{name}]" for name in SAMPLING_FIELDS},
}
"""Field paths of SpeechService, without indices, to those of Riva."""

PRECONDITIONS: Mapping[Precondition, str] = {
    Precondition.VOICE_CLONING: "zero_shot_data",
    Precondition.VOICE_PROMPT: "zero_shot_data",
    Precondition.WORD_TIMESTAMPS: "enable_word_time_offsets",
}
"""Fields that ask for, or would replace, what a model lacks."""

_INDEX = re.compile(r"\[\d+\]")
_SSML = re.compile(r"\s*(<\?xml[^>]*>\s*)?<speak[\s>]")
_PHONETIC = re.compile(r"[\u0250-\u02ff\u1d00-\u1dbfæðøŋœθβχ/]")
"""Signs of the International Phonetic Alphabet that no respelling has."""


def riva_name(field: str) -> str:
    """Return the field path in Riva's request for one of SpeechService; others are unchanged."""
    path = field.replace("config.synthesis", "config", 1)
    name = FIELDS.get(_INDEX.sub("", path))
    return field if name is None else name + "".join(_INDEX.findall(path))


@contextmanager
def riva_names() -> Iterator[None]:
    """Name Riva's fields in the errors that the block raises."""
    try:
        yield
    except InvalidRequestError as error:
        violations = (FieldViolation(riva_name(v.field), v.description) for v in error.violations)
        raise InvalidRequestError(*violations) from error
    except PreconditionError as error:
        if error.reason not in PRECONDITIONS:
            raise
        message = f"{PRECONDITIONS[error.reason]}: {error}"
        raise PreconditionError(error.reason, message) from error


def to_config(
    request: pb.SynthesizeSpeechRequest, synthesizer: Synthesizer, wrong: Violations
) -> speech_pb2.SynthesisConfig:
    """Return a request's settings: all but its text.

    Raises VoiceNotFoundError for a name that no voice can have.
    """
    config = speech_pb2.SynthesisConfig(
        voice=_voice(request, synthesizer, wrong),
        audio_format=speech_pb2.AudioFormat(
            encoding=wrong.member(request.encoding, ENCODINGS, "encoding"),
            sample_rate_hertz=request.sample_rate_hz,
        ),
        pronunciations=_pronunciations(request.custom_dictionary, wrong),
        request_id=request.id.value,
    )
    if request.enable_word_time_offsets:
        config.timestamps = speech_pb2.TIMESTAMP_GRANULARITY_WORD
    _set_options(config, request.custom_configuration, wrong)
    return config


def to_input(text: str) -> speech_pb2.SynthesisInput:
    """Return a request's text, which may be SSML."""
    if _SSML.match(text):
        return speech_pb2.SynthesisInput(ssml=text)
    return speech_pb2.SynthesisInput(text=text)


def check_phrase(text: str, max_characters: int) -> None:
    """Check a text of a call that streams text in.

    Raises InvalidRequestError for one that is too long, and NotAvailableError for SSML.
    """
    if len(text) > max_characters:
        limit = f"has {len(text)} characters, the limit is {max_characters}"
        raise InvalidRequestError.of("text", limit)
    if _SSML.match(text):
        raise NotAvailableError("SSML is for Synthesize; text that is streamed in must be plain")


def check_settings(first: pb.SynthesizeSpeechRequest, later: pb.SynthesizeSpeechRequest) -> None:
    """Raise InvalidRequestError for settings that differ from those of the call's first request."""
    with Violations() as wrong:
        for field, value in later.ListFields():
            is_same = field.name == "text" or value == getattr(first, field.name)
            wrong.require(is_same, field.name, "must be that of the call's first request, or unset")


def to_configs(
    voices: Sequence[Voice], model: str, sample_rate: int
) -> Iterator[pb.RivaSynthesisConfigResponse.Config]:
    """Yield a config for each language of the voices; "" has the voices that state none."""
    by_language: dict[str, list[str]] = {}
    for voice in voices:
        for language in voice.language_codes or ("",):
            by_language.setdefault(language, []).append(voice.name)
    for language, names in by_language.items():
        yield pb.RivaSynthesisConfigResponse.Config(
            model_name=model,
            parameters={
                "language_code": language,
                "voice_name": model,
                "subvoices": ",".join(f"{name}:{index}" for index, name in enumerate(names)),
                "sample_rate": str(sample_rate),
            },
        )


def to_words(words: Iterable[WordTime]) -> pb.SynthesizeSpeechResponseMetadata:
    """Return metadata with the times of words, in milliseconds."""
    return pb.SynthesizeSpeechResponseMetadata(
        words=[
            pb.WordTiming(
                word=word.word,
                start_time=round(word.start_s * 1000),
                end_time=round(word.end_s * 1000),
            )
            for word in words
        ],
        predicted_durations=[word.end_s - word.start_s for word in words],
    )


def _voice(
    request: pb.SynthesizeSpeechRequest, synthesizer: Synthesizer, wrong: Violations
) -> speech_pb2.VoiceSelection:
    language = request.language_code
    if request.HasField("zero_shot_data"):
        prompt = _prompt(request.zero_shot_data, wrong)
        return speech_pb2.VoiceSelection(prompt=prompt, language_code=language)
    known = synthesizer.voices.voices()
    if not request.voice_name:
        # Riva's clients always send a language, also to models whose voices state none.
        has_languages = any(voice.language_codes for voice in known)
        return speech_pb2.VoiceSelection(language_code=language if has_languages else "")
    name = request.voice_name.removeprefix(f"{synthesizer.settings.model}.")
    if VOICE_ID.fullmatch(name) is None and not is_blend(name):
        raise VoiceNotFoundError(name, (voice.name for voice in known))
    return speech_pb2.VoiceSelection(name=name, language_code=language)


def _prompt(data: pb.ZeroShotData, wrong: Violations) -> speech_pb2.VoicePrompt:
    prompt = speech_pb2.VoicePrompt(audio=data.audio_prompt, transcript=data.transcript)
    encoding = wrong.member(data.encoding, ENCODINGS, "zero_shot_data.encoding")
    if data.encoding in HEADERLESS and not data.audio_prompt.startswith(FILE_STARTS):
        prompt.format.encoding = encoding
        prompt.format.sample_rate_hertz = data.sample_rate_hz or PROMPT_RATE
    return prompt


def _pronunciations(dictionary: str, wrong: Violations) -> Iterator[speech_pb2.Pronunciation]:
    """Yield the entries of "word  pronunciation,word  pronunciation"."""
    entries = (entry.strip() for entry in dictionary.split(",", MAX_PRONUNCIATIONS))
    for index, entry in enumerate(filter(None, entries)):
        phrase, separator, pronunciation = entry.partition("  ")
        text = "must be a word, two spaces and its pronunciation"
        if wrong.require(bool(separator), f"custom_dictionary[{index}]", text):
            yield speech_pb2.Pronunciation(
                phrase=phrase,
                pronunciation=pronunciation.strip(),
                alphabet=_alphabet(pronunciation),
            )


def _alphabet(pronunciation: str) -> speech_pb2.PronunciationAlphabet:
    """Return the alphabet of a pronunciation by its signs; ARPAbet is {@AH0} or AH0."""
    if "{@" in pronunciation or is_arpabet(pronunciation):
        return speech_pb2.PRONUNCIATION_ALPHABET_ARPABET
    if _PHONETIC.search(pronunciation):
        return speech_pb2.PRONUNCIATION_ALPHABET_IPA
    return speech_pb2.PRONUNCIATION_ALPHABET_UNSPECIFIED


def _set_options(
    config: speech_pb2.SynthesisConfig, options: Mapping[str, str], wrong: Violations
) -> None:
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        text = f"is no option of this server; there are: {', '.join(OPTIONS)}"
        wrong.require(False, f"custom_configuration[{unknown[0]}]", text)
    for name in options.keys() & set(OPTIONS):
        try:
            ParseDict({name: options[name]}, config if name in CONFIG_OPTIONS else config.sampling)
        except ParseError:
            wrong.require(False, f"custom_configuration[{name}]", "must be a number")

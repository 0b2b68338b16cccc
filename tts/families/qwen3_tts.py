"""Qwen3-TTS with the codec of 12.5 Hz: text ids paired with the marks of a codec, then frames.

    instructions   <|im_start|> user \\n … <|im_end|> \\n                           text alone
    role           <|im_start|> assistant \\n
    marks          pad+think pad+begin pad+LANGUAGE pad+end [pad+SPEAKER] bos+codec_pad
    text           word+codec_pad … eos+codec_pad pad+codec_bos                 → frames, codec_eos
    voice prompt   its transcript in front of the words, its frames behind codec_bos
                   pad+vector in place of pad+SPEAKER; alone without a transcript

This is the layout `non_streaming_mode`. In the other one each frame has a word, and one more
stands in front of the first frame:

    text           word+codec_bos                          → word+frame … eos+frame pad+frame …

Frames have a text id in both. Without a language `nothink` replaces `think`. pad, bos and eos are
text ids for speech, `codec_…` codes of the first codebook. The `tts_model_type` decides on
voices: named speakers (custom_voice), described ones (voice_design), recordings (base).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from decoder import CodecSpec
from llm import CheckpointError, SamplingParams, Token, paired_token
from tts.checkpoint.files import SPEECH_FILE
from tts.families.base import (
    Checkpoint,
    FamilyTraits,
    FrameVocabulary,
    SpeechFamily,
    SpeechVocabulary,
    with_texts,
)
from tts.text.languages.registry import primary
from tts.voices.types import VOICE_ID, Voice

ARCHITECTURE = "Qwen3TTSForConditionalGeneration"
CODEC_FOLDER = "speech_tokenizer"
FRAMES_PER_SECOND = 12.5
LONGEST_S = 40
MIN_FRAMES = 2
CUSTOM_VOICE, VOICE_DESIGN, BASE = "custom_voice", "voice_design", "base"
ENCODER_KEY = "speaker_encoder_config"
LAYOUT_KEY = "non_streaming_mode"  # in speech.json, as in the package qwen-tts
SMALL = "0b6"  # the size whose named voices read no instructions
LANGUAGES = {
    "zh": "chinese",
    "en": "english",
    "ja": "japanese",
    "ko": "korean",
    "de": "german",
    "fr": "french",
    "ru": "russian",
    "pt": "portuguese",
    "es": "spanish",
    "it": "italian",
}


@dataclass(frozen=True, slots=True)
class Marks:
    """Text ids and codes with a meaning, by their keys in config.json."""

    im_start_token_id: int
    im_end_token_id: int
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_token_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int


class Qwen3TTSFamily(SpeechFamily):
    """Qwen3-TTS of 0.6B and 1.7B: CustomVoice, VoiceDesign and Base."""

    name = "qwen3_tts"
    overrides = SpeechFamily.overrides | {LAYOUT_KEY}

    def __init__(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.folder / "config.json"
        config = _Part(path, checkpoint.config)
        talker = config.part("talker_config")
        self._kind = str(config.values.get("tts_model_type"))
        if self._kind not in (CUSTOM_VOICE, VOICE_DESIGN, BASE):
            raise CheckpointError(f"{path}: tts_model_type={self._kind!r} is not supported")
        self._has_encoder = self._kind == BASE and bool(config.values.get(ENCODER_KEY))
        self._has_text_first = checkpoint.speech.get(LAYOUT_KEY, self._kind != BASE)
        if not isinstance(self._has_text_first, bool):
            raise CheckpointError(
                f"{checkpoint.folder / SPEECH_FILE}: {LAYOUT_KEY} must be true or false"
            )
        self._is_small = config.values.get("tts_model_size") == SMALL
        self._marks = Marks(
            **{
                key.name: (talker if key.name.startswith("codec_") else config).number(key.name)
                for key in fields(Marks)
            }
        )
        self._num_texts = talker.number("text_vocab_size")
        self._num_codebooks = talker.number("num_code_groups")
        self._codebook_size = talker.part("code_predictor_config").number("vocab_size")
        self._speakers, self._languages = talker.codes("spk_id"), talker.codes("codec_language_id")
        self._dialects = talker.dialects(self._languages)
        if self._kind == CUSTOM_VOICE and not self._speakers:
            raise CheckpointError(f"{path}: a model of named voices must have spk_id")
        super().__init__(checkpoint)
        start, encode = self._marks.im_start_token_id, self.tokenizer.encode
        self._user = (start, *encode("user\n"))
        self._role = (start, *encode("assistant\n"))
        self._end_of_turn = (self._marks.im_end_token_id, *encode("\n"))

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        if not (checkpoint.folder / "config.json").is_file():
            return False  # only a tokenizer
        return ARCHITECTURE in (checkpoint.config.get("architectures") or ())

    def own_traits(self) -> FamilyTraits:
        count, has_names = self._num_codebooks, self._kind == CUSTOM_VOICE
        return FamilyTraits(
            codec=CODEC_FOLDER,
            voices=tuple(self._named_voices()) if has_names else (self._invented_voice(),),
            max_codes=int(LONGEST_S * FRAMES_PER_SECOND) * count,
            min_codes=MIN_FRAMES * count,
            sampling=SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05),
            later_prefix="subtalker_",
            language="",
            invents_voices=not has_names,
            needs_transcript=not self._has_encoder,
            takes_vectors=self._has_encoder,
            takes_codes=self._kind == BASE,
            takes_instructions=self._kind == VOICE_DESIGN or (has_names and not self._is_small),
        )

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        self.check_codec(spec, self._codebook_size, self._num_codebooks)
        end = (self._marks.codec_eos_token_id, *(0 for _ in range(self._num_codebooks)))
        return FrameVocabulary(self._codebook_size, end, text_pad=self._marks.tts_pad_token_id)

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        marks, asked = self._marks, voice.instructions
        instructions = self.tokenizer.encode(asked) if asked else ()
        turn = (*self._user, *instructions, *self._end_of_turn) if asked else ()
        opening = (*turn, *self._role, *self._marked(voice))
        words, frames = self._words(text, voice), vocabulary.token_ids(_codes_of(voice))
        if self._has_text_first:
            return (
                *opening,
                *(self._pair(word, marks.codec_pad_id) for word in words),
                self._pair(marks.tts_pad_token_id, marks.codec_bos_id),
                *frames,
            )
        first, *rest = words
        return (*opening, self._pair(first, marks.codec_bos_id), *with_texts(frames, rest))

    def frame_texts(self, text: str, voice: Voice) -> tuple[int, ...]:
        """See `SpeechFamily`: the words behind those that the prompt has."""
        if self._has_text_first:
            return ()
        num_frames = len(_codes_of(voice)) // self._num_codebooks
        return self._words(text, voice)[1 + num_frames :]

    def _words(self, text: str, voice: Voice) -> tuple[int, ...]:
        """Return the text ids that are spoken, those of the voice's recording first."""
        encode, said = self.tokenizer.encode, voice.prompt.transcript if voice.prompt else ""
        return (*encode(said), *encode(text), self._marks.tts_eos_token_id)

    def _marked(self, voice: Voice) -> Iterator[Token]:
        """Yield the positions of language and speaker."""
        marks, language = self._marks, self._language_of(voice)
        if language is None:
            codes = [marks.codec_nothink_id, marks.codec_think_bos_id]
        else:
            codes = [marks.codec_think_id, marks.codec_think_bos_id, language]
        codes.append(marks.codec_think_eos_id)
        if voice.speaker:
            codes.append(self._speaker(voice))
        yield from (self._pair(marks.tts_pad_token_id, code) for code in codes)
        if voice.prompt is not None and voice.prompt.vector:
            yield voice.prompt.vector
        yield self._pair(marks.tts_bos_token_id, marks.codec_pad_id)

    def _speaker(self, voice: Voice) -> int:
        if voice.speaker not in self._speakers:
            known = ", ".join(self._speakers) or "none"
            raise CheckpointError(
                f"voice '{voice.name}': there is no speaker {voice.speaker}; there are: {known}"
            )
        return self._speakers[voice.speaker]

    def _language_of(self, voice: Voice) -> int | None:
        """Return the code of the text's language; None: the model decides.

        Chinese, and a language that is not stated, are a speaker's dialect, if the speaker has one.
        """
        name = LANGUAGES.get(primary(voice.language), "") if voice.language else ""
        if name in ("", "chinese") and voice.speaker in self._dialects:
            return self._dialects[voice.speaker]
        return self._languages.get(name)

    def _pair(self, text_id: int, code: int) -> int:
        return paired_token(text_id, code, self._num_texts)

    @property
    def _language_codes(self) -> tuple[str, ...]:
        return tuple(code for code, name in LANGUAGES.items() if name in self._languages)

    def _named_voices(self) -> Iterator[Voice]:
        for speaker in self._speakers:
            name = speaker.lower().replace(" ", "_")
            if not VOICE_ID.fullmatch(name):
                raise CheckpointError(f"{self.name}: the speaker {speaker!r} is no name of a voice")
            title = name.replace("_", " ").title()
            yield Voice(name, title, self._language_codes, speaker=speaker, is_builtin=True)

    def _invented_voice(self) -> Voice:
        title = "As described" if self._kind == VOICE_DESIGN else "Default"
        return Voice("default", title, self._language_codes, is_builtin=True)


def _codes_of(voice: Voice) -> tuple[int, ...]:
    return voice.prompt.codes if voice.prompt else ()


@dataclass(frozen=True, slots=True)
class _Part:
    """An object of a config.json; errors name the file and the key."""

    path: object
    values: Mapping[str, Any]

    def part(self, key: str) -> _Part:
        found = self.values.get(key)
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path}: {key} must be an object")
        return _Part(self.path, found)

    def number(self, key: str) -> int:
        found = self.values.get(key)
        if type(found) is not int or found < 0:
            raise CheckpointError(f"{self.path}: {key}={found!r} must be a whole number")
        return found

    def codes(self, key: str) -> Mapping[str, int]:
        """Return the codes of names; none if the key is missing."""
        found, size = self.values.get(key) or {}, self.number("vocab_size")
        if not isinstance(found, dict) or not all(
            type(code) is int and 0 <= code < size for code in found.values()
        ):
            raise CheckpointError(f"{self.path}: {key} must have a code below {size} for each name")
        return found

    def dialects(self, languages: Mapping[str, int]) -> Mapping[str, int]:
        """Return the code of the dialect of each speaker who has one."""
        given = self.values.get("spk_is_dialect") or {}
        named = {speaker: dialect for speaker, dialect in given.items() if dialect}
        for speaker, dialect in named.items():
            if dialect not in languages:
                raise CheckpointError(f"{self.path}: {dialect} of {speaker} is no known language")
        return {speaker: languages[dialect] for speaker, dialect in named.items()}

"""`SpeechFamily`: how one kind of checkpoint speaks. A family is data and small overrides.

Checkpoint (files, as data) ─▶ SpeechFamily ─▶ vocabulary   which tokens are codes
                                             ▶ prompt       text + voice as token ids
                                             ▶ voices       what can be asked for
                                             ▶ traits       limits, sampling, codec
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from decoder import CodecSpec
from llm import CheckpointError, SamplingParams
from tts.chat import ChatTemplate, load_chat_template
from tts.checkpoint import load_sampling_defaults, load_speech_file, read_json
from tts.text import TextNormalization, TextOptions
from tts.tokenizer import TextTokenizer
from tts.vocabulary import SpeechVocabulary
from tts.voices import Voice, VoiceSet, load_voices, sample_voices

VOICES_FILE = "voices.json"
SAMPLES = "samples"


class Checkpoint:
    """One checkpoint folder, read as data when asked for. No code in it is run.

    Pickles (codes of voice samples) are read only with `allow_pickle`, and only as tensors.
    """

    def __init__(
        self, folder: Path, chat_template: str | None = None, *, allow_pickle: bool = False
    ) -> None:
        self.folder = folder
        self.allow_pickle = allow_pickle
        self._chat_template = chat_template

    def __repr__(self) -> str:
        return f"Checkpoint({self.folder})"

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.folder / "tokenizer.json")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return read_json(self.folder / "config.json")

    @cached_property
    def speech(self) -> Mapping[str, Any]:
        """speech.json, which names the family and overrides its traits; {} when there is none."""
        return load_speech_file(self.folder)

    @cached_property
    def chat(self) -> ChatTemplate | None:
        return load_chat_template(self.folder, self._chat_template)

    @property
    def vocab_size(self) -> int:
        """Rows of the language model's embedding; 0 when config.json does not say."""
        size = self.config.get("vocab_size", 0)
        return size if isinstance(size, int) else 0


@dataclass(frozen=True, slots=True)
class FamilyTraits:
    """The data of a family. A call is one run of the language model: one segment of the text.

    `codec` is a folder beside the language model or a registered codec's name, and
    `codec_repository` where the codec is published on its own. `sampling` None: what the
    checkpoint's generation_config.json recommends.
    """

    codec: str = "codec"
    codec_repository: str = ""
    voices_file: str = VOICES_FILE
    voices: tuple[Voice, ...] = ()
    max_characters: int = 200  # of one call
    tokens_per_character: int = 1  # at most, by and large: what room a text needs
    max_codes: int = 500  # of one call
    min_codes: int = 1  # of one call
    max_seq_len: int | None = None  # shorter than what the language model could hold
    sampling: SamplingParams | None = None
    ascii_only: bool = False  # the model knows no other letters
    english_figures: bool = True  # figures and abbreviations become English words unless told
    tags: tuple[str, ...] = ()  # words of the text that are sounds, such as <laugh>
    invents_voices: bool = False  # a call without a prompt makes up a speaker
    steady_loudness: bool = False  # segments vary in loudness: later ones follow the first

    def text_options(
        self, normalization: TextNormalization | None = None, voice: Voice | None = None
    ) -> TextOptions:
        """How text is read for the model; `normalization` None: as it was trained, but nothing
        is put into English words for a voice of another language.
        """
        languages = voice.language_codes if voice is not None and not self.ascii_only else ()
        is_foreign = voice is not None and bool(languages) and not voice.speaks("en")
        reads_english = self.english_figures and not is_foreign
        own = TextNormalization.ON if reads_english else TextNormalization.OFF
        return TextOptions(
            max_characters=self.max_characters,
            normalization=normalization or own,
            ascii_only=self.ascii_only,
            tags=self.tags,
        )


class SpeechFamily(ABC):
    """One checkpoint of a family. Subclasses are named in `tts.families.registry`."""

    name: ClassVar[str]
    overrides: ClassVar[frozenset[str]] = frozenset(
        {"family", "codec", "voices", "max_characters", "max_codes"}
    )
    """Keys that this family reads from speech.json."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.tokenizer = checkpoint.tokenizer
        self.traits = self._overridden(self.own_traits())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint.folder})"

    @classmethod
    @abstractmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint that names no family is of this one."""

    @abstractmethod
    def own_traits(self) -> FamilyTraits:
        """The family's data, before speech.json."""

    @abstractmethod
    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        """The code tokens. Raises CheckpointError when the codec has other codes than these."""

    @abstractmethod
    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[int, ...]:
        """Prompt ids after which the model speaks `text` in `voice`.

        Raises CheckpointError for a voice that this family cannot use, RequestError for codes
        outside the codebook.
        """

    def voices(self) -> VoiceSet:
        """Those that voices.json lists, else those that the family is known for and samples."""
        path = self.checkpoint.folder / self.traits.voices_file
        if path.is_file():
            return load_voices(path)
        known, samples = self.traits.voices, self._sampled()
        default = known[0].name if known else samples.default
        return VoiceSet(known + samples.voices, default)

    def _sampled(self) -> VoiceSet:
        checkpoint = self.checkpoint
        return sample_voices(checkpoint.folder / SAMPLES, allow_pickle=checkpoint.allow_pickle)

    def sampling(self) -> SamplingParams:
        """How a speech token is chosen unless a request says otherwise."""
        return self.traits.sampling or load_sampling_defaults(self.checkpoint.folder)

    def check_codec(self, spec: CodecSpec, codebook_size: int, codes_per_frame: int = 1) -> None:
        """Raise CheckpointError unless the codec's codes are those of this language model."""
        wanted, found = (codebook_size, codes_per_frame), (spec.codebook_size, spec.codes_per_frame)
        if wanted != found:
            raise CheckpointError(
                f"{self.name}: the language model writes frames of {wanted[1]} codes below "
                f"{wanted[0]}, codec '{spec.name}' reads frames of {found[1]} below {found[0]}"
            )

    def _overridden(self, traits: FamilyTraits) -> FamilyTraits:
        given = self.checkpoint.speech
        unknown = sorted(given.keys() - self.overrides)
        if unknown:
            raise CheckpointError(
                f"speech.json: {self.name} has no {', '.join(unknown)}; "
                f"there are: {', '.join(sorted(self.overrides))}"
            )
        kept = {k: given[k] for k in ("codec", "max_characters", "max_codes") if k in given}
        return replace(traits, **kept, voices_file=given.get("voices", traits.voices_file))

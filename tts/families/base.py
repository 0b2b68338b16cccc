"""`SpeechFamily`: interface of a kind of speech checkpoint.

Checkpoint (files, as data) ─▶ SpeechFamily ─▶ vocabulary   tokens of speech codes
                                             ▶ prompt       text and voice as token ids
                                             ▶ voices       built-in voices
                                             ▶ traits       limits, sampling, codec
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from decoder import CodecSpec
from llm import CheckpointError, FrameDelays, RequestError, SamplingParams, Token, as_ids
from tts.checkpoint.chat import ChatTemplate, load_chat_template
from tts.checkpoint.files import load_sampling_defaults, load_speech_file, read_json
from tts.checkpoint.tokenizer import TextTokenizer
from tts.text.languages.registry import primary
from tts.text.lexicon.entries import Lexicon
from tts.text.segmenter import SegmentMode, TextNormalization, TextOptions
from tts.voices.files import load_voices, sample_voices
from tts.voices.types import Voice, VoiceSet

NO_ID = -1  # of a token that a vocabulary does not have
VOICES_FILE = "voices.json"
SAMPLES = "samples"


class Checkpoint:
    """Checkpoint folder whose files are read on first use. Its code is never run.

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
        """Content of config.json."""
        return read_json(self.folder / "config.json")

    @cached_property
    def speech(self) -> Mapping[str, Any]:
        """Content of speech.json, which names the family and overrides its traits, or {}."""
        return load_speech_file(self.folder)

    @cached_property
    def chat(self) -> ChatTemplate | None:
        return load_chat_template(self.folder, self._chat_template)

    @property
    def vocab_size(self) -> int:
        """Rows of the language model's embedding; 0 if config.json does not specify them."""
        size = self.config.get("vocab_size", 0)
        return size if isinstance(size, int) else 0


@dataclass(frozen=True, slots=True)
class FamilyTraits:
    """Properties of a family. A call is one run of the language model for one text segment.

    `codec` is a subfolder of the checkpoint or a registered codec's name, and
    `codec_repository` the repository of a codec that is published separately. `sampling` None
    means the checkpoint's generation_config.json; with `later_prefix`, the prefix of its keys for
    the later codebooks, `sampling` is what that file lacks.
    """

    codec: str = "codec"
    codec_repository: str = ""
    voices_file: str = VOICES_FILE
    voices: tuple[Voice, ...] = ()
    max_characters: int = 200  # of one call
    tokens_per_character: int = 1  # approximate maximum, to reserve context
    max_codes: int = 500  # of one call
    min_codes: int = 1  # of one call
    max_seq_len: int | None = None  # if shorter than the language model's context
    sampling: SamplingParams | None = None
    later_prefix: str = ""
    ascii_only: bool = False  # the model reads no other letters
    # other letters than ASCII that an `ascii_only` model reads, by language
    letters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    language: str = "en"  # BCP-47 code of texts whose language nothing states; "": unknown
    tags: tuple[str, ...] = ()  # words of the text that stand for sounds, such as <laugh>
    needs_transcript: bool = True  # of a clip whose voice is cloned
    # of the speaker of a clip, and of a clip without a transcript nothing else
    takes_vectors: bool = False
    invents_voices: bool = False  # a call without a prompt has a random speaker
    takes_codes: bool = True  # of a clip in the prompt, or of the beginning of the same sentence
    takes_instructions: bool = False  # `Voice.instructions`
    steady_loudness: bool = False  # adjust the loudness of later segments to the first

    def text_options(
        self,
        normalization: TextNormalization | None = None,
        voice: Voice | None = None,
        *,
        mode: SegmentMode = SegmentMode.SENTENCE,
        lexicons: tuple[Lexicon, ...] = (),
        field: str = "text",
    ) -> TextOptions:
        """Return the text options of a request.

        `normalization` None selects ON for a known language. The other arguments are those of
        `TextOptions`.
        """
        language = self.language_of(voice)
        own = TextNormalization.ON if language else TextNormalization.OFF
        letters = self.letters.get(primary(language)) if self.ascii_only else None
        return TextOptions(
            max_characters=self.max_characters,
            mode=mode,
            normalization=normalization or own,
            lexicons=lexicons,
            ascii_only=self.ascii_only and letters is None,
            letters=letters,
            tags=self.tags,
            field=field,
            language=language,
        )

    def language_of(self, voice: Voice | None) -> str:
        """Return the language of a text in a voice: that of the request, or of the voice.

        It is the model's if the voice speaks English too, and "" for several other ones; of an
        `ascii_only` model it is one that has `letters`, or the model's.
        """
        if voice is None:
            return self.language
        stated = self._stated_language(voice)
        return stated if self._reads(stated) or not self.ascii_only else self.language

    def _reads(self, language: str) -> bool:
        return primary(language) in self.letters

    def _stated_language(self, voice: Voice) -> str:
        if voice.language or not voice.language_codes or voice.speaks("en"):
            return voice.language or self.language
        first, *others = voice.language_codes
        return first if all(primary(code) == primary(first) for code in others) else ""


class SpeechFamily(ABC):
    """Base class of families; an instance serves one checkpoint. See `tts.families.registry`."""

    name: ClassVar[str]
    contains_codec: ClassVar[bool] = False
    """Whether the files of the language model also hold the codec."""
    overrides: ClassVar[frozenset[str]] = frozenset(
        {"family", "codec", "voices", "max_characters", "max_codes"}
    )
    """Keys of speech.json that this family reads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.tokenizer = checkpoint.tokenizer
        self.traits = self._overridden(self.own_traits())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint.folder})"

    @classmethod
    @abstractmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint without speech.json belongs to this family."""

    @abstractmethod
    def own_traits(self) -> FamilyTraits:
        """Return the family's properties, before overrides by speech.json."""

    @abstractmethod
    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        """Return the speech vocabulary. Raises CheckpointError for a codec with other codes."""

    @abstractmethod
    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        """Return the prompt's tokens for `text` in `voice`.

        Raises CheckpointError for a voice that this family cannot use, and RequestError for codes
        outside the codebook.
        """

    def frame_texts(self, text: str, voice: Voice) -> tuple[int, ...]:
        """Return the text ids of the frames behind the prompt, in order; later ones have none.

        Only a model whose frames have a text id has any, see `SamplingParams.frame_texts`.
        """
        return ()

    def reads_ipa(self, ipa: str) -> bool:
        """Return whether `prompt` reads these phonemes between marks (see `tts.text.ipa`).

        A model that reads phonemes raises ValueError, which names the sign, for a sign that it does
        not know.
        """
        return False

    def voices(self) -> VoiceSet:
        """Return the voices of voices.json, else the family's default voices and the samples."""
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
        """Return the default sampling parameters of speech tokens."""
        traits, folder = self.traits, self.checkpoint.folder
        if traits.later_prefix or traits.sampling is None:
            return load_sampling_defaults(folder, traits.sampling, traits.later_prefix)
        return traits.sampling

    def check_codec(self, spec: CodecSpec, codebook_size: int, codes_per_frame: int = 1) -> None:
        """Raise CheckpointError unless the codec's codes match the language model's."""
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


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Names of a checkpoint's speech tokens."""

    code: str  # with {} in place of the code
    start: str
    end: str


class SpeechVocabulary:
    """Mapping of codes and token ids, with separate tokens for each position of a frame.

    `positions[k][code]` is the token of `code` at position k of a frame; a codec with one code per
    frame has one position. Consecutive ids, the usual case, need no table.
    """

    codes_per_token = 1
    first_delay = last_delay = 0
    """Numbers of tokens in front of a frame's first code and its last, see `DelayedVocabulary`."""
    can_continue = True
    """Whether the model continues codes at the end of a prompt."""

    def __init__(self, positions: Sequence[Sequence[int]], start_id: int, end_id: int) -> None:
        ids = list(chain.from_iterable(positions))
        if not ids or len(set(ids)) != len(ids) or len({len(p) for p in positions}) != 1:
            raise CheckpointError("two codes share a token, or there are no code tokens")
        is_contiguous = ids == list(range(ids[0], ids[0] + len(ids)))
        self.start_id = start_id
        self.end_id = end_id
        self.codebook_size = len(positions[0])
        self.codes_per_frame = len(positions)
        self._base = ids[0]
        self._num_ids = len(ids)
        self._ids = () if is_contiguous else tuple(ids)
        self._codes = {i: k % self.codebook_size for k, i in enumerate(self._ids)}
        self._ranges = tuple(map(ranges_of, positions))

    @classmethod
    def from_tokenizer(
        cls, tokenizer: TextTokenizer, tokens: SpeechTokens, codebook_size: int
    ) -> SpeechVocabulary:
        """Look up one token per code by name. Raises CheckpointError for a missing one."""
        codes = [
            tokenizer.control_id(tokens.code.replace("{}", str(code)))
            for code in range(codebook_size)
        ]
        return cls([codes], tokenizer.control_id(tokens.start), tokenizer.control_id(tokens.end))

    def __repr__(self) -> str:
        kind = "table" if self._ids else f"base {self._base}"
        frames = f"{self.codes_per_frame} x " if self.codes_per_frame > 1 else ""
        return f"SpeechVocabulary({frames}{self.codebook_size} codes, {kind})"

    def constrain(self, sampling: SamplingParams, **others: Any) -> SamplingParams:
        """Return `sampling` limited to codes at their positions, and the end between frames, with
        the values of `others`.
        """
        stops = (self.end_id,)
        if self.codes_per_frame == 1:
            ranges = self._ranges[0]
            return replace(sampling, stop_token_ids=stops, allowed_ranges=ranges, **others)
        return replace(sampling, stop_token_ids=stops, allowed_cycle=self._ranges, **others)

    @property
    def id_range(self) -> tuple[int, int] | None:
        """The ids [start, end) that may be sampled: all codes, the end of speech, and any between
        them. None: other ids may be sampled, too.
        """
        ranges = *chain(*self._ranges), (self.end_id, self.end_id + 1)
        return min(start for start, _ in ranges), max(end for _, end in ranges)

    def whole_frames(self, num_codes: int) -> int:
        """Return the number of codes rounded down to whole frames."""
        return num_codes - num_codes % self.codes_per_frame

    def codes(self, token_ids: Sequence[Token]) -> tuple[int, ...]:
        """Return the codes of the speech tokens in `token_ids`, in order; other ids are skipped."""
        if self._ids:
            known = self._codes
            return tuple([known[i] for i in as_ids(token_ids) if i in known])
        base, size, end = self._base, self.codebook_size, self._base + self._num_ids
        return tuple([(i - base) % size for i in as_ids(token_ids) if base <= i < end])

    def reader(self) -> Callable[[Sequence[Token]], tuple[int, ...]]:
        """Return `codes` for the tokens of one call, which come in pieces."""
        return self.codes

    def token_ids(self, codes: Iterable[int]) -> tuple[Token, ...]:
        """Return the tokens of codes, the first of which begins a frame.

        Raises RequestError for a code outside the codebook and for an incomplete frame.
        """
        given, size, positions = tuple(codes), self.codebook_size, self.codes_per_frame
        if given and not (min(given) >= 0 and max(given) < size):
            raise RequestError(f"speech tokens must be in 0..{size - 1}")
        if len(given) % positions:
            raise RequestError(f"speech tokens must be whole frames of {positions}")
        indices = (size * (n % positions) + code for n, code in enumerate(given))
        if self._ids:
            return tuple(self._ids[index] for index in indices)
        return tuple(self._base + index for index in indices)


class FrameVocabulary(SpeechVocabulary):
    """Speech vocabulary of a language model of frames: one token is K codes, each below
    `codebook_size`. The frame `end` ends speech.

    With `text_pad` a token is K codes and a text id; that of frames without text is `text_pad`.
    """

    def __init__(
        self, codebook_size: int, end: tuple[int, ...], *, text_pad: int | None = None
    ) -> None:
        count = len(end) if text_pad is None else len(end) - 1
        starts = range(0, count * codebook_size, codebook_size)
        positions = [range(start, start + codebook_size) for start in starts]
        super().__init__(positions, NO_ID, NO_ID)
        self.codes_per_token = count
        self.end = end
        self._text = () if text_pad is None else (text_pad,)

    def constrain(self, sampling: SamplingParams, **others: Any) -> SamplingParams:
        """See `SpeechVocabulary`."""
        ranges = ((0, self.codebook_size),)
        return replace(sampling, stop_token_ids=(self.end,), allowed_ranges=ranges, **others)

    def codes(self, token_ids: Sequence[Token]) -> tuple[int, ...]:
        """See `SpeechVocabulary`; other tokens are skipped."""
        count = self.codes_per_token
        frames = (token[:count] for token in token_ids if isinstance(token, tuple))
        return tuple(chain.from_iterable(frames))

    def token_ids(self, codes: Iterable[int]) -> tuple[Token, ...]:
        """See `SpeechVocabulary`: one frame for every K codes, without text."""
        given = tuple(codes)
        super().token_ids(given)  # checks them
        count, text = self.codes_per_token, self._text
        return tuple(given[first : first + count] + text for first in range(0, len(given), count))


class DelayedVocabulary(FrameVocabulary):
    """Frame vocabulary of a language model with delays: the codes of an audio frame come in several
    tokens, and it is found with the last of them.

    Codes from `codebook_size` on are marks; a frame with one of them is no audio.
    """

    can_continue = False  # a part of the codes is missing at the end of a prompt

    def __init__(self, codebook_size: int, delays: FrameDelays) -> None:
        super().__init__(codebook_size, (delays.end,) * len(delays.table))
        self._delays = delays
        self.first_delay, self.last_delay = delays.table[0], delays.longest

    def codes(self, token_ids: Sequence[Token]) -> tuple[int, ...]:
        """See `SpeechVocabulary`: those of complete frames; other tokens are skipped."""
        return self.reader()(token_ids)

    def reader(self) -> Callable[[Sequence[Token]], tuple[int, ...]]:
        """See `SpeechVocabulary`."""
        return partial(self._read, deque(maxlen=self.last_delay + 1))

    def _read(self, latest: deque[tuple[int, ...]], token_ids: Sequence[Token]) -> tuple[int, ...]:
        """Return the codes of frames that `token_ids` complete, behind the `latest` tokens."""
        found: list[int] = []
        for token in token_ids:
            if not isinstance(token, tuple):
                continue
            latest.append(token)
            if len(latest) > self.last_delay:
                frame = self._delays.aligned(latest)
                found += frame if max(frame) < self.codebook_size else ()
        return tuple(found)

    def token_ids(self, codes: Iterable[int]) -> tuple[Token, ...]:
        """See `SpeechVocabulary`: the delayed frames of a whole recording, with its end."""
        frames = super().token_ids(codes)
        return self._delays.delayed([frame for frame in frames if isinstance(frame, tuple)])


def with_texts(frames: Sequence[Token], texts: Sequence[int]) -> tuple[Token, ...]:
    """Return frames with these text ids in place of their own, as far as there are any."""
    pairs = zip(frames, texts, strict=False)
    own = [(*frame[:-1], text) for frame, text in pairs if isinstance(frame, tuple)]
    return (*own, *frames[len(own) :])


def ranges_of(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges that cover exactly these ids."""
    ranges: list[tuple[int, int]] = []
    for token_id in sorted(ids):
        if ranges and ranges[-1][1] == token_id:
            ranges[-1] = (ranges[-1][0], token_id + 1)
        else:
            ranges.append((token_id, token_id + 1))
    return tuple(ranges)

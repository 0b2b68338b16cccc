"""OuteTTS 1.0: words with their features and codes, in one stream; two codebooks of DAC.

    prompt     <|im_start|>⏎ <|text_start|>Hello.<|text_end|>⏎ <|audio_start|>⏎
    speaker    its text stands before the text, and its words follow: word⏎ word⏎ <|word_start|>
    a word     <|word_start|>cat<|features|><|t_0.33|><|energy_8|><|spectral_centroid_30|>
               <|pitch_45|><|code|><|c1_700|><|c2_34|><|c1_597|><|c2_810|>…<|word_end|>

The model writes words in this form, too, and ends with <|audio_end|>. Only the codes are heard.
A speaker is a profile, a JSON file of the OuteTTS library, in the folder `speakers` of the
checkpoint. Its words have times and features that a recording with a transcript does not have, so
voices are not cloned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from decoder import CodecSpec
from llm import CheckpointError, SamplingParams, Token, as_ids
from tts.checkpoint.files import read_json
from tts.families.base import (
    NO_ID,
    Checkpoint,
    FamilyTraits,
    SpeechFamily,
    SpeechVocabulary,
    ranges_of,
)
from tts.voices.types import VOICE_ID, Voice, VoiceSet

CODEBOOK_SIZE = 1024
CODES = ("<|c1_{}|>", "<|c2_{}|>")
FEATURES = ("energy", "spectral_centroid", "pitch")
SPEAKERS = "speakers"
MAX_FEATURE = 100


class OuteTTSFamily(SpeechFamily):
    """OuteTTS 1.0 on Llama or Qwen3."""

    name = "outetts"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._line = self.tokenizer.encode("\n")
        self._ends = tuple(map(self.tokenizer.control_id, ("<|audio_end|>", "<|im_end|>")))
        self._speakers = {
            path.stem.lower(): self._read_speaker(path)
            for path in sorted((checkpoint.folder / SPEAKERS).glob("*.json"))
        }

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        find = checkpoint.tokenizer.find
        return all(find(name) is not None for name in ("<|word_start|>", "<|c1_0|>", "<|c2_0|>"))

    def own_traits(self) -> FamilyTraits:
        return FamilyTraits(
            voices=(Voice("default", "Default", is_builtin=True),),
            max_codes=3600,  # with words and features: some 20 s
            max_seq_len=8192,
            sampling=SamplingParams(
                temperature=0.4,
                top_k=40,
                top_p=0.9,
                min_p=0.05,
                repetition_penalty=1.1,
                penalty_window=64,
            ),
            takes_codes=False,
        )

    def voices(self) -> VoiceSet:
        """Return the profiles as voices; without any, the model chooses a speaker."""
        if not self._speakers:
            return super().voices()
        named = tuple(
            Voice(name, name.capitalize(), speaker=name, is_builtin=True) for name in self._speakers
        )
        return VoiceSet(named, named[0].name)

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        self.check_codec(spec, CODEBOOK_SIZE, len(CODES))
        find = self.tokenizer.find
        spare = {find(name.format(CODEBOOK_SIZE)) for name in CODES}  # of no code
        positions = [
            self._ids(name.format(code) for code in range(CODEBOOK_SIZE)) for name in CODES
        ]
        size = self.checkpoint.vocab_size
        allowed = ranges_of(token_id for token_id in range(size) if token_id not in spare)
        return WordVocabulary(positions, self._ends, allowed)

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        if voice.prompt is not None:
            raise CheckpointError("outetts: a voice is a profile in the folder 'speakers'")
        control, encode = self.tokenizer.control_id, self.tokenizer.encode
        before, words = self._speakers.get(voice.speaker, ("", ()))
        return (
            control("<|im_start|>"),
            *self._line,
            control("<|text_start|>"),
            *encode(before + text.replace('"', "").strip()),
            control("<|text_end|>"),
            *self._line,
            control("<|audio_start|>"),
            *self._line,
            *words,
        )

    def _read_speaker(self, path: Path) -> tuple[str, tuple[int, ...]]:
        """Return a profile's text with its separator, and the ids of its words.

        Raises CheckpointError, which names the file.
        """
        if not VOICE_ID.fullmatch(path.stem.lower()):
            raise CheckpointError(f"{path}: the name of a voice is of a-z, 0-9, _ and -")
        try:
            profile = read_json(path)
            text, words = profile["text"].strip(), profile["words"]
            separator = separator_of(text)
            ids: list[int] = []
            for number, word in enumerate(words, start=1):
                mark = separator.strip() if number == len(words) else ""
                ids += (*self._word(word, mark), *self._line)
        except (CheckpointError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path} is no speaker profile: {error!r}") from error
        if not (text and ids):
            raise CheckpointError(f"{path} has no text or no words")
        return text + separator, (*ids, self.tokenizer.control_id("<|word_start|>"))

    def _word(self, word: Mapping[str, Any], mark: str) -> tuple[int, ...]:
        """Return the ids of a profile's word; `mark` is added to its text."""
        features = [(name, word["features"].get(name, 0)) for name in FEATURES]
        if not all(type(value) is int and 0 <= value <= MAX_FEATURE for _, value in features):
            raise ValueError(f"{features} must be in 0..{MAX_FEATURE}")
        frames = zip(word["c1"], word["c2"], strict=True)
        codes = [(name, code) for frame in frames for name, code in zip(CODES, frame, strict=True)]
        return (
            *self._ids(["<|word_start|>"]),
            *self.tokenizer.encode(word["word"] + mark),
            *self._ids(["<|features|>", f"<|t_{word['duration']:.2f}|>"]),
            *self._ids(f"<|{name}_{value}|>" for name, value in features),
            *self._ids(["<|code|>"]),
            *self._ids(name.format(int(code)) for name, code in codes),
            *self._ids(["<|word_end|>"]),
        )

    def _ids(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(map(self.tokenizer.control_id, names))


class WordVocabulary(SpeechVocabulary):
    """Speech vocabulary of a model that writes other tokens between its codes."""

    def __init__(
        self,
        positions: Sequence[Sequence[int]],
        ends: tuple[int, ...],
        allowed: tuple[tuple[int, int], ...],
    ) -> None:
        """`ends` are the tokens that end speech; `allowed` are the ranges that may be sampled."""
        super().__init__(positions, NO_ID, ends[0])
        self._ends, self._allowed = ends, allowed
        self._places = {
            token_id: (position, code)
            for position, ids in enumerate(positions)
            for code, token_id in enumerate(ids)
        }

    @property
    def id_range(self) -> tuple[int, int] | None:
        """None: nearly all ids may be sampled."""
        return None

    def constrain(self, sampling: SamplingParams, **others: Any) -> SamplingParams:
        """See `SpeechVocabulary`."""
        stops, ranges = self._ends, self._allowed
        return replace(sampling, stop_token_ids=stops, allowed_ranges=ranges, **others)

    def codes(self, token_ids: Sequence[Token]) -> tuple[int, ...]:
        """See `SpeechVocabulary`: the codes of whole frames."""
        return self.reader()(token_ids)

    def reader(self) -> Callable[[Sequence[Token]], tuple[int, ...]]:
        """See `SpeechVocabulary`: a frame that lacks a code is dropped."""
        return partial(_whole_frames, self._places, self.codes_per_frame, [])


def _whole_frames(
    places: Mapping[int, tuple[int, int]], size: int, frame: list[int], token_ids: Sequence[Token]
) -> tuple[int, ...]:
    """Return the codes of the frames that these tokens complete; `frame` keeps an incomplete one.

    `places` has the position in a frame, and the code, of each token.
    """
    found: list[int] = []
    for token_id in as_ids(token_ids):
        if token_id not in places:
            continue
        position, code = places[token_id]
        if position != len(frame):
            frame.clear()
        if position == len(frame):
            frame.append(code)
        if len(frame) == size:
            found += frame
            frame.clear()
    return tuple(found)


def separator_of(text: str) -> str:
    """Return what stands between a speaker's text and the next one."""
    if any("\u3040" <= c <= "\u30ff" or "\u4e00" <= c <= "\u9fff" for c in text):
        return "" if text.endswith(("。", "？", "！", "?", "!")) else "。"
    return " " if text.endswith((".", "?", "!")) else ". "

"""Sonant's natural voices: letters or phonemes to codes, the speaker as a fixed row of codes.

    voice codes, [language] text [start of speech]      → codes [end of speech]
    text = bytes; a word in phonemes: [symbols] symbols, up to the next byte

A built-in voice is a row of codes in voices.json, and a clip is encoded to one, whatever is said in
it. speech.json has the number of the first code's token and of the first symbol's, and the phonemes
that each symbol stands for; `languages` has those that the model reads besides English, each with
the name of the token before its texts, the letters that are not ASCII, and the phonemes that
English texts do not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from decoder import CodecSpec
from llm import CheckpointError, RequestError, Token
from tts.checkpoint.files import SPEECH_FILE
from tts.families.base import Checkpoint, FamilyTraits, SpeechFamily, SpeechVocabulary
from tts.families.ipa import LONG, SymbolTable
from tts.text.clean import clean_word
from tts.text.ipa import OPEN, parts_of
from tts.text.languages.registry import is_english, primary
from tts.voices.types import Voice

START_OF_SPEECH, END_OF_SPEECH = "<|start_of_speech|>", "<|end_of_speech|>"
SYMBOLS = "<|symbols|>"  # symbols follow, until the next byte
BRITISH = "en-GB"
OTHERS = re.compile(r"[^\x00-\x7f]+")


@dataclass(frozen=True, slots=True)
class Language:
    """Token and letters of the texts in a language other than English."""

    token: int  # before a text
    letters: frozenset[str]  # that are not ASCII
    phonemes: frozenset[str]  # that English lacks

    def reduced(self, text: str) -> str:
        """Return a text in these letters and ASCII; others become what English texts have."""
        return OTHERS.sub(self._reduced, text)

    def _reduced(self, found: re.Match[str]) -> str:
        runs = groupby(found.group(), self.letters.__contains__)
        return "".join(
            "".join(run)
            if is_own
            else clean_word("".join(run), ascii_only=True, keep_signs=False)[0]
            for is_own, run in runs
        )


class SonantFamily(SpeechFamily):
    """Family of voices that this project trains on a natural teacher."""

    name = "sonant"
    overrides = SpeechFamily.overrides | {
        "first_code", "first_symbol", "symbols", "languages",
    }  # fmt: skip

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._first_code = self._token("first_code")
        self._first_symbol = self._token("first_symbol")
        phonemes = self._phonemes_of_symbols()
        if self._first_symbol + len(phonemes) > self._first_code:
            raise self._error("the tokens of symbols must be below first_code")
        self._all_symbols = SymbolTable(phonemes)
        others = {phoneme for one in self._languages.values() for phoneme in one.phonemes}
        self._symbols = SymbolTable(["" if one in others else one for one in phonemes])
        names = START_OF_SPEECH, END_OF_SPEECH, SYMBOLS
        self._start, self._end, self._marker = map(self.tokenizer.control_id, names)
        self._voice_codes = 0  # known with the codec

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        return False  # its speech.json, which is required, names the family

    def own_traits(self) -> FamilyTraits:
        self._languages = self._languages_of_texts()
        return FamilyTraits(
            ascii_only=True,
            letters={code: one.letters for code, one in self._languages.items()},
            tokens_per_character=max(
                (
                    len(letter.encode())
                    for one in self._languages.values()
                    for letter in one.letters
                ),
                default=1,
            ),
            needs_transcript=False,
        )

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        if not spec.voice_codes:
            raise CheckpointError(f"{self.name}: codec '{spec.name}' takes no voice of codes")
        first = self._first_code
        self.check_codec(spec, self.checkpoint.vocab_size - first)
        self._voice_codes = spec.voice_codes
        return SpeechVocabulary([range(first, first + spec.codebook_size)], self._start, self._end)

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        if voice.prompt is None:
            raise CheckpointError(f"voice '{voice.name}' has no codes")
        count, wanted = len(voice.prompt.codes), self._voice_codes
        if count != wanted:
            raise RequestError(
                f"voice '{voice.name}' has {count} speech tokens, a voice of this model has "
                f"{wanted}: create it from its recording again"
            )
        codes = vocabulary.token_ids(voice.prompt.codes)
        language = self._languages.get(primary(self.traits.language_of(voice)))
        before = () if language is None else (language.token,)
        ids = self._marked(text, voice, language) if OPEN in text else self._letters(text, language)
        return (*codes, *before, *ids, self._start)

    def _letters(self, text: str, language: Language | None) -> list[int]:
        return self.tokenizer.encode(text if language is None else language.reduced(text))

    def reads_ipa(self, ipa: str) -> bool:
        for word in ipa.split():
            self._symbols.places(word)
            self._all_symbols.places(word)
        return True

    def _marked(self, text: str, voice: Voice, language: Language | None) -> Iterator[int]:
        """Yield the token ids of a text with phonemes. Only British voices have long vowels."""
        is_british = not voice.language_codes or voice.speaks(BRITISH)
        symbols = self._symbols if language is None else self._all_symbols
        for letters, ipa in parts_of(text):
            yield from self._letters(letters, language)
            if ipa:
                yield self._marker
                places = symbols.places(ipa if is_british else ipa.replace(LONG, ""))
                yield from (self._first_symbol + place for place in places)

    def _token(self, key: str) -> int:
        value = self.checkpoint.speech.get(key)
        if type(value) is not int or value < 0:
            raise self._error(f"{key} must be a token's number")
        return value

    def _languages_of_texts(self) -> dict[str, Language]:
        given: Any = self.checkpoint.speech.get("languages", {})
        found: dict[str, Language] = {}
        try:
            for code, value in given.items():
                token, *texts = value["token"], value["letters"], value["phonemes"]
                if is_english(code) or primary(code) in found or not _are_texts(texts):
                    raise TypeError
                found[primary(code)] = Language(
                    self.tokenizer.control_id(token), *map(frozenset, texts)
                )
        except (AttributeError, KeyError, TypeError):
            raise self._error(
                "languages, besides English, must be such as "
                '{"es": {"token": "<|spanish|>", "letters": "áéíóúüñ", "phonemes": "ɾx"}}'
            ) from None
        return found

    def _phonemes_of_symbols(self) -> list[str]:
        values: Any = self.checkpoint.speech.get("symbols")
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self._error("symbols must be a list of phonemes")
        return list(values)

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.folder / SPEECH_FILE}: {problem}")


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)

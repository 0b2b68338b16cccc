"""Phonemes in and out: made-up words that are asked for in IPA, and the IPA of written words.

A made-up word is said in a sentence, and its phones are read from the codes that the language model
writes; the teacher's plans of the same words pass through the same codes. The phonemes that
`tts.say --phonemes` prints are compared with those that the teacher is given, word by word.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper

import numpy as np

from benchmarks.report import Figure, Report, publish
from benchmarks.understood import SEED, VOICES
from benchmarks.word_errors import WordErrors, edit_distance, total
from training.evaluate.reading import CodeClient, PhoneReader, load_with_codes, phones_of
from training.evaluate.systems import THEIRS, Teacher, held_out
from training.kokoro.made_up import judging
from training.kokoro.packages import symbols
from training.kokoro.phonemes import Speller
from training.speech_codec.coder import Coder, load_coder
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_lm.vocabulary import IPA
from tts.api.voice import LoadedVoice
from tts.cli.local import LocalClient
from tts.cli.options import ModelChoice
from tts.cli.run import print_phonemes

LEAST_RIGHT = 0.97
SENTENCE, BLANK = "They call it {}, I think.", "wug"
BETWEEN = " {}"
WORST = 20  # words that are shown


def ipa_of(phonemes: str) -> str:
    """Return symbols of the teacher in IPA."""
    return "".join(IPA.get(symbol, symbol) for symbol in phonemes)


def judging_words(count: int, seed: int) -> list[tuple[str, str]]:
    """Return made-up words, each with the name of the voice that says it."""
    names = [VOICES[n % len(VOICES)] for n in range(count)]
    accents = "".join(THEIRS[name][0] for name in VOICES)
    return list(zip(judging(count, seed, accents), names, strict=True))


def errors_inside(wanted: str, heard: str) -> int:
    """Return the fewest edits that turn a word into some part of what was heard."""
    row = [0] * (len(heard) + 1)  # the word may begin anywhere
    for i, phone in enumerate(wanted, start=1):
        above, row = row, [i]
        for j, other in enumerate(heard, start=1):
            row.append(min(above[j - 1] + (phone != other), above[j] + 1, row[-1] + 1))
    return min(row)


@dataclass(frozen=True, slots=True)
class Asked:
    """A made-up word, and the phones that were read where a system said it."""

    word: str
    voice: str
    heard: str

    @property
    def errors(self) -> WordErrors:
        """The phones that are not as they were asked for."""
        wanted = phones_of(self.word)
        return WordErrors(errors_inside(wanted, self.heard), len(wanted))


def asked_of_us(
    voice: LoadedVoice, codes: CodeClient, reader: PhoneReader, words: Sequence[tuple[str, str]]
) -> Iterator[Asked]:
    """Iterate over words, each with a voice, that our voice says."""
    for word, name in words:
        text = SENTENCE.format(BLANK)
        voice.say(text, voice=name, seed=SEED, phonemes={BLANK: ipa_of(word)})
        yield Asked(word, name, reader.phones(codes.take()))


def asked_of_teacher(
    teacher: Teacher, coder: Coder, reader: PhoneReader, words: Sequence[tuple[str, str]]
) -> Iterator[Asked]:
    """Iterate over the same words by the teacher's plans, as codes."""
    lines = []
    for word, name in words:
        before, after = (teacher.phonemes(part, name) for part in SENTENCE.split(BETWEEN))
        lines.append((f"{before} {word}{after}", name))
    for (word, name), codes in zip(words, teacher.codes_of_lines(coder, lines), strict=True):
        yield Asked(word, name, reader.phones(codes))


async def pronounced(client: LocalClient, texts: Sequence[str]) -> list[list[str]]:
    """Return the words in IPA that the command line prints for texts."""
    found = []
    for text in texts:
        with redirect_stdout(TextIOWrapper(BytesIO(), "utf-8")) as printed:
            await print_phonemes(client, text)
        printed.seek(0)
        found.append(printed.read().split())
    await client.close()
    return found


def words_in_ipa(phonemes: str) -> list[str]:
    """Return the words of the teacher's symbols in IPA, without punctuation."""
    kept = "".join(s for s in phonemes if s == " " or s in "ˈˌː" or phones_of(s))
    return ipa_of(kept).split()


def of_words(found: Sequence[Asked], prefix: str, *, barred: bool) -> Iterator[Figure]:
    """Iterate over the figures of made-up words."""
    errors = [one.errors for one in found]
    bar = LEAST_RIGHT if barred else None
    phones = total(errors)
    share = float(np.mean([error.wrong == 0 for error in errors]))
    note = f"{len(found)} words, {phones.words} phones"
    yield Figure(f"{prefix}made-up words, phones right", (1 - phones.rate,), "", bar, True, note)
    yield Figure(f"{prefix}made-up words, all phones right", (share,), "of words")


def of_letters(
    texts: Sequence[str], wanted: Sequence[list[str]], said: Sequence[list[str]]
) -> Figure:
    """Return the share of written words whose phonemes are the teacher's."""
    pairs = list(zip(texts, wanted, said, strict=True))
    for text, meant, given in pairs:
        if meant != given:
            print(f"{text}\n  {' '.join(meant)}\n  {' '.join(given)}", file=sys.stderr)
    errors = total(WordErrors(edit_distance(meant, given), len(meant)) for _, meant, given in pairs)
    note = f"{errors.words} words"
    return Figure("phonemes of written words", (1 - errors.rate,), "right", LEAST_RIGHT, True, note)


def run(args: argparse.Namespace) -> int:
    """Judge both, and print the report and what is wrong."""
    texts, spell, known = held_out(args.lines), Speller("a"), symbols(args.package)
    wanted = [words_in_ipa("".join(s for s in spell(text) if s in known)) for text in texts]
    said = asyncio.run(pronounced(LocalClient.load(ModelChoice(args.model)), texts))
    rows = [of_letters(texts, wanted, said)]
    if args.reader:
        sizes = coder_sizes(DESIGNS["source_free"])
        words = judging_words(args.words, args.seed)
        reader = PhoneReader.load(args.reader, sizes, known)
        voice, codes = load_with_codes(args.model)
        with voice:
            ours = list(asked_of_us(voice, codes, reader, words))
        teacher, coder = (
            Teacher.open(args.teacher, args.package, args.device),
            load_coder(args.coder, sizes),
        )
        theirs = list(asked_of_teacher(teacher, coder, reader, words))
        wrong = [one for one in ours if one.errors.wrong]
        for one in sorted(wrong, key=lambda one: -one.errors.rate)[:WORST]:
            print(f"{one.voice:8s} {one.word}  {one.heard}", file=sys.stderr)
        rows += [*of_words(ours, "", barred=True), *of_words(theirs, "teacher, ", barred=False)]
    return publish(Report("phonemes", tuple(rows)))

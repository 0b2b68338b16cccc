"""Evaluation of the second task: letters to phonemes, against the teacher.

It covers every word of held-out sentences; held-out words that the teacher pronounces by rules,
which can be learned: of those of the corpus and the word lists and of the synthetic ones, one in
128, selected by a hash of its letters (`training.lexicon`); and words of its lexicon, which are
exceptions from the rules and were all part of the training. Decoding is greedy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path

from benchmarks.report import Figure, Report
from llm import SamplingParams
from training.lexicon import MADE_HELD_OUT
from training.rules import Rules
from training.studio import Studio
from training.teacher import Teacher, phone_text
from training.voices import NAMED
from tts.checkpoint.chat import ChatMessage, ChatRole
from tts.textgen.generator import TextGenerator, TextRequest

MAX_TOKENS = 1024
MOST = 4000  # approximate number of words of a kind
BAR = 0.97
WORD_BREAK = " / "


@dataclass(frozen=True, slots=True)
class Reading:
    """A text, the teacher's phones, and the model's."""

    text: str
    wanted: str
    got: str

    @property
    def is_exact(self) -> bool:
        return self.wanted == self.got

    @property
    def num_words(self) -> int:
        return len(self.wanted.split(WORD_BREAK)) if self.wanted else 0

    @property
    def num_right(self) -> int:
        """Number of words that equal the teacher's; an omitted or added word is one error."""
        wanted, got = self.wanted.split(WORD_BREAK), self.got.split(WORD_BREAK)
        blocks = SequenceMatcher(None, wanted, got, autojunk=False).get_matching_blocks()
        return sum(block.size for block in blocks) if self.wanted else 0


def ask(studio: Studio, texts: Sequence[str]) -> list[str]:
    """Return the phones of all texts as the model writes them; the engine batches the requests."""
    return studio.run(_together(studio, texts))


async def _together(studio: Studio, texts: Sequence[str]) -> list[str]:
    return list(await asyncio.gather(*(_answer(studio, text) for text in texts)))


async def _answer(studio: Studio, text: str) -> str:
    service = studio.service
    prompt = service.prompts.chat_prompt([ChatMessage(ChatRole.USER, text)])
    sampling = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=service.text.stop_token_ids
    )
    writer = TextGenerator(service.client, service.prompts)
    request = TextRequest("phonemes", prompt, sampling)
    return "".join([piece.text async for piece in writer.write(request)]).strip()


def as_spoken(teacher: Teacher, text: str) -> str:
    """Return the phones of a sentence as spoken: "the" before a vowel differs from the isolated
    word.
    """
    spoken = teacher.speak(text, NAMED[0])
    return phone_text(spoken.phones) if spoken is not None else ""


def read(studio: Studio, say: Callable[[str], str], texts: Sequence[str]) -> list[Reading]:
    """Return readings of every text that the teacher can pronounce."""
    wanted = {text: phones for text in texts if (phones := say(text))}
    got = ask(studio, list(wanted))
    return [Reading(*each) for each in zip(wanted, wanted.values(), got, strict=True)]


def share_exact(readings: Sequence[Reading]) -> float:
    """Return the share of whole texts without errors."""
    return sum(reading.is_exact for reading in readings) / max(1, len(readings))


def some(items: Sequence[str], count: int | None) -> list[str]:
    """Return so many items, evenly spread; None: `MOST`."""
    return list(items[:: max(1, len(items) // (count or MOST))])[:count]


def words_in(path: Path) -> list[str]:
    """Return the words of a file of `training.lexicon`; empty when there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split("\t")[0] for line in lines]


def evaluate(model: str, words: Path, lines: Path, count: int | None) -> tuple[Report, list[str]]:
    """Return the report, and a line for every difference from the teacher."""
    studio, teacher = Studio(model), Teacher()
    spoken = partial(as_spoken, teacher)
    sentences = read(studio, spoken, lines.read_text().splitlines()[:count])
    ruled, made, known = (
        read(studio, teacher.pronounce, some(names, count))
        for names in (
            [word for word in words_in(words) if not teacher.is_exception(word)],
            words_in(words.with_name(MADE_HELD_OUT)),
            Rules().lexicon(),
        )
    )
    studio.close()
    total = sum(reading.num_words for reading in sentences)
    right = sum(reading.num_right for reading in sentences) / total
    readings = (*ruled, *made, *known, *sentences)
    wrong = [f"{r.text}: {r.got} ({r.wanted})" for r in readings if not r.is_exact]
    return Report("phonemes", (
        Figure("words of held-out sentences", (float(total),), ""),
        Figure("exactly as the teacher", (right,), "share", BAR, True),
        Figure("sentences without a slip", (share_exact(sentences),), "share"),
        Figure("words never seen", (float(len(ruled)),), ""),
        Figure("exactly as the rules", (share_exact(ruled),), "share", BAR, True),
        Figure("made-up words never seen", (float(len(made)),), ""),
        Figure("exactly as the rules", (share_exact(made),), "share", BAR, True),
        Figure("words of the lexicon", (float(len(known)),), ""),
        Figure("exactly as the lexicon", (share_exact(known),), "share"),
    )), wrong  # fmt: skip

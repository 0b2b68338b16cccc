"""Check of a spoken segment against its text, by its speech codes alone.

The letters of the text are aligned with the codes as in `tts.speech.word_times`, but the path may
also jump, at a cost, from the end of any word to the start of any other. Sound speech has no jump:

    text      it is very very cold
    path      it is very ────▶ cold        a jump forward: a word is missing
              it is very very ◀─ very cold   a jump back: a word is spoken again

Without an aligner only the length of the speech and its end are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

import numpy as np

from tts.speech.aligner import LETTERS, letter_labels
from tts.speech.word_times import NOTHING, SKIP, States
from tts.text.segmenter import SpokenWord, TextSegment

FORWARD_COST, AGAIN_COST, BACK_COST = 2.0, 12.0, 24.0
"""Costs of jumps in nats: over words, from a word's end to its own start, to any earlier word.

They were chosen on speech with words cut out and doubled (docs/voices.md).
"""
EQUAL_COST = -6.0
"""The cost of a jump over one of several equal words side by side ("no, no, no").

The frames of one word can be shared out to two of them at no cost. So each has to make the speech
more likely by so much; in sound speech it does so by 35 nats or more.
"""

SLOWEST_START_S, SLOWEST_S_PER_CHARACTER = 1.5, 0.14
FASTEST_S_PER_CHARACTER = 0.035
"""Limits of a segment's length; the built-in voices are between 0.055 and 0.095, and 0.8 s."""


class CheckResult(Enum):
    """Result of a check."""

    SOUND = "sound"
    CUT = "cut"  # no end before the longest length
    TOO_FAST = "too_fast"
    TOO_SLOW = "too_slow"
    SKIPPED = "skipped"  # words are missing
    REPEATED = "repeated"  # words are spoken again, or in another order


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result, and the number of words that are missing or too many."""

    result: CheckResult
    num_words: int = 0


SOUND = Verdict(CheckResult.SOUND)


def check_segment(
    segment: TextSegment,
    seconds: float,
    *,
    is_cut: bool = False,
    letters: np.ndarray | None = None,
) -> Verdict:
    """Compare a segment's speech with its text.

    `is_cut`: it was ended by its length; `letters`: the aligner's log-probabilities of its frames
    [T, NUM_LABELS], None for a model without one. Texts with other signs than plain letters
    (figures that the model itself reads, phonemes) have only their end checked.
    """
    words, num_characters = segment.words, len(segment.text)
    if is_cut:
        return Verdict(CheckResult.CUT, len(words))
    if not words or not all(map(_is_plain, words)):
        return SOUND
    if seconds < FASTEST_S_PER_CHARACTER * num_characters:
        return Verdict(CheckResult.TOO_FAST, len(words))
    if seconds > SLOWEST_START_S + SLOWEST_S_PER_CHARACTER * num_characters:
        return Verdict(CheckResult.TOO_SLOW, len(words))
    if letters is None:
        return SOUND
    parts = _parts(words)
    return _compare(parts, spoken_order(letters, parts))


def _is_plain(word: SpokenWord) -> bool:
    return all(sign in LETTERS or not sign.isalnum() for sign in word.spoken.lower())


def _parts(words: Iterable[SpokenWord]) -> list[SpokenWord]:
    """Return the words one by one of which words of the text are read: "95" is "ninety-five"."""
    return [
        replace(word, spoken=part) for word in words for part in re.split(r"[\s-]+", word.spoken)
    ]


def _compare(words: Sequence[SpokenWord], spoken: Sequence[int]) -> Verdict:
    expected = [index for index, word in enumerate(words) if letter_labels(word.spoken)]
    if list(spoken) == expected:
        return SOUND
    num_missing = len(set(expected).difference(spoken))
    num_more = len(spoken) - len(set(spoken))
    result = CheckResult.SKIPPED if num_missing else CheckResult.REPEATED
    return Verdict(result, max(1, num_missing + num_more))


def spoken_order(letters: np.ndarray, words: Sequence[SpokenWord]) -> list[int]:
    """Return the indices of the words in the order in which they are spoken."""
    states = States(words)
    path = _path(letters[:, states.labels], states, _repeated(words))
    is_start = np.isin(path, states.starts)
    is_start[1:] &= path[1:] != path[:-1]
    found: list[int] = states.owners[path[is_start]].tolist()
    return found


def _repeated(words: Sequence[SpokenWord]) -> np.ndarray:
    """Return for each word with letters whether the one before it has the same letters."""
    spelled = [labels for word in words if (labels := letter_labels(word.spoken))]
    return np.array([False, *(one == other for one, other in pairwise(spelled))])


def _path(emitted: np.ndarray, states: States, repeated: np.ndarray) -> np.ndarray:
    """Return the state of every frame on the most likely path.

    `emitted`: [T, states]; `repeated`: whether a word is the same as the one before it.
    """
    starts, exits = states.starts, states.exits
    num_frames, num_states = emitted.shape
    own, order = np.arange(num_states), np.arange(len(exits))
    # The last exit from which a word is entered over a missing one, and the cost: the two exits
    # directly before a word lead to it without a jump.
    last_exit = np.searchsorted(exits, starts - 2) - 1
    forward_cost = np.where(repeated, EQUAL_COST, FORWARD_COST)
    forward_cost[last_exit < 0] = -NOTHING
    silences = np.append(starts[1:], num_states) - 1  # behind each word
    origins = np.empty((num_frames, num_states), np.int32)  # state of the frame before
    scores = np.full(num_states, NOTHING)
    scores[starts], scores[:SKIP] = -forward_cost, 0.0
    scores = scores + emitted[0]
    for frame in range(1, num_frames):
        before, scores = scores, scores.copy()
        origin = origins[frame]
        origin[:] = own
        origin[1:] -= before[:-1] > before[1:]
        np.maximum(before[:-1], before[1:], out=scores[1:])
        skipped = before[:-SKIP] + states.skip_cost
        np.copyto(origin[SKIP:], own[:-SKIP], where=skipped > scores[SKIP:])
        np.maximum(skipped, scores[SKIP:], out=scores[SKIP:])
        leaving = before[exits]
        best = np.maximum.accumulate(leaving)  # of this exit and those before
        place = np.maximum.accumulate(np.where(leaving == best, order, 0))
        forward, back = best[last_exit] - forward_cost, best[-1] - BACK_COST
        jumped = np.maximum(forward, back)
        source = exits[np.where(forward >= back, place[last_exit], place[-1])]
        ends = np.maximum(before[silences - 1], before[silences])
        is_again = ends - AGAIN_COST > jumped
        jumped = np.where(is_again, ends - AGAIN_COST, jumped)
        own_end = silences - (before[silences - 1] > before[silences])
        source = np.where(is_again, own_end, source)
        is_better = jumped > scores[starts]
        entered = starts[is_better]
        scores[entered], origin[entered] = jumped[is_better], source[is_better]
        scores += emitted[frame]
    final = np.full(num_states, NOTHING)
    final[exits], final[-SKIP:] = -FORWARD_COST, 0.0  # an end before the last word
    path = np.empty(num_frames, np.int64)
    state = int((scores + final).argmax())
    for frame in range(num_frames - 1, -1, -1):
        path[frame] = state
        state = int(origins[frame, state])
    return path

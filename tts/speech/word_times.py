"""Word times: the most likely path through the letters of a text, computed incrementally.

The states are the letters, with an optional silence before every word and after the last
(Viterbi 1967):

    ( ) h e l l o ( ) w o r l d ( )
     └──▲     └────────▲           each frame stays, advances by one, or skips a silence

A word is reported when it is settled: when the most likely path of the frames so far has left it
for `SETTLED_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tts.speech.aligner import SILENCE, Aligner, LetterStream, letter_labels
from tts.text.segmenter import SpokenWord

SETTLED_S = 0.25
NOTHING = -1e30  # log-probability of an impossible state
SKIP = 2  # states forward; a stay is 0, a move 1


@dataclass(frozen=True, slots=True)
class WordSpan:
    """Word with its time, in seconds from the segment's first sample."""

    word: SpokenWord
    start_s: float
    end_s: float


class States:
    """Sequence of states: letters and silences."""

    def __init__(self, words: Sequence[SpokenWord]) -> None:
        labels, owners = [SILENCE], [-1]
        for index, word in enumerate(words):
            letters = letter_labels(word.spoken)
            if letters:
                labels += [*letters, SILENCE]
                owners += [*(index,) * len(letters), -1]
        self.labels = np.array(labels)
        self.owners = np.array(owners)  # word, or -1
        # Transition from two states before: only over a silence.
        is_silence = self.labels == SILENCE
        self.skip_cost = np.where(is_silence[1:-1] & ~is_silence[2:], 0.0, NOTHING)
        self.starts = np.flatnonzero(is_silence[:-1] & ~is_silence[1:]) + 1  # of words
        self.exits = np.flatnonzero(is_silence | np.roll(is_silence, -1))  # ends and silences


class WordTimer:
    """Word timer of one segment. Words without letters get no time."""

    def __init__(self, aligner: Aligner, words: Sequence[SpokenWord], seconds_per_code: float):
        self._words = words
        self._letters = LetterStream(aligner)
        self._frame_s = seconds_per_code / aligner.config.frames_per_code
        self._states = States(words)
        self._scores = np.full(len(self._states.labels), NOTHING)
        self._moves: list[np.ndarray] = []  # by frame: the transition into each state
        self._num_reported = 0

    def push(self, codes: tuple[int, ...]) -> list[WordSpan]:
        """Add codes of the segment; return the words that are settled."""
        self._extend(self._letters.push(codes))
        if not self._moves:
            return []
        return self._settled(self._path(int(self._scores.argmax())))

    def finish(self, *, is_whole: bool = True) -> list[WordSpan]:
        """End the segment and return the remaining words.

        Without `is_whole` the segment may end before its last word."""
        self._extend(self._letters.push((), is_last=True))
        if not self._moves:
            return []
        first = max(0, len(self._scores) - 2) if is_whole else 0
        if self._scores[first:].max() <= NOTHING / 2:  # too short for all words
            first = 0
        spans = self._spans(self._path(first + int(self._scores[first:].argmax())))
        reported, self._num_reported = spans[self._num_reported :], len(spans)
        return reported

    def _extend(self, frames: np.ndarray) -> None:
        labels, may_skip = self._states.labels, self._states.skip_cost
        for emitted in frames[:, labels]:
            moves = np.zeros(len(labels), np.uint8)
            self._moves.append(moves)
            if len(self._moves) == 1:
                self._scores[:2] = emitted[:2]
                continue
            before, scores = self._scores, self._scores.copy()
            moves[1:] = before[:-1] > before[1:]
            np.maximum(before[:-1], before[1:], out=scores[1:])
            skipped = before[:-2] + may_skip
            moves[2:][skipped > scores[2:]] = SKIP
            np.maximum(skipped, scores[2:], out=scores[2:])
            self._scores = scores + emitted

    def _path(self, state: int) -> np.ndarray:
        """Return the state of every frame on the most likely path to `state`."""
        path = np.empty(len(self._moves), np.int64)
        for frame in range(len(path) - 1, -1, -1):
            path[frame] = state
            state -= int(self._moves[frame][state])
        return path

    def _spans(self, path: np.ndarray) -> list[WordSpan]:
        owners = self._states.owners[path]
        spans = []
        for index in np.unique(owners[owners >= 0]):
            frames = np.flatnonzero(owners == index)
            start_s, end_s = frames[0] * self._frame_s, (frames[-1] + 1) * self._frame_s
            spans.append(WordSpan(self._words[index], float(start_s), float(end_s)))
        return spans

    def _settled(self, path: np.ndarray) -> list[WordSpan]:
        """Return unreported words that ended `SETTLED_S` before the last frame."""
        now_s = len(path) * self._frame_s
        spans = self._spans(path)
        settled = [span for span in spans if span.end_s <= now_s - SETTLED_S]
        reported = settled[self._num_reported :]
        self._num_reported = max(self._num_reported, len(settled))
        return reported

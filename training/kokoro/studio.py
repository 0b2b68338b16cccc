"""Sessions of speech in parallel timbres, with everything that the teacher knows about them.

    python -m training.kokoro.studio --teacher runs/teacher --phonemes runs/phonemes \
        --out runs/speech --seconds 150

A session is one voice that says several lines. Every line is said twice with the same durations,
pitch and energy: in the voice's own timbre, and in that of a partner, the next session's voice of
its sex. So what is said is the same frame by frame, and only who says it differs; and a partner's
own session is a reference of its timbre.

The lines of a session are spoken as one row: the teacher's last stage has instance norms, so its
sound depends on the statistics of all that it says at once. Those of a single line are nothing that
a decoder could know while it streams; those of a whole session are the voice's.

A take (OUT/take_SEED_NUMBER.npz) holds some sessions, one after the other:
    own, other    int16 [S]      samples at 24 kHz in the two timbres
    phones        uint8 [S/600]  the teacher's id in every 25 ms
    pitch         float32 [S/300] in Hz; below 10 where there is no voice
    energy        float16 [S/300] of the teacher's own unit
    start, end    int64 [N]      each session's samples, multiples of 600
    partner       int64 [N]      the session whose timbre `other` has
    style         float16 [N, 256] the voice at a middling length
    lines         int64 [L, 2]   each line's session and first sample
    row           int32 [L]      each line's number in its accent's table of phonemes
    symbols       int32 [L]      its symbols, with the one before and the one after it
    durations     uint8 [D]      of all symbols, in frames of 25 ms
    voice         int16 [N]      number of a named voice (`StyleBook.named`), or -1: a mixture
    accent        uint8 [N]      number of the accent among the tables

A plan is a take without samples: all that the teacher decides before it speaks, at a fifteenth of
the work. With --alone takes have no `other`: half the work, and enough for the encoder of voices.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.kokoro.blocks import Pointwise
from training.kokoro.convert import VOICES_FILE, WEIGHTS_FILE
from training.kokoro.network import FRAME, Curves, Kokoro
from training.kokoro.packages import symbols
from training.kokoro.phonemes import ACCENTS, accents_in, ids_of, read_table, table
from training.kokoro.style import NAMED_SHARE, StyleBook, Voice
from training.kokoro.text import Prosody
from training.kokoro.weights import unpack

SYMBOLS_PER_CALL = 32_768  # padding included
FRAMES_PER_CALL = 16_384  # of 25 ms, padding included: 6 to 11 GiB on a GPU
MIDDLING = 100  # ids
PITCH_GRID = 300  # samples of a pitch value


@dataclass(frozen=True, slots=True)
class Session:
    """A voice and its lines, each a list of ids; `rows` are their numbers in the table."""

    voice: Voice
    lines: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]


@dataclass(slots=True)
class Spoken:
    """One line: where it belongs, and what the teacher has made of it so far."""

    session: int
    ids: tuple[int, ...]
    style: Tensor
    prosody: Prosody
    frames: int  # of 25 ms
    start: int = 0


@dataclass(frozen=True, slots=True)
class Reel:
    """Arrays that a take's lines are written to."""

    pitch: Tensor
    energy: Tensor
    samples: tuple[Tensor, ...]  # int16: own timbre, the partner's; for a plan none

    @classmethod
    def blank(cls, total: int, device: torch.device, timbres: int) -> Reel:
        """Zeros for `total` samples in each timbre."""
        pitch, energy = torch.zeros(2, total // PITCH_GRID, device=device)
        silent = torch.zeros(timbres, total, dtype=torch.int16, device=device)
        return cls(pitch, energy, tuple(silent))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of a take."""
        found = dict(zip(("own", "other"), self.samples, strict=False))
        curves = {"pitch": self.pitch, "energy": self.energy.half()}
        return {name: value.cpu().numpy() for name, value in (found | curves).items()}


def batches(items: Sequence, size: Callable[[object], int], limit: int) -> Iterator[list]:
    """Neighbours in order of size, as many at once as fit `limit` when all are as long as the
    longest."""
    batch: list = []
    for item in sorted(items, key=size):
        if batch and (len(batch) + 1) * size(item) > limit:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def partners(sessions: Sequence[Session]) -> list[int]:
    """For each session the next one of the same sex; itself when there is no other."""
    found = list(range(len(sessions)))
    for sex in "fm":
        group = [i for i, session in enumerate(sessions) if session.voice.sex == sex]
        for i, j in zip(group, group[1:] + group[:1], strict=True):
            found[i] = j
    return found


class Studio:
    """The teacher and its voices on one device."""

    def __init__(self, teacher: Kokoro, book: StyleBook, device: torch.device) -> None:
        self.teacher, self.book, self.device = teacher, book, device

    @classmethod
    def open(cls, folder: Path, device: torch.device) -> Studio:
        """Load the files of `training.kokoro.convert`; compile on a GPU."""
        pointwise = Pointwise.compiled() if device.type == "cuda" else Pointwise()
        teacher = Kokoro.load(unpack(folder / WEIGHTS_FILE), device, pointwise)
        return cls(teacher, StyleBook.load(folder / VOICES_FILE, device), device)

    def take(self, sessions: Sequence[Session], timbres: int = 2) -> dict[str, np.ndarray]:
        """Speak sessions; arrays as the module says, without `other` for one timbre."""
        return self._record(sessions, timbres)

    def plan(self, sessions: Sequence[Session]) -> dict[str, np.ndarray]:
        """Return the arrays of `take` without the samples."""
        return self._record(sessions, 0)

    def _record(self, sessions: Sequence[Session], timbres: int) -> dict[str, np.ndarray]:
        paired = partners(sessions)
        spoken = self._plan(sessions)
        starts, ends = self._lay_out(spoken, len(sessions))
        total = int(ends[-1])
        reel = Reel.blank(total, self.device, timbres)
        for batch in batches(spoken, lambda line: line.frames, FRAMES_PER_CALL):
            self._decide(batch, reel)
        middle = [self.book.style(session.voice, MIDDLING) for session in sessions]
        wanted = [middle, [middle[number] for number in paired]]
        for out, styles in zip(reel.samples, wanted, strict=False):
            self._speak(spoken, styles, reel, out)
        return reel.arrays() | {
            "phones": _phones(spoken, total),
            "start": starts,
            "end": ends,
            "partner": np.array(paired),
            "style": torch.stack(middle).cpu().numpy().astype(np.float16),
            "lines": np.array([(line.session, line.start) for line in spoken]),
            "row": np.array([row for session in sessions for row in session.rows], np.int32),
            "symbols": np.array([len(line.ids) + 2 for line in spoken], np.int32),
            "durations": np.concatenate([_durations(line) for line in spoken]).astype(np.uint8),
            "voice": np.array([self.book.number(session.voice) for session in sessions], np.int16),
            "accent": np.array(
                [ACCENTS.index(session.voice.accent) for session in sessions], np.uint8
            ),
        }

    def _plan(self, sessions: Sequence[Session]) -> list[Spoken]:
        """Every line with its prosody, in the sessions' order."""
        wanted = [
            (number, ids, self.book.style(session.voice, len(ids)))
            for number, session in enumerate(sessions)
            for ids in session.lines
        ]
        planned: dict[int, Spoken] = {}
        order = range(len(wanted))
        for batch in batches(order, lambda i: len(wanted[i][1]) + 2, SYMBOLS_PER_CALL):
            rows = [wanted[i] for i in batch]
            found = self._prosody(rows)
            for i, row, (prosody, frames) in zip(batch, rows, found, strict=True):
                planned[i] = Spoken(*row, prosody, frames)
        return [planned[i] for i in order]

    def _prosody(
        self, rows: Sequence[tuple[int, tuple[int, ...], Tensor]]
    ) -> list[tuple[Prosody, int]]:
        """Each row's prosody without padding, and its frames."""
        lengths = [len(ids) + 2 for _, ids, _ in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for row, (_, line, _) in zip(ids, rows, strict=True):
            row[1 : len(line) + 1] = torch.tensor(line)
        style = torch.stack([own for _, _, own in rows])
        found = self.teacher.prosody(ids.to(self.device), torch.tensor(lengths), style)
        return [
            (Prosody(*(part[row, :length] for part in found)), frames)
            for row, (length, frames) in enumerate(
                zip(lengths, found.durations.sum(1).tolist(), strict=True)
            )
        ]

    @staticmethod
    def _lay_out(spoken: Sequence[Spoken], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Give every line its first sample; returns the sessions' first and last ones."""
        starts, ends, at = np.zeros(count, np.int64), np.zeros(count, np.int64), 0
        sessions = [line.session for line in spoken]
        for previous, line in zip([-1, *sessions], spoken, strict=False):
            if line.session != previous:
                starts[line.session] = at
            line.start, at = at, at + line.frames * FRAME
            ends[line.session] = at
        return starts, ends

    def _decide(self, batch: list[Spoken], reel: Reel) -> None:
        """Write the pitch and the energy of a batch's lines to their places."""
        prosody = _padded([line.prosody for line in batch])
        curves = self.teacher.curves(prosody, torch.stack([line.style for line in batch]))
        places = [(line.start // PITCH_GRID, 2 * line.frames) for line in batch]
        _lay(curves.pitch, places, reel.pitch)
        _lay(curves.energy, places, reel.energy)

    def _speak(
        self, spoken: Sequence[Spoken], styles: Sequence[Tensor], reel: Reel, out: Tensor
    ) -> None:
        """Write the sound of all sessions in the timbres of `styles`, a session's lines at once."""
        sessions: list[list[Spoken]] = [[] for _ in styles]
        for line in spoken:
            sessions[line.session].append(line)
        for batch in batches(list(filter(None, sessions)), _frames, FRAMES_PER_CALL):
            frames = [_frames(lines) for lines in batch]
            firsts = [lines[0].start // PITCH_GRID for lines in batch]
            pitch, energy = (
                pad_sequence(
                    [curve[at : at + 2 * n] for at, n in zip(firsts, frames, strict=True)],
                    batch_first=True,
                )
                for curve in (reel.pitch, reel.energy)
            )
            prosody = _padded([_joined(lines) for lines in batch])
            curves = Curves(pitch, energy, torch.tensor(frames, device=self.device))
            style = torch.stack([styles[lines[0].session] for lines in batch])
            samples = self.teacher.speak(prosody, curves, style)
            places = [(lines[0].start, n * FRAME) for lines, n in zip(batch, frames, strict=True)]
            _lay((samples.clamp(-1, 1) * 32767).to(torch.int16), places, out)


def _frames(lines: Sequence[Spoken]) -> int:
    return sum(line.frames for line in lines)


def _joined(lines: Sequence[Spoken]) -> Prosody:
    """The prosody of lines that are spoken one after the other."""
    return Prosody(*map(torch.cat, zip(*(line.prosody for line in lines), strict=True)))


def _padded(rows: Sequence[Prosody]) -> Prosody:
    return Prosody(*(pad_sequence(part, batch_first=True) for part in zip(*rows, strict=True)))


def _lay(rows: Tensor, places: Sequence[tuple[int, int]], out: Tensor) -> None:
    """Copy the beginning of each row to its place: first index and size."""
    for row, (first, size) in zip(rows, places, strict=True):
        out[first : first + size] = row[:size]


def _durations(line: Spoken) -> np.ndarray:
    return line.prosody.durations.cpu().numpy()


def _phones(spoken: Sequence[Spoken], total: int) -> np.ndarray:
    phones = np.zeros(total // FRAME, np.uint8)
    for line in spoken:
        symbols = np.repeat(np.array((0, *line.ids, 0), np.uint8), _durations(line))
        first = line.start // FRAME
        phones[first : first + len(symbols)] = symbols
    return phones


def draw_sessions(
    book: StyleBook,
    lines: dict[str, list[tuple[int, ...]]],
    sizes: tuple[int, int],
    rng: random.Random,
    named: float = NAMED_SHARE,
    spanish: float = 0.0,
) -> list[Session]:
    """`sizes` voices and lines of each, of its accent; `named`: share of voices that are not
    mixtures, `spanish`: of those that speak Spanish."""
    sessions = []
    for _ in range(sizes[0]):
        voice = book.draw(rng, named, spanish)
        table_ = lines[voice.accent]
        rows = tuple(rng.randrange(len(table_)) for _ in range(sizes[1]))
        sessions.append(Session(voice, tuple(table_[row] for row in rows), rows))
    return sessions


def record(
    make: Callable[[], dict[str, np.ndarray]], out: Path, name: str, seconds: float
) -> float:
    """Write takes or plans OUT/NAME_NUMBER.npz until the time is over; returns their hours."""
    out.mkdir(parents=True, exist_ok=True)
    began, samples, number = time.monotonic(), 0, 0
    while number == 0 or time.monotonic() - began < seconds:
        take = make()
        partial = out / f"{name}_{number:04d}.tmp.npz"
        np.savez(partial, **take)
        partial.rename(out / f"{name}_{number:04d}.npz")
        number, samples = number + 1, samples + FRAME * len(take["phones"])
        passed, hours = time.monotonic() - began, samples / 24_000 / 3600
        print(f"take {number}: {hours:.2f} h in {passed:.0f} s, {hours * 3600 / passed:.0f} x real "
              f"time, {np.mean(take['pitch'] > 10):.2f} voiced", flush=True)  # fmt: skip
    return hours


def read_lines(folder: Path, known: dict[str, int]) -> dict[str, list[tuple[int, ...]]]:
    """The ids of all lines of `training.kokoro.phonemes`, by accent."""
    return {
        accent: [
            tuple(ids_of(row.split("\t")[0], known)) for row in read_table(table(folder, accent))
        ]
        for accent in accents_in(folder)
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--package", type=Path, required=True, help="folder with the symbols")
    parser.add_argument("--phonemes", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--sessions", type=int, default=120, help="per take")
    parser.add_argument("--lines", type=int, default=8, help="per session")
    parser.add_argument(
        "--named", type=float, default=NAMED_SHARE, help="of sessions: named voices"
    )
    parser.add_argument("--spanish", type=float, default=0.0, help="of sessions: Spanish lines")
    parser.add_argument("--silent", action="store_true", help="plans without samples")
    parser.add_argument("--alone", action="store_true", help="takes in the voices' own timbre only")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    studio = Studio.open(args.teacher, device)
    lines = read_lines(args.phonemes, symbols(args.package))
    passed, count = time.monotonic() - began, sum(map(len, lines.values()))
    print(f"ready in {passed:.0f} s: {count} lines, {len(studio.book.all)} voices", flush=True)
    kind, timbres = ("plan", 0) if args.silent else ("take", 1 if args.alone else 2)

    def take() -> dict[str, np.ndarray]:
        sizes = args.sessions, args.lines
        shares = args.named, args.spanish
        return studio.take(draw_sessions(studio.book, lines, sizes, rng, *shares), timbres)

    record(take, args.out, f"{kind}_{args.seed}", args.seconds)


if __name__ == "__main__":
    main()

"""Synthesize the corpus with the teacher, in parallel, until enough hours are on disk.

    python -m training.synthesize --corpus runs/corpus.txt --out runs/speech --hours 1 --workers 2

Worker w takes lines w, w + W, w + 2W …; the voice of a line changes with every pass, so that
every voice speaks all texts (`training.voices.voice_of`). A file named STOP ends it early.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from training.alignment import Alignment
from training.recipe import parse
from training.rules import Rules
from training.shards import FAILED, ShardWriter, hours
from training.teacher import SAMPLE_RATE, Teacher, phone_text
from training.voices import TURNS, VOICES, voice_of

STOP = "STOP"
REPORT_S = 10.0
MIN_SAMPLES, MAX_SAMPLES = SAMPLE_RATE * 2 // 5, SAMPLE_RATE * 13


def work(worker: int, args: argparse.Namespace) -> None:
    """Run one process: its share of the lines, pass after pass."""
    if multiprocessing.parent_process() is not None:
        os.nice(10)
        torch.set_num_threads(1)
    teacher, alignment = Teacher(args.libraries), Alignment(Rules(args.libraries))
    lines = args.corpus.read_text().splitlines()
    writer = ShardWriter(args.out, worker, args.hop)
    limit = args.hours * 3600 * SAMPLE_RATE / args.workers
    for round_ in range(args.first_round, args.first_round + len(TURNS)):
        for number in range(worker, len(lines), args.workers):
            if writer.offset >= limit or (args.out / STOP).exists():
                break
            voice = voice_of(number, number // args.workers, round_)
            spoken = teacher.speak(lines[number], VOICES[voice])
            if spoken is not None and MIN_SAMPLES <= len(spoken.samples) <= MAX_SAMPLES:
                sounds = alignment.text(lines[number], phone_text(spoken.phones))
                writer.add(spoken, number, voice, sounds)
    writer.close()
    (args.out / f"{worker:03d}.done").touch()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args, recipe = parse(parser, "synthesis", argv)
    args.hop = recipe.codec.hop  # clips are multiples of a code's length
    args.workers = args.workers or max(1, (os.cpu_count() or 1) - 6)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in (STOP, FAILED):
        (args.out / name).unlink(missing_ok=True)
    if args.workers == 1:
        work(0, args)
    else:
        _together(args)
    print(f"{hours(args.out):.2f} h of speech", flush=True)


def _together(args: argparse.Namespace) -> None:
    """Run all workers and log the progress."""
    processes = [
        multiprocessing.Process(target=work, args=(worker, args)) for worker in range(args.workers)
    ]
    start = told = time.monotonic()
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        processes[0].join(1) if processes[0].is_alive() else time.sleep(1)
        if time.monotonic() - told >= REPORT_S:
            told = time.monotonic()
            rate = hours(args.out) * 3600 / (told - start)
            print(f"{hours(args.out):.2f} h of speech, {rate:.0f} times real time", flush=True)
    if any(process.exitcode for process in processes):
        raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()

"""A run of a book: pieces that are spoken at the same time, stored, and joined in order.

pieces ──▶ N workers ── one request each ──▶ work folder ──▶ joined into the files, in order
              ▲                                   │
              └── the server is busy: later       └─▶ a killed run continues from here
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc

from tts import __version__
from tts.cli.book.chapters import Book, book_of, plain_blocks
from tts.cli.book.output import (
    BookFile,
    Joiner,
    WrittenFile,
    check_format,
    files_of,
    raw_encoding,
    samples_of,
    write_playlist,
)
from tts.cli.book.work_folder import (
    Manifest,
    PieceRecord,
    WorkFolder,
    digest_of,
    open_work_folder,
)
from tts.cli.client import SayError, SpeechClient
from tts.cli.console import print_error
from tts.cli.options import SayOptions, UsageError
from tts.cli.progress import Progress, SpeechStats
from tts.cli.request import note_times, synthesis_config
from tts.cli.timestamps import SegmentTimes
from tts.text.clean import TextError, check_text
from tts.v1 import common_pb2, speech_pb2

WORK_SUFFIX = ".parts"
MAX_TRIES = 20  # of a piece, while a server is busy: a quarter of an hour
RETRY_S = (0.5, 60.0)  # shortest and longest delay; it doubles with each try
INVENTING_FAMILY = "llasa"
"""Its requests without a voice have a random speaker each."""
WHOLE = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


def read_text(options: SayOptions) -> Book:
    """Return the text of the options as a book. Raises UsageError when nothing can be spoken."""
    text = options.text or ""
    try:
        check_text(text)
    except TextError as error:
        raise UsageError(f"the text has a {error.violations[0].description}") from error
    if options.is_markdown:
        from tts.cli.book.markdown import read_markdown  # markdown-it takes a tenth of a second

        text, blocks = read_markdown(text)
    else:
        blocks = [*plain_blocks(text)]
    book = book_of(text, blocks, Path(options.file).stem or "Text")
    if not book.chapters:
        raise UsageError("the text holds nothing that can be spoken")
    return book


def piece_seed(seed: int, index: int) -> int:
    """Return the seed of a piece: those of a book need different random numbers."""
    key = b"piece" + seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


async def say_book(client: SpeechClient, options: SayOptions, loaded_s: float) -> None:
    """Speak a text into its files. Raises SayError, UsageError, OSError."""
    assert options.book is not None
    book = read_text(options)
    if not book.has_text:
        raise UsageError("the text has headings only")
    check_format(options)
    files = files_of(book, options)
    config = await _config(client, options)
    with open_work_folder(
        work_path(options),
        _manifest(config, options, book),
        has_seed=options.seed is not None,
        resume=options.book.resume,
        restart=options.book.restart,
    ) as work:
        await BookRun(options, book, files, config, work).say(client, loaded_s)


def work_path(options: SayOptions) -> Path:
    """Return the path of the work folder: next to the file, or in the folder of chapters."""
    target = Path(options.output).resolve()
    if options.is_folder:
        return target / WORK_SUFFIX
    return target.with_name(target.name + WORK_SUFFIX)


async def _config(client: SpeechClient, options: SayOptions) -> speech_pb2.SynthesisConfig:
    """Return the configuration of all pieces' requests: raw samples, without a seed."""
    encoding = raw_encoding(options.encoding)
    model = await client.model()
    options = replace(options, encoding=encoding, trim_silence=False, seed=None)
    config = synthesis_config(options, has_word_times=model.word_timestamps)
    if model.family == INVENTING_FAMILY and not (options.voice or options.reference):
        raise UsageError(
            "this model invents a speaker for each request; name one for the whole text with "
            "--ref-audio or --voice"
        )
    return config


def _manifest(config: speech_pb2.SynthesisConfig, options: SayOptions, book: Book) -> Manifest:
    """Return what the samples depend on, with the given seed or a random one."""
    others = speech_pb2.SynthesisConfig()
    others.CopyFrom(config)
    others.ClearField("voice")
    pauses = repr([(piece.start, piece.pause_s) for piece in book.pieces])
    place = repr((options.model, bool(options.server)))
    return Manifest(
        version=__version__,
        text=digest_of(book.text.encode(), pauses.encode()),
        voice=digest_of(config.voice.SerializeToString(deterministic=True)),
        settings=digest_of(others.SerializeToString(deterministic=True), place.encode()),
        seed=secrets.randbits(63) if options.seed is None else options.seed,
    )


class BookRun:
    """Synthesis of a book's pieces, and the files that they are joined into."""

    def __init__(
        self,
        options: SayOptions,
        book: Book,
        files: tuple[BookFile, ...],
        config: speech_pb2.SynthesisConfig,
        work: WorkFolder,
    ) -> None:
        self._options, self._book, self._files = options, book, files
        self._config, self._work_folder = config, work
        self._pieces = book.pieces
        self._keys = [work.key(n, self._text(n)) for n in range(len(self._pieces))]
        self._stored: list[asyncio.Future[None]] = []
        self._waiting: Iterator[int] = iter(())
        self._num_done = self._num_stored = 0  # characters, pieces
        self._spoken_s = 0.0  # seconds of audio of this run
        self._progress: Progress | None = None

    async def say(self, client: SpeechClient, loaded_s: float) -> None:
        """Speak what is not stored yet, and write the files. Raises SayError, UsageError, OSError.

        What is stored stays there when it ends early.
        """
        assert self._options.book is not None
        started = time.perf_counter()
        missing = await self._find_missing()
        total = sum(map(self._size, range(len(self._pieces))))
        self._progress = Progress.of(self._options, total, self._num_done)
        self._waiting = iter(missing)
        jobs = min(self._options.book.jobs, len(missing))
        workers = [asyncio.ensure_future(self._work(client)) for _ in range(jobs)]
        joining = asyncio.ensure_future(self._join())
        try:
            await asyncio.gather(joining, *workers)
        except SayError as error:
            raise SayError(error.code, f"{error}{self._hint()}") from error
        except OSError as error:
            reason = f"{error.strerror or error}{self._hint()}"
            raise OSError(error.errno, reason, error.filename) from error
        except asyncio.CancelledError:
            self._print(f"stopped early{self._hint()}")
            raise
        finally:
            for task in (joining, *workers):
                task.cancel()
            await asyncio.wait((joining, *workers))
            if self._progress is not None:
                self._progress.close()
        self._end(joining.result(), time.perf_counter() - started, loaded_s)

    async def _find_missing(self) -> list[int]:
        """Return the numbers of pieces that are not stored, and note the others."""
        loop = asyncio.get_running_loop()
        self._stored = [loop.create_future() for _ in self._pieces]
        missing = []
        for index, key in enumerate(self._keys):
            if await asyncio.to_thread(self._work_folder.load, index, key) is None:
                missing.append(index)
            else:
                self._note_stored(index)
        return missing

    def _note_stored(self, index: int) -> None:
        self._stored[index].set_result(None)
        self._num_stored += 1
        self._num_done += self._size(index)

    def _size(self, index: int) -> int:
        return self._pieces[index].end - self._pieces[index].start

    def _text(self, index: int) -> str:
        return self._book.text[self._pieces[index].start : self._pieces[index].end]

    async def _work(self, client: SpeechClient) -> None:
        """Speak and store pieces until none is left."""
        for index in self._waiting:
            record, samples = await self._speak(client, index)
            self._work_folder.store(index, record, samples)
            self._note_stored(index)
            num_samples = len(samples_of(samples, self._options.encoding))
            self._spoken_s += num_samples / record.sample_rate
            if self._progress is not None:
                self._progress.show(self._spoken_s, self._num_done)

    async def _speak(self, client: SpeechClient, index: int) -> tuple[PieceRecord, bytes]:
        """Speak a piece; a busy server is asked again after the delay that it names."""
        shortest, longest = RETRY_S
        for attempt in range(MAX_TRIES):
            try:
                return await self._synthesize(client, index)
            except SayError as error:
                if error.retry_after_s is None:
                    raise
                busy = error
                delay_s = max(error.retry_after_s, shortest * 2**attempt)
                await asyncio.sleep(min(longest, delay_s))
        raise busy

    async def _synthesize(self, client: SpeechClient, index: int) -> tuple[PieceRecord, bytes]:
        request = speech_pb2.SynthesizeStreamRequest(config=self._config)
        request.config.sampling.seed = piece_seed(self._work_folder.manifest.seed, index)
        request.input.text = self._text(index)
        times, samples, sample_rate = SegmentTimes(), bytearray(), 0
        done = speech_pb2.SynthesisDone()
        async with aclosing(client.synthesize(request)) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "started":
                        sample_rate = event.started.audio_format.sample_rate_hertz
                    case "audio":
                        samples += event.audio.data
                    case "done":
                        done = event.done
                note_times(times, event, sample_rate)
        if done.finish_reason not in WHOLE:
            raise SayError(grpc.StatusCode.ABORTED, "the service stopped in the middle of a text")
        record = PieceRecord(
            key=self._keys[index],
            sample_rate=sample_rate,
            digest=digest_of(bytes(samples)),
            segments=times.segments(),
            words=times.words(),
            warnings=tuple(done.warnings),
        )
        return record, bytes(samples)

    async def _join(self) -> list[WrittenFile]:
        """Write the files in order, as their pieces are stored."""
        return [await self._join_file(file) for file in self._files]

    async def _join_file(self, file: BookFile) -> WrittenFile:
        joiner = Joiner(file, self._book.text, self._options, self._work_folder)
        try:
            for index, piece in file.pieces:
                await self._stored[index]
                await asyncio.to_thread(joiner.append, index, piece, self._keys[index])
            return await asyncio.to_thread(joiner.finish)
        finally:
            joiner.close()

    def _hint(self) -> str:
        """Return where the stored pieces are, for the end of a message."""
        if not self._num_stored:
            return ""
        count = f"{self._num_stored} of {len(self._pieces)} pieces"
        return f"; {count} are in {self._work_folder.path}, and --resume continues"

    def _end(self, written: list[WrittenFile], waited_s: float, loaded_s: float) -> None:
        """Write the playlist, remove the work folder and print what was written."""
        options = self._options
        if options.is_folder:
            write_playlist(Path(options.output).resolve(), written)
        self._work_folder.remove()
        for one in written:
            for warning in one.warnings:
                self._print(f"say: warning: {warning}")
        speed = SpeechStats(None, self._spoken_s, waited_s).real_time_factor
        parts = [f"{sum(one.seconds for one in written):.2f} s of audio"]
        parts += [f"{len(written)} chapters"] if options.is_folder else []
        parts += [] if speed is None else [f"real-time factor {speed:.2f}"]
        parts += [] if options.server else [f"voice loaded in {loaded_s:.2f} s"]
        self._print(f"{options.output}: {', '.join(parts)}")

    def _print(self, line: str) -> None:
        if self._progress is not None:
            self._progress.close()
        if not self._options.is_quiet:
            print_error(line)

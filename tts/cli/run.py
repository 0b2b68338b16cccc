"""One run of `tts.say`: a client, an audio sink, and messages on standard error."""

from __future__ import annotations

import asyncio
import codecs
import re
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import grpc

from tts.cli.client import RemoteClient, SayError, SpeechClient
from tts.cli.console import BROKEN_PIPE, print_error, print_line
from tts.cli.options import LONG_TEXT, STANDARD_STREAM, SayOptions, UsageError
from tts.cli.progress import Progress, Stopwatch
from tts.cli.request import Event, dialogue, note_times, synthesis_config
from tts.cli.script import in_lines
from tts.cli.sinks import FileSink, PipeSink, PlayerSink, Sink, SinkThread, StreamSink
from tts.cli.timestamps import SegmentTimes, write_timestamps
from tts.text.clean import TextError, check_text
from tts.text.segmenter import TextOptions, split_text
from tts.v1 import speech_pb2

PIECE = 1_000  # characters of a fragment
TYPING_DELAY_MS = 500  # after which an unfinished line is spoken
IDLE_S = 24 * 3600
MAX_PARTS = 16  # that are read ahead
MAX_PART_BYTES = 8192

PHONEME_SENTENCE = 160  # characters of the longest text whose phones the model was trained on
MAX_PHONEME_TOKENS = 1024
IPA = "abdefhijklmnopstuvwzæðŋɐɑɒɔəɛɜɡɪɹɾʃʊʌʒθᵊᵻˈˌː"
MARKS = re.escape('.,:;!?—…“”"()')
PHONEME_CHARACTERS = re.compile(rf"[{IPA}{MARKS} /]*")
PHONES = re.compile(rf"(?:[{IPA}]{{1,2}}|[{MARKS}/])(?: (?:[{IPA}]{{1,2}}|[{MARKS}/]))*")


def run(options: SayOptions) -> int:
    """Say the text and return the exit status. Closes everything before a KeyboardInterrupt."""
    started = time.perf_counter()
    try:
        if options.is_markdown and options.book is None and options.text is not None:
            from tts.cli.book.run import read_text  # takes time that "hello" does not

            options = replace(options, text=read_text(options).text)
        client = _open_client(options)
        loaded_s = time.perf_counter() - started
        asyncio.run(_run(client, options, loaded_s))
    except SayError as error:
        print_error(f"say: {in_lines(str(error), options.script)}")
        return error.exit_status
    except OSError as error:
        if isinstance(error, BrokenPipeError) and (options.list_voices or options.phonemes):
            return BROKEN_PIPE
        what = error.filename or "the output"
        print_error(f"say: cannot write {what}: {error.strerror or error}")
        return 1
    return 0


def _open_client(options: SayOptions) -> SpeechClient:
    if options.server:
        return RemoteClient(options.server, options.credentials)
    from tts.cli.local import LocalClient

    return LocalClient.load(options.model)


async def _run(client: SpeechClient, options: SayOptions, loaded_s: float) -> None:
    try:
        if options.list_voices:
            await _list_voices(client, options.language)
        elif options.phonemes:
            await print_phonemes(client, options.text or "")
        elif options.book is not None:
            from tts.cli.book.run import say_book

            await say_book(client, options, loaded_s)
        else:
            await SayRun(options, _sink(options.output), loaded_s).say(client)
    finally:
        await client.close()


async def _list_voices(client: SpeechClient, language: str) -> None:
    for voice in await client.voices(language):
        print_line(
            f"{voice.name:<16} {' '.join(voice.language_codes):<8} {voice.display_name}".rstrip()
        )


def _sink(output: str) -> Sink:
    if not output:
        return PlayerSink()
    if output == STANDARD_STREAM:
        return StreamSink(sys.stdout.fileno())
    path = Path(output)
    return PipeSink(path) if path.exists() and not path.is_file() else FileSink(path)


class SayRun:
    """Synthesis of one text into a sink, with its times and progress."""

    def __init__(self, options: SayOptions, sink: Sink, loaded_s: float) -> None:
        self._options = options
        self._sink = SinkThread(sink)
        self._loaded_s = loaded_s
        self._watch = Stopwatch()
        self._times = SegmentTimes()
        self._text = options.text or ""  # grows with the lines of standard input
        self._sample_rate = 0
        self._problem: UsageError | None = None
        length = None if options.text is None else len(options.text)
        self._progress = Progress.of(options, length)

    async def say(self, client: SpeechClient) -> None:
        """Run until the sink has every sample. Raises SayError, UsageError, OSError."""
        is_asked = self._options.has_subtitles or self._options.writes_files
        has_words = is_asked and await client.has_word_times()
        events = self._events(client, has_words=has_words)
        try:
            while (event := await self._next(events)) is not None:
                await self._take(event)
            where = await self._sink.close()
        except BaseException:
            with suppress(OSError):
                await self._sink.abort()
            if self._sample_rate:
                self._end("stopped early")
            raise
        finally:
            await events.aclose()
        self._end(where)
        if self._problem is not None:
            raise self._problem

    def _events(self, client: SpeechClient, *, has_words: bool) -> AsyncGenerator[Event, None]:
        config = synthesis_config(self._options, has_word_times=has_words)
        markup, script = self._options.markup, self._options.script
        if script:
            talk = speech_pb2.SynthesisInput(dialogue=dialogue(script))
            return client.synthesize(speech_pb2.SynthesizeStreamRequest(config=config, input=talk))
        if markup or (self._options.text is not None and len(self._text) <= LONG_TEXT):
            words = speech_pb2.SynthesisInput()
            setattr(words, markup or "text", self._text)
            return client.synthesize(speech_pb2.SynthesizeStreamRequest(config=config, input=words))
        streaming = speech_pb2.StreamingSynthesizeConfig(synthesis=config)
        if self._options.text is None:
            streaming.eager = self._options.eager
            streaming.max_text_delay.FromMilliseconds(TYPING_DELAY_MS)
            streaming.idle_timeout.FromSeconds(IDLE_S)
        return client.converse(streaming, self._fragments())

    async def _fragments(self) -> AsyncIterator[str]:
        """Yield the text in fragments, or what comes from standard input as it comes."""
        if self._options.text is not None:
            for piece in pieces(self._text):
                yield piece
                await asyncio.sleep(0)  # let audio be received between fragments
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        async for part in read_parts(sys.stdin.fileno()):
            try:
                text = decoder.decode(part, final=not part)
                check_text(text, len(self._text))
            except UnicodeDecodeError:
                self._problem = UsageError("standard input is not UTF-8 text")
                return
            except TextError as error:
                self._problem = UsageError(f"standard input: {error.violations[0].description}")
                return
            self._text += text
            for piece in pieces(text):
                yield piece

    async def _next(self, events: AsyncIterator[Event]) -> Event | None:
        self._watch.resume()
        try:
            return await anext(events, None)
        finally:
            self._watch.pause()

    async def _take(self, event: Event) -> None:
        match event.WhichOneof("event"):
            case "started":
                await self._open(event.started.audio_format.sample_rate_hertz)
            case "audio":
                await self._take_audio(event.audio)
            case "done":
                self._warn(event.done.warnings)
        note_times(self._times, event, self._sample_rate)

    async def _open(self, sample_rate: int) -> None:
        try:
            await self._sink.open(sample_rate)
        except OSError as error:
            what = self._options.output or error.filename
            raise UsageError(f"cannot write {what}: {error.strerror or error}") from error
        self._sample_rate = sample_rate

    async def _take_audio(self, chunk: speech_pb2.AudioChunk) -> None:
        end = chunk.sample_offset + chunk.sample_count
        if chunk.sample_count:
            self._watch.audio(end)
        await self._sink.write(chunk.data, chunk.sample_count)
        if self._progress is not None:
            self._progress.show(self._watch.stats(self._sample_rate).audio_s, chunk.text_end)

    def _warn(self, warnings: Iterable[str]) -> None:
        if not self._options.is_quiet:
            for warning in warnings:
                self._print(f"say: warning: {warning}")

    def _end(self, where: str) -> None:
        """Write the timestamps, and print the place of the audio and its statistics."""
        if self._options.timestamps is not None:
            by_word = self._options.word_timestamps
            write_timestamps(self._options.timestamps, self._times, self._text, by_word=by_word)
        if not self._options.is_quiet:
            loaded = "" if self._options.server else f", voice loaded in {self._loaded_s:.2f} s"
            self._print(f"{where}: {self._watch.stats(self._sample_rate)}{loaded}")

    def _print(self, line: str) -> None:
        if self._progress is not None:
            self._progress.close()
        print_error(line)


def pieces(text: str) -> Iterator[str]:
    """Cut a text into fragments, anywhere: the service joins them again byte for byte."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


async def read_parts(descriptor: int) -> AsyncIterator[bytes]:
    """Yield the lines that are read, or parts of them, as they come, and b"" at the end.

    A daemon thread reads the descriptor, not `sys.stdin`: the interpreter aborts at exit if a
    thread holds the lock of `sys.stdin`.
    """
    parts: asyncio.Queue[bytes] = asyncio.Queue()
    room = threading.Semaphore(MAX_PARTS)
    loop = asyncio.get_running_loop()

    def pump() -> None:
        # RuntimeError: the loop is closed because the command has ended.
        with suppress(RuntimeError), open(descriptor, "rb", closefd=False) as stream:
            part = None
            while part != b"":
                part = stream.read1(MAX_PART_BYTES)
                room.acquire()
                loop.call_soon_threadsafe(parts.put_nowait, part)

    threading.Thread(target=pump, name="stdin", daemon=True).start()
    is_open = True
    while is_open:
        part = await parts.get()
        room.release()
        for line in part.splitlines(keepends=True):
            yield line
        is_open = bool(part)
    yield b""


async def print_phonemes(client: SpeechClient, text: str) -> None:
    """Print the phonemes of each sentence on a line, in IPA, by the voice model's second task.

    Raises `SayError`, also when the model does not have this task.
    """
    try:
        segments = split_text(text, TextOptions(max_characters=PHONEME_SENTENCE))
    except TextError as error:
        raise SayError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
    for segment in segments:
        print_line(await _phones(client, segment.text))


async def _phones(client: SpeechClient, text: str) -> str:
    answer = ""
    try:
        async with aclosing(client.complete_chat(text, MAX_PHONEME_TOKENS)) as pieces:
            async for piece in pieces:
                answer += piece
                if not PHONEME_CHARACTERS.fullmatch(piece):  # no phonemes: stop generating
                    raise _no_such_task()
    except SayError as error:
        raise (_no_such_task() if _is_no_task(error) else error) from error
    if not PHONES.fullmatch(answer.strip()):
        raise _no_such_task()
    return words_in_ipa(answer)


def words_in_ipa(answer: str) -> str:
    """Return the words of a model's answer, whose phonemes are apart, and words have a slash
    between them; without punctuation.
    """
    joined = re.sub(rf"[{MARKS} ]", "", answer)
    return " ".join(word for word in joined.split("/") if word)


def _is_no_task(error: SayError) -> bool:
    """Whether an error means no chat template, no text output or an endless answer."""
    return error.code in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE}


def _no_such_task() -> SayError:
    return SayError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "this model does not turn letters into phonemes; the built-in voice's does",
    )

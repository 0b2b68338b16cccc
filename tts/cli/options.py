"""`SayOptions`: the checked options of `tts.say`, without slow imports."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from tts.api.suffixes import SUFFIXES
from tts.cli.script import ScriptTurn, read_script
from tts.cli.timestamps import JSON, WRITERS

MAX_REFERENCE_BYTES = 16 * 2**20  # limit of a gRPC message
MAX_TEXT_BYTES = 16 * 2**20  # weeks of speech; a device file has no end
MAX_PEM_BYTES = 2**20
STANDARD_STREAM = "-"
LONG_TEXT = 2_000  # characters; what is longer is a book in a file, and streamed elsewhere
MARKDOWN = (".md", ".markdown")
MAX_EAGER = 2
JOBS = 8  # pieces of a book that are spoken at once: on two cores twice the speed of one

FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))
PREPEND = ("never", "once", "rolling")
MARKUP = ("ssml", "tags")


class UsageError(Exception):
    """A wrong command line; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials for a server: contents of files, not their names."""

    use_tls: bool = False
    root_certificates: bytes | None = None  # None: the gRPC library's own
    certificate: bytes | None = None
    private_key: bytes | None = None
    token: str = ""


@dataclass(frozen=True, slots=True)
class Chunking:
    """Size and context of audio blocks; None or () is the codec's own choice."""

    chunk_sizes: tuple[int, ...] = ()
    buffer: int | None = None
    block_causal: bool | None = None
    prepend: str | None = None
    prepend_prompt_speech_tokens_causal: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The checkpoint to load, without a server; an empty name is the built-in voice."""

    name: str = ""  # a folder, or a name on the hub
    revision: str = ""
    family: str = ""  # of the checkpoint; empty: found by its files
    audio_decoder: str = ""  # a codec's folder or name; empty: the family's own
    offline: bool = False
    allow_pickle: bool = False
    watermark: bool = False  # of the built-in voice, too
    lexicon: tuple[str, ...] = ()  # files of pronunciations; of the built-in voice, too


@dataclass(frozen=True, slots=True)
class BookOptions:
    """Number of pieces that are spoken at once, and the fate of an unfinished run."""

    jobs: int = JOBS
    resume: bool = False
    restart: bool = False


@dataclass(frozen=True, slots=True)
class SayOptions:
    """Options of one run. `text` is None for standard input as it comes."""

    text: str | None
    file: str  # name of the text's file, or ""
    is_markdown: bool
    eager: int  # as in StreamingSynthesizeConfig, of a text that comes
    book: BookOptions | None  # None: one request, or a stream of text
    markup: str  # one of MARKUP, or "" for plain text
    script: tuple[ScriptTurn, ...]  # turns of a dialogue, whose texts `text` joins; or ()
    voice: str
    list_voices: bool
    phonemes: bool  # print them instead of synthesizing
    output: str  # a file name, a folder, "-", or "" for a player
    is_folder: bool
    encoding: str  # one of FORMATS
    sample_rate: int
    trim_silence: bool
    check: bool | None  # None: for files, if the model has word times
    rate: float | None
    pitch: float | None
    instructions: str
    seed: int | None
    temperature: float | None
    language: str
    reference: bytes  # a recording of the voice to imitate, or b""
    reference_text: str
    chunking: Chunking
    timestamps: Path | None  # in a folder, its suffix is that of each chapter's file
    word_timestamps: bool
    model: ModelChoice
    server: str
    credentials: Credentials
    show_progress: bool
    is_quiet: bool

    @property
    def writes_files(self) -> bool:
        """Whether the audio goes to files, and not to a player or a pipe as it is made."""
        if self.output in ("", STANDARD_STREAM):
            return False
        path = Path(self.output)
        return self.is_folder or path.is_file() or not path.exists()

    @property
    def has_subtitles(self) -> bool:
        """Whether the timestamps are cues for reading, which word times divide best."""
        times = self.timestamps
        return times is not None and times.suffix.lower() != JSON and not self.word_timestamps


def read_options(args: argparse.Namespace, stdin: BinaryIO | None = None) -> SayOptions:
    """Convert parsed arguments to options and read the text. Raises UsageError."""
    stdin = stdin or (sys.stdin.buffer if sys.stdin else None)
    list_voices = args.list_voices or args.voice == "?"
    _check_together(args)
    _decode_arguments(args)
    _check_streams(args, has_input=stdin is not None)
    script = () if list_voices else _script(args.script)
    encoding = _encoding(args.output, args.format)
    text = None if args.stream_stdin or list_voices else _text(args, stdin, script)
    return SayOptions(
        text=text,
        file=args.file,
        eager=args.eager,
        is_markdown=Path(args.file).suffix.lower() in MARKDOWN and not args.markup,
        book=_book(args, text),
        markup=args.markup,
        script=script,
        voice="" if args.voice == "?" else args.voice,
        list_voices=list_voices,
        phonemes=args.phonemes,
        output=args.output,
        is_folder=_is_folder(args.output),
        encoding=encoding,
        sample_rate=args.sample_rate,
        trim_silence=args.trim_silence,
        check=args.check,
        rate=args.rate,
        pitch=args.pitch,
        instructions=args.instructions,
        seed=args.seed,
        temperature=args.temperature,
        language=args.language,
        reference=_read(args.ref_audio, MAX_REFERENCE_BYTES) if args.ref_audio else b"",
        reference_text=args.ref_text,
        chunking=Chunking(
            chunk_sizes=args.chunk_size,
            buffer=args.buffer,
            block_causal=args.block_causal,
            prepend=args.prepend_prompt_speech_tokens,
            prepend_prompt_speech_tokens_causal=args.prepend_prompt_speech_tokens_causal,
        ),
        timestamps=_timestamps(args.timestamps, args.output),
        word_timestamps=args.timestamp_level == "word",
        model=_model(args),
        server=args.server,
        credentials=read_credentials(args, args.token),
        show_progress=args.progress,
        is_quiet=args.quiet,
    )


def _check_together(args: argparse.Namespace) -> None:
    sources = bool(args.text) + bool(args.file) + bool(args.script) + args.stream_stdin
    rules = (
        (sources > 1, "give the text once: as arguments, with -f, --script or --stream-stdin"),
        (
            bool(args.script and (args.markup or args.phonemes or args.voice or args.ref_audio)),
            "--script has plain text and names its voices: no --markup, --phonemes, --voice, "
            "--ref-audio",
        ),
        (
            args.phonemes and (_asks_for_sound(args) or args.stream_stdin or args.language),
            "--phonemes prints those of US English: no voice, no language, no lexicon, no output "
            "file, no --stream-stdin",
        ),
        (
            bool(args.markup) and (args.phonemes or args.stream_stdin),
            "--markup is for whole texts that are spoken: no --phonemes, no --stream-stdin",
        ),
        (args.eager > 0 and not args.stream_stdin, "--eager needs --stream-stdin"),
        (bool(args.ref_text) and not args.ref_audio, "--ref-text needs --ref-audio"),
        (bool(args.ref_audio and args.voice), "give --voice or --ref-audio, not both"),
        (bool(args.server and args.model), "--model is for speaking without --server"),
        (bool(args.server and args.watermark), "--watermark is for speaking without --server"),
        (bool(args.server and args.lexicon), "--lexicon is for speaking without --server"),
        (
            not args.model and replace(_model(args), watermark=False, lexicon=()) != ModelChoice(),
            "--revision, --family, --audio-decoder, --offline and --allow-pickle need --model",
        ),
        (not args.server and _asks_for_server(args), "--tls-* and --token need --server"),
        (args.resume and args.restart, "give --resume or --restart, not both"),
        (
            _asks_for_book(args) and not (args.output and args.output != STANDARD_STREAM),
            "--resume, --restart and --jobs are for -o FILE and -o FOLDER/",
        ),
        (
            (_asks_for_book(args) or _is_folder(args.output))
            and bool(args.markup or args.stream_stdin or args.phonemes),
            "texts in pieces (a folder, --resume, --restart, --jobs) are plain or Markdown: no "
            "--markup, --stream-stdin, --phonemes",
        ),
        (not _is_header(args.token), "--token may hold printable ASCII characters alone"),
        (
            bool(args.output and args.timestamps)
            and Path(args.output).resolve() == Path(args.timestamps).resolve(),
            "-o and --timestamps name the same file",
        ),
    )
    for is_broken, message in rules:
        if is_broken:
            raise UsageError(message)


def _model(args: argparse.Namespace) -> ModelChoice:
    return ModelChoice(
        name=args.model,
        revision=args.revision,
        family=args.family,
        audio_decoder=args.audio_decoder,
        offline=args.offline,
        allow_pickle=args.allow_pickle,
        watermark=args.watermark,
        lexicon=tuple(args.lexicon),
    )


def _asks_for_sound(args: argparse.Namespace) -> bool:
    return any(
        (args.output, args.format, args.timestamps, args.voice, args.ref_audio, args.lexicon)
    )


def _asks_for_book(args: argparse.Namespace) -> bool:
    return args.resume or args.restart or args.jobs is not None


def _is_folder(output: str) -> bool:
    return output.endswith("/") or (bool(output) and Path(output).is_dir())


def _book(args: argparse.Namespace, text: str | None) -> BookOptions | None:
    """Return how a text is spoken in pieces; None for a short one, and for a player or pipe."""
    is_file = bool(args.output) and args.output != STANDARD_STREAM and _is_regular(args.output)
    is_long = _asks_for_book(args) or _is_folder(args.output) or len(text or "") > LONG_TEXT
    if text is None or args.markup or args.script or args.phonemes or not (is_file and is_long):
        return None
    return BookOptions(args.jobs or JOBS, args.resume, args.restart)


def _is_regular(output: str) -> bool:
    """Whether an output is or will be a file or a folder: neither a pipe nor a device."""
    path = Path(output)
    return not path.exists() or path.is_file() or path.is_dir()


def _asks_for_server(args: argparse.Namespace) -> bool:
    return args.tls or bool(args.tls_ca or args.tls_cert or args.tls_key or args.token)


def _is_header(value: str) -> bool:
    return value.isascii() and (value.isprintable() or not value)


def _decode_arguments(args: argparse.Namespace) -> None:
    """Decode arguments that are text, not file names, as UTF-8 in any locale."""
    args.text = [_decode_argument("TEXT", text) for text in args.text]
    for name in ("voice", "language", "ref_text", "server"):
        flag = "--" + name.replace("_", "-")
        setattr(args, name, _decode_argument(flag, getattr(args, name)))


def _decode_argument(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # bytes that are not text in the locale's encoding
        try:
            return os.fsencode(value).decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{name} is not UTF-8 text") from error
    return value


def _check_streams(args: argparse.Namespace, *, has_input: bool) -> None:
    lists = args.list_voices or args.voice == "?"
    if sys.stdout is None and (lists or args.phonemes or args.output == STANDARD_STREAM):
        raise UsageError("standard output is closed")
    if not has_input and args.stream_stdin:
        raise UsageError("standard input is closed")


def _script(name: str) -> tuple[ScriptTurn, ...]:
    if not name:
        return ()
    try:
        turns = read_script(_decode(_read(name, MAX_TEXT_BYTES), name), name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not turns:
        raise UsageError(f"{name} has no text")
    return turns


def _text(
    args: argparse.Namespace, stdin: BinaryIO | None, script: Sequence[ScriptTurn] = ()
) -> str:
    if script:
        return "\n".join(turn.text for turn in script)
    if args.text and args.text != [STANDARD_STREAM]:
        text = " ".join(args.text)
    elif args.file and args.file != STANDARD_STREAM:
        text = _decode(_read(args.file, MAX_TEXT_BYTES), args.file)
    elif stdin is None:
        raise UsageError("standard input is closed; give the text as an argument or with -f FILE")
    elif stdin.isatty() and not (args.text or args.file):
        raise UsageError("there is no text; give it as an argument, with -f FILE or in a pipe")
    else:
        text = _decode(_at_most(stdin, MAX_TEXT_BYTES, "standard input"), "standard input")
    if not text.strip():
        raise UsageError("the text is empty")
    return text


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})") from error


def _read(name: str, most: int) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return _at_most(file, most, name)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error


def _at_most(file: BinaryIO, most: int, name: str) -> bytes:
    data = file.read(most + 1)
    if len(data) > most:
        raise UsageError(f"{name} has more than {most} bytes")
    return data


def _encoding(output: str, chosen: str) -> str:
    """Return the encoding: --format, else by the suffix, else 16-bit samples."""
    if _is_folder(output):
        _check_folder(Path(output))
        return chosen or "mp3"
    if output and output != STANDARD_STREAM:
        _check_writable(Path(output))
        suffix = Path(output).suffix.lower()
        if not chosen and suffix not in SUFFIXES:
            raise UsageError(
                f"{output}: no format has the suffix '{suffix}'; use one of "
                f"{' '.join(SUFFIXES)}, or --format"
            )
        return chosen or SUFFIXES[suffix]
    if chosen and not output:
        raise UsageError("--format needs -o FILE, or -o - for standard output")
    if output and sys.stdout.isatty():
        raise UsageError(
            "standard output is a terminal; send it to a file or a pipe, or use -o FILE"
        )
    return chosen or "s16le"


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")


def _check_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UsageError(f"cannot write {path}/: it is a file")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}/: there is no folder {path.parent}")


def _timestamps(name: str, output: str) -> Path | None:
    """Return the file of --timestamps; a format alone is a file with the name of the output."""
    if not name:
        return None
    path, is_folder = Path(name), _is_folder(output)
    if f".{name.lower()}" in WRITERS and output and output != STANDARD_STREAM:
        path = Path(output, name) if is_folder else Path(output)
        path = path.with_suffix(f".{name.lower()}")
        if path == Path(output):
            raise UsageError("-o and --timestamps name the same file")
    elif is_folder:
        raise UsageError(
            f"--timestamps {name}: with a folder it is srt, vtt or json, for a file per chapter"
        )
    if path.suffix.lower() not in WRITERS:
        raise UsageError(f"{name}: timestamps are written as {' or '.join(WRITERS)}")
    if not is_folder:
        _check_writable(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write {path}: timestamps need a regular file")
    return path


def read_credentials(args: argparse.Namespace, token: str = "") -> Credentials:
    """Read the files that the TLS options name. Raises UsageError."""
    if bool(args.tls_cert) != bool(args.tls_key):
        raise UsageError("--tls-cert and --tls-key go together")
    return Credentials(
        use_tls=args.tls or bool(args.tls_ca or args.tls_cert),
        root_certificates=_pem(args.tls_ca),
        certificate=_pem(args.tls_cert),
        private_key=_pem(args.tls_key),
        token=token,
    )


def _pem(name: str) -> bytes | None:
    return _read(name, MAX_PEM_BYTES) if name else None

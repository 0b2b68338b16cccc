"""`python -m tts.say`: the command line of `tts.cli.run`, which turns text into audio.

Exit status: 0 said, 1 failed, 2 wrong request, 130 interrupted, 141 the list's reader ended.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from tts.api.suffixes import SUFFIXES
from tts.cli.console import prepare_streams, print_error
from tts.cli.options import (
    FORMATS,
    JOBS,
    MARKUP,
    MAX_EAGER,
    PREPEND,
    UsageError,
    read_options,
)
from tts.cli.parser import HelpFormatter, OptionGroup, add_information, add_tls_options
from tts.cli.program import run_program
from tts.config.environment import prepare_libraries

NAME = "say"
PROGRAM = "python -m tts.say"
INTERRUPTED = 130
MAX_INT32 = 2**31 - 1  # largest number in the service's messages


class _Parser(argparse.ArgumentParser):
    """Raises `UsageError`, so that an error is one line like all others of the command."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help-all shows all options)")


def build_parser(*, show_all: bool = False, program: str = PROGRAM) -> argparse.ArgumentParser:
    """Create the command line; options of the codec, model and connection show with `show_all`."""
    parser = _Parser(
        prog=program,
        usage="%(prog)s [options] [TEXT ...]",
        allow_abbrev=False,
        add_help=False,
        formatter_class=HelpFormatter,
        description="Say a text: through the loudspeaker, or into a file.",
        epilog="Without -o the first of sounddevice, ffplay, aplay, afplay and paplay plays the "
        "sound; without any of them it is written to out.wav. "
        "Exit status: 0 said, 1 failed, 2 wrong request, 130 interrupted, 141 the list's "
        "reader ended.",
    )
    _add_text(parser.add_argument_group("text"))
    _add_voice(parser.add_argument_group("voice"))
    _add_output(parser.add_argument_group("output"))
    _add_book(parser.add_argument_group("long texts, into a file or a folder of chapters"))
    _add_place(parser.add_argument_group("where it runs"))
    _add_streaming(OptionGroup(parser.add_argument_group("audio blocks"), show_all))
    _add_model(OptionGroup(parser.add_argument_group("model, with --model"), show_all))
    _add_connection(OptionGroup(parser.add_argument_group("connection, with --server"), show_all))
    add_information(parser, lambda: build_parser(show_all=True, program=program))
    return parser


def build_voices_parser(*, show_all: bool = False, program: str) -> argparse.ArgumentParser:
    """Create the command line of `--list-voices` alone: what speech needs besides is refused."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [options]",
        allow_abbrev=False,
        add_help=False,
        formatter_class=HelpFormatter,
        description="List the voices of a model or a server: name, languages, description.",
    )
    _add_language(parser.add_argument_group("voice"))
    _add_place(parser.add_argument_group("where it runs"))
    _add_model(OptionGroup(parser.add_argument_group("model, with --model"), show_all))
    _add_connection(OptionGroup(parser.add_argument_group("connection, with --server"), show_all))
    add_information(parser, lambda: build_voices_parser(show_all=True, program=program))
    return parser


def _add_text(group: argparse._ArgumentGroup) -> None:
    group.add_argument("text", nargs="*", metavar="TEXT", help="text to say; - is standard input")
    group.add_argument(
        "-f", "--file", default="", metavar="FILE", help="read FILE, .md as Markdown; - as above"
    )
    group.add_argument(
        "--markup", choices=MARKUP, default="", help="the text is SSML, or has [tags]"
    )
    group.add_argument(
        "--script", default="", metavar="FILE", help="say a dialogue: lines of 'NAME: text'"
    )
    group.add_argument(
        "--stream-stdin", action="store_true", help="say the text of standard input as it comes"
    )
    group.add_argument(
        "--eager",
        type=int,
        choices=range(MAX_EAGER + 1),
        default=0,
        help="begin such a text after its first clause (1) or its first words (2)",
    )
    group.add_argument(
        "--phonemes", action="store_true", help="print the text's phonemes in IPA instead"
    )


def _add_book(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--resume", action="store_true", help="continue a run that was ended early")
    group.add_argument(
        "--restart", action="store_true", help="begin again, without what such a run left"
    )
    group.add_argument(
        "--jobs",
        type=_integer(1),
        metavar="N",
        help=f"pieces that are spoken at once (default: {JOBS})",
    )


def _add_voice(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-v",
        "--voice",
        default="",
        metavar="NAME",
        help="voice, or a blend such as hazel(2)+owen; '?' lists the voices",
    )
    group.add_argument("--list-voices", action="store_true", help="list the voices and exit")
    _add_language(group)
    group.add_argument("--ref-audio", default="", metavar="FILE", help="imitate this recording")
    group.add_argument(
        "--ref-text", default="", metavar="TEXT", help="transcript of it, which most models need"
    )
    group.add_argument(
        "--lexicon",
        action="append",
        default=[],
        metavar="FILE",
        help="file of pronunciations; give it again for more",
    )
    group.add_argument("-r", "--rate", type=float, metavar="FACTOR", help="speed; 1 is normal")
    group.add_argument(
        "--pitch", type=float, metavar="SEMITONES", help="-12 to 12 above the voice's own"
    )
    group.add_argument(
        "--instructions",
        default="",
        metavar="TEXT",
        help="how to speak, in words, for models that read it",
    )
    group.add_argument(
        "--seed", type=_integer(0, 2**64 - 1), metavar="N", help="same seed, same speech"
    )
    group.add_argument("--temperature", type=float, metavar="X", help="0 to 2; lower is more even")


def _add_language(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--language", default="", metavar="CODE", help="language of the text, such as es"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-o",
        "--output",
        default="",
        metavar="FILE",
        help=f"file to write, by its suffix {' '.join(SUFFIXES)}; FOLDER/ gets a file for each "
        "chapter; - is standard output",
    )
    group.add_argument(
        "--format",
        default="",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"format whatever the suffix: {', '.join(FORMATS)}",
    )
    group.add_argument(
        "--sample-rate", type=_integer(0), default=0, metavar="HZ", help="resample the audio"
    )
    group.add_argument("--trim-silence", action="store_true", help="remove silence at both ends")
    group.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="speak sentences again whose words are missing or doubled; each is heard when it is "
        "whole (default: for files, by a voice with word timings)",
    )
    group.add_argument(
        "--watermark", action="store_true", help="mark the audio as generated (extra watermark)"
    )
    group.add_argument(
        "--timestamps",
        default="",
        metavar="FILE",
        help="write subtitles or times: .srt, .vtt, .json; srt, vtt or json alone names them as "
        "the audio",
    )
    group.add_argument(
        "--timestamp-level",
        choices=("segment", "word"),
        default="segment",
        metavar="LEVEL",
        help="times by segment or word (default: segment)",
    )
    group.add_argument("--progress", action="store_true", help="report every chunk")
    group.add_argument("-q", "--quiet", action="store_true", help="report errors only")


def _add_place(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="folder or hub OWNER/NAME (default: built in)",
    )
    group.add_argument("--server", default="", metavar="HOST:PORT", help="use a running server")


def _add_streaming(group: OptionGroup) -> None:
    group.add_argument(
        "--chunk-size",
        type=_sizes,
        default=(),
        metavar="N,N,...",
        help="speech tokens per block; the last size repeats (default: the codec's choice)",
    )
    group.add_argument(
        "--buffer",
        type=_integer(0),
        metavar="N",
        help="earlier tokens decoded again with each block (default: the codec's choice)",
    )
    boolean = argparse.BooleanOptionalAction
    group.add_argument(
        "--block-causal",
        action=boolean,
        help="earlier tokens do not attend to the new block (default: the codec's choice)",
    )
    group.add_argument(
        "--prepend-prompt-speech-tokens",
        choices=PREPEND,
        metavar="CHOICE",
        help="decode the recording's tokens never, with the first block (once) or with every "
        "block (rolling) (default: the codec's choice)",
    )
    group.add_argument(
        "--prepend-prompt-speech-tokens-causal",
        action=boolean,
        help="the recording's tokens do not attend to the new block (default: the codec's choice)",
    )


def _add_model(group: OptionGroup) -> None:
    group.add_argument(
        "--revision",
        default="",
        metavar="REVISION",
        help="branch, tag or commit on the hub (default: main)",
    )
    group.add_argument(
        "--family", default="", metavar="NAME", help="speech family (default: by the files)"
    )
    group.add_argument(
        "--audio-decoder",
        default="",
        metavar="NAME",
        help="codec by name or folder (default: the model's own)",
    )
    group.add_argument(
        "--offline", action="store_true", help="download nothing; use earlier downloads"
    )
    group.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read weights from pickles; code in them is not run",
    )


def _add_connection(group: OptionGroup) -> None:
    add_tls_options(group)
    group.add_argument("--token", default="", metavar="TOKEN", help="bearer token")


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < low or (high is not None and number > high):
            bounds = f"must be {low} or more" if high is None else f"must be in [{low}, {high}]"
            raise argparse.ArgumentTypeError(f"{text}: {bounds}")
        if high is None and number > MAX_INT32:
            raise argparse.ArgumentTypeError(f"{text}: must be at most {MAX_INT32}")
        return number

    parse.__name__ = "number"  # argparse shows it when int() fails
    return parse


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_integer(1)(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run the command line and return its exit status. `program`: its name in the help."""
    prepare_streams()
    try:
        options = read_options(build_parser(program=program).parse_args(argv))
        prepare_libraries()
        from tts.cli.run import run  # slow to import (torch, gRPC): only for a valid request

        return run(options)
    except UsageError as error:
        print_error(f"{NAME}: {error}")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def list_voices(argv: Sequence[str], program: str) -> int:
    """Run the command line of `build_voices_parser` and return its exit status."""
    build_voices_parser(program=program).parse_args(argv)
    return main(["--list-voices", *argv])


if __name__ == "__main__":
    run_program(main)

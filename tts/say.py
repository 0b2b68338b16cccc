"""`python -m tts.say`: text in, sound out. Parse, build, call; the rest is in `tts.say_*`.

Exit status: 0 said · 1 something failed · 2 the request is wrong · 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tts import __version__
from tts.console import prepare_streams, tell
from tts.say_options import FORMATS, PREPEND, SUFFIXES, UsageError, read_options

PROGRAM = "say"
INTERRUPTED = 130
MOST = 2**31 - 1  # the largest number that the service's messages hold


class _Parser(argparse.ArgumentParser):
    """Errors are one line, as all of ours."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help shows all options)")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(
        prog="python -m tts.say",
        allow_abbrev=False,
        description="Say a text: through the loudspeaker, or into a file.",
        epilog="Without -o the first of sounddevice, ffplay, aplay, afplay and paplay plays the "
        "sound; where there is none, it goes to out.wav. "
        "Exit status: 0 said, 1 failed, 2 wrong request, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"sonant {__version__}")
    _add_text(parser.add_argument_group("text"))
    _add_voice(parser.add_argument_group("voice"))
    _add_output(parser.add_argument_group("output"))
    _add_streaming(parser.add_argument_group("streaming (default: the codec's choice)"))
    _add_server(parser.add_argument_group("where it runs"))
    return parser


def _add_text(group: argparse._ArgumentGroup) -> None:
    group.add_argument("text", nargs="*", metavar="TEXT", help="what to say; - is standard input")
    group.add_argument("-f", "--file", default="", help="read the text from FILE (- as above)")
    group.add_argument(
        "--stream-stdin",
        action="store_true",
        help="say the lines of standard input as they come",
    )
    group.add_argument(
        "--phonemes",
        action="store_true",
        help="print the text's phonemes (ARPAbet, stress 0 or 1, / between words); say nothing",
    )


def _add_voice(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-v", "--voice", default="", help="its name; '?' lists the voices")
    group.add_argument("--list-voices", action="store_true", help="list the voices and end")
    group.add_argument("--language", default="", help="language code, such as en-US")
    group.add_argument("--ref-audio", default="", metavar="FILE", help="imitate this recording")
    group.add_argument("--ref-text", default="", metavar="TEXT", help="what is said in it")
    group.add_argument("-r", "--rate", type=float, metavar="FACTOR", help="speed; 1 is normal")
    group.add_argument("--seed", type=_integer(0, 2**64 - 1), help="same seed, same speech")
    group.add_argument("--temperature", type=float, help="0 to 2; lower is more even")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-o",
        "--output",
        default="",
        metavar="FILE",
        help=f"write FILE, in the format of its suffix ({' '.join(SUFFIXES)}); "
        "- is standard output",
    )
    group.add_argument("--format", default="", choices=FORMATS, help="format, whatever the suffix")
    group.add_argument("--sample-rate", type=_integer(0), default=0, metavar="HZ", help="resample")
    group.add_argument("--trim-silence", action="store_true", help="leave out silence at both ends")
    group.add_argument(
        "--timestamps", default="", metavar="FILE", help="say when what is said: .srt or .json"
    )
    group.add_argument(
        "--timestamp-level",
        choices=("segment", "word"),
        default="segment",
        help="for each segment (default) or each word",
    )
    group.add_argument("--progress", action="store_true", help="report every chunk")
    group.add_argument("-q", "--quiet", action="store_true", help="report errors only")


def _add_streaming(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chunk-size",
        type=_sizes,
        default=(),
        metavar="N,N,...",
        help="speech tokens per chunk; the last size repeats",
    )
    group.add_argument(
        "--buffer",
        type=_integer(0),
        metavar="N",
        help="earlier tokens decoded again for each chunk",
    )
    boolean = argparse.BooleanOptionalAction
    group.add_argument(
        "--block-causal", action=boolean, help="earlier tokens do not see the new chunk"
    )
    group.add_argument(
        "--prepend-prompt-speech-tokens",
        choices=PREPEND,
        help="decode the reference's tokens in front: never, of the first chunk or of every chunk",
    )
    group.add_argument(
        "--prepend-prompt-speech-tokens-causal",
        action=boolean,
        help="the reference's tokens do not see the new chunk",
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="checkpoint: a folder, or OWNER/NAME on the Hugging Face hub (default: built in)",
    )
    group.add_argument(
        "--revision", default="", help="the model's branch, tag or commit on the hub"
    )
    group.add_argument(
        "--family", default="", help="its speech family (default: what it looks like)"
    )
    group.add_argument(
        "--audio-decoder", default="", help="another codec for it: a folder or a name"
    )
    group.add_argument("--offline", action="store_true", help="download nothing")
    group.add_argument("--allow-pickle", action="store_true", help="its weights may be pickles")
    group.add_argument("--server", default="", metavar="HOST:PORT", help="ask this server instead")
    group.add_argument("--tls", action="store_true", help="encrypt the connection")
    group.add_argument("--tls-ca", default="", metavar="FILE", help="trust this CA (PEM)")
    group.add_argument(
        "--tls-cert", "--cert", default="", metavar="FILE", help="client certificate (PEM)"
    )
    group.add_argument("--tls-key", "--key", default="", metavar="FILE", help="its private key")
    group.add_argument("--token", default="", help="bearer token")


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < low or (high is not None and number > high):
            bounds = f"must be {low} or more" if high is None else f"must be in [{low}, {high}]"
            raise argparse.ArgumentTypeError(f"{text}: {bounds}")
        if high is None and number > MOST:
            raise argparse.ArgumentTypeError(f"{text}: must be at most {MOST}")
        return number

    parse.__name__ = "number"  # argparse names the type when int() refuses
    return parse


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_integer(1)(part) for part in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    prepare_streams()
    try:
        options = read_options(build_parser().parse_args(argv))
        from tts.config import process_environment

        # gRPC's core would write the cause of a failed handshake beside our line, twice.
        process_environment().setdefault("GRPC_VERBOSITY", "NONE")
        from tts.say_run import run  # imports torch and gRPC: only for a request that makes sense

        return run(options)
    except UsageError as error:
        tell(f"{PROGRAM}: {error}")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

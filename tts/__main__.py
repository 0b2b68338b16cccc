"""`sonant`, or `python -m tts`: the programs of this package under one name.

    sonant say ...         python -m tts.say ...
    sonant voices ...      python -m tts.say --list-voices ...
    sonant serve ...       python -m tts.serve ...
    sonant health ...      python -m tts.health ...
    sonant completion ...  a script that completes all of these in a shell

Modules are imported when their command runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from tts import __version__
from tts.cli.console import BROKEN_PIPE, prepare_streams, print_line
from tts.cli.parser import HelpFormatter
from tts.cli.program import run_program

PROGRAM = "sonant"
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "say": "say a text: through the loudspeaker, or into a file",
        "voices": "list the voices",
        "serve": "serve speech and text over gRPC",
        "health": "ask a server for its health",
        "completion": "print a script that completes commands in a shell",
    }
)
SHELLS = ("bash", "zsh", "fish", "tcsh")
FILE_VALUES = frozenset({"FILE", "PATH"})
"""Names of option values that are completed as file names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    prepare_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        try:
            return _run(arguments[0], arguments[1:])
        except BrokenPipeError:
            return BROKEN_PIPE
    build_parser({}).parse_args(arguments)  # prints the help, the version or an error, and exits
    raise AssertionError("the command is missing in _run")


def build_parser(parsers: Mapping[str, argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Create the command line of all commands, with the options of those in `parsers`."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="%(prog)s COMMAND [options]",
        allow_abbrev=False,
        formatter_class=HelpFormatter,
        description="Speech from text: in one command, or from a server.",
        epilog="`sonant COMMAND --help` shows the options of a command.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND [options]", required=True)
    for name, text in COMMANDS.items():
        parents = [parsers[name]] if name in parsers else []
        commands.add_parser(name, help=text, add_help=False, parents=parents)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    return parser


def _run(command: str, arguments: list[str]) -> int:
    program = f"{PROGRAM} {command}"
    match command:
        case "say":
            from tts.say import main as say

            return say(arguments, program)
        case "voices":
            from tts.say import list_voices

            return list_voices(arguments, program)
        case "serve":
            from tts.serve import main as serve

            return serve(arguments, program)
        case "health":
            from tts.health import main as health

            return health(arguments, program)
        case _:
            print_line(completion_script(_completion_parser().parse_args(arguments).shell))
            return 0


def _completion_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} completion",
        formatter_class=HelpFormatter,
        description="Print a script that completes commands, options and file names.",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return parser


def completion_script(shell: str) -> str:
    """Return the completion script of a shell."""
    from shtab import FILE, complete

    from tts import health, say, serve

    parsers = {
        "say": say.build_parser(show_all=True),
        "voices": say.build_voices_parser(show_all=True, program=PROGRAM),
        "serve": serve.build_parser(show_all=True),
        "health": health.build_parser(),
        "completion": _completion_parser(),
    }
    for parser in parsers.values():
        for action in parser._actions:
            if action.metavar in FILE_VALUES:
                action.complete = FILE  # type: ignore[attr-defined]  # read by shtab
    return complete(build_parser(parsers), shell)


def program() -> NoReturn:
    """Run the command `sonant`, and end its process."""
    run_program(main)


if __name__ == "__main__":
    program()

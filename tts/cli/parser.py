"""Command lines with two helps: `--help` for the options most users need, `--help-all` for all."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tts import __version__

WIDTH = 80
HELP_COLUMN = 32


class HelpFormatter(argparse.HelpFormatter):
    """Lines of at most 80 columns; an option's names once, before its value."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {action.metavar or action.dest.upper()}"


class _HelpAll(argparse.Action):
    """Prints the help of the parser that `const` creates, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        self.const().print_help()
        parser.exit()


def add_information(parser: argparse.ArgumentParser, create_full: Callable[[], Any]) -> None:
    """Add `--help`, `--help-all` and `--version` to a parser made with `add_help=False`.

    `create_full` creates the same parser with the help of all options.
    """
    group = parser.add_argument_group("information")
    group.add_argument("-h", "--help", action="help", help="show the most used options and exit")
    group.add_argument(
        "--help-all",
        action=_HelpAll,
        nargs=0,
        const=create_full,
        default=argparse.SUPPRESS,
        help="show all options and exit",
    )
    group.add_argument(
        "--version",
        action="version",
        version=f"sonant {__version__}",
        help="show the version and exit",
    )


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """The options of one subject, in the help or left out of it."""

    group: argparse._ArgumentGroup
    is_shown: bool = True

    def add_argument(self, *names: str, **settings: Any) -> None:
        """Add an option that is always accepted, and shown where the group is."""
        if not self.is_shown:
            settings["help"] = argparse.SUPPRESS
        self.group.add_argument(*names, **settings)


def add_tls_options(group: OptionGroup) -> None:
    """Add the options of an encrypted connection; `tts.cli.options.read_credentials` reads them."""
    group.add_argument("--tls", action="store_true", help="encrypt the connection")
    group.add_argument("--tls-ca", default="", metavar="FILE", help="CA to trust, PEM")
    group.add_argument(
        "--tls-cert", "--cert", default="", metavar="FILE", help="client certificate, PEM"
    )
    group.add_argument(
        "--tls-key", "--key", default="", metavar="FILE", help="private key of it, PEM"
    )

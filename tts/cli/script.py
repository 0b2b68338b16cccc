"""Scripts of dialogues: lines "NAME: text", and errors of the service with the script's lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NAMED = re.compile(r"\s*([\w.+()-]{1,200}):(?:\s+|$)")  # 12:30 and http://... are no names
_TURN = re.compile(r"\binput\.dialogue\.turns\[(\d+)\](?:\.text|\.voice\.name)?: ")
_UNKNOWN = re.compile(r"no voice '([^']*)'")


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """Turn of a script. `place` is where it begins, as in "talk.txt, line 3"."""

    voice: str
    text: str
    place: str


def read_script(source: str, name: str) -> tuple[ScriptTurn, ...]:
    """Return the turns of a script, the file `name`. Raises ValueError, which names the line.

    Names are in lower case, as those of voices are. A line without a name continues the turn.
    """
    found: list[tuple[str, str, list[str]]] = []  # voice, place and lines of each turn
    for number, line in enumerate(source.splitlines(), start=1):
        named, place = _NAMED.match(line), f"{name}, line {number}"
        text = line[named.end() :].strip() if named else line.strip()
        if named:
            found.append((named[1].lower(), place, []))
        elif text and not found:
            raise ValueError(f"{place}: begins without a name; write NAME: text")
        if text:
            found[-1][2].append(text)
    for voice, place, lines in found:
        if not lines:
            raise ValueError(f"{place}: {voice} has no text")
    return tuple(ScriptTurn(voice, "\n".join(lines), place) for voice, place, lines in found)


def in_lines(message: str, turns: Sequence[ScriptTurn]) -> str:
    """Return an error message with the lines of turns instead of their fields."""
    for turn in turns:
        if (unknown := _UNKNOWN.match(message)) and unknown[1] == turn.voice:
            return f"{turn.place}: {message}"
    return _TURN.sub(lambda found: f"{turns[int(found[1])].place}: ", message)

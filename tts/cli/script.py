"""Scripts of dialogues: lines "NAME: text", and errors of the service with the script's lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    turns: list[ScriptTurn] = []
    for number, line in enumerate(source.splitlines(), start=1):
        found, place = _NAMED.match(line), f"{name}, line {number}"
        if found:
            turns.append(ScriptTurn(found[1].lower(), line[found.end() :].strip(), place))
        elif line.strip() and not turns:
            raise ValueError(f"{place}: begins without a name; write NAME: text")
        elif line.strip():
            text = f"{turns[-1].text}\n{line.strip()}".lstrip()
            turns[-1] = replace(turns[-1], text=text)
    for turn in turns:
        if not turn.text:
            raise ValueError(f"{turn.place}: {turn.voice} has no text")
    return tuple(turns)


def in_lines(message: str, turns: Sequence[ScriptTurn]) -> str:
    """Return an error message with the lines of turns instead of their fields."""
    for turn in turns:
        if (unknown := _UNKNOWN.match(message)) and unknown[1] == turn.voice:
            return f"{turn.place}: {message}"
    return _TURN.sub(lambda found: f"{turns[int(found[1])].place}: ", message)

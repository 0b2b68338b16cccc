"""Language rules: phrases that docstrings, comments, messages and documents must not have."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = ("llm", "decoder", "tts", "training", "benchmarks", "samples", "tests")

NAME_THE_PART = "name the component, request or caller"
NO_FEELINGS = "code has no feelings or senses: use the technical verb"
NOT_HERE = "the document or path is not part of the repository"
STANDARD_TERM = "use the standard term"

BORDER = "\0"  # between pieces of a file; no phrase has it

BANNED = {
    r"\b(?:no|some|every|any)body\b": NAME_THE_PART,
    r"\bwhoever\b": NAME_THE_PART,
    r"\bstrangers?\b": NAME_THE_PART,
    r"\b(?:is|are|was|were|be|still) at it\b": "write 'runs' or 'is running'",
    r"\bwants?\b": NO_FEELINGS,
    r"\btells\b": NO_FEELINGS,
    r"\blooks? at\b": NO_FEELINGS,
    r"\b(?:be|is|are|was) heard of\b": NO_FEELINGS,
    r"\bhas heard\b": NO_FEELINGS,
    r"\blets? go of\b": "write 'frees' or 'releases'",
    r"\b(?:be|is|are|was) had\b": "write 'is available' or 'is allocated'",
    r"\bgives? way\b": "write 'yields' or name the priority",
    r"\bgo(?:es)? on\b": "write 'continues'",
    r"\banew\b": "write 'again' or 'new'",
    r"\bin company\b": "write 'in a batch'",
    r"\bbeside\b": "write 'with', 'next to' or 'in parallel with'",
    r"\btwins?\b": STANDARD_TERM + ": 'reference'",
    r"\bon its way\b": STANDARD_TERM + ": 'in flight' or 'pending'",
    r"\bseed \d{3}\b": NOT_HERE,
    r"\b(?:semantics|invariant|part) [A-Z]\.\d": NOT_HERE,
    r"\b(?:issue|ticket) #?\d": NOT_HERE,
    r"\([BC]\.\d|\b[BC]\.\d+(?:'s|:)": NOT_HERE,
    r"/work/|/tmp/helpers": NOT_HERE,
}
"""Regular expression to the reason; case is ignored."""

WORD = r"\b"
AT_WORDS = [pattern for pattern in BANNED if pattern.startswith(WORD)]
ANY = re.compile(
    f"{WORD}(?:{'|'.join(pattern.removeprefix(WORD) for pattern in AT_WORDS)})", re.IGNORECASE
)
"""All that begin where a word does: a third of the time of one after the other."""

BAD_OPENINGS = r"(?:Of|As|What|Who|How|So|Such|Those|That|Has)\b"
"""Words that a docstring must not begin with: begin with a verb or a noun phrase."""

ALLOWED = {
    "benchmarks/path.py": 2,
    "tests/training": 17,  # 6 of them are sentences that are spoken
    "training/kokoro": 5,
    "training/speech_lm": 2,
}
"""Findings in files and folders that are not rewritten yet. The numbers may only decrease."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A banned phrase in a file."""

    file: str
    line: int
    phrase: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.phrase!r}: {self.reason}"


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments by line, and what follows a # in a string, which is searched anyway."""
    for number, line in enumerate(source.splitlines(), start=1):
        if "#" in line:
            yield number, line.partition("#")[2]


def strings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Iterate over line numbers and values of strings, docstrings included."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def docstrings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Iterate over line numbers and texts of docstrings, also of attributes."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)


def names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Iterate over line numbers and words of the names of functions and classes."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name.replace("_", " ")


def phrases_in(file: str, parts: Iterable[tuple[int, str]]) -> Iterator[Finding]:
    """Search pieces of a file, each with its line; all at once, because most are short."""
    lines, texts = zip(*parts, strict=True)
    starts = [0, *accumulate(len(text) + len(BORDER) for text in texts)]
    whole = BORDER.join(texts)
    has_any = bool(ANY.search(whole))
    for pattern, reason in BANNED.items():
        if pattern in AT_WORDS and not has_any:
            continue
        for match in re.finditer(pattern, whole, re.IGNORECASE):
            index = bisect_right(starts, match.start()) - 1
            line = lines[index] + whole.count("\n", starts[index], match.start())
            yield Finding(file, line, match[0], reason)


def findings_in_python(file: str, source: str) -> Iterator[Finding]:
    """Yield the findings of a module's source."""
    nodes = list(ast.walk(ast.parse(source)))
    yield from phrases_in(file, (*comments(source), *strings(nodes), *names(nodes), (0, "")))
    for line, text in docstrings(nodes):
        opening = re.match(BAD_OPENINGS, text)
        if opening:
            yield Finding(file, line, opening[0], "begin with a verb or a noun phrase")


@cache
def findings() -> tuple[Finding, ...]:
    """Return the findings of all Python sources, without generated ones, and of docs."""
    found: list[Finding] = []
    for path in sorted(path for folder in PYTHON for path in (ROOT / folder).rglob("*.py")):
        if path == Path(__file__) or path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        found += findings_in_python(name_of(path), path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "docs").glob("*.md")):
        found += phrases_in(name_of(path), [(1, path.read_text(encoding="utf-8"))])
    return tuple(found)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folder_of(finding: Finding) -> str:
    """Return the longest folder of `ALLOWED` that has the file; else the file itself."""
    folders = (f for f in ALLOWED if finding.file.startswith(f + "/") or finding.file == f)
    return max(folders, key=len, default=finding.file)


def test_there_are_no_banned_phrases() -> None:
    counts = Counter(map(folder_of, findings()))
    wrong = [str(f) for f in findings() if counts[folder_of(f)] > ALLOWED.get(folder_of(f), 0)]
    assert not wrong, "\n".join(wrong)


def test_folders_without_findings_are_not_listed() -> None:
    counts = Counter(map(folder_of, findings()))
    assert [folder for folder in ALLOWED if not counts[folder]] == []


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ('"""Nobody uses it."""', "Nobody"),
        ("x = 1  # the loop wants more", "wants"),
        ("raise ValueError('ask somebody')", "somebody"),
        ("text = f'{x} goes on'", "goes on"),
        ('x = 1\n"""See semantics B.2."""', "semantics B.2"),
        ('def f():\n    """Of one codec."""', "Of"),
        ("path = '/work/model'", "/work/"),
        ("def test_nobody_waits(): pass", "nobody"),
    ],
)
def test_a_planted_phrase_is_found(source: str, phrase: str) -> None:
    assert [found.phrase for found in findings_in_python("planted.py", source)] == [phrase]


@pytest.mark.parametrize(
    "source", ['"""Return the number of pages."""', "# The device is idle.", "tells = wants = 1"]
)
def test_plain_text_has_no_findings(source: str) -> None:
    assert list(findings_in_python("plain.py", source)) == []

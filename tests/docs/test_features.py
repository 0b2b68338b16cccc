"""The page of features names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<feature>[^|]+) \| (?P<answer>yes|no|in part) \|", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_each_feature_that_exists_names_a_test() -> None:
    rows = [row for row in (ROOT / "docs/features.md").read_text().splitlines() if ROW.match(row)]
    assert len(rows) > 40
    assert not [row for row in rows if "| no |" not in row and not TEST.search(row)]


def test_the_tests_exist() -> None:
    named = TEST.findall((ROOT / "docs/features.md").read_text())
    missing = [
        f"{path}::{name}"
        for path, name in named
        if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert not missing

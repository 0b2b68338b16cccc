"""The page of clips has the texts of its command, and files that hold speech."""

from __future__ import annotations

import pytest
import soundfile

from docs.tools.clips import CLIPS, PAGE, clips, page
from docs.tools.site import DOCS

NAMES = [path for path, _, _ in clips()]


def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    assert sorted(str(path.relative_to(DOCS)) for path in CLIPS.iterdir()) == sorted(NAMES)


def test_the_clips_are_small() -> None:
    assert sum(path.stat().st_size for path in CLIPS.iterdir()) <= 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_clip_holds_speech(name: str) -> None:
    samples, rate = soundfile.read(DOCS / name, dtype="float32")
    assert rate == 24_000
    assert 1.0 < len(samples) / rate < 10.0
    assert 0.1 < abs(samples).max() <= 1.0

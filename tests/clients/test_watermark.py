"""The watermark of the extra is found in speech of the built-in voice, and not without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile

import tts
from benchmarks import watermark
from tts.api.voice import LoadedVoice

for package in ("perth", "librosa"):
    if find_spec(package) is None:  # `importorskip` would import it, with its warnings
        pytest.skip(f"needs {package}", allow_module_level=True)

TEXTS = (
    "Good morning, and welcome to the first test of the day.",
    "Yes.",
    "The weather will be cloudy in the north, with some rain in the evening.",
    "It costs twelve dollars and fifty cents.",
)
SURE = 0.9  # of 1
LIKELY, SHORT = 0.5, 10  # the library's own limit, for texts of so few characters in a lossy format


@pytest.fixture(scope="module")
def marking() -> Iterator[LoadedVoice]:
    with tts.load(watermark=True) as voice:
        yield voice


@pytest.fixture(scope="module")
def plain() -> Iterator[LoadedVoice]:
    with tts.load() as voice:
        yield voice


@pytest.fixture(scope="module")
def detect(marking: LoadedVoice) -> Callable[[Path], float]:
    """Return how sure the library is that a file is marked, from 0 to 1."""
    perth = sys.modules["perth.perth_net.perth_net_implicit.perth_watermarker"]
    network = perth.PerthImplicitWatermarker()

    def detect(path: Path) -> float:
        samples, rate = soundfile.read(path, dtype="float32")
        return float(network.get_watermark(samples, sample_rate=rate, round=False))

    return detect


@pytest.mark.parametrize("suffix", ["wav", "mp3", "opus", "flac"])
def test_the_watermark_is_found_in_every_format(
    marking: LoadedVoice, detect: Callable[[Path], float], suffix: str, tmp_path: Path
) -> None:
    for seed, text in enumerate(TEXTS):
        file = marking.say(text, seed=seed).save(tmp_path / f"{seed}.{suffix}")
        limit = LIKELY if suffix == "opus" and len(text) < SHORT else SURE
        assert detect(file) > limit, text


def test_it_is_not_found_without_the_option(
    plain: LoadedVoice, detect: Callable[[Path], float], tmp_path: Path
) -> None:
    for seed, text in enumerate(TEXTS):
        assert detect(plain.say(text, seed=seed).save(tmp_path / "x.wav")) < 1 - SURE, text


def test_the_same_samples_alone_and_among_others(marking: LoadedVoice, plain: LoadedVoice) -> None:
    def say(seed: int) -> np.ndarray:
        return marking.say(TEXTS[seed], seed=seed).samples

    alone = [say(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(say, range(4)))
    for seed, samples in enumerate(alone):
        parts = marking.stream(TEXTS[seed], seed=seed)
        np.testing.assert_array_equal(together[seed], samples)
        np.testing.assert_array_equal(np.concatenate([part.samples for part in parts]), samples)
        assert len(plain.say(TEXTS[seed], seed=seed).samples) == len(samples)


def test_the_benchmark_finds_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert watermark.main(["--repeat=1"]) == 0
    found = {f["name"]: f["value"] for f in json.loads(capsys.readouterr().out)["figures"]}
    assert found["not marked"] < 1 - SURE < SURE < found["marked, Ogg Opus"]
    assert -20 < found["change relative to the speech"] < -10

"""Takes to codes and voice tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.codecs.source_filter.modules import SpeechCodec
from tests.training.takes import SYMBOLS, write_take
from training.speech_codec.checkpoint import CODEC, halved, write
from training.speech_codec.config import DESIGNS, save_config
from training.speech_codec.crops import GRID
from training.speech_codec.tokenise import Reference as Piece
from training.speech_codec.tokenise import Tokeniser, heard, main, waiting

TOY = DESIGNS["toy"]
LINE = int(1.25 * 24_000) // GRID * GRID


@pytest.fixture
def codec() -> SpeechCodec:
    """Untrained, but for the mean and size of its values: its codes differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        codec = SpeechCodec(TOY)
        for part in (codec.encoder.even, codec.voice_encoder.even):
            part.momentum = 1.0
        noise = torch.randn(8, 20 * TOY.hop) * torch.rand(8, 20 * TOY.hop) * 0.1
        codec.encode(noise)
        codec.voice(noise)
    return codec.eval()


@pytest.fixture
def take(tmp_path: Path) -> dict[str, np.ndarray]:
    """Four sessions of three lines; not two of the same length."""
    path = tmp_path / "take_0_0000.npz"
    write_take(path, sessions=4, seconds=1.25, lines=3)
    with np.load(path) as stored:
        take = dict(stored)
    rng = np.random.default_rng(0)
    noise = rng.integers(-3000, 3000, len(take["own"])).astype(np.int16)
    return take | {"own": noise, "other": noise[::-1].copy()}


def test_a_lines_codes_are_those_it_has_alone(codec: SpeechCodec, take: dict) -> None:
    found = Tokeniser(codec, torch.device("cpu")).tokens(take, np.random.default_rng(0))
    assert found["codes"].dtype == np.uint16
    assert found["size"].tolist() == [-(-LINE // TOY.hop)] * 12
    ends = np.cumsum(found["size"])
    for side, name in enumerate(("own", "other")):
        line = torch.from_numpy(take[name][LINE * 4 : LINE * 5]).float() / 32768
        padded = torch.nn.functional.pad(line, (0, 30 * TOY.hop - LINE % TOY.hop))
        padded = padded[: len(padded) // TOY.hop * TOY.hop]
        alone = codec.encode(padded[None])[1][0, : found["size"][4]]
        got = found["codes"][side, ends[3] : ends[4]]
        assert (alone.numpy() == got).mean() > 0.97  # rounding moves values that lie on an edge
        assert len(np.unique(got)) > 3


def test_references_are_of_their_session_and_lines(codec: SpeechCodec, take: dict) -> None:
    found = Tokeniser(codec, torch.device("cpu")).tokens(take, np.random.default_rng(0))
    assert found["rows"].shape == (4 * 2 * 3, TOY.voice_tokens)
    session, side, first, last = found["heard"].T.astype(int)
    assert np.bincount(session * 2 + side).tolist() == [3] * 8
    assert (found["session"][first] == session).all()
    assert (found["session"][last] == session).all()
    assert (first < last).all()  # three seconds are more than two lines
    assert found["named_by"].tolist() == [0, 2]
    assert found["named"].shape == (2, TOY.voice_tokens)
    # the long one is the whole of such a short session
    whole = LINE * 3 // TOY.hop * TOY.hop
    samples = torch.from_numpy(take["own"][LINE * 6 : LINE * 6 + whole]).float()[None] / 32768
    assert (codec.voice(samples)[1][0].numpy() == found["named"][1]).mean() > 0.7


def test_lines_of_a_reference_are_found_by_its_samples() -> None:
    starts, ends = np.array([0, 100, 200]), np.array([100, 200, 300])
    pieces = [Piece(0, 0, 0, 100), Piece(0, 1, 99, 2), Piece(0, 0, 150, 150)]
    found = heard(pieces, starts, ends).tolist()
    assert found == [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 2]]


def test_what_a_later_stage_needs_of_a_line_is_kept(codec: SpeechCodec, take: dict) -> None:
    found = Tokeniser(codec, torch.device("cpu")).tokens(take, np.random.default_rng(0))
    assert found["row"].tolist() == [i % 9 for i in range(12)]
    frames = found["durations"].reshape(12, SYMBOLS).sum(1)
    assert (frames * GRID == LINE).all()
    assert found["voice"].tolist() == [0, -1, 2, -1]
    assert len(set(found["style"].tolist())) == 4


def test_a_follower_takes_up_finished_takes_until_it_is_told(
    codec: SpeechCodec, tmp_path: Path
) -> None:
    takes, out = tmp_path / "takes", tmp_path / "tokens"
    takes.mkdir()
    state = {f"{CODEC}{name}": value for name, value in codec.state_dict().items()}
    weights, config = tmp_path / "toy.safetensors", tmp_path / "toy.json"
    write(halved(state), weights)
    save_config(TOY, config)
    write_take(takes / "take_0_0000.npz", sessions=2, lines=2)
    (takes / "take_0_0001.tmp.npz").write_bytes(b"not finished")
    flags = ["--takes", takes, "--weights", weights, "--config", config, "--out", out]
    until = takes / "finished"
    command = [sys.executable, "-m", "training.speech_codec.tokenise", *map(str, flags)]
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--until", str(until)], cwd=root, env=environment,
        stdout=subprocess.PIPE, text=True,
    ) as follower:  # fmt: skip
        assert follower.stdout is not None
        assert "take_0_0000.npz" in follower.stdout.readline()
        write_take(takes / "later.npz", sessions=2, lines=2)
        (takes / "later.npz").rename(takes / "take_1_0000.npz")
        until.touch()
        assert follower.wait(timeout=300) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "tokens_0_0000.npz", "tokens_1_0000.npz",
    ]  # fmt: skip
    assert not waiting(takes, out, (0, 1))
    before = (out / "tokens_1_0000.npz").stat().st_mtime_ns
    main(list(map(str, flags)))  # nothing is left to do
    assert (out / "tokens_1_0000.npz").stat().st_mtime_ns == before


def test_followers_share_takes(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"take_0_{number:04d}.npz").touch()
    shares = [waiting(tmp_path, tmp_path / "out", (number, 2)) for number in range(2)]
    assert min(map(len, shares)) > 0
    assert sorted(shares[0] + shares[1]) == sorted(tmp_path.glob("*.npz"))

"""Plans to codes and voice tokens."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.takes import SYMBOLS, TOY, take_of, toy_coder, write_coder, write_take
from training.kokoro.text import QUESTION
from training.speech_codec.coder import PARTS, PHONE_DIM
from training.speech_codec.plans import CURVE_GRID, PHONE_GRID, SILENCE
from training.speech_codec.tokenise import (
    ERRORS,
    clearer,
    codes_of_lines,
    ends_of_voice,
    main,
    tokens,
    waiting,
)

LINE = int(1.25 * 24_000) // PHONE_GRID * PHONE_GRID
CPU = torch.device("cpu")


@pytest.fixture
def plan() -> dict[str, np.ndarray]:
    """Four sessions of three lines."""
    return take_of(sessions=4, seconds=1.25, lines=3)


def test_a_lines_codes_are_those_it_has_alone(plan: dict[str, np.ndarray]) -> None:
    coder = toy_coder()
    found = tokens(plan, coder, CPU)
    assert found["codes"].dtype == np.uint16
    assert found["size"].tolist() == [-(-LINE // TOY.hop)] * 12
    assert len(found["codes"]) == found["size"].sum()
    ends = np.cumsum(found["size"])
    held = {name: torch.from_numpy(plan[name]) for name in ("phones", "pitch", "energy")}
    for line in (0, 4, 11):
        alone = {name: v[line * LINE // g : (line + 1) * LINE // g] for name, v, g in (
            (name, value, PHONE_GRID if name == "phones" else CURVE_GRID)
            for name, value in held.items()
        )}  # fmt: skip
        wanted, _ = codes_of_lines(coder, alone, torch.zeros(1, dtype=torch.long))
        got = found["codes"][ends[line] - found["size"][line] : ends[line]]
        assert (wanted.numpy() == got).all()
        assert len(np.unique(got)) > 3


def test_rows_are_the_styles_tokens_then_some_with_errors(plan: dict[str, np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    plan["style"] = rng.normal(0, 1, (4, 256)).astype(np.float16)
    plan["style"][3] = plan["style"][1]
    coder = toy_coder()
    found = tokens(plan, coder, CPU)["rows"]
    assert found.shape == (4, len(ERRORS), TOY.voice_tokens)
    own = coder.voice(torch.from_numpy(plan["style"]).float())[1]
    assert (found[:, 0] == own.numpy()).all()
    assert (found[3, 0] == found[1, 0]).all()
    assert (found[3, 1:] != found[1, 1:]).any()
    assert (found[:, -1] != found[:, 0]).any()


def test_what_a_later_stage_needs_of_a_line_is_kept(plan: dict[str, np.ndarray]) -> None:
    found = tokens(plan, toy_coder(), CPU)
    assert found["row"].tolist() == [i % 9 for i in range(12)]
    assert found["session"].tolist() == [i // 3 for i in range(12)]
    frames = found["durations"].reshape(12, SYMBOLS).sum(1)
    assert (frames * PHONE_GRID == LINE).all()
    assert found["voice"].tolist() == [0, -1, 2, -1]
    assert found["accent"].tolist() == [0] * 4


def test_the_end_of_a_lines_voice_and_its_rise_are_kept(plan: dict[str, np.ndarray]) -> None:
    """The first line rises by an octave at 0.9 s, the second one falls, the third has no voice."""
    values = LINE // CURVE_GRID
    voiced = round(0.9 * 24_000 / CURVE_GRID)
    plan["pitch"] = plan["pitch"].astype(np.float32)
    for line, last in enumerate((200.0, 50.0 * 2**0.5, 0.0)):
        own = plan["pitch"][line * values : (line + 1) * values]
        own[:] = 0
        own[:voiced] = 100.0 if last else 0.0
        own[voiced - 6 : voiced] = last
    found = tokens(plan, toy_coder(), CPU)
    glide = 2  # values next to a pause
    seconds = (voiced - glide) * CURVE_GRID / 24_000
    codes = -(-seconds * 24_000 // TOY.hop)
    assert found["voiced"][:3].tolist() == [codes, codes, 0]
    assert found["rise"][:2].tolist() == pytest.approx([12.0, -6.0], abs=0.01)
    assert np.isnan(found["rise"][2])


def test_clearer_ends_of_questions(plan: dict[str, np.ndarray]) -> None:
    """Questions of the first three lines rise by 2, .5 and -3 semitones, the second one in quotes;
    the fourth rises by 2 and is none. Only the codes of those that rise change."""
    values, count = LINE // CURVE_GRID, 4
    plan["phones"][:] = 3
    plan["pitch"] = plan["pitch"].astype(np.float32)
    first = plan["lines"][:count, 1]
    for line, rise in enumerate((2.0, 0.5, -3.0, 2.0)):
        own = plan["pitch"][line * values : (line + 1) * values]
        own[:] = np.append(np.full(values - 6, 100.0), np.full(6, 100.0 * 2 ** (rise / 12)))
        plan["phones"][(line + 1) * LINE // PHONE_GRID - 2] = 4 if line == 3 else QUESTION
        plan["phones"][(line + 1) * LINE // PHONE_GRID - 1] = 15 if line in (1, 3) else SILENCE
    plan["phones"][4 * LINE // PHONE_GRID : 5 * LINE // PHONE_GRID] = 0  # no phone at all
    first = plan["lines"][:5, 1]
    made = clearer(plan, first, first + LINE, 1.5)
    first = first[:count]
    _, rises = ends_of_voice(made, first, first + LINE, TOY.hop)
    assert rises.tolist() == pytest.approx([3.5, 0.25, -3.0, 2.0], abs=0.01)
    assert (made[: values - 6] == plan["pitch"][: values - 6]).all()
    assert (made[2 * values :] == plan["pitch"][2 * values :]).all()
    coder = toy_coder()
    with torch.no_grad():  # it depends on pitch little
        coder.content.input.weight[:, PHONE_DIM :: PHONE_DIM + PARTS] *= 100
    before, after = (tokens(plan, coder, CPU, emphasis) for emphasis in (0.0, 12.0))
    ends = np.cumsum(before["size"])[:3]
    same = [(a == b).all() for a, b in zip(
        np.split(before["codes"], ends)[:3], np.split(after["codes"], ends)[:3], strict=True
    )]  # fmt: skip
    assert (same[0], same[2]) == (False, True)
    assert np.array_equal(before["rise"], after["rise"], equal_nan=True)


def test_a_follower_takes_up_finished_plans_until_no_more_will_come(tmp_path: Path, capsys) -> None:
    plans, out = tmp_path / "plans", tmp_path / "tokens"
    plans.mkdir()
    write_coder(tmp_path / "coder.safetensors", toy_coder())
    take = take_of(sessions=2, lines=2)
    write_take(plans / "plan_0_0000.npz", take)
    (plans / "plan_0_0001.tmp.npz").write_bytes(b"not finished")
    flags = [f"--plans={plans}", f"--coder={tmp_path / 'coder.safetensors'}", f"--out={out}"]
    flags += ["--design=toy"]
    until = plans / "finished"
    follower = threading.Thread(target=main, args=([*flags, f"--until={until}"],))
    follower.start()
    while not (out / "tokens_0_0000.npz").exists():
        assert follower.is_alive()
        time.sleep(0.01)
    write_take(tmp_path / "plan.npz", take)
    (tmp_path / "plan.npz").rename(plans / "plan_1_0000.npz")
    until.touch()
    follower.join(timeout=300)
    assert sorted(path.name for path in out.iterdir()) == [
        "tokens_0_0000.npz", "tokens_1_0000.npz",
    ]  # fmt: skip
    assert "plan_1_0000.npz: 0.00 h" in capsys.readouterr().out
    assert not waiting(plans, out)
    left = [[path.name for path in waiting(plans, tmp_path, part, 2)] for part in (0, 1)]
    assert left == [["plan_0_0000.npz"], ["plan_1_0000.npz"]]
    before = (out / "tokens_1_0000.npz").stat().st_mtime_ns
    main(flags)  # nothing is left to do
    assert (out / "tokens_1_0000.npz").stat().st_mtime_ns == before

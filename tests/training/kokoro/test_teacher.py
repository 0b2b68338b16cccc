"""The natural teacher at its own size with random weights: batches, timbres, takes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from training.kokoro.network import FRAME, STYLE, Kokoro, needed_to_speak
from training.kokoro.studio import Session, Studio, batches, draw_sessions, partners, record
from training.kokoro.style import StyleBook, Voice
from training.speech_codec import clips
from training.speech_codec.crops import load_takes

NAMES = ("af_one", "af_two", "am_one", "am_two", "bf_one", "bm_one", "zf_one")


@pytest.fixture(scope="module")
def studio(kokoro: Kokoro) -> Studio:
    generator = np.random.default_rng(0)
    rows = {name: generator.normal(0, 0.3, (20, STYLE)).astype(np.float16) for name in NAMES}
    return Studio(kokoro, StyleBook(rows, torch.device("cpu")), torch.device("cpu"))


def spoken(kokoro: Kokoro, lines: list[list[int]], style: torch.Tensor) -> list[torch.Tensor]:
    ids = torch.zeros(len(lines), max(map(len, lines)) + 2, dtype=torch.long)
    for row, line in zip(ids, lines, strict=True):
        row[1 : len(line) + 1] = torch.tensor(line)
    lengths = torch.tensor([len(line) + 2 for line in lines])
    prosody = kokoro.prosody(ids, lengths, style)
    curves = kokoro.curves(prosody, style)
    samples = kokoro.speak(prosody, curves, style, noise=0.0)
    return [
        row[: count * FRAME] for row, count in zip(samples, curves.frames.tolist(), strict=True)
    ]


def test_a_line_sounds_the_same_alone_and_beside_a_longer_one(kokoro: Kokoro) -> None:
    style = torch.randn(2, STYLE, generator=torch.Generator().manual_seed(1)) / 4
    lines = [[50, 43, 4], [61, 62, 83, 16, 60, 51, 5]]
    together = spoken(kokoro, lines, style)
    for number, line in enumerate(lines):
        alone = spoken(kokoro, [line], style[number : number + 1])[0]
        assert len(alone) == len(together[number])
        error = (alone - together[number]).square().mean() / alone.square().mean()
        assert error < 1e-2  # the phase of bins without energy amplifies rounding


def test_weights_that_do_not_fit_are_refused(kokoro: Kokoro) -> None:
    weights = dict(kokoro.state_dict())
    del weights["decoder.generator.conv_post.bias"]
    with pytest.raises(RuntimeError, match=r"conv_post\.bias"):
        Kokoro.load(weights, torch.device("cpu"))


def test_a_take_holds_aligned_timbres(studio: Studio) -> None:
    voices = [Voice.named(name) for name in ("af_one", "am_one", "bf_one")]
    sessions = [Session(voice, ((50, 43), (61, 62, 83)), (7, 9)) for voice in voices]
    take = studio.take(sessions)
    total = len(take["own"])
    assert total == len(take["other"]) == FRAME * len(take["phones"]) == 300 * len(take["pitch"])
    assert take["partner"].tolist() == [2, 1, 0]
    assert take["start"].tolist() == [0, *take["end"][:-1].tolist()]
    assert take["end"][-1] == total
    assert {0, 43, 50, 61, 62, 83} == set(take["phones"].tolist())
    assert [row[0] for row in take["lines"].tolist()] == [0, 0, 1, 1, 2, 2]
    assert not np.array_equal(take["own"], take["other"])
    assert take["row"].tolist() == [7, 9] * 3
    assert take["symbols"].tolist() == [4, 5] * 3
    ends = take["symbols"].cumsum()
    frames = [int(part.sum()) for part in np.split(take["durations"], ends[:-1])]
    starts = [*take["lines"][:, 1].tolist(), total]
    assert [count * FRAME for count in frames] == np.diff(starts).tolist()
    assert take["voice"].tolist() == [0, 2, 4]  # of af_one, af_two, am_one, am_two, bf_one, bm_one
    assert take["accent"].tolist() == [0, 0, 1]


def test_a_plan_is_a_take_without_samples(studio: Studio) -> None:
    voices = [Voice.named(name) for name in ("af_one", "am_one")]
    sessions = [Session(voice, ((50, 43), (61, 62, 83)), (7, 9)) for voice in voices]
    take, plan = studio.take(sessions), studio.plan(sessions)
    assert take.keys() - plan.keys() == {"own", "other"}
    alone = studio.take(sessions, timbres=1)
    assert take.keys() - alone.keys() == {"other"}
    for name, value in plan.items():
        assert value.dtype == take[name].dtype
        assert np.array_equal(value, take[name])
    assert len(plan["energy"]) == len(plan["pitch"]) == 2 * len(plan["phones"])
    assert np.unique(plan["energy"]).size > 10


def test_a_teacher_without_what_it_speaks_with_plans_the_same(studio: Studio) -> None:
    whole = studio.teacher
    kept = {name: v for name, v in whole.state_dict().items() if not needed_to_speak(name)}
    silent = Kokoro.load(kept, torch.device("cpu"))
    assert silent.decoder is None
    sessions = [Session(Voice.named("af_one"), ((50, 43), (61, 62, 83)), (7, 9))]
    plan = Studio(silent, studio.book, studio.device).plan(sessions)
    for name, value in studio.plan(sessions).items():
        assert np.array_equal(plan[name], value)


def test_clips_have_the_plan_and_the_style_of_their_line(studio: Studio, tmp_path: Path) -> None:
    rng = random.Random(0)
    mixed = studio.book.mixture(rng)
    voices = [("named", "af_one", Voice.named("af_one")), ("mixture", "mixture0", mixed)]
    lines = [
        clips.Line(kind, name, voice.timbre, voice.prosody, text, ids)
        for kind, name, voice in voices
        for text, ids in (("Hi.", (50, 43)), ("So it is.", (61, 62, 83)))
    ]
    clips.write_lines(lines, tmp_path / "lines.json")
    assert clips.read_lines(tmp_path / "lines.json") == lines
    clips.record(studio, lines, tmp_path)
    found = clips.read_clips(tmp_path)
    assert [(clip.voice, clip.text) for clip in found] == [(line.name, line.text) for line in lines]
    for clip, line in zip(found, lines, strict=True):
        samples, rate = soundfile.read(clip.path, dtype="int16")
        (session,) = [Session(line.voice, (line.ids,), (0,))]
        plan, wanted = clip.plan(), studio.plan([session])
        assert rate == 24_000
        assert len(samples) == FRAME * len(wanted["phones"])
        assert samples.std() > 0
        assert np.array_equal(plan["phones"], wanted["phones"])
        assert np.array_equal(plan["style"], wanted["style"][0])
        for name in ("pitch", "energy"):
            assert np.allclose(plan[name], wanted[name], rtol=2e-3, atol=2e-3)


def test_clips_need_symbols_or_spelled_lines(capsys) -> None:
    for given, message in (
        (["--out", "."], "name --package to spell texts"),
        (["--spelled", "lines.json"], "name --out, --spell or both"),
    ):
        with pytest.raises(SystemExit):
            clips.main(["--teacher", ".", *given])
        assert message in capsys.readouterr().err


def test_recording_goes_on_until_the_time_is_over(studio: Studio, tmp_path) -> None:
    lines = {"a": [(50, 43)], "b": [(61, 62)]}
    rng = random.Random(0)
    hours = record(
        lambda: studio.take(draw_sessions(studio.book, lines, (2, 1), rng)), tmp_path, "take_7", 0.0
    )
    takes = load_takes([tmp_path / "take_7_0000.npz"] * 2, torch.device("cpu"))
    assert len(takes["own"]) == pytest.approx(2 * hours * 3600 * 24_000)
    assert takes["start"].tolist() == sorted(takes["start"].tolist())
    assert (takes["partner"][2:] - takes["partner"][:2]).tolist() == [2, 2]


def test_partners_are_of_one_sex() -> None:
    sexes = "fmffm"
    sessions = [Session(Voice.named(f"a{sex}_{n}"), (), ()) for n, sex in enumerate(sexes)]
    found = partners(sessions)
    assert sorted(found) == list(range(5))
    assert all(sexes[a] == sexes[b] and a != b for a, b in enumerate(found))


def test_batches_fit_their_limit_and_lose_nothing() -> None:
    items = [5, 1, 9, 3, 3, 2, 8]
    found = list(batches(items, lambda item: item, 10))
    assert sorted(x for batch in found for x in batch) == sorted(items)
    assert all(len(batch) == 1 or len(batch) * max(batch) <= 10 for batch in found)

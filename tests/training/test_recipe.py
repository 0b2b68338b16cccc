"""The recipe at a small size, from text to a voice checkpoint; and strict reading of its values."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.training.speechlike import has_teacher, write_speech
from training import codec, run
from training.codes import part_files
from training.distributed import Clock, Deadline, Group
from training.recipe import RecipeError, load_recipe, write_recipe
from training.shards import read_clips
from training.stages import Launcher, Stage, StageError, is_being_made, is_done
from training.together import ParallelRun
from training.vocabulary import FIRST_CODE
from training.voices import NAMED
from tts.say import main as say

TOY = Path(__file__).with_name("toy.toml")
ONWARD = Path(run.__file__).with_name("language_model.toml")
LINES = [
    "The old boat left the harbour before anybody was awake.",
    "Nobody knew where it went.",
    "A letter came.",
    "In the evening they lit the lamp again, and waited.",
    "It was a long winter.",
    "The road to the village was under snow for weeks.",
    "She sold the house.",
    "Then the boat came back, with another name and a new sail.",
    "Who was at the wheel?",
    "He never told them.",
    "Some say it was his brother.",
    "Others say that there was nobody at all.",
    "Good night.",
    "The lamp is still there.",
]
WORDS = ["boat\tABCD", "letter\tEFGHIJ", "lamp\tKLMN", "snow\tOPQR"]  # the sounds do not matter


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a whole run."""
    out = tmp_path_factory.mktemp("recipe")
    (out / "corpus.txt").write_text("\n".join(LINES) + "\n")
    (out / "words.tsv").write_text("\n".join(WORDS) + "\n")
    if not has_teacher():
        write_speech(out / "speech", LINES)
    assert run.main(["--out", str(out), "--config", str(TOY), "--here"]) == 0
    return out


def test_the_speech_is_whole_codes_with_labels(made: Path) -> None:
    ((pcm, clips),) = read_clips(made / "speech")
    assert {clip.line for clip in clips} == set(range(len(LINES)))
    assert all(clip.length % 640 == 0 for clip in clips)
    for name in ("phone", "letter"):
        assert len(pcm.with_suffix(f".{name}").read_bytes()) * 160 * 2 == pcm.stat().st_size
        assert set(pcm.with_suffix(f".{name}").read_bytes()) > {0}


def test_every_code_is_of_the_toy_codec(made: Path) -> None:
    (part,) = part_files(made / "codes")
    with np.load(part) as data:
        assert data["codes"].max() < 4 * 4 * 4
        assert data["clips"][:, 1].sum() == len(data["codes"])
        assert len(data["letters"]) == 4 * len(data["codes"])


def test_the_second_stage_trains_the_decoder_alone(made: Path) -> None:
    first, last = (load_file(made / f"{n}.safetensors") for n in ("codec_stage1", "codec"))
    assert first.keys() == last.keys()
    moved = {name.split(".")[0] for name in first if not first[name].equal(last[name])}
    assert moved == {"decoder"}


def test_the_voice_is_a_checkpoint_that_speaks(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    voice, wav, times = made / "voice", tmp_path / "x.wav", tmp_path / "x.json"
    assert load_file(voice / "model.safetensors")["model.embed_tokens.weight"].shape[0] == (
        FIRST_CODE + 64
    )
    arguments = ["Oh yes.", "-v", "wren", "--seed", "1", "--model", str(voice), "-o", str(wav)]
    timed = ["--timestamps", str(times), "--timestamp-level", "word"]
    assert say([*arguments, *timed]) == 0, capfd.readouterr().err
    assert wav.stat().st_size > 44 + 640 * 2
    assert json.loads(times.read_text())
    assert len(json.loads((voice / "voices.json").read_text())["voices"]) == len(NAMED)


def test_what_is_done_is_not_done_again(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (made / "aligner.safetensors").unlink()
    before = (made / "lm.safetensors").stat().st_mtime_ns
    assert run.main(["--out", str(made), "--config", str(TOY), "--here"]) == 0
    told = capfd.readouterr().out
    assert "language_model: is there" in told
    assert "aligner: is there" not in told
    assert (made / "aligner.safetensors").exists()
    assert (made / "lm.safetensors").stat().st_mtime_ns == before


def test_a_fresh_run_keeps_what_it_is_given_and_nothing_else(tmp_path: Path) -> None:
    plan, words = run.Plan(tmp_path, load_recipe()), tmp_path / "mine.tsv"
    words.write_text("mine")
    outputs = {stage.name: stage.output for stage in plan.in_turn()}
    for output in (*outputs.values(), tmp_path / "codes2.npz"):
        output.parent.mkdir(exist_ok=True)
        output.write_text("old")
    given = {"words": words, "corpus": plan.corpus_file}
    run.prepare(plan, given, fresh=False)
    assert outputs["words"].read_text() == "mine"
    assert all(is_done(stage) for stage in plan.in_turn())
    run.prepare(plan, given, fresh=True)
    assert {name for name, output in outputs.items() if output.exists()} == given.keys()
    assert not (tmp_path / "codes2.npz").exists()
    assert plan.corpus_file.read_text() == "old"


# --- its numbers


def test_the_kept_recipe_is_the_one_that_ran(made: Path) -> None:
    assert load_recipe(made / "recipe.toml") == load_recipe(TOY)


def test_flags_go_before_files_and_files_before_what_ships(tmp_path: Path) -> None:
    shipped, toy = load_recipe(), load_recipe(TOY)
    assert (shipped.language_model.layers, toy.language_model.layers) == (6, 1)
    assert toy.language_model.lr == shipped.language_model.lr
    changed = load_recipe(TOY, ["language_model.layers=3", "synthesis.libraries=/opt/flite"])
    assert changed.language_model == replace(toy.language_model, layers=3)
    assert changed.synthesis.libraries == "/opt/flite"
    write_recipe(changed, tmp_path / "kept.toml")
    assert load_recipe(tmp_path / "kept.toml") == changed


def test_the_language_model_continues_with_its_shape() -> None:
    onward, shipped = load_recipe(ONWARD), load_recipe()
    values, start = onward.language_model, shipped.language_model
    assert (values.layers, values.dim) == (start.layers, start.dim)
    assert sum(values.phoneme_parts) == pytest.approx(1)
    assert (onward.codec, onward.aligner) == (shipped.codec, shipped.aligner)
    lists = "\n".join(onward.lexicon.lists)
    packages = re.findall(r"\bw(?:\w+-insane|ordnet-base)|dict-gcide", ONWARD.read_text())
    assert len(packages) == len(re.findall("insane|noun|gcide", lists)) == 5


def test_every_value_is_read() -> None:
    folder = Path(run.__file__).parent
    sources = [p.read_text() for p in folder.glob("*.py") if p.name != "recipe.py"]
    sources.append((folder.parent / "decoder" / "codecs" / "embedded" / "modules.py").read_text())
    code = "\n".join(sources)
    for section, values in asdict(load_recipe()).items():
        unread = [key for key in values if not re.search(rf"\.{key}\b", code)]
        assert unread == [], section


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[langauge_model]", "there is no langauge_model; do you mean language_model?"),
        ("[aligner]\nbach = 3", "[aligner]: there is no bach; do you mean batch?"),
        ("[aligner]\nbatch = 3.5", "aligner.batch must be int, not 3.5"),
        ("[codec]\nlevels = 4", "codec.levels must be a list"),
        ("aligner = 3", "aligner is a section"),
        ("[aligner", "Expected ']'"),
    ],
)
def test_a_wrong_recipe_is_told(
    text: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(RecipeError):
        load_recipe(tmp_path / "own.toml")
    arguments = ["--out", str(tmp_path / "out"), "--config", str(tmp_path / "own.toml")]
    assert run.main(arguments) == 2
    assert words in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


# --- stages and their time


def test_a_stage_that_fails_is_not_done(tmp_path: Path) -> None:
    output = tmp_path / "x"
    stage = Stage("broken", "this", ("--help",), output)
    output.touch()
    assert is_done(stage)
    with pytest.raises(StageError, match=r"broken failed: see .*broken\.log"):
        Launcher(tmp_path).start(replace(stage, module="no_such_module")).wait()
    assert not is_done(stage)
    assert "no_such_module" in (tmp_path / "logs/broken.log").read_text()
    Launcher(tmp_path).start(stage).wait()
    assert is_done(stage)


class _Steps(Clock):
    """A clock on which a step takes a fixed time."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


@pytest.mark.parametrize("step_s", [0.01, 0.7, 30.0])
def test_a_loop_ends_on_time_however_slow_its_steps(step_s: float) -> None:
    clock = _Steps()
    deadline, step, shares = Deadline(clock, Group(), until=100.0), 0, []
    while (share := deadline.share(step)) < 1:
        shares.append(share)
        clock.time_s += step_s
        step += 1
    assert 100 <= clock.time_s <= 100 + max(2.0, step_s)
    assert shares == sorted(shares)


def test_a_loop_ends_after_its_steps() -> None:
    deadline = Deadline(_Steps(), Group(), until=100.0, steps=5)
    assert [deadline.share(step) for step in range(6)] == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert deadline.has_passed


# --- against the clock


def test_what_was_saved_on_the_way_stands_in(tmp_path: Path) -> None:
    plan = run.Plan(tmp_path, load_recipe())
    assert "--aligner" not in plan.voice().command
    (tmp_path / "codec_stage1_partial.safetensors").write_text("partial")
    (tmp_path / "aligner.safetensors").touch()
    plan.stand_in()
    assert "--aligner" in plan.voice().command
    assert (tmp_path / "codec.safetensors").read_text() == "partial"
    (tmp_path / "codec.safetensors").write_text("sharper")
    plan.stand_in()
    assert plan.first_codec.read_text() == "partial"
    assert (tmp_path / "codec.safetensors").read_text() == "sharper"


def test_a_stage_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    parallel_run = ParallelRun(run.Plan(tmp_path, load_recipe(TOY)))
    launcher = Launcher(tmp_path)
    stages = [Stage("broken", "no_such_module", (), tmp_path / "x"),
              Stage("sound", "this", (), tmp_path / "y")]  # fmt: skip
    for stage in [launcher.start(stage) for stage in stages]:
        parallel_run.await_end(stage)
    (failure,) = parallel_run.failures
    assert failure.startswith("broken failed")


def test_waiting_for_words_ends_when_they_fail(tmp_path: Path) -> None:
    parallel_run = ParallelRun(run.Plan(tmp_path, load_recipe(TOY)))
    stage = Stage("words", "no_such_module", (), tmp_path / "words.tsv")
    stage.output.write_text("half\n")
    running = Launcher(tmp_path).start(stage)
    assert is_being_made(stage.output)
    parallel_run._watch_words(stage, running)
    assert not is_being_made(stage.output)
    assert not stage.output.exists()
    assert len(parallel_run.failures) == 1


def test_waiting_for_speech_ends_when_synthesis_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the time is over: the teacher's libraries are missing."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "corpus.txt").write_text("\n".join(LINES) + "\n")
    (out / "words.tsv").write_text("\n".join(WORDS) + "\n")
    values = ["schedule.minutes=30", f"synthesis.libraries={tmp_path}"]
    arguments = ["--out", str(out), "--config", str(TOY), "--together", "--set", *values]
    assert run.main(arguments) == 1
    told = capfd.readouterr().err
    assert re.search(r"recipe: synthesis failed: see \S+; reconstruct failed: see \S+", told)
    log = (out / "logs/reconstruct0.log").read_text()
    assert "the stage synthesis has failed: 0 s of speech are there" in log
    assert "the time is over" not in log


def test_speech_that_is_too_little_ends_the_wait_with_the_time(made: Path, tmp_path: Path) -> None:
    flags = ["--speech", str(made / "speech"), "--out", str(tmp_path), "--until", "0"]
    wanted = ["--config", str(TOY), "--min-hours", "0.04"]
    with pytest.raises(SystemExit, match=r"the time is over: .* s of speech are there, 144 needed"):
        codec.main(["reconstruct", *flags, *wanted])

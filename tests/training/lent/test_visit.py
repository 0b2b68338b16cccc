"""A whole visit at toy size: codes of plans, tokens, then everything that learns from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decoder.codecs.source_filter.modules import Decoder
from tests.training.forked import ForkedPopen
from tests.training.speech_lm.tokens import KNOWN, write_tables
from tests.training.takes import SYMBOLS, take_of, toy_coder, write_coder, write_take, write_voices
from training.kokoro.phonemes import table, write_table
from training.lent import visit
from training.speech_codec.checkpoint import halved, load, write
from training.speech_codec.coder import Reader, load_coder
from training.speech_codec.config import DESIGNS, coder_sizes

DECODER = ["--batch", "2", "--crop", "8", "--judged", "3", "--judge-width", "2"]
MODEL = ["--layers", "1", "--dim", "128", "--tokens-per-step", "1024", "--no-compile"]
REST = ["--", *DECODER, "--steps", "2", "--", *MODEL, "--steps", "3"]
TAKE, PLAN = "take_0_0000.npz", "plan_0_0000.npz"


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visit, "LOOK_EVERY_S", 0.02)
        yield


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments; the teacher, which is not installed here, has spoken already."""
    monkeypatch.setattr(visit.subprocess, "Popen", ForkedPopen)
    monkeypatch.setattr(visit.Visit, "_speak", lambda visit: None)
    write_tables(tmp_path)
    write_voices(tmp_path / "voices.npz")
    for accent in "ab":
        rows = [f"{'abd'[n % 3] * (SYMBOLS - 2)}\tWord {n}." for n in range(9)]
        write_table(rows, table(tmp_path / "phonemes", accent))
    for kind, name in (("takes", TAKE), ("plans", PLAN)):
        (tmp_path / "out" / kind).mkdir(parents=True)
        write_take(tmp_path / "out" / kind / name, take_of(lines=2))
    places = dict.fromkeys(("teacher", "package"), tmp_path)
    places |= {name: tmp_path / name for name in ("phonemes", "out")}
    given = [f"--{name}={place}" for name, place in places.items()]
    quick = ["--coder-after=0", "--coder-minutes=0.01", "--coder-batch=4", "--voices-minutes=0.01"]
    return [*given, "--design=toy", *quick]


def test_a_visit_leaves_tokens_a_decoder_voices_and_a_language_model(
    flags: list[str], tmp_path: Path, capsys
) -> None:
    assert visit.main([*flags, *REST]) == 0, capsys.readouterr().out
    out = tmp_path / "out"
    assert (out / "status").read_text() == "done\n"
    coder = load_coder(out / "coder" / "coder.safetensors", coder_sizes(DESIGNS["toy"]))
    with np.load(out / "tokens" / "tokens_0_0000.npz") as tokens:
        assert tokens["codes"].size > 1000
        own = coder.voice(coder.style.mean[None])[1]
        assert tokens["rows"].shape[2] == own.shape[1]
    codec = [out / "codec" / name for name in ("toy.safetensors", "toy.json", "voices.safetensors")]
    assert load(*codec).config == DESIGNS["toy"]
    assert {"lm.safetensors", "lm.json", "voices.json"} <= {p.name for p in (out / "lm").iterdir()}
    assert "done after 3 steps" in (out / "logs" / "lm.log").read_text()
    assert "held out: clean" in (out / "logs" / "voices.log").read_text()
    assert "held out: English phone" in (out / "logs" / "coder.log").read_text()


def test_a_visit_may_use_an_earlier_coder_and_continue_a_decoder(
    flags: list[str], tmp_path: Path, capsys
) -> None:
    write_coder(tmp_path / "earlier.safetensors", toy_coder())
    decoder = Decoder(DESIGNS["toy"]).state_dict()
    start = tmp_path / "toy.safetensors"
    write(halved({f"decoder.{name}": value for name, value in decoder.items()}), start)
    earlier = [f"--coder={tmp_path / 'earlier.safetensors'}", f"--start={start}", "--no-lm",
               "--voices-minutes=0"]  # fmt: skip
    rest = ["--", *DECODER, "--steps", "1", "--lr", "0"]
    out = tmp_path / "out"
    assert visit.main([*flags, *earlier, *rest]) == 0, capsys.readouterr().out
    kept = (out / "coder" / "coder.safetensors").read_bytes()
    assert kept == (tmp_path / "earlier.safetensors").read_bytes()
    assert not (out / "lm").exists()
    assert not (out / "logs" / "voices.log").exists()
    first, second = load_file(start), load_file(out / "codec" / "toy.safetensors")
    assert all(first[name].equal(second[name]) for name in first)


def test_a_visit_may_be_of_a_language_model_only(flags: list[str], tmp_path: Path, capsys) -> None:
    write_coder(tmp_path / "earlier.safetensors", toy_coder())
    (tmp_path / "out" / "takes" / TAKE).unlink()
    given = [*flags, f"--coder={tmp_path / 'earlier.safetensors'}", "--only-lm"]
    assert visit.main([*given, "--", "--", *MODEL, "--steps", "2"]) == 0, capsys.readouterr().out
    out = tmp_path / "out"
    assert (out / "status").read_text() == "done\n"
    assert "done after 2 steps" in (out / "logs" / "lm.log").read_text()
    assert not (out / "codec").exists()


@pytest.mark.parametrize(
    ("missing", "message"), [(TAKE, "there are no takes"), (PLAN, "there are no plans")]
)
def test_a_visit_without_takes_or_plans_ends(
    flags: list[str], tmp_path: Path, capsys, missing: str, message: str
) -> None:
    write_coder(tmp_path / "earlier.safetensors", toy_coder())
    (tmp_path / "out" / f"{missing[:4]}s" / missing).unlink()
    earlier = [f"--coder={tmp_path / 'earlier.safetensors'}"] if missing == TAKE else []
    assert visit.main([*flags, *earlier, *REST]) == 1
    assert message in capsys.readouterr().out
    assert (tmp_path / "out" / "status").read_text() == "failed\n"


@pytest.mark.parametrize("kind", ["studio", "planner"])
def test_a_visit_whose_studios_fail_says_why(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, kind: str
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(visit.subprocess, "Popen", ForkedPopen)
    for name in (TAKE, PLAN):
        (tmp_path / "out" / f"{name[:4]}s" / name).unlink()
    write_coder(tmp_path / "earlier.safetensors", toy_coder())
    earlier = [f"--coder={tmp_path / 'earlier.safetensors'}"] if kind == "studio" else []
    assert visit.main([*flags, *earlier, "--no-lm", "--studios=1"]) == 1
    assert f"{kind}0 failed" in capsys.readouterr().out
    assert (tmp_path / "out" / "status").read_text() == "failed\n"
    assert "FileNotFoundError" in (tmp_path / "out" / "logs" / f"{kind}0.log").read_text()


def test_a_visit_whose_planner_fails_late_ends_without_a_language_model(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """There are plans, whose tokens are written while more are expected."""

    def speak(started: visit.Visit) -> None:
        started.processes.start("planner0", 0, "no_such_module", [])

    monkeypatch.setattr(visit.Visit, "_speak", speak)
    assert visit.main([*flags, "--voices-minutes=0", *REST]) == 0
    printed, out = capsys.readouterr().out, tmp_path / "out"
    assert "without a language model: --- planner0 failed" in printed
    assert (out / "status").read_text() == "done\n"
    assert (out / "codec" / "toy.safetensors").exists()
    assert not (out / "lm" / "lm.safetensors").exists()


def test_an_earlier_coder_may_learn_symbols(flags: list[str], tmp_path: Path, capsys) -> None:
    earlier, reader = toy_coder(), tmp_path / "reader.safetensors"
    write_coder(tmp_path / "earlier.safetensors", earlier)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = Reader(coder_sizes(DESIGNS["toy"])).state_dict()
    write(halved(state), reader)
    given = [f"--coder={tmp_path / 'earlier.safetensors'}", f"--reader={reader}", "--only-lm"]
    assert visit.main([*flags, *given, *REST]) == 0, capsys.readouterr().out
    path = tmp_path / "out" / "coder" / "coder.safetensors"
    learned = load_coder(path, coder_sizes(DESIGNS["toy"]))
    used = [KNOWN[symbol] for symbol in "abd"]
    rows, before = learned.content.phones.weight, earlier.content.phones.weight
    assert torch.equal(rows[used], before[used].half().float())
    assert (tmp_path / "out" / "coder" / "reader.safetensors").exists()
    assert (tmp_path / "out" / "lm" / "lm.safetensors").exists()


def test_planners_may_be_on_several_gpus(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(count: int, *more: str) -> list[int]:
        monkeypatch.setattr(visit.torch.cuda, "device_count", lambda: count)
        made = visit.Visit(visit.build_parser().parse_args([*flags, *more]))
        return [made._planning_gpu(number) for number in range(4)]

    assert gpus(2) == [1, 1, 1, 1]
    assert gpus(2, "--planner-gpus=2") == [1, 0, 1, 0]
    assert gpus(1) == [0, 0, 0, 0]


@pytest.mark.parametrize("given", [0, 3])
def test_planners_need_gpus_of_this_machine(
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: int,
) -> None:
    monkeypatch.setattr(visit.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        visit.main([*flags, f"--planner-gpus={given}"])
    assert f"--planner-gpus {given}: this machine has 2 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--reader=reader.safetensors", "--reader: it needs --coder"),
        ("--spanish=0.5", "--spanish: there is no "),
    ],
)
def test_what_a_visit_lacks_ends_it_at_once(
    flags: list[str], capsys: pytest.CaptureFixture[str], given: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        visit.main([*flags, given])
    assert message in capsys.readouterr().err


def test_processes_run_in_parallel_and_all_are_waited_for(tmp_path: Path) -> None:
    processes = visit.Processes(tmp_path)
    processes.start("fine", 0, "this", [])
    processes.wait("fi")
    processes.start("wrong", 1, "no_such_module", [])
    with pytest.raises(visit.VisitError, match="no_such_module"):
        processes.wait()
    assert "Zen" in (tmp_path / "logs" / "fine.log").read_text()


def test_processes_that_still_run_are_ended(tmp_path: Path) -> None:
    processes = visit.Processes(tmp_path)
    processes.start("server", 0, "http.server", ["0"])
    assert processes.are_running("serv")
    assert not processes.are_running("studio")
    processes.stop()
    assert not processes.are_running("")


def test_arguments_of_decoder_and_language_model_are_apart() -> None:
    assert visit.parts_of(["a", "--", "b", "--", "c", "--"]) == (["a"], ["b"], ["c", "--"])
    assert visit.parts_of(["a"]) == (["a"], [], [])

"""The benchmark of a server at small sizes, and the calculation of its figures."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks import frames, results, serve
from benchmarks.listeners import Plan, StreamResult, arrivals, request
from benchmarks.playback import Playback, first_audible
from benchmarks.report import Figure, Report, publish
from benchmarks.server_metrics import Samples, busiest, processor_s
from benchmarks.speech_shapes import SPEAKERS, Speaker
from decoder import create_decoder
from llm.models.hf_config import HuggingFaceConfig, ModelShape
from tests.tts.family_checkpoints import write_qwen3_tts_family
from tts.families.base import Checkpoint
from tts.families.registry import find_family
from tts.serve import build_parser

PAGE = Path(results.__file__).parent / "RESULTS.md"
PLAN = Plan(rate=50.0, seconds=4.0, seed=3, low_s=1.0, high_s=2.0, code_rate=50.0, multiple=7)
SETUP = serve.Setup(
    low_s=0.2, high_s=0.4, warm_up_s=0.3, step_s=1.0, start=1, most=1, alone=2, seeds=2
)


def stream_result(first_ms: float = 50.0, stalls: int = 0, error: str = "") -> StreamResult:
    return StreamResult(
        1.0, first_ms / 1000, first_ms / 1000, 2.0, stalls, 0.04, 3 if stalls else None, 9, 9, error
    )


def step(streams: int, *listeners: StreamResult) -> serve.Step:
    return serve.Step(streams, listeners, seconds=4.0)


# --- listeners


def test_arrivals_are_poisson() -> None:
    moments = list(arrivals(replace(PLAN, seconds=100.0), Random(1)))
    gaps = np.diff(moments)
    assert len(moments) == pytest.approx(5000, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert 0 < moments[0] < moments[-1] < 100


def test_a_request_has_its_length_fixed_and_its_text_to_itself() -> None:
    random = Random(1)
    requests = [request(PLAN, random) for _ in range(200)]
    counts = [asked.config.sampling.max_tokens for asked in requests]
    assert counts == [asked.config.sampling.min_tokens for asked in requests]
    assert {count % 7 for count in counts} == {0}
    assert 49 <= min(counts) < 60
    assert 90 < max(counts) <= 105
    assert len({asked.input.text for asked in requests}) == 200
    assert {len(asked.input.text) for asked in requests} == {60}


def test_the_first_sound_is_not_silence() -> None:
    assert first_audible(np.array([0, 31, -31], np.int16).tobytes()) is None
    assert first_audible(np.array([0, 5, -32, 900], np.int16).tobytes()) == 2


def test_playback_stalls_when_nothing_is_left() -> None:
    playback = Playback(1000)
    silence, sound = bytes(2 * 500), np.full(1000, 900, np.int16).tobytes()
    playback.take(10.0, silence)  # until 10.5
    playback.take(10.4, silence)  # until 11.0
    playback.take(11.25, sound)  # a quarter of a second late; until 12.25
    playback.take(12.25, sound)  # just in time
    assert (playback.first_s, playback.audible_s) == (10.0, 11.25)
    assert (playback.stalls, playback.stalled_s, playback.first_stall) == (1, 0.25, 2)
    assert playback.audio_s == 3.0


def test_the_first_sound_counts_when_it_is_played() -> None:
    playback = Playback(1000)
    playback.take(10.0, bytes(2 * 500))
    playback.take(10.1, np.array([0, 0, 900], np.int16).tobytes())
    assert playback.audible_s == pytest.approx(10.502)


# --- steps and the search


def test_a_step_holds_when_all_are_served_in_time() -> None:
    assert step(4, *[stream_result()] * 100).holds
    assert step(4, *[stream_result()] * 99, stream_result(first_ms=900)).first_ms(99) < 200
    assert not step(4, *[stream_result()] * 97, *[stream_result(first_ms=900)] * 3).holds
    assert not step(4, *[stream_result()] * 99, stream_result(stalls=1)).holds
    assert not step(4, *[stream_result()] * 99, stream_result(error="UNAVAILABLE: gone")).holds
    assert not step(4).holds
    assert "1 stalled (40 ms each, first at message 3; medians)" in str(
        step(4, stream_result(stalls=1))
    )
    assert "0 stalled, 0 errors: holds" in str(step(4, stream_result()))


def test_percentiles_of_few() -> None:
    assert serve.percentile([], 50) == math.inf
    assert serve.percentile([3.0], 99) == 3.0
    assert serve.percentile([1.0, 2.0, 3.0], 50) == 2.0


@pytest.mark.parametrize("limit", [0, 1, 31, 32, 33, 100, 150, 511, 512, 5000])
def test_the_search_ends_near_what_holds(limit: int) -> None:
    def tried(streams: int) -> serve.Step:
        return step(streams, stream_result(stalls=int(streams > limit)))

    setup = serve.Setup(start=32, most=512, closeness=0.1)
    steps = serve.search(tried, setup)
    best = max((s.streams for s in steps if s.holds), default=0)
    assert best <= limit
    assert min(limit, 512) - best <= max(1, 0.1 * best)
    assert len({s.streams for s in steps}) == len(steps) <= 10


def test_samples_are_what_was_added() -> None:
    def at(count: float, total: float) -> Samples:
        mode = frozenset({("mode", "decode")})
        return Samples({("x_count", mode): count, ("x_sum", mode): total})

    added = at(6, 9.0) - at(2, 1.0)
    assert added.mean("x") == 2.0
    assert added.total("x_sum") == 8.0
    assert added.get("x_count", mode="decode") == 4
    assert added.mean("y") == 0
    assert (added.mean("x", mode="decode"), added.mean("x", mode="mixed")) == (2.0, 0.0)


def test_a_percentile_of_a_histogram_is_a_bound() -> None:
    def bucket(le: str, mode: str, count: float) -> tuple[tuple[str, frozenset], float]:
        return ("x_bucket", frozenset({("le", le), ("mode", mode)})), count

    found = Samples(
        dict(
            bucket(le, mode, count)
            for mode in ("a", "b")
            for le, count in (("0.1", 0.0), ("0.5", 49.0), ("2.5", 50.0), ("+Inf", 50.0))
        )
    )
    assert (found.at_most("x", 98), found.at_most("x", 99)) == (0.5, 2.5)
    assert found.at_most("y", 99) == math.inf


# --- shapes


@pytest.mark.parametrize(
    ("name", "family", "hidden", "vocabulary", "rate"),
    [("a", "llasa", 2048, 193_800, 50), ("b", "orpheus", 3072, 156_940, 82.03125)],
)
def test_shapes_are_checkpoints_without_weights(
    name: str, family: str, hidden: int, vocabulary: int, rate: float, tmp_path: Path
) -> None:
    flags = SPEAKERS[name].flags(tmp_path)
    folder = Path(flags[flags.index("--model.model-path") + 1])
    assert not list(folder.rglob("*.safetensors"))
    shape = ModelShape.read(HuggingFaceConfig.read(folder))
    assert (shape.hidden_size, shape.vocab_size) == (hidden, vocabulary)
    found = find_family(Checkpoint(folder))
    assert found is not None
    assert found.name == family
    decoder = create_decoder(folder / "codec", test_mode=True)
    assert decoder.spec.codes_per_second == rate
    assert found.vocabulary(decoder.spec)


# --- the whole


@pytest.fixture(scope="module")
def stage(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serve.Stage]:
    speaker = Speaker("toy")
    flags = ["--model.model-path", str(tiny_checkpoint), "--max-batch-size", "8"]
    flags += ["--profiling.trace-after", "4", "--profiling.trace-steps", "8"]
    folder = tmp_path_factory.mktemp("profile")
    with serve.staged(speaker, SETUP, 2, flags, has_trace=True, profile=folder) as stage:
        yield stage


def test_a_server_traces_its_steps(stage: serve.Stage) -> None:
    gap, busy = serve.gaps(stage, Speaker("toy"))
    assert gap.value > 0
    assert 0 < busy.value <= 100


def test_one_after_the_other(stage: serve.Stage) -> None:
    figure, *parts = serve.alone(stage, Speaker("toy"))
    assert len(figure.values) == 2
    assert all(ms > 1 for ms in figure.values)
    assert "0 errors" in figure.note
    assert [part.name.rpartition(": ")[2] for part in parts] == [*serve.FIRST_PARTS]
    assert all(len(part.values) == 2 and min(part.values) > 0 for part in parts)
    whole = [sum(values) for values in zip(*(part.values for part in parts), strict=True)]
    assert all(ms <= first + 0.01 for ms, first in zip(whole, figure.values, strict=True))


def test_calls_at_a_rate(stage: serve.Stage) -> None:
    at_rate = replace(stage, setup=replace(SETUP, rate=6.0))
    figures = list(serve.rate(at_rate, Speaker("toy")))
    assert [figure.name for figure in figures] == [
        f"toy, 6 calls/s: first sound, p{percent}" for percent in (50, 95, 99)
    ]
    first, *later = [figure.value for figure in figures]
    assert 0 < first <= min(later)
    assert all("calls, 0 errors" in figure.note for figure in figures)


def test_clients_receive_the_requested_length(stage: serve.Stage) -> None:
    done = stage.step(streams=1)
    assert done.errors == 0
    assert done.results
    for one in done.results:
        assert one.due_s >= SETUP.warm_up_s
        assert one.audio_s == pytest.approx(one.output_tokens / stage.code_rate)
        assert 0.2 - 0.1 <= one.audio_s <= 0.4 + 0.1
        assert 0 < one.first_s <= one.audible_s
    assert done.counted.mean("sonant_batch_execute_seconds") > 0
    kinds = list(serve.by_kind(done.counted))
    assert any(re.fullmatch(r"; decode [\d.]+ ms with \d+", kind) for kind in kinds)
    assert done.counted.total("sonant_output_tokens_total") >= sum(
        one.output_tokens for one in done.results
    )


def test_the_busiest_process_is_first() -> None:
    before = {1: {1: 1.0, 2: 2.0}, 7: {7: 5.0}}
    after = {1: {1: 1.5, 2: 4.0}, 7: {7: 6.0}, 9: {9: 0.5}}
    assert busiest(before, after, 5.0) == [[50.0, 40.0, 10.0], [20.0, 20.0], [10.0, 10.0]]


def test_processor_time_is_counted_by_thread() -> None:
    pids, own = [os.getpid(), 2**22 + 1], threading.get_native_id()
    (before,) = processor_s(pids).values()
    started_s = time.thread_time()
    while time.thread_time() - started_s < 0.3:
        pass
    (after,) = processor_s(pids).values()
    assert after[own] - before[own] == pytest.approx(0.3, abs=0.1)


def test_the_most_streams_are_reported(
    stage: serve.Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "LIMIT_MS", 60_000.0)
    most, *rest = serve.streams(stage, Speaker("toy"))
    shown = capsys.readouterr().err
    assert re.search(r"batches/s of 1 rows.*ms between two.*decoder calls/s of 1\.\d blocks", shown)
    assert re.search(r"threads: \d+ \(\d+ \+ \d+", shown)
    assert "tried 1" in most.note
    assert most.value in (0, 1)
    assert len(rest) == (10 if most.value else 0)


def test_clients_that_leave_are_cancelled(stage: serve.Stage) -> None:
    long = replace(stage, setup=replace(SETUP, low_s=8.0, high_s=10.0, start=40))
    (figure,) = serve.cancel(long, Speaker("toy"))
    assert figure.value > 0
    assert "mean of 0," not in figure.note
    assert "p99 at most " in figure.note


# --- results


def test_results_are_what_was_printed(tmp_path: Path) -> None:
    figures = (
        Figure("first | sound", (3.0, 1.0), "ms", bar=1.5, note="alone"),
        Figure("x", (7,), ""),
        Figure("y", (43_306.2,), "tokens/s", bar=30_000, at_least=True),
    )
    report = Report("toy", figures, command="python -m benchmarks.toy", date="2026-01-02")
    out = io.StringIO()
    publish(report, out, io.StringIO())
    (tmp_path / "b.json").write_text(out.getvalue())
    assert results.read(tmp_path / "b.json") == replace(report)
    (tmp_path / "a.json").write_text(out.getvalue())
    text = results.page(tmp_path)
    assert text.index("## a\n") < text.index("## b\n")
    assert f"`python -m benchmarks.toy`, 2026-01-02, on {report.machine}." in text
    assert "| first \\| sound | 2 ms | 1 - 3 | <= 1.5 | MISSED | alone |" in text
    assert "| y | 43,310 tokens/s |  | >= 30,000 | reached |  |" in text


QUICK = "scheduler --repeat 1"


def test_one_command_measures_a_kind_of_machine_and_replaces_its_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only commands that failed run again; other sections stay."""
    page, folder = tmp_path / "PAGE.md", tmp_path / "runs"
    page.write_text("# Old\n\nIntro.\n\n## kept\n\nBy hand.\n\n## steps\n\nOld.\n")
    monkeypatch.setitem(results.KINDS, "toy", {"steps": QUICK, "wrong": "scheduler --no-such-flag"})
    command = [str(folder), "--run", "toy", "--into", str(page)]
    assert results.main(command) == 1
    assert "wrong failed with status 2" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["steps.json"]
    text = page.read_text()
    assert text.startswith(results.TITLE + "\n\n## kept\n\nBy hand.\n\n## steps\n\n`python -m")
    assert "Old." not in text
    first = (folder / "steps.json").read_bytes()
    monkeypatch.setitem(results.KINDS, "toy", {"steps": "no_such_module", "right": QUICK})
    assert results.main(command) == 0
    assert (folder / "steps.json").read_bytes() == first
    assert page.read_text().startswith(text.rstrip() + "\n\n## right\n\n`python -m")


class ParsedError(Exception):
    """A command line was parsed, and its program stops."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Parse command lines of programs that run as `python -m MODULE`, without running them."""
    parse_args = ArgumentParser.parse_args

    def stop(self: ArgumentParser, args: Sequence[str] | None = None) -> None:
        parse_args(self, args)
        raise ParsedError

    def parse(command: str) -> None:
        own, _, of_server = command.partition(" -- ")
        module, *arguments = shlex.split(own)
        build_parser().parse_args(shlex.split(of_server))
        main = import_module(module).main
        with monkeypatch.context() as patch:
            patch.setattr(ArgumentParser, "parse_args", stop)
            patch.setattr(sys, "argv", [module, *arguments])
            with pytest.raises(ParsedError):
                main()

    return parse


@pytest.mark.parametrize("kind", results.KINDS)
def test_the_commands_of_a_kind_of_machine_parse(kind: str, parse: Callable[[str], None]) -> None:
    for command in results.KINDS[kind].values():
        parse(f"benchmarks.{command}")


def test_each_section_of_the_page_has_a_command_that_parses(parse: Callable[[str], None]) -> None:
    """Flags that were renamed or removed are found, and figures without a command."""
    for title, text in results.sections_of(PAGE.read_text(encoding="utf-8")).items():
        commands = re.findall(r"`python -m ([^`]+)`", text)
        assert commands, f"{title} has no command"
        for command in commands:
            if command.startswith("benchmarks."):
                parse(command)


def test_commands_of_the_documents_parse(parse: Callable[[str], None]) -> None:
    """Commands without flags only name a program, and are left out."""
    root = PAGE.parent.parent
    paths = [*root.glob("*.md"), *root.glob("docs/*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    commands = set(re.findall(r"`python -m (benchmarks\.[^`]+ --[^`]+)`", text))
    assert len(commands) > 15
    for command in commands:
        parse(re.sub(r"\bN\b", "1", command))


@pytest.mark.parametrize("wrong", ["scheduler --no-such-flag", "serve -- --no-such-flag"])
def test_a_flag_that_does_not_exist_is_found(wrong: str, parse: Callable[[str], None]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(f"benchmarks.{wrong}")


def test_the_page_says_how_it_is_written() -> None:
    assert PAGE.read_text(encoding="utf-8").startswith(results.TITLE)


def test_other_files_than_reports_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert results.main([str(tmp_path)]) == 2
    (tmp_path / "x.json").write_text(json.dumps({"benchmark": "toy"}))
    assert results.main([str(tmp_path)]) == 2
    assert "x.json is not what a benchmark printed" in capsys.readouterr().err


def test_a_server_that_takes_too_few_steps_leaves_no_trace(
    stage: serve.Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "TRACE_TRIES", 1)
    with pytest.raises(RuntimeError, match=r"lower --profiling\.trace-after"):
        list(serve.gaps(replace(stage, trace_file=tmp_path / "none.json"), Speaker("toy")))


def test_the_bar_of_streams_grows_with_gpus() -> None:
    speaker = SPEAKERS["a"]
    assert speaker.on_gpus(1) is speaker
    assert speaker.on_gpus(4).streams_bar == round(3.6 * (speaker.streams_bar or 0))
    assert SPEAKERS["voice"].on_gpus(4).streams_bar is None


def test_codes_of_frames_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Speaker("qwen", lambda folder: write_qwen3_tts_family(folder / "qwen"))
    monkeypatch.setitem(SPEAKERS, "qwen", small)
    arguments = "--shape qwen --rows 1 3 --repeat 2 --model.device-specs cpu"
    assert frames.main(arguments.split()) == 0
    found = {one["name"]: one["values"] for one in json.loads(capsys.readouterr().out)["figures"]}
    assert [*found] == ["qwen: 1 rows", "qwen: 3 rows"]
    assert all(len(values) == 2 and min(values) > 0 for values in found.values())

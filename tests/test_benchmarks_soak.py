"""The soak test at small sizes, and its accounting of calls."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks import results, serve, soak
from benchmarks.process_samples import ProcessUsage, Sample, median, process_usage
from benchmarks.report import Figure, Report
from benchmarks.server_metrics import Samples
from benchmarks.soak_ledger import (
    WRITE_FAILED,
    CallRecord,
    Log,
    Window,
    complete,
    disagreements,
    first_audio_ms,
    lost,
)
from benchmarks.soak_report import Part, part_figures
from tests.deadlines import HANG_S
from tests.speech_server import Server
from tts.v1 import speech_pb2, speech_pb2_grpc

OK = frozenset({"OK"})
TAKEN = 200_000_000  # bytes


def asked(name: str, code: str = "OK", kind: str = "stream", **values: float | None) -> CallRecord:
    times: dict[str, Any] = {"began_s": 10.0, "ended_s": 11.0, **values}
    return CallRecord(kind, name, OK, code=code, **times)


def log(**codes: str) -> Log:
    return Log(codes, len(codes), ())


# --- calls


def test_calls_are_lost_that_end_as_they_should_not() -> None:
    kill = Window(20.0, 25.0)
    fine = asked("a")
    wrong = asked("b", "INTERNAL")
    endless = CallRecord("stream", "c", OK, began_s=10.0)
    with_the_engine = asked("d", "UNAVAILABLE", ended_s=20.1)
    without_a_kill = asked("e", "UNAVAILABLE")
    while_it_was_away = asked("f", "UNAVAILABLE", began_s=24.0, ended_s=26.0)
    otherwise = asked("g", "INTERNAL", ended_s=20.1)
    refused = CallRecord("wrong", "h", frozenset({"NOT_FOUND"}), 10.0, 11.0, "OK")
    calls = [fine, wrong, endless, with_the_engine, without_a_kill, while_it_was_away]
    calls += [otherwise, refused]
    assert lost(calls, [kill]) == [wrong, endless, without_a_kill, otherwise, refused]
    assert [str(call) for call in lost([endless])] == ["stream c: no end"]


def test_the_first_end_counts() -> None:
    call = CallRecord("cancelled", "a", OK)
    call.end("CANCELLED")
    call.end("OK")
    assert call.code == "CANCELLED"


def test_the_log_and_the_clients_know_the_same_calls() -> None:
    calls = [asked("a"), asked("b", "CANCELLED"), asked("c", "VANISHED"), asked("d", "CANCELLED")]
    same = log(a="OK", b="CANCELLED", c="CANCELLED", other="CANCELLED")  # d, before its id was read
    assert not list(disagreements(calls, same))
    assert list(disagreements([asked("a")], log())) == ["not in the log: stream a: OK"]
    assert list(disagreements([], log(x="OK"))) == [
        "1 calls in the log that ended OK are no client's"
    ]
    (early,) = disagreements(calls[:1], log(a="OK", x="CANCELLED"))
    assert early == "more than 0 calls in the log were cancelled before their id was read"
    (other,) = disagreements([asked("a")], log(a="INTERNAL"))
    assert other == "the log has INTERNAL: stream a: OK"


def test_a_status_that_the_library_lost_is_the_logs(tiny_server: Server) -> None:
    """A call that is refused while its client writes: grpc.aio reports a failed write."""

    async def refused(stub: speech_pb2_grpc.SpeechServiceStub) -> CallRecord:
        async def requests() -> AsyncIterator[speech_pb2.StreamingSynthesizeRequest]:
            wrong = speech_pb2.SynthesisConfig(speaking_rate=9)
            config = speech_pb2.StreamingSynthesizeConfig(synthesis=wrong)
            yield speech_pb2.StreamingSynthesizeRequest(config=config)
            while True:
                yield speech_pb2.StreamingSynthesizeRequest(text="x ")
                await asyncio.sleep(0.001)

        call = CallRecord("typed", "a", OK)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in stub.StreamingSynthesize(requests())]
        call.fail(caught.value)
        return call

    async def until_lost() -> CallRecord:
        async with grpc.aio.insecure_channel(tiny_server.address) as channel:
            stub = speech_pb2_grpc.SpeechServiceStub(channel)
            while (call := await refused(stub)).code != WRITE_FAILED:
                assert call.code == "INVALID_ARGUMENT"
        return call

    lost_one = asyncio.run(asyncio.wait_for(until_lost(), HANG_S))
    complete([lost_one], log(b="OK"))
    assert lost_one.code == WRITE_FAILED
    complete([lost_one], log(a="INVALID_ARGUMENT"))
    assert lost_one.code == "INVALID_ARGUMENT"


def test_a_log_is_read_between_two_positions(tmp_path: Path) -> None:
    def line(**values: str) -> str:
        return json.dumps({"level": "info", "message": "call ended", **values}) + "\n"

    former = line(request_id="former", code="OK")
    lines = line(request_id="a", code="OK") + line(message="ready")
    lines += line(level="error", message="broken") + "Traceback\n"
    path = tmp_path / "log"
    path.write_text(former + lines + line(request_id="later", code="OK"))
    found = Log.read(path, len(former), len(former + lines))
    assert (found.codes, found.num_calls) == ({"a": "OK"}, 1)
    assert found.troubles == (line(level="error", message="broken")[:-1], "Traceback")


# --- windows


def test_windows_are_shares_of_a_part() -> None:
    minutes = Window(0.0, 25.0)
    early = minutes.share(8 / 25, 12 / 25)
    assert (8.0 in early, 11.9 in early, 12.0 in early) == (True, True, False)
    calls = [asked(str(n), began_s=float(n), first_audio_s=float(n)) for n in (7, 8, 9, 11, 12)] + [
        asked("none", began_s=9.0),
        asked("other", kind="unary", began_s=9.0, first_audio_s=1.0),
    ]
    assert first_audio_ms(calls, "stream", early) == (9000.0, 3)
    assert first_audio_ms([], "stream", early) == (0.0, 0)


# Other programs that map the same libraries come and go, which changes this process's part of them.
# So what it takes is ten times what a bare interpreter maps in all.
TAKES_MEMORY = f"""
import mmap, os, sys, threading
print(flush=True)
input()
held = mmap.mmap(-1, {TAKEN})
held.write(bytes(1) * len(held))
pipe = os.pipe()
threading.Thread(target=sys.stdin.readline).start()
print(flush=True)
"""


def test_resources_of_a_process_are_read_from_the_kernel() -> None:
    command = [sys.executable, "-I", "-S", "-c", TAKES_MEMORY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        before = process_usage(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = process_usage(process.pid)
        process.stdin.close()
    assert before.rss < TAKEN / 10
    assert TAKEN * 0.9 < after.pss - before.pss < TAKEN * 1.1
    assert TAKEN * 0.9 < after.rss - before.rss < TAKEN * 1.1
    assert after.descriptors == before.descriptors + 2
    assert after.threads == before.threads + 1 == 2


def part(late: ProcessUsage) -> Part:
    early = ProcessUsage(100, 200, 10, 5)
    samples = [Sample(9.0, {"engine": early, "serve": early}), Sample(23.0, {"engine": late})]
    calls = [
        asked("a", began_s=9.0, first_audio_s=0.1),
        asked("b", began_s=23.0, first_audio_s=0.15),
    ]
    counts = Samples({("grpc_server_started_total", frozenset()): 2.0})
    both = log(a="OK", b="OK")
    span = Window(0.0, 25.0)
    return Part("steady", span, tuple(calls), both, Samples(), counts, tuple(samples), ())


def test_growth_and_slowness_miss_their_bars() -> None:
    figures = {
        figure.name: figure
        for figure in part_figures(part(ProcessUsage(300, 390, 20, 10)), Samples())
    }
    assert figures["steady: memory, all processes"].value == pytest.approx(1.5)
    assert figures["steady: memory, all processes"].reached is False
    assert figures["steady: resident memory, all processes"].reached is True
    assert figures["steady: descriptors, all processes"].value == 1.0
    assert figures["steady: memory, engine"].value == pytest.approx(3)
    assert figures["steady: memory, engine"].reached is None
    slower = figures["steady: time to the first audio, stream"]
    assert slower.value == pytest.approx(1.5)
    assert slower.reached is False
    assert figures["steady: time to the whole answer, unary"].reached is None  # there was none
    assert figures["steady: lost calls"].reached is True
    # neither of two has ended
    assert figures["steady: difference in the server's counts"].value == 2


def test_resources_that_are_not_released_miss_their_bar() -> None:
    used = frozenset({("state", "used")})
    rest = Samples({("sonant_kv_pages", used): 3.0})
    kept = replace(part(ProcessUsage()), rest=rest)
    figures = {figure.name: figure for figure in part_figures(kept, Samples())}
    assert figures["steady: KV pages not released"].reached is False
    assert figures["steady: decoder states not released"].reached is True


def test_the_median_is_of_all_processes_or_of_one_kind() -> None:
    one, two = ProcessUsage(1, 1, 1, 1), ProcessUsage(10, 10, 10, 10)
    samples = [Sample(0.0, {"a": one, "b": two}), Sample(1.0, {"a": two}), Sample(2.0, {"b": two})]
    assert median(samples, "pss") == 10
    assert median(samples, "pss", "a") == 1
    assert median([], "pss") == 0


# --- the whole


@pytest.mark.long
def test_a_soak(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few seconds each; an engine is killed while the clients continue."""
    for name, value in (("NUM_KILLS", 1), ("NUM_SAMPLES", 25), ("MAX_PROMPTS", 16)):
        monkeypatch.setattr(soak, name, value)
    setup = serve.Setup(low_s=0.2, high_s=0.4, warm_up_s=0.1, step_s=1.0, start=2, most=2)
    plan = soak.Plan(minutes=5 / 60, killing_minutes=3 / 60, setup=setup)
    report = soak.measure(plan, tmp_path, str(tiny_checkpoint))
    figures = {figure.name: figure for figure in report.figures}
    _is_complete(figures)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"server.log", "steady.jsonl", "killing.jsonl"}
    first = json.loads((tmp_path / "steady.jsonl").read_text().splitlines()[0])
    assert set(first["by_role"]) == {"serve", "engine", "front_end"}
    (tmp_path / "soak.json").write_text(report.to_json())
    assert results.read(tmp_path / "soak.json") == Report(
        "soak", report.figures, report.machine, report.command, report.date
    )


def _is_complete(figures: dict[str, Figure]) -> None:
    """Check that no call is lost, no resource is kept, and clients of all kinds made calls."""
    for name in ("steady", "killing"):
        for what in ("lost calls", "calls on which log and clients differ"):
            assert figures[f"{name}: {what}"].value == 0, figures[f"{name}: {what}"].note
        assert figures[f"{name}: difference in the server's counts"].value == 0
        for what in ("calls", "sequences", "KV pages", "decoder states"):
            assert figures[f"{name}: {what} not released"].value == 0
        assert figures[f"{name}: calls that clients made"].value > 10
    assert figures["steady: errors in the log"].value == 0, figures[
        "steady: errors in the log"
    ].note
    assert figures["steady: memory, all processes"].value > 0
    assert figures["killing: until a killed engine is back"].value > 0
    kinds = figures["steady: calls that the server took"].note
    for kind in ("create voice", "text", "wrong", "unread", "channel closed", "killed"):
        assert f"{kind} " in kinds


def test_flags_allow_every_kill() -> None:
    flags = soak.Plan(killing_minutes=15).flags(9)
    assert flags[flags.index("--max-restarts") + 1] == "6"
    assert "--max-restarts" not in soak.Plan(killing_minutes=0).flags(9)


def test_times_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("0", "-1", "nan", "x"):
        with pytest.raises(SystemExit, match="2"):
            soak.main(["--minutes", wrong])
    assert "--minutes" in capsys.readouterr().err

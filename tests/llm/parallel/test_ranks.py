"""An engine on several ranks, each in a process of its own."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from llm.config import PipelineConfig
from llm.engine.engine import create_engine
from llm.errors import EngineStoppedError
from llm.pipeline import ranks
from llm.pipeline.ranks import RankLaunch
from llm.pipeline.registry import create_pipeline
from llm.request import FinishReason, Request, SamplingParams
from tests.deadlines import HANG_S
from tests.llm.llama_checkpoints import write_llama
from tests.llm.parallel.engines import pipeline_of, tokens, wait_for, wait_stopped
from tests.llm.parallel.test_sharded_models import split_config
from tests.llm.qwen3_moe_checkpoints import write_qwen3_moe

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("checkpoint"), **HEADS)


RANK_PROCESS = "llm.pipeline.rank_process"
PROGRAM = """
import pickle, sys, time
from llm.pipeline.ranks import RankLeader
config = pickle.load(sys.stdin.buffer)
leaders = [RankLeader(config) for _ in range(2)]
for leader in leaders:
    print(leader.folder, *leader.process_ids, flush=True)
time.sleep(600)
"""


def ranks_config(folder: Path, num_ranks: int, **keys: object) -> PipelineConfig:
    return split_config(folder, num_ranks, sampling={"enable_penalties": True}, **keys)


def run(folder: Path, num_ranks: int, **keys: object) -> list[list[int]]:
    engine = create_engine(ranks_config(folder, num_ranks, **keys))
    found = tokens(engine)
    engine.shutdown()
    pipeline_of(engine).shutdown()
    return found


def test_ranks_generate_the_tokens_of_one_until_one_is_killed(folder: Path) -> None:
    """Between requests, which an engine without work notices, too."""
    keys = {"max_num_steps": 5, "max_batch_input_tokens": 32}
    expected = run(folder, 1, **keys)
    assert min(map(len, expected)) > 12
    engine = create_engine(ranks_config(folder, 4, **keys))
    leader = pipeline_of(engine).leader
    assert leader is not None
    assert tokens(engine) == expected
    os.kill(leader.process_ids[1], signal.SIGKILL)
    wait_stopped(engine)
    assert leader.is_lost
    pipeline_of(engine).shutdown()
    for process_id in leader.process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_ranks_with_experts_generate_the_tokens_of_one_until_one_is_killed(tmp_path: Path) -> None:
    """Each expert is cut; of the idle ranks below, each has whole ones. The rank is killed while
    steps are running.
    """
    folder = write_qwen3_moe(tmp_path, **HEADS, initializer_range=0.4)
    expected = run(folder, 1)
    assert min(map(len, expected)) > 12
    engine = create_engine(ranks_config(folder, 2))
    leader = pipeline_of(engine).leader
    assert leader is not None
    assert tokens(engine) == expected
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    stream = engine.submit(Request("a", (5, 6, 7), endless))
    assert next(stream).token_ids  # steps are running
    os.kill(leader.process_ids[0], signal.SIGKILL)
    last = list(stream)[-1]
    assert (last.finish_reason, leader.is_lost) == (FinishReason.ERROR, True)
    wait_stopped(engine)
    with pytest.raises(EngineStoppedError):
        engine.submit(Request("b", (5, 6, 7)))
    pipeline_of(engine).shutdown()


def test_ranks_that_do_not_end_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One is stopped during a step; all others wait for it in a collective."""
    monkeypatch.setattr(ranks, "STOP_S", 3.0)
    engine = create_engine(ranks_config(write_qwen3_moe(tmp_path, **HEADS), 4, ep_size=4))
    leader = pipeline_of(engine).leader
    assert leader is not None
    engine.start()
    endless = SamplingParams(max_tokens=900, ignore_eos=True)
    stream = engine.submit(Request("a", (5, 6, 7), endless))
    assert next(stream).token_ids
    os.kill(leader.process_ids[1], signal.SIGSTOP)
    wait_for(lambda: engine.stats().turn_s > 0.5)
    assert not engine.shutdown(0.1)
    pipeline_of(engine).shutdown()
    assert "ranks [1, 2, 3] have not ended within 3 s and are killed" in caplog.text
    assert "although" not in caplog.text
    wait_stopped(engine)
    assert list(stream)[-1].finish_reason is FinishReason.ERROR
    for process_id in leader.process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_idle_ranks_run_forwards(tmp_path: Path) -> None:
    """In step with each other, so that requests get the same tokens. While a rank is stopped, the
    turn of the idle engine does not end, which is what `--step-timeout-s` limits.
    """
    folder = write_qwen3_moe(tmp_path, **HEADS, initializer_range=0.4)
    expected = run(folder, 1)
    keys = {"ep_size": 2, "execute_empty_batches": True, "sampling": {"enable_penalties": True}}
    engine = create_engine(split_config(folder, 2, **keys))
    leader = pipeline_of(engine).leader
    assert leader is not None
    engine.start()
    wait_for(lambda: engine.stats().empty_steps > 3)
    assert tokens(engine) == expected
    before = engine.stats().empty_steps
    wait_for(lambda: engine.stats().empty_steps > before + 3)
    (rank,) = leader.process_ids
    os.kill(rank, signal.SIGSTOP)
    try:
        wait_for(lambda: engine.stats().turn_s > 0.5)
    finally:
        os.kill(rank, signal.SIGCONT)
    wait_for(lambda: engine.stats().turn_s < 0.5)
    engine.shutdown()
    pipeline_of(engine).shutdown()


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_processes_end_with_their_pipeline(folder: Path, temporary: Path) -> None:
    pipeline = create_pipeline(split_config(folder, 2))
    assert pipeline.leader is not None
    (process_id,) = pipeline.leader.process_ids
    os.kill(process_id, 0)
    del pipeline
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert list(temporary.glob("sonant-ranks-*")) == []


def test_a_rank_that_fails_says_why_and_has_status_1(folder: Path, tmp_path: Path) -> None:
    config = split_config(folder, 2)
    config = config.model_copy(update={"custom_architectures": ["no_such_module"]})
    launch = RankLaunch(config, 1, tmp_path / "meeting", 1, 1, logging.WARNING)
    program, pipe = [sys.executable, "-m", RANK_PROCESS], subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(pickle.dumps(launch))
        process.stdin.flush()  # it stays open while the process ends
        log = process.stderr.read().decode()
        assert process.wait(HANG_S) == 1
    assert "rank 1: ERROR" in log
    assert "this rank has failed" in log


def test_processes_end_with_a_program_that_is_killed(folder: Path) -> None:
    """Also one that is stopped: it is continued, and ends."""
    config = pickle.dumps(split_config(folder, 2))
    program = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(config)
        process.stdin.close()
        lines = [process.stdout.readline().decode().split() for _ in range(2)]
        assert all(Path(place).is_dir() for place, _ in lines)
        stopped = int(lines[0][1])
        os.kill(stopped, signal.SIGSTOP)
        process.kill()
    try:
        for place, _ in lines:
            wait_for(lambda place=place: not Path(place).exists())  # last work of the other rank
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)

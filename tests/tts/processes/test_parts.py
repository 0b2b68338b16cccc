"""Parts of the supervisor: restarts, ports, and options that conflict."""

from __future__ import annotations

import asyncio
import pickle
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm import ConfigError
from tests.deadlines import HANG_S
from tests.fakes import tiny_config
from tests.tts.processes import ends_once_ready, hangs_when_restarted, many_voices
from tts.config.serve import ServeConfig
from tts.config.server import ServerConfig
from tts.factory import create_service
from tts.ipc.endpoints import Endpoints, ServerEndpoints, replica_base
from tts.processes.child import Launch, Ready
from tts.processes.supervisor import (
    LONGEST_DELAY_S,
    STEADY_S,
    Restarts,
    Worker,
    WorkerError,
    Workers,
    check_processes,
    reserved_port,
)


def test_restart_delays_grow_up_to_the_restart_limit() -> None:
    restarts = Restarts(10)
    delays = [restarts.next_delay_s(up_s=1) for _ in range(10)]
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert delays[-1] == LONGEST_DELAY_S
    assert restarts.next_delay_s(up_s=1) is None
    assert restarts.next_delay_s(up_s=STEADY_S) == 0.1, "it was fine for a while"
    assert Restarts(0).next_delay_s(up_s=STEADY_S) is None


def test_a_delay_is_bounded_after_thousands_of_restarts() -> None:
    restarts = Restarts(3_000)
    assert {restarts.next_delay_s(up_s=1) for _ in range(2_000)} >= {0.1, LONGEST_DELAY_S}


def test_a_report_may_name_very_many_voices(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        launch = Launch(config(tiny_checkpoint), "front-end-0", Endpoints.of("ipc:///tmp/x", "x"))
        worker = Worker(many_voices.__name__, launch, 0, lambda _: None)
        running = asyncio.create_task(worker.run())
        try:
            ready = await asyncio.wait_for(asyncio.shield(worker.ready), HANG_S)
            assert ready.voices == many_voices.NAMES
        finally:
            await worker.stop(30)
            await running

    asyncio.run(scenario())


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_port_belongs_to_one_server(is_shared: bool) -> None:
    with reserved_port("127.0.0.1", 0, is_shared=is_shared) as port:
        assert port > 0
        with socket.socket() as listening:
            option = socket.SO_REUSEPORT if is_shared else socket.SO_REUSEADDR
            listening.setsockopt(socket.SOL_SOCKET, option, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen()
            for other_is_shared in (False, True):
                with (
                    pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"),
                    reserved_port("127.0.0.1", port, is_shared=other_is_shared),
                ):
                    pass


def test_a_host_that_does_not_exist_is_reported() -> None:
    with (
        pytest.raises(ConfigError, match="cannot listen on no-such-host"),
        reserved_port("no-such-host.invalid", 0, is_shared=False),
    ):
        pass


def config(checkpoint: Path, front_ends: int = 1, **model: object) -> ServeConfig:
    return ServeConfig(tiny_config(checkpoint, **model), ServerConfig(front_ends=front_ends))


def test_options_that_conflict_with_processes_are_refused(tiny_checkpoint: Path) -> None:
    check_processes(config(tiny_checkpoint))
    with pytest.raises(ConfigError, match="reaches no other process"):
        check_processes(config(tiny_checkpoint, zmq_endpoint_base="inproc://here"))
    metrics = {"prometheus_metrics_mode": "launch_server"}
    check_processes(config(tiny_checkpoint, **metrics))
    with pytest.raises(ConfigError, match="use launch_multiproc_server"):
        check_processes(config(tiny_checkpoint, front_ends=2, **metrics))


def test_options_that_conflict_with_replicas_are_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    several = {"model": {"model_path": str(tiny_checkpoint), "data_parallel_degree": 2}}
    check_processes(config(tiny_checkpoint, **several))
    traced = {"profiling": {"trace_file": tmp_path / "trace.json"}}
    with pytest.raises(ConfigError, match=r"trace_file needs model\.data_parallel_degree=1: all"):
        check_processes(config(tiny_checkpoint, **several, **traced))
    serve = config(tiny_checkpoint, **several)
    unloading = ServerConfig(unload_after_s=5)
    with pytest.raises(ConfigError, match=r"unload_after_s needs model\.data_parallel_degree=1"):
        check_processes(replace(serve, server=unloading))
    with pytest.raises(ConfigError, match="the text model has one engine"):
        check_processes(ServeConfig(tiny_config(tiny_checkpoint), ServerConfig(), serve.model))
    with pytest.raises(ConfigError, match="with front_ends of at least 1"):
        create_service(serve.model)


def test_each_replica_has_endpoints_of_its_own(tiny_checkpoint: Path) -> None:
    for base in ("ipc:///tmp/x", "tcp://127.0.0.1:5555"):
        bases = [replica_base(base, number) for number in range(3)]
        addresses = [address for each in bases for address in Endpoints.of(each)]
        assert bases[0] == base
        assert len(set(addresses)) == len(addresses)
    assert replica_base("tcp://127.0.0.1:5555", 1) == "tcp://127.0.0.1:5560", "one port is a lock"


@pytest.mark.parametrize("is_last", [False, True])
def test_a_replica_is_given_up_only_if_it_is_the_last(tiny_checkpoint: Path, is_last: bool) -> None:
    async def scenario() -> None:
        launch = Launch(config(tiny_checkpoint), "engine-0", Endpoints.of("ipc:///tmp/x", "x"))
        ended: list[int] = []
        worker = Worker(
            ends_once_ready.__name__, launch, 0, ended.append, may_give_up=lambda: is_last
        )
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(asyncio.shield(worker.ready), 60)
        if is_last:
            with pytest.raises(WorkerError, match="ended with status 3 once too often"):
                await asyncio.wait_for(running, 60)
            return
        while not ended:
            await asyncio.sleep(0.01)
        assert worker.fails
        assert not running.done()
        await worker.stop(30)
        await asyncio.wait_for(running, 60)

    asyncio.run(scenario())


def test_a_process_that_does_not_become_ready_again_is_killed(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first start takes longer than the limit, which is for restarts."""

    async def scenario() -> None:
        serve = config(tiny_checkpoint)
        serve = replace(serve, server=ServerConfig(load_timeout_s=0.01))
        launch = Launch(serve, "engine", Endpoints.of("ipc:///tmp/x", "x"))
        worker = Worker(hangs_when_restarted.__name__, launch, 1, lambda _: None)
        with pytest.raises(WorkerError, match="was ended by SIGKILL once too often"):
            await asyncio.wait_for(worker.run(), HANG_S)

    asyncio.run(scenario())
    assert "engine is not ready after 0.01 s (load_timeout_s): killing it" in caplog.text


def test_a_replica_that_starts_again_keeps_the_server(tiny_checkpoint: Path) -> None:
    """One fails all the time while the other one is drained: the server ends when both fail."""

    async def scenario() -> None:
        bases = [replica_base("ipc:///tmp/x", number) for number in range(2)]
        endpoints = ServerEndpoints(tuple(Endpoints.of(base) for base in bases))
        workers = Workers(config(tiny_checkpoint), endpoints, {"port": 0}, tiny_checkpoint)
        one = Launch(config(tiny_checkpoint), "x", endpoints.model[0], replicas=endpoints.model)
        _, other = workers.engines.values()
        assert not workers.may_give_up(one)
        other.fails = True
        assert workers.may_give_up(one)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("model", "server", "message"),
    [
        ({}, {"prefill_devices": ["cuda:0"]}, "must be GPUs other than model.device_specs=cpu"),
        (
            {"pipeline_role": "prefill_only"},
            {"prefill_devices": ["cpu"]},
            "leave out pipeline_role",
        ),
        ({"pipeline_role": "decode_only"}, {}, "decode_only needs prefill_endpoints, or prefill_"),
        ({"pipeline_role": "prefill_only"}, {"unload_after_s": 5}, "unload_after_s excludes pipe"),
        ({}, {"prefill_devices": ["cpu"], "unload_after_s": 5}, "unload_after_s needs no prefill_"),
        (
            {"pipeline_role": "prefill_only", "prometheus_metrics_mode": "launch_server"},
            {},
            "prometheus_metrics_mode needs front ends, and pipeline_role=prefill_only has none",
        ),
    ],
)
def test_roles_that_do_not_go_together_are_refused(
    tiny_checkpoint: Path, model: dict[str, Any], server: dict[str, Any], message: str
) -> None:
    serve = replace(config(tiny_checkpoint, **model), server=ServerConfig(**server))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_processes(serve)


def test_engines_for_prompts_share_the_memory_and_have_devices_of_their_own(
    tiny_checkpoint: Path,
) -> None:
    several = {"model": {"model_path": str(tiny_checkpoint), "data_parallel_degree": 2}}
    serve = config(tiny_checkpoint, **several)
    serve = replace(serve, server=ServerConfig(prefill_devices=["cpu", "cpu"]))
    check_processes(serve)
    whole = serve.model.model.kv_cache.device_memory_utilization
    decodes = serve.of_replica(1, "ipc:///tmp/one", ("ipc:///tmp/two",)).model
    prompts = serve.of_prefill(0, "ipc:///tmp/two").model
    assert [decodes.pipeline_role.value, prompts.pipeline_role.value] == [
        "decode_only",
        "prefill_only",
    ]
    assert decodes.prefill_endpoints == [prompts.zmq_endpoint_base]
    for own in (decodes, prompts):
        assert own.model.device_specs == ["cpu"]
        assert own.model.kv_cache.device_memory_utilization == whole / 4


def test_an_engine_for_prompts_has_its_gpu_where_replicas_share_another(
    tiny_checkpoint: Path,
) -> None:
    model = {"model_path": str(tiny_checkpoint), "device_specs": ["cuda:0"]}
    serve = config(tiny_checkpoint, model={**model, "data_parallel_degree": 2})
    serve = replace(serve, server=ServerConfig(prefill_devices=["cuda:1"]))
    whole = serve.model.model.kv_cache.device_memory_utilization
    decodes = serve.of_replica(1, "ipc:///tmp/one", ("ipc:///tmp/two",)).model
    prompts = serve.of_prefill(0, "ipc:///tmp/two").model
    assert prompts.model.device_specs == ["cuda:1"]
    assert prompts.model.kv_cache.device_memory_utilization == whole
    assert decodes.model.device_specs == ["cuda:0"]
    assert decodes.model.kv_cache.device_memory_utilization == whole / 2


def test_a_role_needs_processes(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill_only needs tts\.serve with front_ends of at"):
        create_service(config(tiny_checkpoint, pipeline_role="prefill_only").model)


def test_launch_parameters_round_trip(tiny_checkpoint: Path) -> None:
    endpoints = Endpoints.of("tcp://127.0.0.1:5555", "abc")
    serve = config(tiny_checkpoint, max_num_steps=3)
    launch = Launch(serve, "engine", endpoints, {"port": 7}, tiny_checkpoint)
    again = pickle.loads(launch.to_bytes())
    assert again == launch
    assert again.config.model.is_resolved
    with pytest.raises(ConfigError, match="resolved"):
        again.config.model.max_num_steps = 4


def test_the_ready_line() -> None:
    assert str(Ready("h:1", "m", ("a", "b"))) == "ready: h:1 model=m voices=a, b"
    ready = Ready("h:1", "m", ("a",), (("http", "h:2"), ("other", "h:3")))
    assert str(ready) == "ready: h:1 http=h:2 other=h:3 model=m voices=a"
    assert str(Ready("h:1", "m")) == "ready: h:1 model=m voices=none"

"""Ray Serve's proxy and Ray's actors in a cluster of two nodes on this machine."""

from __future__ import annotations

import asyncio
import copy
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from pydantic import ValidationError

from llm import ConfigError
from tests.deadlines import HANG_S
from tests.tts.server_process import SERVING, command_line, is_running
from tests.tts.serving import (
    CHANNEL_OPTIONS,
    TEXT,
    config,
    error_of,
    error_of_reading,
    fields_of,
    flush,
    grouped,
    health,
    hum,
    reason_of,
    retry_s,
    run,
    say,
    serving,
    session_config,
    stream_request,
    unary_request,
    wav,
)
from tts.config.pipeline import AudioGenerationConfig
from tts.config.server import ServerConfig
from tts.config.sources import flag_values
from tts.factory import Service
from tts.serve import build_parser
from tts.v1 import speech_pb2 as pb
from tts.v1 import text_pb2
from tts.v1.speech_pb2_grpc import SpeechServiceStub
from tts.v1.text_pb2_grpc import TextServiceStub

ray = pytest.importorskip("ray")
# Ray's own modules, and those of its dashboard, use what other packages have deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
TLS = ROOT / "tests" / "tts" / "tls"
SERVICERS = [
    "tts.cluster.proxy.add_speech_service",
    "tts.cluster.proxy.add_text_service",
]
PAGE = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NUM_STREAMS = 16
STORE_BYTES = 80 * 2**20
REPLICA = {"ray_actor_options": {"num_cpus": 1}}


@dataclass(frozen=True)
class ServeCluster:
    """A cluster with two nodes, and the address of Serve's gRPC proxy on the first one."""

    cluster: Any
    second: Any
    address: str
    flags: dict[str, Any]

    @contextmanager
    def application(self, flags: dict[str, Any] | None = None, **options: Any) -> Iterator[str]:
        """Serve an application in the block; return its address."""
        from ray import serve

        self.deploy(flags, **options)
        try:
            yield self.address
        finally:
            serve.delete("sonant")

    def deploy(self, flags: dict[str, Any] | None = None, **options: Any) -> None:
        from ray import serve

        from tts.cluster.deployment import create_application

        application = create_application({**self.flags, **(flags or {})}, **REPLICA, **options)
        serve.run(application, name="sonant")

    def kill_second(self) -> None:
        """Kill the second node and wait for the end of its workers."""
        (raylet,) = self.second.all_processes["raylet"]
        pid = raylet.process.pid
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert workers
        self.cluster.remove_node(self.second, allow_graceful=False)
        until(lambda: not any(is_running(int(worker)) for worker in workers))

    @staticmethod
    def num_running() -> int:
        from ray import serve

        (deployment,) = serve.status().applications["sonant"].deployments.values()
        return sum(n for state, n in deployment.replica_states.items() if state == "RUNNING")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def serve_cluster(tiny_checkpoint: Path) -> Iterator[ServeCluster]:
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.config import gRPCOptions

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # The proxy of the first node would use replicas there until they are full.
        patch.setenv("RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING", "0")
        node = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 2})
        try:
            second = cluster.add_node(**node, num_cpus=2)
            ray.init(cluster.address, log_to_driver=False)
            cluster.wait_for_nodes()
            port = free_port()
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": "127.0.0.1", "port": free_port()},
                grpc_options=gRPCOptions(port=port, grpc_servicer_functions=SERVICERS),
            )
            flags = {
                "model": str(tiny_checkpoint),
                "audio-decoder": "embedded",
                "max-batch-size": 16,
                "model.kv-cache.kv-cache-page-size": 16,
                "model.kv-cache.num-pages": 512,
            }
            yield ServeCluster(cluster, second, f"127.0.0.1:{port}", flags)
            serve.shutdown()
        finally:
            ray.shutdown()
            cluster.shutdown()


@dataclass(frozen=True)
class Clients:
    channel: grpc.aio.Channel
    speech: SpeechServiceStub
    text: TextServiceStub


@asynccontextmanager
async def clients(
    address: str, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[Clients]:
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", "localhost"))
    channel = (
        grpc.aio.insecure_channel(address, options)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options)
    )
    async with channel:
        yield Clients(channel, SpeechServiceStub(channel), TextServiceStub(channel))


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def all_calls(made: Clients | Any) -> dict[str, Any]:
    """Return what calls of both services give with one seed."""
    streamed = grouped([r async for r in made.speech.SynthesizeStream(stream_request())])
    session = [session_config(), say("Hello there. "), flush("a"), say("This is a short test.")]
    spoken = [r async for r in made.speech.StreamingSynthesize(iter(session))]
    asked = text_pb2.GenerateRequest(input=text_pb2.GenerationInput(prompt="Once upon a time"))
    asked.config.sampling.seed, asked.config.sampling.max_tokens = 7, 20
    streaming = text_pb2.GenerateStreamRequest(input=asked.input, config=asked.config)
    both = text_pb2.GenerateSpeechRequest(input=asked.input, config=asked.config)
    both.synthesis.CopyFrom(config())
    events = [r async for r in made.text.GenerateSpeech(both)]
    return {
        "stream": streamed.data,
        "unary": (await made.speech.Synthesize(unary_request())).audio,
        "session": b"".join(r.audio.data for r in spoken),
        "events": [r.WhichOneof("event") for r in spoken if not r.HasField("audio")],
        "voices": [v.name for v in (await made.speech.ListVoices(pb.ListVoicesRequest())).voices],
        "text": list((await made.text.Generate(asked)).token_ids),
        "pieces": [i async for r in made.text.GenerateStream(streaming) for i in r.delta.token_ids],
        "spoken": b"".join(r.speech.audio.data for r in events),
    }


# --- Serve


def test_calls_give_what_a_plain_server_gives(
    serve_cluster: ServeCluster, tiny_service: Service
) -> None:
    async def plain() -> dict[str, Any]:
        async with serving(tiny_service) as served:
            return await all_calls(served)

    async def proxied(address: str) -> dict[str, Any]:
        async with clients(address) as made:
            return await all_calls(made)

    expected = run(plain())
    assert len(expected["stream"]) > 10_000
    with serve_cluster.application() as address:
        assert run(proxied(address)) == expected


def test_failures_have_codes_and_details(serve_cluster: ServeCluster) -> None:
    async def ask(address: str) -> None:
        allowed = (("authorization", "Bearer secret"),)
        async with clients(address) as made:
            speech = made.speech
            refused = await error_of(speech.SynthesizeStream(stream_request()))
            assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
            assert reason_of(refused) == "UNAUTHENTICATED"
            for call in (
                speech.Synthesize(unary_request(""), metadata=allowed),
                speech.SynthesizeStream(stream_request(""), metadata=allowed),
            ):
                wrong = await error_of(call)
                assert fields_of(wrong) == ["input.text"]
                assert wrong.details() == "input.text: is empty"
            streamed = speech.SynthesizeStream(stream_request(""), metadata=allowed)
            assert fields_of(await error_of_first(streamed)) == ["input.text"]
            session = [session_config(), say("\0")]
            wrong = await error_of(speech.StreamingSynthesize(iter(session), metadata=allowed))
            assert fields_of(wrong) == ["text"]
            unknown = unary_request(voice=pb.VoiceSelection(name="unknown"))
            missing = await error_of(speech.Synthesize(unknown, metadata=allowed))
            assert missing.code() is grpc.StatusCode.NOT_FOUND
            assert reason_of(missing) == "VOICE_NOT_FOUND"
            await check_busy(speech, allowed)

    flags = {"auth-token": "secret", "max-concurrent-requests": 1, "max-queued-requests": 0}
    with serve_cluster.application(flags, max_ongoing_requests=8) as address:
        run(ask(address))


async def error_of_first(call: Any) -> grpc.aio.AioRpcError:
    """Return the error of a stream that ends without a response."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


async def check_busy(speech: SpeechServiceStub, allowed: Any) -> None:
    """A second call is refused until the first one is cancelled."""
    open_call = speech.StreamingSynthesize(metadata=allowed)
    await open_call.write(session_config())
    assert (await open_call.read()).WhichOneof("event") == "started"
    busy = await error_of(speech.SynthesizeStream(stream_request(), metadata=allowed))
    assert reason_of(busy) == "QUEUE_FULL"
    assert retry_s(busy) > 0
    open_call.cancel()
    while True:
        try:
            assert (await speech.Synthesize(unary_request(), metadata=allowed)).audio
            return
        except grpc.aio.AioRpcError as error:
            if reason_of(error) != "QUEUE_FULL":
                raise


def test_calls_with_one_id_go_to_one_replica(serve_cluster: ServeCluster) -> None:
    """Shown by a voice that was created in one of two replicas."""

    async def ask(address: str) -> None:
        affine = (("multiplexed_model_id", "news"),)
        prompt = pb.VoicePrompt(audio=wav(hum(1.2)), transcript="This is what I said.")
        async with clients(address) as made:
            request = pb.CreateVoiceRequest(voice_id="news", prompt=prompt)
            await made.speech.CreateVoice(request, metadata=affine)
            await asyncio.sleep(2)  # until the proxy knows where the id is
            with_id = [await has_voice(made.speech, affine) for _ in range(20)]
            without = [await has_voice(made.speech, ()) for _ in range(40)]
            assert all(with_id)
            assert {*without} == {True, False}

    with serve_cluster.application(num_replicas=2) as address:
        run(ask(address))


async def has_voice(speech: SpeechServiceStub, metadata: Any) -> bool:
    found = await speech.ListVoices(pb.ListVoicesRequest(), metadata=metadata)
    return "news" in [voice.name for voice in found.voices]


def test_replicas_follow_the_number_of_streams(serve_cluster: ServeCluster) -> None:
    """From one to three and back; a stream that stays open speaks afterwards."""

    async def ask(address: str) -> None:
        async with clients(address) as made:
            calls = [made.speech.StreamingSynthesize() for _ in range(6)]
            for call in calls:
                await call.write(session_config())
            await asyncio.to_thread(until, lambda: serve_cluster.num_running() == 3)
            for call in calls[1:]:
                call.cancel()
            await asyncio.to_thread(until, lambda: serve_cluster.num_running() == 1)
            await calls[0].write(say(TEXT))
            await calls[0].done_writing()
            assert [r async for r in calls[0]][-1].HasField("done")

    scaling = {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 2,
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 1,
    }
    with serve_cluster.application(autoscaling_config=scaling) as address:
        assert serve_cluster.num_running() == 1
        run(ask(address))


def test_no_call_fails_while_replicas_are_replaced(serve_cluster: ServeCluster) -> None:
    async def ask(address: str) -> None:
        async with clients(address) as made:
            before = (await made.speech.Synthesize(unary_request())).audio
            update = asyncio.create_task(
                asyncio.to_thread(
                    serve_cluster.deploy, {"model.served-model-name": "new"}, num_replicas=2
                )
            )
            num_calls = 0
            while not update.done():
                speaking = [made.speech.Synthesize(unary_request()) for _ in range(2)]
                streaming = made.speech.SynthesizeStream(stream_request())
                assert grouped([r async for r in streaming]).data == before
                assert [(await call).audio for call in speaking] == [before, before]
                num_calls += 3
            await update
            assert num_calls > 10
            info = await made.speech.GetServerInfo(pb.GetServerInfoRequest())
            assert [model.name for model in info.models] == ["new"]

    with serve_cluster.application(num_replicas=2) as address:
        run(ask(address))


def test_a_lost_replica_ends_calls_as_unavailable(serve_cluster: ServeCluster) -> None:
    """Also calls that no response has been sent to, and which wait in its queue."""

    async def ask(address: str) -> None:
        async with clients(address) as made:
            session = made.speech.StreamingSynthesize()
            await session.write(session_config())
            assert (await session.read()).HasField("started")
            waiting = made.speech.Synthesize(unary_request())
            for _ in range(10):  # by then the replica has the call before them
                await made.speech.ListVoices(pb.ListVoicesRequest())
            kill_replicas()
            for lost in (await error_of(waiting), await error_of_first(session)):
                assert lost.code() is grpc.StatusCode.UNAVAILABLE
                assert lost.details() == "the replica was lost; try again"
                assert reason_of(lost) == "ENGINE_LOST"
                assert retry_s(lost) > 0
            assert (await made.speech.Synthesize(unary_request())).audio

    flags = {"max-concurrent-requests": 1, "max-queued-requests": 4}
    with serve_cluster.application(flags) as address:
        run(ask(address))


def kill_replicas() -> None:
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("SERVE_REPLICA::"):
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def test_a_replica_whose_engine_stops_is_replaced(serve_cluster: ServeCluster) -> None:
    """Its model is split over two ranks, one of which is killed; none is left at the end."""

    async def ask(address: str) -> bytes:
        async with clients(address) as made:
            return bytes((await made.speech.Synthesize(unary_request())).audio)

    async def lose_rank(address: str) -> None:
        async with clients(address) as made:
            session = made.speech.StreamingSynthesize()
            await session.write(session_config())
            assert (await session.read()).HasField("started")
            await session.write(say(TEXT))
            (rank,) = ranks()
            os.kill(rank, signal.SIGKILL)
            await session.done_writing()
            lost = await error_of_reading(session)
            assert lost.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(lost) == "ENGINE_LOST"

    flags = {"model.device-specs": "cpu,cpu"}
    with serve_cluster.application(flags, health_check_period_s=1) as address:
        expected = run(ask(address))
        (before,) = ranks()
        run(lose_rank(address))
        until(lambda: ranks() not in ([], [before]))
        until(lambda: serve_cluster.num_running() == 1)
        assert run(ask(address)) == expected
    until(lambda: not ranks())


def ranks() -> list[int]:
    """Return the ids of the processes of ranks that belong to replicas."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        if "llm.pipeline.rank_process" in command_line(int(folder.name)):
            status = (folder / "status").read_text()
            parent = re.search(r"^PPid:\t(\d+)$", status, re.MULTILINE)
            if parent and "ServeReplica" in " ".join(command_line(int(parent[1]))):
                found.append(int(folder.name))
    return found


def test_the_configuration_file_serves_an_application_for_each_model(
    serve_cluster: ServeCluster, tmp_path: Path
) -> None:
    """Run the file of deploy/ in the cluster, with a second application."""
    from ray import serve

    data = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8"))
    assert data["grpc_options"]["grpc_servicer_functions"] == SERVICERS
    (first,) = data["applications"]
    first["args"] |= serve_cluster.flags | {"model.served-model-name": "first"}
    first["deployments"][0]["ray_actor_options"] = {"num_cpus": 1}
    second = copy.deepcopy(first) | {"name": "second", "route_prefix": "/second"}
    second["args"]["model.served-model-name"] = "second"
    data["applications"].append(second)
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(data))

    async def models(address: str, application: str) -> list[str]:
        async with clients(address) as made:
            metadata = (("application", application),)
            request = pb.GetServerInfoRequest()
            info = await made.speech.GetServerInfo(request, metadata=metadata)
            assert info.limits.max_streams_per_client == 10_000
            return [model.name for model in info.models]

    async def unnamed(address: str) -> None:
        async with clients(address) as made:
            wrong = await error_of(made.speech.Synthesize(unary_request()))
            assert wrong.code() is grpc.StatusCode.NOT_FOUND
            assert "Application metadata not set" in (wrong.details() or "")

    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", str(file)]
    address = ("--address", serve_cluster.cluster.address)
    subprocess.run([*command, *address], cwd=ROOT, check=True, timeout=HANG_S)
    until(lambda: {a.status for a in serve.status().applications.values()} == {"RUNNING"})
    assert run(models(serve_cluster.address, "sonant")) == ["first"]
    assert run(models(serve_cluster.address, "second")) == ["second"]
    run(unnamed(serve_cluster.address))
    serve.delete("sonant")
    serve.delete("second")


def test_a_lost_node_ends_its_own_streams_only(serve_cluster: ServeCluster) -> None:
    """The last test with the second node."""

    async def until_spoken(speech: SpeechServiceStub) -> Any:
        call = speech.StreamingSynthesize()
        for message in (session_config(), say("Hello there. "), flush("a")):
            await call.write(message)
        heard = b""
        while not (response := await call.read()).HasField("flush_done"):
            heard += response.audio.data
        return call, heard

    async def finished(call: Any, heard: bytes) -> bytes | grpc.aio.AioRpcError:
        try:
            await call.write(say("This is a short test."))
            await call.done_writing()
            while (response := await call.read()) is not grpc.aio.EOF:
                heard += response.audio.data
            return heard
        except grpc.aio.AioRpcError as error:
            return error
        except asyncio.InvalidStateError:  # it had ended before it was written to
            return await error_of_reading(call)

    async def ask(address: str) -> None:
        async with clients(address) as made:
            expected = await finished(*await until_spoken(made.speech))
            streams = await asyncio.gather(*(until_spoken(made.speech) for _ in range(NUM_STREAMS)))
            await asyncio.to_thread(serve_cluster.kill_second)
            ends = await asyncio.gather(*(finished(*stream) for stream in streams))
            lost = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
            assert [end for end in ends if not isinstance(end, grpc.aio.AioRpcError)] == [
                expected
            ] * (NUM_STREAMS - len(lost))
            assert 0 < len(lost) < NUM_STREAMS
            assert {error.code() for error in lost} == {grpc.StatusCode.UNAVAILABLE}
            assert {reason_of(error) for error in lost} == {"ENGINE_LOST"}
            again = await asyncio.gather(
                *(until_spoken(made.speech) for _ in range(NUM_STREAMS // 2))
            )
            assert {await finished(*stream) for stream in again} == {expected}

    with serve_cluster.application(num_replicas=2, max_replicas_per_node=1) as address:
        run(ask(address))


# --- servers of actors


def test_servers_keep_tls_health_and_details(
    serve_cluster: ServeCluster, tiny_service: Service
) -> None:
    from tts.cluster.servers import place_servers

    async def plain() -> dict[str, Any]:
        async with serving(tiny_service) as served:
            return await all_calls(served)

    async def ask(address: str) -> dict[str, Any]:
        trusted = grpc.ssl_channel_credentials((TLS / "ca.pem").read_bytes())
        async with clients(address, trusted) as made:
            assert await health(made.channel) == SERVING
            wrong = await error_of(made.speech.SynthesizeStream(stream_request("")))
            assert fields_of(wrong) == ["input.text"]
            return await all_calls(made)

    async def ask_in_clear(address: str) -> None:
        async with clients(address) as made:
            refused = await error_of(made.speech.Synthesize(unary_request()))
            assert refused.code() is grpc.StatusCode.UNAVAILABLE

    tls = {"tls-cert": str(TLS / "server.pem"), "tls-key": str(TLS / "server.key"), "port": 0}
    actors = place_servers(2, {**serve_cluster.flags, **tls}, num_cpus=0.5)
    addresses = [found["grpc"] for found in ray.get([a.addresses.remote() for a in actors])]
    expected = run(plain())
    for address in addresses:
        assert run(ask(address)) == expected
        run(ask_in_clear(address))

    ray.kill(actors[0], no_restart=False)
    until(lambda: not is_open(addresses[0]))  # the server ends with its actor
    until(lambda: restarted(actors[0]) not in (None, addresses[0]))
    assert run(ask(restarted(actors[0]) or "")) == expected
    assert ray.get(actors[1].stop.remote()) == 0
    assert not is_open(addresses[1])


def restarted(actor: Any) -> str | None:
    """Return the address of an actor's server; None while it is being restarted."""
    try:
        return str(ray.get(actor.addresses.remote())["grpc"])
    except ray.exceptions.RayActorError:
        return None


def is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


# --- wrong configurations


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max-concurrent-request": 4}, "did you mean 'max_concurrent_requests'"),
        ({"max-concurrent-requests": 0}, "max_concurrent_requests"),
        ({"model": "a", "model.model-path": "b"}, "model.model_path is given twice"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], message: str) -> None:
    from tts.cluster.deployment import build

    with pytest.raises((ConfigError, ValidationError), match=re.escape(message)):
        build(flags)


@pytest.mark.parametrize(
    "flags", [{"tls-cert": "a", "tls-key": "b"}, {"http-port": 8880}, {"speech-server": "a:1"}]
)
def test_replicas_of_serve_have_no_listeners(flags: dict[str, Any]) -> None:
    from tts.cluster.deployment import build

    field = next(iter(flags)).replace("-", "_")
    with pytest.raises(ConfigError, match=f"{field}: not for a replica of Ray Serve"):
        build(flags)


def test_a_model_that_is_missing_fails_the_deployment(serve_cluster: ServeCluster) -> None:
    from ray import serve

    with pytest.raises(RuntimeError, match="Deploying application sonant failed"):
        serve_cluster.deploy({"model": "./no/such/folder"})
    (deployment,) = serve.status().applications["sonant"].deployments.values()
    assert "no/such/folder" in deployment.message
    assert "is neither a folder nor a model of the hub" in deployment.message
    serve.delete("sonant")


def test_a_server_that_does_not_start_fails_its_actor(serve_cluster: ServeCluster) -> None:
    from tts.cluster.servers import place_servers

    flags = {**serve_cluster.flags, "tls-cert": "missing.pem", "tls-key": "missing.pem"}
    (actor,) = place_servers(1, flags, num_cpus=0.5)
    with pytest.raises(ray.exceptions.RayActorError, match="ended with status 2"):
        ray.get(actor.addresses.remote())
    with pytest.raises(ConfigError, match="unknown key"):
        place_servers(1, {"tls-certificate": "a"})


def test_arguments_are_those_of_the_command() -> None:
    from tts.cluster.flags import command_line, parsed_flags

    flags = {
        "model": "./a b",
        "model.device-specs": ["cpu"],
        "enable_reflection": False,
        "max-batch-size": "4",
        "auth-token": None,
        "text-model-config": {"max_length": 8},
    }
    read = build_parser().parse_args(command_line(flags))
    for model_class in (ServerConfig, AudioGenerationConfig):
        assert flag_values(read, model_class) == flag_values(parsed_flags(flags), model_class)
    assert flag_values(read, AudioGenerationConfig)["model"]["model_path"] == "./a b"


# --- the documentation


def test_the_example_of_the_page_is_an_application(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve

    made: list[tuple[Any, str]] = []
    monkeypatch.setattr(serve, "run", lambda target, name: made.append((target, name)))
    (example,) = (snippet for snippet in SNIPPETS if "create_application" in snippet)
    exec(compile(example, "docs/parallelism.md", "exec"), {})
    ((application, name),) = made
    assert name == "sonant"
    assert isinstance(application, serve.Application)


def test_the_example_of_the_page_places_servers(
    serve_cluster: ServeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CPUs, on free ports and with other files than the page has."""
    (example,) = (snippet for snippet in SNIPPETS if "place_servers" in snippet)
    for stated, own in (
        ('"port": 50051', f'"port": 0, **{serve_cluster.flags}'),
        ("/etc/sonant", str(TLS)),
        ("(3, flags, num_gpus=1)", "(1, flags, num_cpus=0.5)"),
    ):
        assert stated in example
        example = example.replace(stated, own)
    monkeypatch.setattr(ray, "init", lambda address: None)  # the test has done so
    exec(compile(example, "docs/parallelism.md", "exec"), {})
    assert re.fullmatch(r"\['[\d.]+:\d+'\]\n", capsys.readouterr().out)

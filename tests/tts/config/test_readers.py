"""Every field of the configuration has a reader, or is refused.

Servers and engines of every kind run, and what they read is written down, by section and field.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from llm import ModelConfig, PipelineConfig, Request, SamplingParams, StrictModel, create_engine
from tests.deadlines import HANG_S
from tests.fakes import tiny_config
from tests.llm.lora.adapters import write_adapter
from tests.tts.config.config_reads import ROOT, Place, Reads, places, recorded
from tests.tts.ipc.remote_engine import new_base
from tests.tts.serving import (
    hum,
    say,
    session_config,
    stream_request,
    unary_request,
    wav,
)
from tts import serve
from tts.config.flags import is_refused
from tts.config.pipeline import AudioGenerationConfig
from tts.config.serve import ServeConfig
from tts.config.server import ServerConfig
from tts.config.sources import walk_fields
from tts.factory import Service, create_service
from tts.observe.logs import configure_logging
from tts.processes.calls import serve_calls
from tts.processes.child import Ready, Signals
from tts.processes.supervisor import supervise
from tts.server.server import SpeechServer
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub

ROOTS = (AudioGenerationConfig, ServerConfig)
# Taken out of the values before there is a configuration; tested with the files.
BEFORE = {"config_file", "section_name"}
# Only the configuration itself acts on these, when it is resolved or sets a session.
ITS_OWN = {
    "chat_template",
    "custom_architectures",
    "defer_resolve",
    "force",
    "lora.lora_paths",
    "pdl_level",
    "profiling.trace_after",
    "profiling.trace_file",
    "profiling.trace_steps",
    "use_experimental_kernels",
    "use_legacy_module",
}


REFUSED = {
    name for root in ROOTS for name, field in walk_fields(root) if is_refused(name, field, root)
}
ALL_FIELDS = {
    name: place
    for root in ROOTS
    for name, place in places(root).items()
    # A draft model is the model of a configuration of its own, and read as that.
    if not (name.startswith("draft_model.") or name in REFUSED | BEFORE)
}


@pytest.fixture(scope="module")
def reads(
    tiny_checkpoint: Path, text_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Reads:
    """Fields read by a server with its processes, and by engines with other features."""
    folder = tmp_path_factory.mktemp("reads")
    with recorded() as found:
        _run_command()
        _serve(tiny_checkpoint, folder)
        _supervise(tiny_checkpoint, text_checkpoint, folder)
        for values in _special(text_checkpoint, folder):
            _generate(text_checkpoint, values)
    return found


def _run_command() -> None:
    """Run the command with a model that does not exist."""
    arguments = ["--model.model-path=no/such-model", "--offline", "--log-level=error"]
    assert serve.main(arguments) != 0
    configure_logging("info", "text")


def _serve(checkpoint: Path, folder: Path) -> None:
    """Run a server in this process: every kind of call, then a drain."""
    cache = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 0.01}
    model = tiny_config(
        checkpoint,
        prometheus_metrics_mode="launch_server",
        lora={"enable_lora": True, "lora_paths": [str(write_adapter(folder / "a", checkpoint))]},
        model={"kv_cache": cache},
    )
    server_config = ServerConfig(
        port=0, http_port=0, metrics_port=0, voice_folder=folder / "voices"
    )

    async def scenario() -> None:
        signals = Signals()

        async def load(_: SpeechServer) -> Service:
            return await asyncio.to_thread(create_service, model, server_config)

        calling: list[asyncio.Task[None]] = []

        def ready(what: Ready) -> None:
            calling.append(asyncio.create_task(call_all(what.address)))
            calling[0].add_done_callback(lambda _: signals.asked.set())

        assert await serve_calls(ServeConfig(model, server_config), signals, load, ready) == 0
        await calling[0]

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))


async def call_all(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        speech = SpeechServiceStub(channel)
        await speech.Synthesize(unary_request())
        async for _ in speech.SynthesizeStream(stream_request()):
            pass
        async for _ in speech.StreamingSynthesize(iter([session_config(), say("Hello there.")])):
            pass
        prompt = pb.VoicePrompt(audio=wav(hum(1.5)), transcript="hello there")
        await speech.CreateVoice(
            pb.CreateVoiceRequest(voice_id="mine", prompt=prompt, consent="mine")
        )


def _supervise(checkpoint: Path, text_checkpoint: Path, folder: Path) -> None:
    """Run the supervisor; the engine process ends at once because the weights were removed."""
    copy = Path(shutil.copytree(checkpoint, folder / "copy"))
    model = tiny_config(copy, zmq_endpoint_base=new_base())
    (copy / "model.safetensors").unlink()
    server = ServerConfig(
        port=0, wyoming_port=0, wyoming_host="127.0.0.2", text_model=str(text_checkpoint)
    )
    serving = supervise(ServeConfig.of(model, server))
    assert asyncio.run(asyncio.wait_for(serving, HANG_S)) == 2


def _special(checkpoint: Path, folder: Path) -> Iterator[dict[str, Any]]:
    yield {"draft_model": {"model_path": str(checkpoint)}}
    yield {"enable_overlap_scheduler": True, "force": True}
    yield {"profiling": {"trace_file": folder / "trace.json", "trace_after": 1, "trace_steps": 1}}


def _generate(checkpoint: Path, values: dict[str, Any]) -> None:
    """Run an engine without the service."""
    model = ModelConfig(model_path=str(checkpoint), device_specs=["cpu"])
    engine = create_engine(PipelineConfig(model=model, **values))
    engine.start()
    assert list(engine.submit(Request("r", (1, 2), SamplingParams(max_tokens=4))))
    engine.shutdown()


@pytest.mark.parametrize("name", sorted(ALL_FIELDS))
def test_every_field_has_a_reader(reads: Reads, name: str) -> None:
    files = reads.get(ALL_FIELDS[name], set())
    acting = {file for file in files if not file.startswith("llm/config/")}
    assert acting or (name in ITS_OWN and files), f"only {files or 'nothing'} reads {name}"


def test_a_field_without_a_reader_is_noticed() -> None:
    """A field without a reader is found although another section has a read field of that name."""

    class Cache(StrictModel):
        page_size: int = 1

    class Other(StrictModel):
        page_size: int = 2
        cache: Cache = Cache()

    class Heir(Other):
        more: int = 3

    with recorded() as found:
        config = Heir()
        assert (config.page_size, config.cache.page_size) == (2, 1)  # a test is no service
        code = compile("config.cache.page_size, config.more", str(ROOT / "tts/seen.py"), "eval")
        assert eval(code, {"config": config}) == (1, 3)
    assert found == {
        Place("Other", "cache"): {"tts/seen.py"},
        Place("Cache", "page_size"): {"tts/seen.py"},
        Place("Heir", "more"): {"tts/seen.py"},
    }
    assert places(Heir) == {
        "page_size": Place("Other", "page_size"),
        "cache.page_size": Place("Cache", "page_size"),
        "more": Place("Heir", "more"),
    }

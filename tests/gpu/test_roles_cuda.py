"""Prompts computed by an engine on a GPU and decoded by another one: over the host, or directly."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder import AudioEncoding
from llm import (
    PageTransfer,
    PipelineConfig,
    PipelineRole,
    Request,
    SamplingParams,
    create_engine,
)
from llm.kv_cache import transfer
from tests.gpu.test_cuda_graphs import SHAPE, VOCAB
from tests.llm.llama_checkpoints import random_ids, write_llama
from tests.tts.ipc.remote_engine import new_base, new_tcp_base
from tests.tts.ipc.roles import (
    INBOX,
    MESSAGE,
    WRITTEN,
    check_released,
    tokens_of,
    ways_of_pages,
)
from tts.engine.client import EngineInfo
from tts.engine.local_client import LocalEngineClient
from tts.engine.prefill_client import PrefillClient
from tts.ipc.decode_client import DecodeClient
from tts.ipc.endpoints import Endpoints, reserved
from tts.ipc.engine_server import EngineServer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
START_S = 300.0
STEPS: dict[str, dict[str, Any]] = {  # of both engines; pages are written layer by layer if eager
    "awaited": {},
    "captured": {"enable_overlap_scheduler": True},
    "eager": {"enable_overlap_scheduler": True, "model": {"disable_cuda_graph": True}},
}
NUM_GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"), **SHAPE)


def client_of(checkpoint: Path, device: str, role: str, **keys: Any) -> LocalEngineClient:
    model = {
        "model_path": str(checkpoint),
        "device_specs": [device],
        "quantization_encoding": "float32",
        "attention_backend": "gathered",
        "kv_cache": {"kv_cache_page_size": 16, "num_pages": 256},
    } | keys.pop("model", {})
    bases = ["ipc:///unused"] if role == "decode_only" else []
    config = PipelineConfig(
        model=model,
        max_batch_size=8,
        max_length=500,
        pipeline_role=PipelineRole(role),
        prefill_endpoints=bases,
        **keys,
    )
    return LocalEngineClient(create_engine(config))


def requests() -> list[Request]:
    return [
        Request(
            f"r{number}",
            tuple(random_ids(300 + 5 * number, VOCAB, seed=number)),
            SamplingParams(
                seed=number, temperature=0.9 * (number % 2), max_tokens=20, ignore_eos=True
            ),
        )
        for number in range(6)
    ]


async def _serve(
    checkpoint: Path, device: str, base: str, keys: dict[str, Any], ready: Event, done: Event
) -> None:
    client = PrefillClient(client_of(checkpoint, device, "prefill_only", **keys))
    with reserved(base):
        info = EngineInfo(None, 500, AudioEncoding.PCM_S16LE)
        server = EngineServer(client, info, Endpoints.of(base, client.page_format))
        await server.start()
        ready.set()
        await asyncio.to_thread(done.wait)
        await server.close()
    await client.close()


def serve(
    checkpoint: Path, device: str, base: str, keys: dict[str, Any], ready: Event, done: Event
) -> None:
    transfer.PART_BYTES = 1
    asyncio.run(_serve(checkpoint, device, base, keys, ready, done))


@contextmanager
def prefill_process(
    checkpoint: Path, device: str, base: str, keys: dict[str, Any]
) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=serve, args=(checkpoint, device, base, keys, ready, done))
    process.start()
    try:
        assert ready.wait(START_S)
        yield
    finally:
        done.set()
        process.join(60)
        process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("way", ["directly", "shared memory", "messages"])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_tokens_are_those_of_one_engine(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, device: str, way: str, steps: str
) -> None:
    """One after the other, so that nothing else shares a step. Twice, so that memory is reused."""
    if int(device[-1]) >= NUM_GPUS:
        pytest.skip("needs two CUDA devices")
    monkeypatch.setattr(transfer, "PART_BYTES", 1)  # parts of a page, so that slots are reused
    if way == "shared memory":
        monkeypatch.setattr(PageTransfer, "share", lambda self: None)
    base = new_tcp_base() if way == "messages" else new_base()
    if way == "messages":
        monkeypatch.setattr("tts.ipc.inbox.FOLDER", Path("/no/such/folder"))
    ways = ways_of_pages(monkeypatch)

    async def scenario() -> None:
        plain = client_of(
            checkpoint, "cuda:0", "prefill_and_decode", model=STEPS[steps].get("model", {})
        )
        expected = [(await tokens_of(plain, request))[0] for request in requests()]
        await plain.close()
        local = client_of(checkpoint, "cuda:0", "decode_only", **STEPS[steps])
        client = await DecodeClient.connect(local, [base])
        for salt in ("one", "two"):
            for request, tokens in zip(requests(), expected, strict=True):
                own = Request(request.request_id, request.prompt_ids, request.sampling, 0, salt)
                found, num_cached = await tokens_of(client, own)
                assert num_cached == len(own.prompt_ids)
                assert found == tokens
        expected_way = {"directly": WRITTEN, "shared memory": INBOX, "messages": MESSAGE}[way]
        assert ways == {expected_way}
        await check_released(local)
        await client.close()

    with prefill_process(checkpoint, device, base, STEPS[steps]):
        asyncio.run(scenario())

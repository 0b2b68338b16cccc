"""The folder of created voices under a real server: foreign files, a full disk, no folder."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from llm import CheckpointError
from tests.fakes import tiny_config
from tests.tts.server.test_voices import clip
from tests.tts.server_process import (
    FRONT_END,
    Process,
    Shared,
    processes_of,
    serving_process,
    shared,
    stub_of,
)
from tests.tts.serving import error_of, grouped, reason_of, run, serving, stream_request
from tts.config.server import ServerConfig
from tts.factory import create_service
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub
from tts.voices.folder import VoiceFolder

FORGED = {
    "name": "forged",
    "display_name": "\ud800",
    "language_codes": [],
    "prompt": {"codes": [1], "transcript": ""},
    "consent": "",
}


BUILT_IN = ["hazel", "owen", "edith"]


class Served(NamedTuple):
    """A server and its folder of voices, in which foreign files lay at the start."""

    process: Shared[Process]
    folder: Path
    address: str


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("voices")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "forged.json").write_text(json.dumps(FORGED))
    with shared(serving_process(tiny_checkpoint, voice_folder=folder)) as process:
        yield Served(process, folder, process.run(process.value.ready()))


async def names(stub: SpeechServiceStub) -> list[str]:
    return [voice.name for voice in (await stub.ListVoices(pb.ListVoicesRequest())).voices]


def create(name: str) -> pb.CreateVoiceRequest:
    return pb.CreateVoiceRequest(voice_id=name, prompt=clip())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"codes": [], "transcript": "", "vector": "AAAA*"}, "vector must be in base64"),
        ({"codes": [], "transcript": "", "vector": 7}, "vector must be in base64"),
        ({"codes": [], "transcript": "", "vector": "AAAA"}, "vector must have numbers of 4 bytes"),
        ({"codes": [], "transcript": "", "vector": ""}, "codes must be whole numbers, in a list"),
        ({"codes": [-1], "transcript": "", "vector": "AAAAAA=="}, "codes must be whole numbers"),
    ],
)
def test_a_file_with_a_wrong_vector_is_an_error(
    tmp_path: Path, prompt: dict[str, Any], message: str
) -> None:
    values = FORGED | {"display_name": "Forged", "prompt": prompt}
    (tmp_path / "forged.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        VoiceFolder(tmp_path).read("forged.json")


def test_foreign_files_are_reported_and_ignored(served: Served) -> None:
    async def scenario() -> None:
        async with stub_of(served.address) as stub:
            await stub.CreateVoice(create("mine"))
            assert await names(stub) == [*BUILT_IN, "mine"]
            assert len(json.loads((served.folder / "mine.json").read_text())["codec"]) == 64
            await stub.DeleteVoice(pb.DeleteVoiceRequest(name="mine"))
        for name in ("deep.json", "forged.json"):
            await served.process.value.logged(rf"voice file \S*/{name} is not used")

    served.process.run(scenario())


def test_a_full_disk_is_reported_and_leaves_no_file(served: Served) -> None:
    async def scenario() -> None:
        async with stub_of(served.address) as stub:
            before = sorted(served.folder.iterdir())
            limits = {
                pid: _no_file_space(pid) for pid in processes_of(served.process.value, FRONT_END)
            }
            error = await error_of(stub.CreateVoice(create("full")))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "STORAGE_FULL"
            assert sorted(served.folder.iterdir()) == before
            for pid, limit in limits.items():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
            await stub.CreateVoice(create("full"))
            assert sorted(served.folder.iterdir()) == sorted([*before, served.folder / "full.json"])
            await stub.DeleteVoice(pb.DeleteVoiceRequest(name="full"))

    served.process.run(scenario())


def _no_file_space(pid: int) -> tuple[int, int]:
    """Make every file write of the process fail; return its earlier limits."""
    found = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (8, found[1]))
    return found


def test_built_in_voices_need_no_folder(served: Served) -> None:
    served.process.run(_without_folder(served.address, served.folder))


def test_nor_do_they_in_one_process(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    service = create_service(tiny_config(tiny_checkpoint), ServerConfig(voice_folder=folder))

    async def scenario() -> None:
        async with serving(service, voice_folder=folder) as served:
            await _without_folder(served.server.address, folder)
        await service.client.close()

    run(scenario())


async def _without_folder(address: str, folder: Path) -> None:
    """Remove the folder; the built-in voices speak, and the next created voice makes it again."""
    async with stub_of(address) as stub:
        shutil.rmtree(folder)
        spoken = grouped([r async for r in stub.SynthesizeStream(stream_request())])
        assert spoken.data
        assert await names(stub) == BUILT_IN
        await stub.CreateVoice(create("mine"))
        assert (folder / "mine.json").is_file()

"""The folder of created voices under a real server: foreign files, a full disk, no folder."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import grpc
import pytest

from tests.tts.server.test_voices import clip
from tests.tts.server_process import FRONT_END, processes_of, serving_process, stub_of
from tests.tts.serving import error_of, grouped, reason_of, run, stream_request
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub

FORGED = {
    "name": "forged",
    "display_name": "\ud800",
    "language_codes": [],
    "prompt": {"codes": [1], "transcript": ""},
    "consent": "",
}


async def names(stub: SpeechServiceStub) -> list[str]:
    return [voice.name for voice in (await stub.ListVoices(pb.ListVoicesRequest())).voices]


def test_foreign_files_are_reported_and_ignored(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "forged.json").write_text(json.dumps(FORGED))

    async def scenario() -> None:
        async with serving_process(tiny_checkpoint, voice_folder=tmp_path) as process:
            async with stub_of(await process.ready()) as stub:
                await stub.CreateVoice(pb.CreateVoiceRequest(voice_id="mine", prompt=clip()))
                assert await names(stub) == ["hazel", "owen", "edith", "mine"]
                assert len(json.loads((tmp_path / "mine.json").read_text())["codec"]) == 64
            for name in ("deep.json", "forged.json"):
                await process.logged(rf"voice file \S*/{name} is not used")

    run(scenario(), 100)


def test_a_full_disk_is_reported_and_leaves_no_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            serving_process(tiny_checkpoint, voice_folder=tmp_path) as process,
            stub_of(await process.ready()) as stub,
        ):
            limits = {pid: _no_file_space(pid) for pid in processes_of(process, FRONT_END)}
            create = pb.CreateVoiceRequest(voice_id="mine", prompt=clip())
            error = await error_of(stub.CreateVoice(create))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "STORAGE_FULL"
            assert list(tmp_path.iterdir()) == []
            for pid, limit in limits.items():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
            await stub.CreateVoice(create)
            assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]

    run(scenario(), 100)


def _no_file_space(pid: int) -> tuple[int, int]:
    """Make every file write of the process fail; return its earlier limits."""
    found = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (8, found[1]))
    return found


@pytest.mark.parametrize("flags", [{}, {"front_ends": 0}], ids=["processes", "one process"])
def test_built_in_voices_need_no_folder(
    tiny_checkpoint: Path, tmp_path: Path, flags: dict[str, int]
) -> None:
    folder = tmp_path / "voices"

    async def scenario() -> None:
        async with (
            serving_process(tiny_checkpoint, voice_folder=folder, **flags) as process,
            stub_of(await process.ready()) as stub,
        ):
            shutil.rmtree(folder)
            spoken = grouped([r async for r in stub.SynthesizeStream(stream_request())])
            assert spoken.data
            assert await names(stub) == ["hazel", "owen", "edith"]
            await stub.CreateVoice(pb.CreateVoiceRequest(voice_id="mine", prompt=clip()))
            assert (folder / "mine.json").is_file()

    run(scenario(), 100)

"""Adapters of a speech model, named as models as `/v1/models` lists them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.llm.lora.adapters import write_adapter
from tests.tts.http.http_serving import HttpServing, error_of, run_with_http
from tests.tts.http.test_http_speech import expected_pcm
from tests.tts.http.test_http_websocket import CONFIG, END, audio_of, fed, talk
from tests.tts.http.text_requests import loaded
from tests.tts.serving import TEXT, run_conversation, say, session_config
from tts.factory import Service
from tts.v1 import speech_pb2 as pb


@pytest.fixture(scope="module")
def adapted(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A speech model with two adapters, one of which has the name of a model of OpenAI."""
    folder = write_adapter(tmp_path_factory.mktemp("lora") / "pirate", tiny_checkpoint, gain=1.0)
    paths = [f"pirate={folder}", f"tts-1-hd={folder}"]
    yield from loaded(tiny_checkpoint, lora={"enable_lora": True, "lora_paths": paths})


def test_speech_with_an_adapter_is_that_of_grpc(adapted: Service) -> None:
    async def ask(served: HttpServing) -> None:
        models = (await served.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [adapted.model, "pirate", "tts-1-hd"]
        plain, own = await expected_pcm(served), await expected_pcm(served, lora="pirate")
        assert plain != own
        names = {adapted.model: plain, "tts-1": plain, "": plain, "pirate": own, "tts-1-hd": own}
        for name, audio in names.items():
            assert (await served.speak(model=name)).content == audio, name
        missing = await served.speak(model="none")
        assert (missing.status_code, error_of(missing)["param"]) == (404, "model")

    run_with_http(adapted, ask)


def test_a_session_with_an_adapter_is_that_of_grpc(adapted: Service) -> None:
    async def ask(served: HttpServing) -> None:
        pcm = pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_S16LE, sample_rate_hertz=24_000)
        first = session_config(max_tokens=None, audio_format=pcm, lora="pirate")
        answers = await run_conversation(served.grpc, first, say(TEXT))
        async with talk(served, {**CONFIG, "model": "pirate"}, fed(TEXT), END) as talking:
            expected = b"".join(answer.audio.data for answer in answers)
            assert audio_of(await talking.rest()) == expected

    run_with_http(adapted, ask)

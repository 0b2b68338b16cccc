"""`custom_architectures`: a language model and an audio decoder of a plug-in in a server."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import decoder.registry as decoder_registry
from decoder import DecoderArchitecture, DecoderConfigError, supported_decoders
from llm import Request, SamplingParams
from llm.config import architectures, supported_architectures
from tests.fakes import tiny_config
from tests.tts.serving import run
from tts.config.pipeline import AudioGenerationConfig
from tts.factory import Service, create_service
from tts.speech.types import SamplingOverrides, SpeechRequest

PLUGIN = '''
"""Llama read against the grain, and a codec of ramps."""

from decoder import DecoderArchitecture
from decoder.codecs.ramp import RampDecoder
from llm import Architecture
from llm.models.llama import LlamaModel


class ContraryModel(LlamaModel):
    def execute(self, model_inputs):
        outputs = super().execute(model_inputs)
        outputs.logits.neg_()
        if outputs.next_token_logits is not outputs.logits:
            outputs.next_token_logits.neg_()
        return outputs


class StairDecoder(RampDecoder):
    """The ramp decoder under another name."""


ARCHITECTURES = [
    Architecture("ContraryForCausalLM", "sonant_test_plugin:ContraryModel"),
    DecoderArchitecture("stairs", "sonant_test_plugin:StairDecoder"),
]
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the plug-in's name; restore the registries after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(architectures, "_architectures", dict(architectures._architectures))
    monkeypatch.setattr(decoder_registry, "_DECODERS", dict(decoder_registry._DECODERS))
    (tmp_path / "sonant_test_plugin.py").write_text(PLUGIN)
    yield f"{tmp_path}:sonant_test_plugin"
    sys.modules.pop("sonant_test_plugin", None)


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """Return the tiny checkpoint with the plug-in's architecture and codec."""
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "contrary"))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["ContraryForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree(folder / "codec")
    (folder / "codec").mkdir()
    values = {"type": "stairs", "codebook_size": 64}
    (folder / "codec" / "config.json").write_text(json.dumps(values))
    return folder


def tokens_of(service: Service) -> list[int]:
    """Return the greedy tokens of the language model after one byte."""

    async def ask() -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        request = Request("r", (65,), sampling)
        return [t async for chunk in service.client.generate(request) for t in chunk.token_ids]

    return run(ask())


def test_the_model_and_the_decoder_of_a_plugin_serve(
    plugin: str, checkpoint: Path, tiny_service: Service
) -> None:
    config = tiny_config(checkpoint, audio_decoder="stairs", custom_architectures=[plugin])
    service = create_service(config)
    try:
        assert service.codec is not None
        assert service.codec.name == "ramp"
        assert tokens_of(service) != tokens_of(tiny_service)
        assert service.synthesizer is not None
        sampling = SamplingOverrides(seed=1, max_tokens=12)
        spoken = run(service.synthesizer.synthesize(SpeechRequest("Hello.", sampling=sampling)))
        samples = np.frombuffer(spoken.audio, "<i2").astype(int)
        assert len(samples) > 0
        steps = set(np.diff(samples).tolist())
        assert {32} < steps  # stairs of one height, and the drops between codes
    finally:
        asyncio.run(service.client.close())


def test_plugins_are_registered_in_other_processes(
    plugin: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(checkpoint, audio_decoder="stairs", custom_architectures=[plugin])
    sent = pickle.dumps(config)
    monkeypatch.setattr(architectures, "_architectures", {})
    monkeypatch.setattr(decoder_registry, "_DECODERS", {})
    received: AudioGenerationConfig = pickle.loads(sent)
    assert received.is_resolved
    service = create_service(received)
    asyncio.run(service.client.close())
    assert supported_architectures() == ("ContraryForCausalLM",)
    assert supported_decoders() == ("stairs",)


def test_a_decoder_path_must_be_module_and_class() -> None:
    with pytest.raises(DecoderConfigError, match="'stairs': decoder='here' is no module:Class"):
        DecoderArchitecture("stairs", "here")

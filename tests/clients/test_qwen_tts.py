"""Qwen3-TTS against the package qwen-tts 0.1.1, which needs another transformers: whole models."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decoder import create_speaker_encoder
from tests.decoder.qwen3_tts_reference import write_reference
from tests.decoder.speaker_encoders import CONFIG as ENCODER
from tests.tts.family_checkpoints import write_qwen3_tts_family
from tests.tts.family_services import configured
from tests.tts.serving import hum
from tts.factory import create_service
from tts.speech.types import AudioChunk, SamplingOverrides, SpeechRequest
from tts.voices.types import Voice, VoicePrompt

pytestmark = pytest.mark.timeout(1800)  # half a gigabyte of packages

PACKAGES = [
    "qwen-tts==0.1.1",
    "transformers==4.57.3",
    "huggingface-hub<1",
    "tokenizers>=0.22,<0.23",
    *("accelerate==1.12.0", "einops", "librosa", "audioread", "lazy_loader", "soxr", "numba"),
    *("llvmlite", "joblib", "decorator", "pooch", "scipy", "threadpoolctl"),
    *("msgpack", "platformdirs", "requests", "urllib3", "idna", "certifi", "charset-normalizer"),
]
COUNT, NUM_FRAMES = 7, 12
SOUNDS, MARKS = 16, 1024  # of the first codebook
TALKER: dict[str, Any] = {
    "vocab_size": SOUNDS + MARKS,
    "codec_pad_id": 20,
    "codec_bos_id": 21,
    "codec_eos_token_id": 22,
    "codec_think_id": 26,
    "codec_nothink_id": 27,
    "codec_think_bos_id": 28,
    "codec_think_eos_id": 29,
    "codec_language_id": {"chinese": 55, "english": 50, "sichuan_dialect": 62},
    "spk_id": {"vivian": 65, "eric": 75},
    "spk_is_dialect": {"vivian": False, "eric": "sichuan_dialect"},
}
CODES = tuple((place * 5) % SOUNDS for place in range(5 * COUNT))
RECORDING = "recording.npy"
INSTRUCTIONS = "Be glad, hello."
GENERATION: dict[str, Any] = {
    "do_sample": False,
    "temperature": 0.9,
    "repetition_penalty": 1.3,
    "subtalker_dosample": False,
    "subtalker_temperature": 0.9,
}

REQUESTS: dict[str, list[tuple[dict[str, Any], Voice]]] = {
    "custom_voice": [
        (
            {"text": "hello, you.", "speaker": "vivian"},
            Voice("vivian", speaker="vivian"),
        ),
        (
            {
                "text": "hello.",
                "speaker": "Eric",
                "language": "Chinese",
                "instruct": INSTRUCTIONS,
            },
            Voice("eric", speaker="eric", language="zh", instructions=INSTRUCTIONS),
        ),
        (
            {"text": "hello.", "speaker": "eric", "language": "English"},
            Voice("eric", speaker="eric", language="en"),
        ),
    ],
    "voice_design": [
        (
            {"text": "hello.", "language": "English", "instruct": INSTRUCTIONS},
            Voice("default", language="en", instructions=INSTRUCTIONS),
        ),
    ],
    # The vectors of the prompts are those of RECORDING. With a text token in each frame the text of
    # the first ends behind the recording's codes, that of the second in front of their end.
    "base": [
        *(
            (
                {
                    "text": "hello.",
                    "reference": {
                        "codes": [CODES[n : n + COUNT] for n in range(0, len(CODES), COUNT)],
                        "text": said,
                        "recording": RECORDING,
                    },
                },
                Voice("mine", prompt=VoicePrompt(CODES, said)),
            )
            for said in ("hello you.", "hello")
        ),
        (
            {"text": "hello.", "reference": {"recording": RECORDING}, "language": "English"},
            Voice("mine", language="en", prompt=VoicePrompt(())),
        ),
    ],
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package without torch, which is that of this environment."""
    folder = tmp_path_factory.mktemp("packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *PACKAGES], check=True)
    return folder


# `hidden` is that of the code predictor; 48 is the talker's, as of the 0.6B. `has_text_first` is
# `non_streaming_mode`; None: the default of both sides.
@pytest.mark.parametrize(
    ("hidden", "has_text_first"), [(32, None), (48, None), (32, True), (32, False)]
)
@pytest.mark.parametrize("kind", REQUESTS)
def test_codes_and_samples_are_those_of_the_package(
    packages: Path, tmp_path: Path, kind: str, hidden: int, has_text_first: bool | None
) -> None:
    folder = write_qwen3_tts_family(
        tmp_path / "model",
        talker=TALKER,
        predictor={"hidden_size": hidden},
        tts_model_type=kind,
        speaker_encoder_config=ENCODER if kind == "base" else None,
    )
    shutil.rmtree(folder / "speech_tokenizer")
    write_reference(folder / "speech_tokenizer", num_quantizers=COUNT)
    fill_gaps(folder / "tokenizer.json")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    np.save(tmp_path / RECORDING, hum(1.3, 24_000))
    requests = tmp_path / "requests.json"
    layout = {} if has_text_first is None else {"non_streaming_mode": has_text_first}
    requests.write_text(json.dumps([request | layout for request, _ in REQUESTS[kind]]))
    if layout:
        (folder / "speech.json").write_text(json.dumps({"family": "qwen3_tts"} | layout))
    program = Path(__file__).with_name("qwen_tts_reference.py")
    arguments = [program, folder, requests, tmp_path / "out.safetensors"]
    environment = os.environ | {"PYTHONPATH": str(packages)}
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    expected = load_file(tmp_path / "out.safetensors")
    voices = [voice for _, voice in REQUESTS[kind]]
    if kind == "base":
        vector = create_speaker_encoder(folder).encode(np.load(tmp_path / RECORDING))
        prompts = [voice.prompt for voice in voices if voice.prompt is not None]
        voices = [
            replace(voice, prompt=replace(prompt, vector=vector))
            for voice, prompt in zip(voices, prompts, strict=True)
        ]
    found = asyncio.run(spoken(folder, voices, kind))
    for place, (codes, samples) in enumerate(found):
        theirs = expected[f"{place}.codes"]
        said = voices[place].prompt
        prompt = len(said.codes) // COUNT if said else 0
        assert torch.equal(torch.tensor(codes).view(-1, COUNT), theirs[prompt:])
        assert len(theirs) > prompt
        theirs_spoken = expected[f"{place}.samples"].numpy()
        assert len(samples) == len(theirs_spoken) > 0
        np.testing.assert_allclose(samples, theirs_spoken, atol=1e-5)


def fill_gaps(path: Path) -> None:
    """Give every text id a token: transformers numbers the added ones from the last of them."""
    data = json.loads(path.read_text())
    names = {index: token for token, index in data["model"]["vocab"].items()}
    size = min(token["id"] for token in data["added_tokens"])
    data["model"]["vocab"] = {names.get(k, f"<text {k}>"): k for k in range(size)}
    path.write_text(json.dumps(data))


async def spoken(
    folder: Path, voices: list[Voice], kind: str
) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return greedy codes and samples of each request, by the service, in one batch.

    The settings are those of generation_config.json.
    """
    values = {"audio_decoder_config": {"stateful": True, "pcm_format": "f32le"}}
    service = create_service(configured(folder, run_model_test_mode=False, **values))
    synthesizer = service.synthesizer
    assert synthesizer is not None

    async def listen(voice: Voice, text: str) -> tuple[tuple[int, ...], np.ndarray]:
        sampling = SamplingOverrides(max_tokens=COUNT * NUM_FRAMES)
        asked = SpeechRequest(text, voice=voice, sampling=sampling)
        codes: tuple[int, ...] = ()
        data = b""
        async for event in synthesizer.stream(asked):
            if isinstance(event, AudioChunk):
                codes, data = event.carry, data + event.data
        return codes, np.frombuffer(data, "<f4")

    pairs = zip(voices, REQUESTS[kind], strict=True)
    found = await asyncio.gather(*(listen(voice, asked["text"]) for voice, (asked, _) in pairs))
    await service.client.close()
    return found

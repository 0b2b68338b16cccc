"""CSM as a service: the prompts, recordings and frames of transformers, and errors at start."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder import StreamingOptions, codec_identity, create_decoder
from llm import CheckpointError, CodeSampling, Request, SamplingParams
from tests.llm.csm_checkpoints import edit_config, embedded, reference, reference_frames
from tests.tts.family_checkpoints import SNAC_CODEC
from tests.tts.family_services import CASES, Running, configured
from tests.tts.serving import hum, wav
from tts.engine.client import SpeechJob
from tts.errors import InvalidRequestError
from tts.factory import create_service
from tts.families.base import Checkpoint
from tts.families.registry import find_family
from tts.ipc.codec import decode_from_front_end, encode
from tts.ipc.messages import Speak
from tts.speech.types import AudioChunk, Done, SamplingOverrides, SpeechRequest
from tts.voices.types import Voice, VoicePrompt

pytestmark = pytest.mark.parametrize(
    "running",
    [case for case in CASES if case.name == "csm"],
    indirect=True,
    ids=lambda case: case.name,
    scope="session",
)
COUNT = 7  # codebooks
CODE_SIZE, VOCABULARY = 16, 19  # of Mimi, and of the language model
AUDIO, AUDIO_END = 128_002, 128_003


def spoken_codes(running: Running, voice: Voice | None, num_frames: int) -> tuple[int, ...]:
    """Return the greedy codes of "hello"."""
    sampling = SamplingOverrides(temperature=0.0, max_tokens=num_frames * COUNT)
    synthesizer = running.service.synthesizer
    assert synthesizer is not None

    async def listen() -> tuple[int, ...]:
        codes: tuple[int, ...] = ()
        async for event in synthesizer.stream(
            SpeechRequest("hello.", voice=voice, sampling=sampling)
        ):
            if isinstance(event, AudioChunk):
                codes = event.carry  # all of them: the buffer is longer
            if isinstance(event, Done):
                assert event.result.usage.output_tokens == len(codes)
        return codes

    return asyncio.run(listen())


def test_greedy_codes_are_those_of_transformers(running: Running) -> None:
    model, builder = reference(running.folder), running.service.prompts
    suppressed = range(CODE_SIZE, VOCABULARY)
    mine = Voice("mine", speaker="3", prompt=VoicePrompt(running.case.codes, "hello"))
    for voice in (None, mine):
        spoken = voice or running.family.voices().voices[0]
        prompt = builder.speech_prompt("hello.", spoken)
        frames = reference_frames(model, prompt, 12, suppressed)
        found = spoken_codes(running, voice, 12)
        assert found == tuple(code for frame in frames for code in frame)


def test_a_recording_becomes_a_turn_as_in_transformers(running: Running) -> None:
    """The codes of Mimi's encoder, and the inputs that transformers makes of text and clip."""
    model, synthesizer = reference(running.folder), running.service.synthesizer
    assert synthesizer is not None
    clip = hum(1.1, 24_000)
    prompt = asyncio.run(synthesizer.cloner.from_clip(wav(clip, 24_000), None, "hello"))
    pcm = torch.from_numpy(np.round(clip * 32_767) / 32_768).float()
    padded = torch.nn.functional.pad(pcm, (0, -len(pcm) % 1920))[None, None]
    with torch.no_grad():
        expected = model.codec_model.encode(padded).audio_codes[0].T
    frames = torch.tensor(prompt.codes).view(-1, COUNT)
    assert frames.shape == (14, COUNT)
    assert (frames == expected).float().mean() > 0.95  # rounding to 16 bits moves few codes
    voice = Voice("mine", speaker="1", prompt=VoicePrompt(prompt.codes, "hello"))
    tokens = running.service.prompts.speech_prompt("hello", voice)
    asked = [128000, 58, 16, 60, 71, 68, 75, 75, 78, 128001]  # [1]hello
    ids = torch.tensor([[*asked, *[AUDIO] * len(frames), AUDIO_END, *asked]])
    model.codec_model.encode = lambda _: type("Codes", (), {"audio_codes": frames.T[None]})
    with torch.no_grad():
        theirs = model._merge_input_ids_with_input_values(
            ids, padded, torch.tensor([[padded.shape[-1]]])
        )["inputs_embeds"]
        torch.testing.assert_close(embedded(model, tokens), theirs)


def test_requests_of_frames_cross_processes(running: Running) -> None:
    tokens = running.case.prompted
    later = CodeSampling(0.5, top_k=3)
    stop, ranges = ((0,) * COUNT,), ((0, 16),)
    sampling = SamplingParams(stop_token_ids=stop, allowed_ranges=ranges, later_codes=later)
    job = SpeechJob(Request("r", tokens, sampling), StreamingOptions(chunk_sizes=(COUNT,)))
    sent = Speak("front", 3, job)
    assert decode_from_front_end(encode(sent)) == sent


def test_a_voice_longer_than_the_context_is_refused(running: Running) -> None:
    synthesizer = running.service.synthesizer
    assert synthesizer is not None
    most = synthesizer.cloner.from_codes((1,) * COUNT * 1400)
    assert len(most.codes) == COUNT * 1400
    with pytest.raises(InvalidRequestError, match="tokens of the model's context"):
        synthesizer.cloner.from_codes((1,) * COUNT * 1600)


@pytest.mark.parametrize(
    ("values", "later"),
    [
        ({}, CodeSampling(0.9, 50)),
        (
            {
                "depth_decoder_do_sample": True,
                "depth_decoder_max_new_tokens": 31,
                "depth_decoder_temperature": 0.6,
                "depth_decoder_top_k": 20,
            },
            CodeSampling(0.6, 20),
        ),
        ({"depth_decoder_do_sample": False}, CodeSampling(0.0, 50)),
    ],
)
def test_later_codes_have_settings_of_the_checkpoint(
    running: Running, tmp_path: Path, values: dict[str, Any], later: CodeSampling
) -> None:
    without_weights(running, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.8} | values))
    family = find_family(Checkpoint(tmp_path))
    assert family is not None
    assert family.sampling() == SamplingParams(temperature=0.8, top_k=50, later_codes=later)


def without_weights(running: Running, folder: Path, **keys: Any) -> Path:
    """Return a folder with the checkpoint's configuration and tokenizer."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((running.folder / name).read_text())
    edit_config(folder, **keys)
    return folder


def test_a_wrong_codec_is_an_error_before_the_model_is_loaded(
    running: Running, tmp_path: Path
) -> None:
    folder = without_weights(running, tmp_path)
    (tmp_path / "snac").mkdir()
    (tmp_path / "snac" / "config.json").write_text(json.dumps(SNAC_CODEC))
    expected = "csm: the language model writes frames of 7 codes below 16, codec '{}' reads {}"
    for name, values, found in (
        ("snac", {"audio_decoder": str(tmp_path / "snac")}, "frames of 7 below 4096"),
        ("mimi", {"audio_decoder_config": {"num_codebooks": 3}}, "frames of 3 below 16"),
    ):
        with pytest.raises(CheckpointError, match=expected.format(name, found)):
            create_service(configured(folder, **values))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"codec_config": None}, "has no codec_config"),
        ({"codec_config": {"codebook_size": 20}}, "codebook_size=20 is above vocab_size=19"),
        ({"num_codebooks": "7"}, "num_codebooks='7' in config.json must be a whole number"),
    ],
)
def test_a_wrong_configuration_is_an_error(
    running: Running, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_family(Checkpoint(without_weights(running, tmp_path, **keys)))


def test_the_codec_is_read_from_the_shards_of_an_index(running: Running, tmp_path: Path) -> None:
    """The samples of a codec in a language model's files, and of the same in its own folder."""
    index = "transformers.safetensors.index.json"
    sharded = without_weights(running, tmp_path, transformers_weights=index)
    tensors = load_file(running.folder / "model.safetensors")
    codec = {n.removeprefix("codec_model."): t for n, t in tensors.items() if "codec_model." in n}
    files = {name: f"transformers-{len(name) % 3}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, tmp_path / file)
    (tmp_path / index).write_text(json.dumps({"weight_map": files}))
    own = tmp_path / "own"
    own.mkdir()
    config = json.loads((sharded / "config.json").read_text())["codec_config"]
    (own / "config.json").write_text(json.dumps(config))
    save_file(codec, own / "model.safetensors")
    decoders = [create_decoder(folder) for folder in (running.folder, sharded, own)]
    clip = hum(0.5, 24_000)
    codes = [decoder.encode(clip) for decoder in decoders]
    assert codes[0] == codes[1] == codes[2]
    assert len(codes[0]) == 7 * COUNT
    assert len({decoder.spec for decoder in decoders}) == 1
    spec = decoders[0].spec
    known = [codec_identity(folder, "", spec) for folder in (running.folder, sharded)]
    assert known[0] == known[1]
    changed = {
        name: t + 1 if name == "codec_model.upsample.conv.weight" else t
        for name, t in tensors.items()
    }
    save_file(changed, tmp_path / "model.safetensors")
    edit_config(tmp_path, transformers_weights="model.safetensors")
    assert codec_identity(tmp_path, "", spec) != known[0]

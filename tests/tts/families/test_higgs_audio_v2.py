"""Higgs Audio v2 as a service: frames and audio of transformers, voices, errors at start."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import HiggsAudioV2Processor

from llm import CheckpointError, FinishReason, FrameDelays, Token
from tests.closeness import error
from tests.decoder.small_codecs import write_higgs_audio_v2
from tests.llm.csm_checkpoints import edit_config
from tests.llm.higgs_checkpoints import BEGIN, END, reference, reference_frames
from tests.tts.family_checkpoints import HIGGS_CODEC, SNAC_CODEC, write_higgs_family
from tests.tts.family_services import HIGGS_HELLO, configured
from tests.tts.serving import (
    Serving,
    flush,
    hum,
    run_conversation,
    run_with_server,
    say,
    session_config,
    wav,
)
from tts.engine.client import AudioBlock, SpeechJob
from tts.factory import Service, create_service
from tts.families.base import Checkpoint, DelayedVocabulary
from tts.families.registry import find_family
from tts.speech.types import AudioChunk, SamplingOverrides, SpeechRequest, SynthesizedSpeech
from tts.voices.types import Voice, VoicePrompt

COUNT, CODE_SIZE = 7, 16
CODEC = {"codebook_size": CODE_SIZE, "target_bandwidths": [0.75]}
VOCABULARY = DelayedVocabulary(CODE_SIZE, FrameDelays(tuple(range(1, COUNT + 1)), BEGIN, END))
CODES = tuple(np.random.default_rng(0).integers(0, CODE_SIZE, 12 * COUNT).tolist())


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Service, Any]]:
    """Yield a checkpoint, its service, and its codec in transformers, which is not too loud."""
    folder = write_higgs_family(tmp_path_factory.mktemp("higgs") / "model")
    shutil.rmtree(folder / "codec")
    codec = write_higgs_audio_v2(folder / "codec", **CODEC)
    with torch.no_grad():
        loud = codec.decode(torch.tensor(CODES).view(1, -1, COUNT).transpose(1, 2)).audio_values
        codec.acoustic_decoder.conv2.weight /= 10 * loud.abs().max()
    codec.save_pretrained(folder / "codec")
    service = create_service(configured(folder))
    yield folder, service, codec
    asyncio.run(service.client.close())


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yield the service of a model that often ends."""
    folder = write_higgs_family(tmp_path_factory.mktemp("ending") / "model", seed=4, ends=2.0)
    service = create_service(configured(folder))
    yield service
    asyncio.run(service.client.close())


def reverted(positions: list[tuple[int, ...]]) -> list[list[int]]:
    """Return the audio frames of delayed ones, by transformers, without marks."""
    rows = torch.tensor(positions)
    frames = HiggsAudioV2Processor.revert_delay_pattern(None, rows).tolist()
    return [frame for frame in frames if max(frame) < CODE_SIZE]


def speak(service: Service, text: str, **values: Any) -> SynthesizedSpeech:
    sampling = SamplingOverrides(temperature=0.0, max_tokens=values.pop("max_tokens", None))
    assert service.synthesizer is not None
    request = SpeechRequest(text, sampling=sampling, **values)
    return asyncio.run(service.synthesizer.synthesize(request))


def test_prompts_are_delayed_as_in_transformers() -> None:
    rows = torch.tensor(CODES).view(1, -1, COUNT).transpose(1, 2)
    marks = [torch.full((1, COUNT, 1), mark) for mark in (BEGIN, END)]

    class Processor:
        audio_stream_bos_id, audio_stream_eos_id = BEGIN, END

    whole = torch.cat([marks[0], rows, marks[1]], dim=2)
    wanted = HiggsAudioV2Processor.build_delay_pattern(Processor(), whole)[0].T
    assert VOCABULARY.token_ids(CODES) == tuple(map(tuple, wanted.tolist()))


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_frame_is_read_as_soon_as_its_last_code_is_there(size: int) -> None:
    tokens = (5, *VOCABULARY.token_ids(CODES), 6)
    read, found, counts = VOCABULARY.reader(), [], []
    for first in range(0, len(tokens), size):
        codes = read(tokens[first : first + size])
        found += codes
        counts.append(len(codes))
    assert tuple(found) == CODES == VOCABULARY.codes(tokens)
    if size == 1:  # after the text token and the longest delay, a frame with each token
        assert counts == [0] * (1 + COUNT) + [COUNT] * 12 + [0, 0]


def test_frames_with_marks_are_no_audio() -> None:
    tokens: list[Token] = list(VOCABULARY.token_ids(CODES))
    whole = VOCABULARY.codes(tokens)
    damaged = tokens[5]
    assert isinstance(damaged, tuple)
    tokens[5] = (damaged[0], END, *damaged[2:])  # the second code of frame 3
    assert VOCABULARY.codes(tokens) == (*whole[: 3 * COUNT], *whole[4 * COUNT :])
    assert VOCABULARY.codes(tokens[:COUNT]) == ()


@pytest.mark.parametrize("prompt", [None, VoicePrompt(CODES, "hello")])
def test_greedy_speech_is_that_of_transformers(
    spoken: tuple[Path, Service, Any], prompt: VoicePrompt | None
) -> None:
    """The frames, and the samples that the published tokenizer makes of them."""
    folder, service, codec = spoken
    voice = Voice("mine", prompt=prompt)
    tokens = service.prompts.speech_prompt("hello.", voice)
    frames = reverted(reference_frames(reference(folder), tokens, 30 + COUNT)[1:])
    speech = speak(service, "hello.", voice=voice, max_tokens=30 * COUNT)
    assert sum(chunk.token_count for chunk in speech.chunks) == len(frames) * COUNT > 0
    with torch.no_grad():
        rows = torch.tensor(frames).T[None]
        wanted = codec.decode(rows).audio_values[0, 0].numpy()
    found = np.frombuffer(speech.audio[-2 * len(wanted) :], dtype="<i2") / 32_768
    assert sum(chunk.sample_count for chunk in speech.chunks) == len(wanted)
    assert len(found) == len(wanted)
    assert error(found, wanted) < 1e-3


def test_limits_count_codes_that_are_heard(spoken: tuple[Path, Service, Any]) -> None:
    """The delays come on top of them."""
    _, service, _ = spoken
    speech = speak(service, "hello.", max_tokens=5 * COUNT + 3)
    assert speech.result.finish_reason is FinishReason.LENGTH
    assert speech.result.usage.output_tokens == 5 * COUNT
    assert sum(chunk.token_count for chunk in speech.chunks) == 5 * COUNT


def test_speech_ends_with_the_frame_before_the_first_end_code(ending: Service) -> None:
    speech = speak(ending, "hello.")
    num_codes = sum(chunk.token_count for chunk in speech.chunks)
    assert speech.result.finish_reason is FinishReason.STOP
    assert 0 < num_codes <= speech.result.usage.output_tokens
    assert num_codes % COUNT == 0
    assert sum(chunk.sample_count for chunk in speech.chunks) == num_codes // COUNT * 960


def test_a_cancelled_stream_frees_its_pages(spoken: tuple[Path, Service, Any]) -> None:
    _, service, _ = spoken
    synthesizer = service.synthesizer
    assert synthesizer is not None

    async def listen() -> None:
        sampling = SamplingOverrides(min_tokens=200 * COUNT)
        async for event in synthesizer.stream(SpeechRequest("hello.", sampling=sampling)):
            if isinstance(event, AudioChunk):
                break
        async with asyncio.timeout(20):
            while (await service.client.status()).used_pages:
                await asyncio.sleep(0.01)

    asyncio.run(listen())


def test_instructions_describe_the_speaker(spoken: tuple[Path, Service, Any]) -> None:
    _, service, _ = spoken
    encode = service.prompts.tokenizer.encode
    plain = service.prompts.speech_prompt("hello", Voice("v"))
    told = service.prompts.speech_prompt("hello", Voice("v", instructions="A calm woman."))
    ids = encode("\nAudio is recorded from a quiet room.\n\nSPEAKER0: A calm woman.\n")
    place = told.index(128_011) + 1
    assert told[place : place + len(ids)] == tuple(ids)
    assert told[: place - 1] == plain[: place - 1]
    assert told[-len(HIGGS_HELLO) :] == plain[-len(HIGGS_HELLO) :] == tuple(HIGGS_HELLO)


def test_a_recording_is_encoded_as_by_transformers(spoken: tuple[Path, Service, Any]) -> None:
    _, service, codec = spoken
    assert service.synthesizer is not None
    clip = hum(1.2, 24_000)
    prompt = asyncio.run(service.synthesizer.cloner.from_clip(wav(clip, 24_000), None, "hello"))
    pcm = torch.from_numpy(np.round(clip * 32_767) / 32_768).float()[None, None]
    with torch.no_grad():
        wanted = codec.encode(pcm).audio_codes[0].T
    found = torch.tensor(prompt.codes).view(-1, COUNT)
    assert found.shape == wanted.shape == (30, COUNT)
    assert (found == wanted).float().mean() > 0.9  # rounding to 16 bits moves few codes


def test_an_eager_beginning_becomes_a_turn_of_its_own(
    ending: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the prompt a part of its codes would be missing."""
    prompts: list[tuple[Token, ...]] = []
    speak_job = ending.client.speak

    def speaking(job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        prompts.append(job.request.prompt_ids)
        return speak_job(job)

    monkeypatch.setattr(ending.client, "speak", speaking)

    async def ask(served: Serving) -> None:
        config = session_config(max_tokens=600 * COUNT)
        config.config.eager = 2
        words = say("One two three four five six, seven eight.")
        responses = await run_conversation(served, config, words, flush("f"))
        assert responses[-1].HasField("done")

    run_with_server(ending, ask)
    first, rest = prompts
    assert not [token for token in first if isinstance(token, tuple)]
    frames = [token for token in rest if isinstance(token, tuple)]
    assert frames[0] == (BEGIN,) * COUNT
    assert frames[-1] == (END,) * COUNT
    assert rest[-1] == first[-1] == HIGGS_HELLO[-1]


def without_weights(folder: Path, target: Path, **keys: Any) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_text((folder / name).read_text())
    edit_config(target, **keys)
    return target


@pytest.mark.parametrize(
    ("codec", "found"),
    [
        (SNAC_CODEC, "'snac' reads frames of 7 below 4096"),
        (HIGGS_CODEC | {"target_bandwidths": [0.6]}, "reads frames of 6 below 16"),
    ],
)
def test_a_wrong_codec_is_an_error_before_the_model_is_loaded(
    spoken: tuple[Path, Service, Any], tmp_path: Path, codec: dict[str, object], found: str
) -> None:
    without_weights(spoken[0], tmp_path)
    (tmp_path / "codec").mkdir()
    (tmp_path / "codec" / "config.json").write_text(json.dumps(codec))
    message = f"higgs_audio_v2: the language model writes frames of 7 codes below 16, .*{found}"
    with pytest.raises(CheckpointError, match=message):
        create_service(configured(tmp_path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_codebooks": "7"}, "num_codebooks='7' in config.json must be"),
        ({"audio_stream_eos_id": None}, "audio_stream_eos_id=None in config.json must be"),
    ],
)
def test_a_wrong_configuration_is_an_error(
    spoken: tuple[Path, Service, Any], tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_family(Checkpoint(without_weights(spoken[0], tmp_path, **keys)))


def test_a_tokenizer_without_marks_of_audio_is_an_error(
    spoken: tuple[Path, Service, Any], tmp_path: Path
) -> None:
    folder = without_weights(spoken[0], tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != "<|audio_out_bos|>"]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"tokenizer.json has no token <\|audio_out_bos\|>"):
        find_family(Checkpoint(folder))

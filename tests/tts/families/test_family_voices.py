"""Voice prompts of the cloning families: clips, samples, created voices, the prefix cache."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from decoder import create_decoder, read_prompt_audio
from llm import CheckpointError, FinishReason
from tests.decoder.small_codecs import write_neucodec
from tests.tts.family_checkpoints import write_neutts
from tests.tts.family_services import configured
from tests.tts.ramp import RampClient, collect_speech
from tests.tts.serving import (
    Serving,
    error_of,
    fields_of,
    hum,
    reason_of,
    run_with_server,
    wav,
)
from tests.tts.serving import collect_speech as collect_over_grpc
from tts.config.server import ServerConfig
from tts.engine.client import EncodedClip
from tts.errors import PreconditionError
from tts.factory import Service, create_service
from tts.families.prompt import PromptBuilder
from tts.speech.cloning import PromptCache
from tts.speech.run import SynthesisSettings
from tts.speech.synthesizer import Synthesizer
from tts.v1 import speech_pb2 as pb
from tts.voices.files import sample_voices
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice, VoicePrompt

PAGE = 16  # tokens, as `configured` sets it


def add_sample(folder: Path, name: str, seconds: float, text: str) -> None:
    samples = folder / "samples"
    samples.mkdir(exist_ok=True)
    (samples / f"{name}.wav").write_bytes(wav(hum(seconds)))
    (samples / f"{name}.txt").write_text(text + "\n")


def clip(seconds: float = 1.2, transcript: str = "This is what I said.") -> pb.VoicePrompt:
    return pb.VoicePrompt(audio=wav(hum(seconds)), transcript=transcript)


@pytest.fixture(scope="module")
def neutts(neutts_folder: Path) -> Iterator[Service]:
    """NeuTTS with two recordings in its folder and a codec that encodes."""
    add_sample(neutts_folder, "dave", 1.0, "My name is Dave.")
    add_sample(neutts_folder, "jo", 2.0, "And I am Jo.")
    service = create_service(configured(neutts_folder))
    yield service
    asyncio.run(service.client.close())


def test_recordings_next_to_the_model_are_voices(neutts: Service) -> None:
    """The first is the default; each is encoded once, after which its file is not read."""
    dave, jo = pb.VoiceSelection(name="dave"), pb.VoiceSelection(name="jo")

    async def ask(served: Serving) -> None:
        listed = (await served.speech.ListVoices(pb.ListVoicesRequest())).voices
        assert [voice.name for voice in listed] == ["dave", "jo"]
        first = await collect_over_grpc(served, "Hello.", voice=dave)
        other = await collect_over_grpc(served, "Hello.", voice=jo)
        default = await collect_over_grpc(served, "Hello.")
        assert default.data == first.data != other.data
        assert neutts.prompts.family is not None
        (neutts.prompts.family.checkpoint.folder / "samples" / "dave.wav").unlink()
        again = await collect_over_grpc(served, "Hello.", voice=dave)
        assert again.data == first.data
        # 34 of "user: Convert …" with its mark, then the transcript's phonemes.
        cached = again.done.usage.cached_prompt_tokens
        assert cached % PAGE == 0
        assert cached >= 48
        close = await collect_over_grpc(served, "Bye, then.", voice=dave)
        assert close.done.usage.cached_prompt_tokens >= 48

    run_with_server(neutts, ask)


def test_a_recording_passes_the_published_encoder(tmp_path: Path) -> None:
    """Reference clip → NeuCodec's own encoder → prompt codes → speech, as one service."""
    folder = write_neutts(tmp_path / "neutts")
    write_neucodec(folder / "codec", quantization_levels=[4] * 8)
    add_sample(folder, "dave", 1.0, "My name is Dave.")
    service = create_service(configured(folder))

    async def ask(served: Serving) -> None:
        synthesizer = service.synthesizer
        assert synthesizer is not None
        dave = await synthesizer.cloner.ready(synthesizer.voices.get("dave"))
        assert dave.prompt is not None
        recording = (folder / "samples" / "dave.wav").read_bytes()
        codec = create_decoder(folder / "codec")
        assert dave.prompt.codes == codec.encode(read_prompt_audio(recording, 24_000))
        assert len(dave.prompt.codes) == 50
        assert (await collect_over_grpc(served, "Hello.")).data

    run_with_server(service, ask)
    asyncio.run(service.client.close())


def test_created_voices_are_bounded(neutts: Service) -> None:
    async def ask(served: Serving) -> None:
        create = served.speech.CreateVoice
        await create(pb.CreateVoiceRequest(voice_id="mine", prompt=clip()))
        mine = await collect_over_grpc(served, "Hello.", voice=pb.VoiceSelection(name="mine"))
        inline = await collect_over_grpc(served, "Hello.", voice=pb.VoiceSelection(prompt=clip()))
        assert mine.data == inline.data
        full = await error_of(create(pb.CreateVoiceRequest(voice_id="two", prompt=clip(29.0))))
        assert fields_of(full) == ["prompt"]
        assert "of the model's context" in str(full.details())
        await served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="mine"))

    run_with_server(neutts, ask)


def test_the_count_and_the_bytes_of_created_voices_have_limits(llasa: Path, tmp_path: Path) -> None:
    server = ServerConfig(max_voices=2, max_voice_bytes=600, voice_folder=tmp_path / "voices")
    service = create_service(configured(llasa), server)

    async def ask(served: Serving) -> None:
        create = served.speech.CreateVoice
        await create(pb.CreateVoiceRequest(voice_id="one", prompt=clip()))  # 60 codes
        heavy = await error_of(create(pb.CreateVoiceRequest(voice_id="two", prompt=clip(3.0))))
        assert (heavy.code(), reason_of(heavy)) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "VOICE_LIMIT_REACHED",
        )
        await create(pb.CreateVoiceRequest(voice_id="two", prompt=clip()))
        third = await error_of(create(pb.CreateVoiceRequest(voice_id="three", prompt=clip())))
        assert reason_of(third) == "VOICE_LIMIT_REACHED"

    run_with_server(service, ask)
    asyncio.run(service.client.close())
    again = create_service(configured(llasa), server)
    assert again.synthesizer is not None
    names = [voice.name for voice in again.synthesizer.voices.voices()]
    assert names == ["default", "one", "two"]
    asyncio.run(again.client.close())


def test_a_stored_voice_is_refused_with_another_codec(llasa: Path, tmp_path: Path) -> None:
    server = ServerConfig(voice_folder=tmp_path / "voices")
    other = Path(shutil.copytree(llasa, tmp_path / "other"))
    sizes = other / "codec" / "config.json"
    sizes.write_text(json.dumps(json.loads(sizes.read_text()) | {"version": 2}))
    mine = pb.VoiceSelection(name="mine")

    async def create(served: Serving) -> None:
        await served.speech.CreateVoice(pb.CreateVoiceRequest(voice_id="mine", prompt=clip()))
        assert (await collect_over_grpc(served, "Hello.", voice=mine)).data

    async def refused(served: Serving) -> None:
        error = await error_of(collect_over_grpc(served, "Hello.", voice=mine))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(error) == "VOICE_OF_ANOTHER_CODEC"
        assert "create it from its recording again" in str(error.details())
        await served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="mine"))
        await create(served)

    for folder, ask in ((llasa, create), (other, refused)):
        service = create_service(configured(folder), server)
        run_with_server(service, ask)
        asyncio.run(service.client.close())


def test_a_server_without_penalties_applies_none(llasa: Path) -> None:
    service = create_service(configured(llasa, sampling={"enable_penalties": False}))

    async def ask(served: Serving) -> None:
        assert (await collect_over_grpc(served, "Hello.", max_tokens=10)).data

    assert service.synthesizer is not None
    assert service.synthesizer.settings.sampling.repetition_penalty == 1.0
    run_with_server(service, ask)
    asyncio.run(service.client.close())


def test_a_repeated_clip_is_encoded_once() -> None:
    cache = PromptCache(max_codes=10)
    clips = [EncodedClip((number,) * 4) for number in range(3)]
    cache.put(b"a", clips[0])
    cache.put(b"b", clips[1])
    assert cache.get(b"a") == clips[0]
    cache.put(b"c", clips[2])  # b is the oldest now
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == (clips[0], None, clips[2])
    cache.put(b"d", EncodedClip(tuple(range(11))))  # larger than all that may be kept
    assert cache.get(b"d") is None
    assert len(cache) == 0


def test_samples_need_a_name_and_a_text(tmp_path: Path) -> None:
    assert sample_voices(tmp_path / "nowhere").default == ""
    for name in ("b.wav", "a.wav", "a.txt", "b.txt", "no text.flac", "c.wav", "notes.md"):
        (tmp_path / name).write_text("words")
    found = sample_voices(tmp_path)
    assert [voice.name for voice in found.voices] == ["a", "b"]
    assert found.default == "a"


def test_pickled_codes_stand_for_a_recording_when_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(torch.tensor([[5, 6, 7]]), tmp_path / "jo.pt")
    torch.save(torch.tensor([1, 2]), tmp_path / "dave.pt")
    for name in ("dave.wav", "dave.txt", "jo.txt"):
        (tmp_path / name).write_text("words\n")
    found = sample_voices(tmp_path, allow_pickle=True).voices
    assert [(voice.name, voice.clip is None) for voice in found] == [("dave", False), ("jo", True)]
    assert found[1].prompt == VoicePrompt((5, 6, 7), "words")
    assert [voice.name for voice in sample_voices(tmp_path).voices] == ["dave"]
    assert "jo.pt is not used: it is a pickle" in caplog.text
    torch.save({"codes": print}, tmp_path / "jo.pt")
    with pytest.raises(CheckpointError, match=r"cannot read the codes of .*jo\.pt"):
        sample_voices(tmp_path, allow_pickle=True)


def test_an_unusable_recording_is_not_an_invalid_argument(neutts: Service) -> None:
    synthesizer = neutts.synthesizer
    assert synthesizer is not None
    jo = synthesizer.voices.get("jo").clip
    assert jo is not None
    silent = Voice("mute", clip=replace(jo, transcript="\N{PARTY POPPER}"))
    with pytest.raises(PreconditionError, match=r"recording of voice 'mute': .*must say what"):
        asyncio.run(synthesizer.cloner.ready(silent))


def test_a_voices_file_may_hold_codes_speakers_and_clips(tmp_path: Path) -> None:
    (tmp_path / "me.wav").write_bytes(wav(hum(1.0)))
    entries = [
        {"name": "codes", "codes": [1, 2], "transcript": "One, two."},
        {"name": "named", "speaker": "Anna", "language_codes": ["de-DE"]},
        {"name": "clip", "audio": "me.wav", "transcript": "My words."},
    ]
    (tmp_path / "voices.json").write_text(json.dumps({"voices": entries}))
    registry = VoiceRegistry.load(tmp_path / "voices.json")
    assert registry.default.prompt == VoicePrompt((1, 2), "One, two.")
    assert registry.choose("", "de").speaker == "Anna"
    recorded = registry.get("clip").clip
    assert recorded is not None
    assert recorded.audio == tmp_path / "me.wav"


# --- a speaker that the model makes up


def synthesizer_of(client: RampClient, folder: Path, **values: object) -> Synthesizer:
    prompts = PromptBuilder.load(folder, client.codec)
    assert prompts.family is not None
    own = prompts.family.voices()
    settings = SynthesisSettings(traits=prompts.family.traits, **values)  # type: ignore[arg-type]
    return Synthesizer(client, prompts, VoiceRegistry(own.voices, own.default), settings)


@pytest.fixture
def client() -> RampClient:
    return RampClient(codebook_size=65_536)


def test_later_segments_use_the_first_as_their_voice_prompt(
    client: RampClient, llasa: Path
) -> None:
    synthesizer = synthesizer_of(client, llasa)
    collect_speech(synthesizer, "One is here. Two is there. Three.")
    first, second, third = client.jobs
    spoken = tuple(client.codes_of(first.request))
    made = Voice("default", prompt=VoicePrompt(spoken, "One is here."))
    builder = PromptBuilder.load(llasa, client.codec)
    assert second.request.prompt_ids == builder.speech_prompt("Two is there.", made)
    assert third.request.prompt_ids == builder.speech_prompt("Three.", made)
    assert second.prompt_codes == spoken


def test_a_capped_segment_is_not_used_as_a_voice_prompt(client: RampClient, llasa: Path) -> None:
    synthesizer = synthesizer_of(client, llasa)
    client.ends_with = FinishReason.LENGTH
    collect_speech(synthesizer, "One is here. Two is there. Three.")
    lengths = [len(job.prompt_codes) for job in client.jobs]
    assert lengths[:2] == [0, 0]
    assert lengths[2] == len(client.codes_of(client.jobs[1].request))


def test_a_segment_too_long_for_the_context_is_not_used_as_a_voice_prompt(
    client: RampClient, llasa: Path
) -> None:
    collect_speech(synthesizer_of(client, llasa, max_seq_len=1000), "One is here. Two is there.")
    assert [job.prompt_codes for job in client.jobs] == [(), ()]


def test_a_requested_voice_is_kept(client: RampClient, llasa: Path) -> None:
    mine = Voice("mine", prompt=VoicePrompt((1, 2, 3), "Mine."))
    collect_speech(synthesizer_of(client, llasa), "One is here. Two is there.", voice=mine)
    assert [job.prompt_codes for job in client.jobs] == [(1, 2, 3)] * 2

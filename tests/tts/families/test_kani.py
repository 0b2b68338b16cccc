"""Kani-TTS: literal ids, speakers, speech and errors at start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llm import CheckpointError, FinishReason, Request, as_ids
from tests.llm.csm_checkpoints import edit_config
from tests.tts.family_checkpoints import SNAC_CODEC, write_kani, write_vyvo_on_lfm2
from tests.tts.family_services import configured, exactly
from tests.tts.serving import Serving, collect_speech, run_with_server
from tts.factory import Service, create_service
from tts.families.base import Checkpoint
from tts.families.kani import KaniFamily
from tts.families.registry import find_family
from tts.v1 import speech_pb2 as pb
from tts.voices.types import Voice, VoicePrompt

LONG = {"max_length": 4096}  # a voice must leave room for the longest speech of one call
CODES = (0, 1, 2, 4031, 9, 0, 0, 9)
HELLO = (
    571,
    568,
    575,
    575,
    578,
)  # letters: LFM2's own ids of words are not in the test's tokenizer


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = create_service(configured(write_kani(tmp_path_factory.mktemp("kani") / "m"), **LONG))
    yield made
    asyncio.run(made.client.close())


def test_prompts_are_literal(service: Service) -> None:
    """The tokens of the published program, and those that begin the answer."""
    prompts = service.prompts
    asked, answer = (64_403, *HELLO), (2, 64_404, 64_405, 64_401)
    assert prompts.speech_prompt("hello", Voice("v")) == (*asked, *answer)
    named = prompts.speech_prompt("hello", Voice("v", speaker="Andrew"))
    assert named[-len(HELLO) - len(answer) :] == (*HELLO, *answer)
    assert prompts.tokenizer.decode(as_ids(named)[1:-4]) == "Andrew: hello"
    mine = prompts.speech_prompt("hello", Voice("v", prompt=VoicePrompt(CODES, "hello")))
    codes = (64_410, 68_443, 72_476, 80_537, 64_419, 68_442, 72_474, 76_515)
    assert mine == (*asked, *answer, *codes, 64_402, 64_406, *asked, *answer)


def test_speakers_are_those_of_the_configuration(service: Service, tmp_path: Path) -> None:
    assert service.family == "kani"
    assert service.synthesizer is not None
    voices = service.synthesizer.voices.voices()
    assert [(voice.name, voice.speaker) for voice in voices] == [
        ("andrew", "Andrew"),
        ("katie", "Katie"),
    ]
    family = find_family(Checkpoint(write_kani(tmp_path / "one", speakers=())))
    assert isinstance(family, KaniFamily)
    assert [voice.name for voice in family.voices().voices] == ["default"]
    edit_config(tmp_path / "one", speaker_settings={"speaker_list": ["?"]})
    with pytest.raises(CheckpointError, match=r"the speaker '\?' is no name of a voice"):
        find_family(Checkpoint(tmp_path / "one"))


def test_frames_are_whole_and_spoken(service: Service) -> None:
    async def ask(served: Serving) -> None:
        katie = pb.VoiceSelection(name="katie")
        spoken = await collect_speech(served, "Hello.", voice=katie, **exactly(20))
        assert spoken.done.usage.output_tokens == 20
        assert len(spoken.data) == 2 * 5 * 1764
        info = await served.speech.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.models[0].family, info.models[0].codec) == ("kani", "nanocodec")
        assert info.models[0].native_sample_rate_hertz == 22_050

    run_with_server(service, ask)


def test_an_end_comes_between_frames_only(service: Service) -> None:
    vocabulary, family = service.prompts.vocabulary, service.prompts.family
    assert vocabulary is not None
    assert family is not None
    own = replace(vocabulary.constrain(family.sampling()), max_tokens=60, temperature=2.0)
    prompt = service.prompts.speech_prompt("hello", Voice("v"))

    async def listen(seed: int) -> FinishReason | None:
        request = Request(f"k{seed}", prompt, replace(own, seed=seed))
        chunks = [chunk async for chunk in service.client.generate(request)]
        ids = [token for chunk in chunks for token in as_ids(chunk.token_ids)]
        assert [(token - 64_410) // 4032 for token in ids] == [n % 4 for n in range(len(ids))]
        assert len(ids) % 4 == 0
        return chunks[-1].finish_reason

    async def scenario() -> set[FinishReason | None]:
        return set(await asyncio.gather(*(listen(seed) for seed in range(4))))

    assert asyncio.run(scenario()) <= {FinishReason.STOP, FinishReason.LENGTH}


def test_a_wrong_codec_is_an_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    folder = write_kani(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "codec" / "config.json").write_text(json.dumps(SNAC_CODEC))
    message = "kani: the language model writes frames of 4 codes below 4032, codec 'snac' reads"
    with pytest.raises(CheckpointError, match=message):
        create_service(configured(folder))


def test_vyvo_on_the_same_base_is_another_family(tmp_path: Path) -> None:
    family = find_family(Checkpoint(write_vyvo_on_lfm2(tmp_path / "vyvo")))
    assert family is not None
    assert family.name == "vyvo"

"""Speech families on other language models than the ones they are best known on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.tts.family_checkpoints import (
    write_llasa,
    write_neutts_on_llama,
    write_orpheus,
    write_veena,
    write_vyvo_on_lfm2,
    write_vyvo_on_llama,
)
from tests.tts.family_services import configured, exactly
from tests.tts.serving import Serving, collect_speech, run_with_server
from tts.factory import create_service
from tts.v1 import speech_pb2 as pb
from tts.voices.types import Voice, VoicePrompt

LONG = {"max_length": 4096}  # a voice must leave room for the longest speech of one call
CLIP = (0, 1, 2, 3, 4, 5, 4095)

BASES = [
    # family, checkpoint, configuration, start of speech, first code
    ("llasa", partial(write_llasa, is_tied=False), {}, 128_260, 128_264),
    ("neutts", write_neutts_on_llama, {}, 128_260, 128_262),
    ("vyvo", write_vyvo_on_llama, LONG, 128_257, 128_266),
    ("vyvo", write_vyvo_on_lfm2, LONG, 64_401, 64_410),
]


@pytest.mark.parametrize(("family", "write", "values", "start", "first_code"), BASES)
def test_a_family_works_on_another_base_model(
    family: str,
    write: Callable[[Path], Path],
    values: dict[str, Any],
    start: int,
    first_code: int,
    tmp_path: Path,
) -> None:
    service = create_service(configured(write(tmp_path / "model"), **values))
    assert service.family == family
    mine = Voice("mine", prompt=VoicePrompt(CLIP, "hello"))
    ids = service.prompts.speech_prompt("hello", mine)
    assert ids[ids.index(start) + 1] == first_code

    async def ask(served: Serving) -> None:
        clip = pb.VoiceSelection(prompt_tokens=pb.SpeechTokens(tokens=CLIP))
        spoken = await collect_speech(served, "Hello.", voice=clip, **exactly(21))
        assert spoken.done.usage.output_tokens == 21
        assert len(spoken.data) > 0

    run_with_server(service, ask)
    asyncio.run(service.client.close())


IN_THE_LAYOUT_OF_ORPHEUS = [
    # family, checkpoint, its name is given, speaker, prompt of "hello"
    (
        "maya1",
        write_orpheus,
        True,
        "X",
        (128259, 128000, 27, 67, 68, 82, 66, 81, 72, 79, 83, 72, 78, 77, 28, 1, 55, 1, 29, 24748),
        (128009, 128260, 128261, 128257),
    ),
    ("veena", write_veena, False, "maitri", (128259, 156942, 24748), (128260, 128261, 128257)),
]


@pytest.mark.parametrize(
    ("family", "write", "is_named", "speaker", "asked", "answer"), IN_THE_LAYOUT_OF_ORPHEUS
)
def test_a_model_in_the_layout_of_orpheus(
    family: str,
    write: Callable[[Path], Path],
    is_named: bool,
    speaker: str,
    asked: tuple[int, ...],
    answer: tuple[int, ...],
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "model")
    service = create_service(
        configured(folder, **(LONG | ({"family": family} if is_named else {})))
    )
    assert service.family == family
    prompts, voices = service.prompts, service.synthesizer.voices if service.synthesizer else None
    assert prompts.speech_prompt("hello", Voice("x", speaker=speaker)) == (*asked, *answer)
    mine = Voice("mine", prompt=VoicePrompt(CLIP, "hello"))
    codes = (128266, 132363, 136460, 140557, 144654, 148751, 156937)
    assert prompts.speech_prompt("hello", mine)[-len(answer) :] == answer
    assert set(codes) < set(prompts.speech_prompt("hello", mine))
    assert voices is not None
    assert voices.default.speaker

    async def ask(served: Serving) -> None:
        spoken = await collect_speech(served, "Hello.", **exactly(14))
        assert spoken.done.usage.output_tokens == 14

    run_with_server(service, ask)
    asyncio.run(service.client.close())


def test_a_named_family_overrides_the_detected_one(tmp_path: Path) -> None:
    """Vyvo on Llama has all tokens of Orpheus, so the configuration must name the family."""
    folder = write_vyvo_on_llama(tmp_path / "model")
    service = create_service(configured(folder, family="orpheus"))
    assert service.family == "orpheus"

    async def ask(served: Serving) -> None:
        tara = pb.VoiceSelection(name="tara")
        spoken = await collect_speech(served, "Hello.", voice=tara, **exactly(14))
        assert spoken.done.usage.output_tokens == 14

    run_with_server(service, ask)
    asyncio.run(service.client.close())

"""Speech families on other language models than the ones they are best known on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.tts.families import configured, exactly
from tests.tts.family_checkpoints import (
    write_llasa,
    write_neutts_on_llama,
    write_vyvo_on_lfm2,
    write_vyvo_on_llama,
)
from tests.tts.serving import Serving, hear, serve_and
from tts.factory import create_service
from tts.v1 import speech_pb2 as pb
from tts.voices import Voice, VoicePrompt

LONG = {"max_length": 4096}  # a voice must leave room for the longest speech of one call
ALONE = LONG | {"max_batch_size": 1, "model": {"kv_cache": {"enable_prefix_caching": False}}}
CLIP = (0, 1, 2, 3, 4, 5, 4095)

BASES = [
    # family, checkpoint, configuration, start of speech, first code
    ("llasa", partial(write_llasa, is_tied=False), {}, 128_260, 128_264),
    ("neutts", write_neutts_on_llama, {}, 128_260, 128_262),
    ("vyvo", write_vyvo_on_llama, LONG, 128_257, 128_266),
    ("vyvo", write_vyvo_on_lfm2, ALONE, 64_401, 64_410),
]


@pytest.mark.parametrize(("family", "write", "values", "start", "first_code"), BASES)
def test_a_family_speaks_on_another_base(
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
        spoken = await hear(served, "Hello.", voice=clip, **exactly(21))
        assert spoken.done.usage.output_tokens == 21
        assert len(spoken.data) > 0

    serve_and(service, ask)
    asyncio.run(service.client.close())


def test_a_family_that_is_named_goes_before_the_one_that_is_found(tmp_path: Path) -> None:
    """Vyvo on Llama holds all that Orpheus needs: who knows better says so."""
    folder = write_vyvo_on_llama(tmp_path / "model")
    service = create_service(configured(folder, family="orpheus"))
    assert service.family == "orpheus"

    async def ask(served: Serving) -> None:
        tara = pb.VoiceSelection(name="tara")
        spoken = await hear(served, "Hello.", voice=tara, **exactly(14))
        assert spoken.done.usage.output_tokens == 14

    serve_and(service, ask)
    asyncio.run(service.client.close())

"""Blends of voices: how they are written, and how they sound and are stored in the service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.tts.family_checkpoints import SONANT_VOICES, write_sonant
from tests.tts.family_services import configured
from tests.tts.serving import (
    Serving,
    error_of,
    fields_of,
    hum,
    reason_of,
    run_with_server,
    unary_request,
    wav,
)
from tests.tts.serving import collect_speech as collect_over_grpc
from tts.errors import (
    InvalidRequestError,
    Precondition,
    PreconditionError,
    VoiceNotFoundError,
)
from tts.factory import Service, create_service
from tts.text.markup.ssml import read_ssml
from tts.text.markup.tags import read_tags
from tts.v1 import speech_pb2 as pb
from tts.voices.blends import MAX_PARTS, read_blend
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice, VoiceClip, VoicePrompt

LEVELS = (4, 4, 4)
HAZEL, OWEN = (tuple(SONANT_VOICES[name]) for name in ("hazel", "owen"))


def registry() -> VoiceRegistry:
    voices = (
        Voice("hazel", "", ("en-US",), prompt=VoicePrompt(HAZEL), is_builtin=True),
        Voice("hugh", "", ("en-GB",), prompt=VoicePrompt(OWEN), is_builtin=True),
        Voice("tape", clip=VoiceClip(Path("tape.wav"), ""), is_builtin=True),
    )
    return VoiceRegistry(voices, "hazel", levels=LEVELS)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hazel+owen", (("hazel", 1), ("owen", 1))),
        ("owen + hazel", (("hazel", 1), ("owen", 1))),
        ("hazel(2)+owen(1)", (("hazel", 2), ("owen", 1))),
        (" owen ( 0.5 ) + hazel ( 1 ) ", (("hazel", 2), ("owen", 1))),
        ("hazel(0.4)+owen(0.6)", (("hazel", 2), ("owen", 3))),
        ("a_b(9999)+c-d(0.0001)", (("a_b", 99_990_000), ("c-d", 1))),
        ("hazel+owen+hazel", (("hazel", 2), ("owen", 1))),
        ("hazel(3)+hazel", (("hazel", 1),)),
        ("+".join("abcdefgh"), tuple((name, 1) for name in "abcdefgh")),
    ],
)
def test_a_blend_has_names_and_whole_weights(text: str, parts: tuple[tuple[str, int], ...]) -> None:
    assert read_blend(text, "voice").parts == parts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hazel+owen(0)", "character 11: a weight"),
        ("hazel(0.0000)+owen", "character 6: a weight"),
        ("hazel(-1)+owen", "character 6: a weight"),
        ("hazel(1e3)+owen", "character 6: a weight"),
        ("hazel(10000)+owen", "character 6: a weight"),
        ("hazel(1.00001)+owen", "character 6: a weight"),
        ("hazel(٣)+owen", "character 6: a weight"),
        ("hazel()+owen", "character 6: a weight"),
        ("hazel(2+owen", "character 6: a weight"),
        ("hazel(2)x+owen", "character 6: a weight"),
        ("hazel+owen)", "character 11: only a weight"),
        ("hazel+ owen two", "character 13: only a weight"),
        ("hazel+", "character 7: a voice's name"),
        ("+owen", "character 1: a voice's name"),
        ("hazel++owen", "character 7: a voice's name"),
        ("hazel+Owen", "character 7: a voice's name"),
        ("hazel+(2)", "character 7: a voice's name"),
        ("hazel(2)", f"2 to {MAX_PARTS} voices"),
        ("+".join("abcdefghi"), f"2 to {MAX_PARTS} voices"),
        ("hazel+owen" + " " * 1000, "at most 1000 characters"),
    ],
)
def test_wrong_blends_name_the_position(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^a\.field: .*{problem}"):
        registry().get(text, "a.field")


def test_a_blend_is_between_its_voices() -> None:
    voices = registry()
    found = voices.get("hazel(2)+hugh(1)")
    assert found.prompt is not None
    # 1 is (1, 0, 0) and 60 is (0, 3, 3): 2/3, 1 and 1
    assert found.prompt.codes[0] == 1 + 4 + 16
    assert found.language_codes == ("en-US", "en-GB")
    assert voices.get("hugh (1) + hazel (2)") is found
    assert voices.get("hazel(0.2)+hugh(0.1)") is found
    assert voices.get("hugh(2)+hazel").language_codes == ("en-GB", "en-US")
    same = voices.get("hazel(5)+hazel(2)")
    assert (same.prompt, same.language_codes) == (VoicePrompt(HAZEL), ("en-US",))


def test_a_blend_follows_its_voices() -> None:
    """A voice that is created again under a name is another one."""
    voices = registry()
    voices.create(Voice("mine", prompt=VoicePrompt(OWEN)))
    first = voices.get("hazel+mine")
    voices.delete("mine")
    with pytest.raises(VoiceNotFoundError, match="no voice 'mine'; there are: hazel, hugh"):
        voices.get("hazel+mine")
    voices.create(Voice("mine", prompt=VoicePrompt(HAZEL)))
    assert voices.get("hazel+mine").prompt == VoicePrompt(HAZEL) != first.prompt


def test_a_blend_is_chosen_by_name_and_language() -> None:
    voices = registry()
    assert voices.choose("hazel+hugh", "en-GB").name == "hazel(1)+hugh(1)"
    with pytest.raises(InvalidRequestError, match=r"^lang: voice 'hazel\(1\)\+hugh\(1\)' speaks"):
        voices.choose("hazel + hugh", "de", "lang")


def test_a_recording_of_the_checkpoint_is_not_blended() -> None:
    with pytest.raises(PreconditionError, match="'tape' is a recording") as error:
        registry().get("hazel+tape")
    assert error.value.reason is Precondition.VOICE_BLEND


@pytest.mark.parametrize("name", ["a+b", "a(2)", "a(2)+b", "a b"])
def test_no_voice_has_the_name_of_a_blend(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="voice_id"):
        registry().create(Voice(name, prompt=VoicePrompt(HAZEL)))


def test_other_models_have_no_blends(tiny_checkpoint: Path) -> None:
    voices = VoiceRegistry.load(tiny_checkpoint / "voices.json")
    with pytest.raises(PreconditionError, match="voices cannot be blended") as error:
        voices.get("hazel+owen")
    assert error.value.reason is Precondition.VOICE_BLEND


@pytest.fixture(scope="module")
def sonant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = create_service(configured(write_sonant(tmp_path_factory.mktemp("blends") / "sonant")))
    yield service
    asyncio.run(service.client.close())


def named(name: str) -> pb.VoiceSelection:
    return pb.VoiceSelection(name=name)


async def spoken(served: Serving, name: str) -> bytes:
    return (await collect_over_grpc(served, "Hello.", voice=named(name))).data


def test_a_blend_is_another_voice_and_can_be_stored(sonant: Service) -> None:
    async def ask(served: Serving) -> None:
        blend = await spoken(served, "hazel(2)+owen(1)")
        assert await spoken(served, "owen (0.1) + hazel (0.2)") == blend
        for other in ("hazel", "owen", "hazel+owen(2)"):
            assert await spoken(served, other) != blend
        assert await spoken(served, "owen+owen") == await spoken(served, "owen")
        created = await served.speech.CreateVoice(
            pb.CreateVoiceRequest(
                voice_id="both", blend="hazel(2) + owen(1)", consent="none needed"
            )
        )
        assert (created.voice.name, created.voice.language_codes) == ("both", ["en-US"])
        assert await spoken(served, "both") == blend
        assert await spoken(served, "both+both") == blend
        await served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="both"))

    run_with_server(sonant, ask)


def test_wrong_blends_are_refused(sonant: Service) -> None:
    async def ask(served: Serving) -> None:
        wrong = await error_of(
            served.speech.Synthesize(unary_request(voice=named("hazel+owen(0)")))
        )
        assert fields_of(wrong) == ["config.voice.name"]
        unknown = await error_of(served.speech.Synthesize(unary_request(voice=named("hazel+x"))))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND
        assert "no voice 'x'" in (unknown.details() or "")
        clip = pb.VoicePrompt(audio=wav(hum(1.2)))
        for values, field in (
            ({"blend": "hazel+owen(x)"}, "blend"),
            ({"blend": "hazel"}, "blend"),
            ({"blend": "hazel+owen", "prompt": clip}, "blend"),
            ({"voice_id": "a+b", "blend": "hazel+owen"}, "voice_id"),
        ):
            request = pb.CreateVoiceRequest(**{"voice_id": "new", **values})
            assert fields_of(await error_of(served.speech.CreateVoice(request))) == [field]
        delete = served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="hazel+owen"))
        assert fields_of(await error_of(delete)) == ["name"]

    run_with_server(sonant, ask)


def test_a_model_without_blends_says_so(service: Service) -> None:
    async def ask(served: Serving) -> None:
        error = await error_of(served.speech.Synthesize(unary_request(voice=named("hazel+owen"))))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(error) == "VOICE_BLEND_UNAVAILABLE"

    run_with_server(service, ask)


@pytest.mark.parametrize(
    "document",
    [
        read_tags("[voice:hazel(2)+owen]Hello."),
        read_tags("[voice:owen(1) + hazel(2)]Hello."),
        read_ssml('<speak><voice name="hazel(2) + owen(1)">Hello.</voice></speak>'),
    ],
)
def test_markup_names_blends(sonant: Service, document: object) -> None:
    assert sonant.synthesizer is not None
    voices = sonant.synthesizer.voices
    assert isinstance(document.parts[0].style.voice, str)
    assert voices.get(document.parts[0].style.voice) == voices.get("hazel(2)+owen")

"""The voice registry: names, bounds, languages, and files that survive a restart."""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm import CheckpointError, ConfigError
from tts.errors import (
    InvalidRequestError,
    Precondition,
    PreconditionError,
    UnavailableError,
    VoiceExistsError,
    VoiceNotFoundError,
)
from tts.text.lexicon.entries import Alphabet, Pronunciation
from tts.voices.registry import VoiceLimits, VoiceRegistry
from tts.voices.types import Voice, VoicePrompt

MINE = Voice("mine", "Mine", ("de-DE",), prompt=VoicePrompt((1, 2, 3), "my words"), consent="yes")
SAID = (Pronunciation("SQL", "sequel"), Pronunciation("Nguyễn", "wɪn", Alphabet.IPA))
SAID_IN_JSON = [
    {"phrase": "SQL", "pronunciation": "sequel"},
    {"phrase": "Nguyễn", "pronunciation": "wɪn", "alphabet": "ipa"},
]


@pytest.fixture
def voices_file(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint / "voices.json"


def test_built_in_voices_come_from_the_file(voices_file: Path) -> None:
    registry = VoiceRegistry.load(voices_file)
    assert [voice.name for voice in registry.voices()] == ["hazel", "owen", "edith"]
    assert registry.default == registry.get("hazel")
    assert registry.get("owen") == Voice(
        "owen", "Owen", ("en-US",), control_token="<|voice_1|>", is_builtin=True
    )


def test_a_created_voice_is_found_and_listed_last(voices_file: Path) -> None:
    registry = VoiceRegistry.load(voices_file)
    registry.create(replace(MINE, name="zoe"))
    registry.create(MINE)
    assert registry.get("mine") == MINE
    assert [voice.name for voice in registry.voices()] == ["hazel", "owen", "edith", "mine", "zoe"]
    assert len(registry) == 5


@pytest.mark.parametrize(
    ("name", "language", "chosen"),
    [
        ("", "", "hazel"),
        ("edith", "", "edith"),
        ("", "en", "hazel"),
        ("", "de", "mine"),
        ("owen", "en", "owen"),
    ],
)
def test_choosing_by_name_and_language(
    voices_file: Path, name: str, language: str, chosen: str
) -> None:
    registry = VoiceRegistry.load(voices_file)
    registry.create(MINE)
    found = registry.choose(name, language)
    assert (found.name, found.language) == (chosen, language)
    with pytest.raises(InvalidRequestError, match=r"^spoken: voice 'owen' speaks en-US$"):
        registry.choose("owen", "de", "spoken")


def test_errors_for_unknown_names_list_the_voices(voices_file: Path) -> None:
    registry = VoiceRegistry.load(voices_file)
    with pytest.raises(
        VoiceNotFoundError, match=r"no voice 'unknown'; there are: edith, hazel, owen"
    ):
        registry.get("unknown")
    with pytest.raises(VoiceNotFoundError, match="language fr"):
        registry.choose("", "fr")


@pytest.mark.parametrize(
    ("asked", "speaks"),
    [("en", True), ("en-US", True), ("EN-us", True), ("en-GB", False), ("e", False), ("de", False)],
)
def test_languages_match_by_their_parts(asked: str, speaks: bool) -> None:
    assert Voice("v", language_codes=("en-US",)).speaks(asked) is speaks


@pytest.mark.parametrize(
    "name", ["", "Upper", "-dash", "a" * 65, "a/b", "../up", "é", "a b", "x\n", "٣"]
)
def test_bad_ids_are_refused(voices_file: Path, name: str) -> None:
    registry = VoiceRegistry.load(voices_file)
    with pytest.raises(InvalidRequestError, match="voice_id"):
        registry.create(replace(MINE, name=name))


def test_names_are_unique(voices_file: Path) -> None:
    registry = VoiceRegistry.load(voices_file)
    registry.create(MINE)
    for name in ("mine", "hazel"):
        with pytest.raises(VoiceExistsError, match=name):
            registry.create(replace(MINE, name=name))


def test_the_voice_limit_evicts_no_voice(voices_file: Path) -> None:
    registry = VoiceRegistry.load(voices_file, VoiceLimits(max_voices=2))
    registry.create(MINE)
    registry.create(replace(MINE, name="two"))
    with pytest.raises(PreconditionError, match="2 voices are registered") as caught:
        registry.create(replace(MINE, name="three"))
    assert caught.value.reason is Precondition.VOICE_LIMIT
    assert registry.get("mine") == MINE
    registry.delete("mine")
    registry.create(replace(MINE, name="three"))


def test_the_byte_limit_evicts_no_voice(voices_file: Path) -> None:
    registry = VoiceRegistry.load(voices_file, VoiceLimits(max_bytes=1000))
    long = replace(MINE, prompt=VoicePrompt(tuple(range(200))))
    registry.create(long)
    with pytest.raises(PreconditionError, match="1000 bytes"):
        registry.create(replace(long, name="two"))
    assert len(registry) == 4


def test_only_created_voices_can_be_deleted(voices_file: Path) -> None:
    registry = VoiceRegistry.load(voices_file)
    registry.create(MINE)
    registry.delete("mine")
    with pytest.raises(VoiceNotFoundError):
        registry.delete("mine")
    with pytest.raises(PreconditionError, match="built in") as caught:
        registry.delete("hazel")
    assert caught.value.reason is Precondition.BUILTIN_VOICE


def test_created_voices_survive_a_restart(voices_file: Path, tmp_path: Path) -> None:
    registry = VoiceRegistry.load(voices_file, folder=tmp_path / "voices")
    registry.create(MINE)
    registry.create(replace(MINE, name="gone"))
    registry.delete("gone")
    again = VoiceRegistry.load(voices_file, folder=tmp_path / "voices")
    assert again.get("mine") == MINE
    assert len(again) == 4
    assert [path.name for path in (tmp_path / "voices").iterdir()] == ["mine.json"]


def test_pronunciations_come_from_the_files_of_voices(voices_file: Path, tmp_path: Path) -> None:
    values = json.loads(voices_file.read_text())
    values["voices"][0]["pronunciations"] = SAID_IN_JSON
    path = tmp_path / "voices.json"
    path.write_text(json.dumps(values))
    assert VoiceRegistry.load(path).default.pronunciations == SAID
    folder = tmp_path / "voices"
    VoiceRegistry.load(path, folder=folder).create(replace(MINE, pronunciations=SAID))
    assert VoiceRegistry.load(path, folder=folder).get("mine").pronunciations == SAID
    made = json.loads((folder / "mine.json").read_text())
    del made["pronunciations"]  # as files of 0.1
    (folder / "mine.json").write_text(json.dumps(made))
    assert VoiceRegistry.load(path, folder=folder).get("mine") == MINE


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"SQL": "sequel"}, "pronunciations must be a list of objects"),
        (["SQL"], r"pronunciations\[0\] must be an object with phrase and pronunciation"),
        ([SAID_IN_JSON[0], {"phrase": "a"}], r"pronunciations\[1\] must be an object"),
        ([{**SAID_IN_JSON[0], "x": "y"}], "may have the texts alphabet, phrase, pronunciation"),
        ([{**SAID_IN_JSON[0], "phrase": 5}], "may have the texts"),
        ([{**SAID_IN_JSON[0], "alphabet": "x-sampa"}], "alphabet must be one of letters, ipa"),
        ([{**SAID_IN_JSON[0], "phrase": ""}], "a text must have 1 to 200 characters"),
        ([{**SAID_IN_JSON[0], "phrase": "\ud800"}], "text that is not Unicode"),
    ],
)
def test_wrong_pronunciations_of_a_voice_are_named(
    voices_file: Path, tmp_path: Path, said: Any, message: str
) -> None:
    values = json.loads(voices_file.read_text())
    values["voices"][0]["pronunciations"] = said
    path = tmp_path / "voices.json"
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        VoiceRegistry.load(path)


@pytest.mark.parametrize(("made_with", "reason"), [("old", "another"), ("", "an unknown")])
def test_voices_of_another_codec_can_only_be_deleted(
    voices_file: Path, tmp_path: Path, made_with: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    former = VoiceRegistry.load(voices_file, folder=tmp_path, codec=made_with)
    assert former.create(MINE).codec == made_with
    assert former.get("mine").codec == made_with
    registry = VoiceRegistry.load(voices_file, folder=tmp_path, codec="new")
    with pytest.raises(PreconditionError, match=f"of {reason} codec.*: delete it, and create it"):
        registry.choose("mine")
    with pytest.raises(PreconditionError) as caught:
        registry.get("mine")
    assert caught.value.reason is Precondition.VOICE_CODEC
    assert f"mine.json is not used: {caught.value}" in caplog.text
    assert all(voice.is_builtin for voice in registry.voices())
    with pytest.raises(VoiceNotFoundError):
        registry.choose("", "de")
    with pytest.raises(VoiceExistsError, match="of another codec: delete it first"):
        registry.create(MINE)
    with pytest.raises(VoiceNotFoundError, match=r"there are: edith, hazel, owen$"):
        registry.get("unknown")
    registry.delete("mine")
    registry.create(MINE)
    assert registry.get("mine") == replace(MINE, codec="new")
    again = VoiceRegistry.load(voices_file, folder=tmp_path, codec="new")
    assert again.choose("", "de") == replace(registry.get("mine"), language="de")


def test_files_of_the_first_version_are_of_an_unknown_codec(
    voices_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.json").write_text(stored())
    registry = VoiceRegistry.load(voices_file, folder=tmp_path, codec="new")
    with pytest.raises(PreconditionError, match="of an unknown codec, by an earlier version: del"):
        registry.get("broken")


def test_registries_with_one_folder_are_consistent(voices_file: Path, tmp_path: Path) -> None:
    """Two front ends of one server share a folder, and each serves any voice."""
    limits = VoiceLimits(max_voices=2)
    one, two = (VoiceRegistry.load(voices_file, limits, tmp_path / "both") for _ in range(2))
    one.create(MINE)
    assert two.get("mine") == MINE
    with pytest.raises(VoiceExistsError):
        two.create(MINE)
    two.delete("mine")
    assert [voice.name for voice in one.voices()] == [v.name for v in two.voices() if v.is_builtin]
    with pytest.raises(VoiceNotFoundError):
        one.get("mine")
    two.create(replace(MINE, display_name="another one"))
    assert one.get("mine").display_name == "another one"
    one.delete("mine")
    two.create(replace(MINE, display_name="a third"))
    assert one.choose("mine").display_name == "a third"
    one.create(replace(MINE, name="other"))
    with pytest.raises(PreconditionError, match="2 voices"):
        two.create(replace(MINE, name="more"))


def stored(**values: object) -> str:
    voice = {"name": "broken", "display_name": "", "language_codes": [], "consent": ""}
    return json.dumps(voice | {"prompt": {"codes": [1], "transcript": ""}} | values)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "{}",
        "[" * 100_000,
        stored(display_name="\ud800"),
        stored(language_codes=["\udfff"]),
        stored(prompt={"codes": [1], "transcript": "\ud83d"}),
        stored(prompt={"codes": [2**70], "transcript": ""}),
        '{"name": "other", "prompt": {"codes": [1], "transcript": ""}}',
        '{"name": "broken", "display_name": "", "language_codes": [], "consent": "",'
        ' "prompt": {"codes": ["x"], "transcript": ""}}',
    ],
)
def test_invalid_files_are_reported_and_kept(
    voices_file: Path, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        registry = VoiceRegistry.load(voices_file, folder=tmp_path)
    assert len(registry) == 3
    assert "broken.json is not used" in caplog.text
    assert file.read_text() == text


def test_only_regular_files_are_voices(voices_file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "device.json").symlink_to("/dev/zero")
    assert len(VoiceRegistry.load(voices_file, folder=tmp_path)) == 3


def test_removing_the_folder_removes_created_voices_only(
    voices_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "voices"
    registry = VoiceRegistry.load(voices_file, folder=folder)
    registry.create(MINE)
    shutil.rmtree(folder)
    assert [voice.name for voice in registry.voices()] == ["hazel", "owen", "edith"]
    assert registry.get("hazel").is_builtin
    assert caplog.text.count("cannot be read") == 1
    registry.create(MINE)
    assert VoiceRegistry.load(voices_file, folder=folder).get("mine") == MINE


def test_a_folder_replaced_by_a_file_stores_no_voice(voices_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    registry = VoiceRegistry.load(voices_file, folder=folder)
    registry.create(MINE)
    shutil.rmtree(folder)
    folder.write_text("")
    assert registry.choose().name == "hazel"
    with pytest.raises(UnavailableError, match="cannot be kept"):
        registry.create(MINE)
    with pytest.raises(ConfigError, match="cannot be used"):
        VoiceRegistry.load(voices_file, folder=folder)


def test_a_partial_file_of_a_dead_process_is_removed(voices_file: Path, tmp_path: Path) -> None:
    (tmp_path / ".voice-left.tmp").write_text("{")
    registry = VoiceRegistry.load(voices_file, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".voice-later.tmp").write_text("{")
    registry.create(MINE)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"voices": []}, "lists no voices"),
        ({"voices": [{"name": "x", "display_name": "\ud800"}]}, "not Unicode"),
        ({"voices": [{"control_token": "x"}]}, "every voice needs a name"),
        ({"voices": [{"name": "x", "colour": "red"}]}, "'x' has unknown keys: colour"),
        ({"voices": [{"name": "x", "codes": [1.5]}]}, "codes must be whole numbers"),
        ({"voices": [{"name": "x", "codes": 5}]}, "codes must be whole numbers, in a list"),
        ({"voices": [{"name": "x", "codes": None}]}, "codes must be whole numbers, in a list"),
        ({"voices": [{"name": "x", "codes": [1], "transcript": 5}]}, "transcript of voice 'x' mus"),
        ({"voices": [{"name": "x", "control_token": 5}]}, "control_token of voice 'x' must be t"),
        ({"voices": [{"name": "x", "language_codes": [None]}]}, "must be a list of text"),
        ({"voices": [{"name": "x", "audio": ["x.wav"]}]}, "audio of voice 'x' must be text"),
        ({"voices": [{"name": "x", "audio": "../x.wav"}]}, "no ../x.wav in its folder"),
        ({"voices": [{"name": "x", "audio": "voices.json"}]}, "audio but no transcript"),
        ({"voices": [{"name": "X", "control_token": "t"}]}, "'X' is no voice name"),
        ({"default": "y", "voices": [{"name": "x", "control_token": "t"}]}, "default voice 'y'"),
        ({"voices": [{"name": "x", "control_token": "t"}] * 2}, "same name"),
    ],
)
def test_errors_in_a_voices_file_name_the_problem(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    path = tmp_path / "voices.json"
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        VoiceRegistry.load(path)

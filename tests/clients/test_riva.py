"""NVIDIA's client of Riva and LiveKit's plugin, against a real server with the built-in voice."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import wave
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import soundfile
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tests.clients.riva_texts import CLIP_TEXT, TEXT
from tests.speech_server import Server, SpeechClient, serving
from tts.config.defaults import embedded_folder
from tts.riva.stubs import common_pb2
from tts.riva.stubs import tts_pb2 as riva_pb
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub

ROOT = Path(__file__).parents[2]
TLS = ROOT / "tests" / "tts" / "tls"
RATE = 22_050  # the client's default
VOICES = json.loads((embedded_folder() / "voices.json").read_text(encoding="utf-8"))["voices"]
PAGE = (ROOT / "docs" / "riva.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def listed() -> dict[str, list[str]]:
    """Return the built-in voices by language, as Riva's clients name them."""
    names: dict[str, list[str]] = {}
    for voice in VOICES:
        for language in voice["language_codes"]:
            names.setdefault(language, []).append(f"embedded.{voice['name']}")
    assert "embedded.hazel" in names["en-US"]
    return names


def run(*command: str, cwd: Path = ROOT) -> str:
    """Return the output of a Python program, which must end well."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def clip(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of CLIP_TEXT."""
    path = tmp_path_factory.mktemp("clip") / "clip.wav"
    with SpeechClient(server.address) as client:
        speech = client.synthesize(CLIP_TEXT, voice="owen", seed=3)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, speech.sample_rate, 0, "NONE", ""))
        file.writeframes(speech.pcm)
    return path


@pytest.fixture(scope="module")
def found(server: Server, clip: Path) -> dict[str, Any]:
    """Results of the calls of `riva_calls`."""
    result: dict[str, Any] = json.loads(
        run("-m", "tests.clients.riva_calls", server.address, str(clip))
    )
    return result


def synthesize(server: Server, **values: Any) -> pb.SynthesizeResponse:
    """Return SpeechService's response to the same text, with the same seed."""
    config = pb.SynthesisConfig(**{"voice": pb.VoiceSelection(name="hazel"), **values})
    config.sampling.seed = 7
    config.audio_format.sample_rate_hertz = config.audio_format.sample_rate_hertz or RATE
    request = pb.SynthesizeRequest(config=config, input=pb.SynthesisInput(text=TEXT))
    with grpc.insecure_channel(server.address) as channel:
        return SpeechServiceStub(channel).Synthesize(request)


def samples_of(audio: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(audio), "<i2")


# --- the contract


def described(file: FileDescriptorProto) -> Iterator[tuple[object, ...]]:
    """Iterate over what is on the wire: names, numbers and types of one file."""
    for enum in file.enum_type:
        yield from ((file.package, enum.name, value.name, value.number) for value in enum.value)
    messages = [(file.package, message) for message in file.message_type]
    while messages:
        path, message = messages.pop()
        name = f"{path}.{message.name}"
        messages += [(name, nested) for nested in message.nested_type]
        for field in message.field:
            kind = field.type, field.type_name, field.label, field.oneof_index
            yield name, field.name, field.number, *kind, message.options.map_entry
    for service in file.service:
        for m in service.method:
            types = m.input_type, m.output_type, m.client_streaming, m.server_streaming
            yield file.package, service.name, m.name, *types


def test_the_contract_is_that_of_the_client(found: dict[str, Any]) -> None:
    theirs = [FileDescriptorProto.FromString(base64.b64decode(f)) for f in found["contract"]]
    ours = [FileDescriptorProto(), FileDescriptorProto()]
    common_pb2.DESCRIPTOR.CopyToProto(ours[0])
    riva_pb.DESCRIPTOR.CopyToProto(ours[1])
    wanted = {item for file in theirs for item in described(file)}
    assert len(wanted) > 40
    assert {item for file in ours for item in described(file)} == wanted


# --- NVIDIA's client


def test_speech_has_the_bytes_of_speech_service(server: Server, found: dict[str, Any]) -> None:
    speech = found["speech"]
    expected = synthesize(server).audio
    assert base64.b64decode(speech["whole"]) == expected
    assert base64.b64decode(speech["future"]) == expected
    assert len(speech["streamed"]) > 3
    assert b"".join(map(base64.b64decode, speech["streamed"])) == expected


def test_phrases_are_spoken_one_after_the_other(found: dict[str, Any]) -> None:
    speech = found["speech"]
    whole, phrases = samples_of(speech["whole"]), samples_of(speech["phrases"])
    assert len(phrases) == pytest.approx(len(whole), rel=0.5)
    assert np.abs(phrases).max() > 3000


def test_a_recording_is_imitated(server: Server, found: dict[str, Any], clip: Path) -> None:
    prompt = pb.VoicePrompt(audio=clip.read_bytes(), transcript=CLIP_TEXT)
    expected = synthesize(server, voice=pb.VoiceSelection(prompt=prompt))
    assert base64.b64decode(found["speech"]["imitated"]) == expected.audio


def test_metadata_has_the_words_and_their_times(server: Server, found: dict[str, Any]) -> None:
    speech = found["speech"]
    assert speech["meta"] == [TEXT, "Good morning. It is five past nine."]
    assert speech["dictionary"] == "Good morning. It is five past noon."
    assert [word for word, _, _ in speech["words"]] == TEXT.split()
    assert speech["streamed_words"] == speech["words"]
    expected = synthesize(server, timestamps=pb.TIMESTAMP_GRANULARITY_WORD).words
    times = [(word.start.ToMilliseconds(), word.end.ToMilliseconds()) for word in expected]
    for (_, start, end), (expected_start, expected_end) in zip(speech["words"], times, strict=True):
        assert (start, end) == pytest.approx((expected_start, expected_end), abs=1)
    assert len(speech["durations"]) == len(times)


@pytest.mark.parametrize("encoding", ["FLAC", "OGGOPUS"])
def test_files_can_be_read(found: dict[str, Any], encoding: str) -> None:
    data = base64.b64decode(found["speech"]["encodings"][encoding])
    samples, rate = soundfile.read(BytesIO(data))
    seconds = len(samples_of(found["speech"]["whole"])) / RATE
    assert len(samples) / rate == pytest.approx(seconds, abs=0.1)


def test_mulaw_has_a_byte_for_each_sample(found: dict[str, Any]) -> None:
    seconds = len(samples_of(found["speech"]["whole"])) / RATE
    data = base64.b64decode(found["speech"]["encodings"]["MULAW"])
    assert len(data) / 8_000 == pytest.approx(seconds, abs=0.01)


def test_the_voices_are_listed(found: dict[str, Any]) -> None:
    assert found["voices"] == listed()


def test_failures_say_what_to_change(found: dict[str, Any]) -> None:
    unknown, phonetic, rate = found["failures"]
    assert unknown[0] == "NOT_FOUND"
    assert "there are: " in unknown[1]
    assert "hazel" in unknown[1]
    assert phonetic[0] == "INVALID_ARGUMENT"
    assert phonetic[1].startswith("custom_dictionary[0]: ")
    assert rate[0] == "INVALID_ARGUMENT"
    assert rate[1].startswith("sample_rate_hz: ")


def test_a_token_is_sent_over_tls(found: dict[str, Any], clip: Path) -> None:
    flags = [f"--tls-cert={TLS / 'server.pem'}", f"--tls-key={TLS / 'server.key'}"]
    with serving(flags=[*flags, "--auth-token=secret"]) as protected:
        command = ("-m", "tests.clients.riva_calls", protected.address, str(clip))
        command += (str(TLS / "ca.pem"),)
        same = json.loads(run(*command, "secret"))
        with pytest.raises(AssertionError, match="UNAUTHENTICATED"):
            run(*command, "wrong")
    assert same["speech"]["whole"] == found["speech"]["whole"]


# --- LiveKit's plugin


@pytest.fixture(scope="module")
def spoken(server: Server) -> dict[str, Any]:
    """Results of `livekit_speech`."""
    result: dict[str, Any] = json.loads(run("-m", "tests.clients.livekit_speech", server.address))
    return result


def test_livekit_lists_the_voices(spoken: dict[str, Any]) -> None:
    expected = {language: {"voices": names} for language, names in listed().items()}
    assert spoken["voices"] == expected


@pytest.mark.parametrize("how", ["whole", "streamed"])
def test_livekit_speaks(server: Server, spoken: dict[str, Any], how: str) -> None:
    """The plugin makes a call for each sentence, or for short sentences together."""
    text = "Hello there, my friend. This is the second sentence of this text. And the end."
    with SpeechClient(server.address) as client:
        expected_s = client.synthesize(text, voice="hazel").seconds
    samples = samples_of(spoken[how])
    assert spoken["sample_rate"] == 16_000
    assert len(samples) / 16_000 == pytest.approx(expected_s, rel=0.3)
    assert np.abs(samples).max() > 3000


# --- the documentation


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_examples_of_the_page_write_a_file(server: Server, snippet: str, tmp_path: Path) -> None:
    assert "localhost:50051" in snippet
    run("-c", snippet.replace("localhost:50051", server.address), cwd=tmp_path)
    (path,) = tmp_path.iterdir()
    with wave.open(str(path), "rb") as file:
        assert file.getnframes() / file.getframerate() > 0.5


def test_the_page_has_an_example_of_each_client() -> None:
    assert ["riva.client" in snippet for snippet in SNIPPETS] == [True, False]
    assert "livekit" in SNIPPETS[1]

"""Qwen3-TTS as a service: languages, voices, instructions and recordings, and errors at start."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import RepetitionPenaltyLogitsProcessor

from decoder import DecoderConfigError, StreamingOptions, read_prompt_audio
from decoder.codecs.qwen3_tts.decoder import codec_spec, read_config
from llm import CheckpointError, CodeSampling, Request, RequestError, SamplingParams, Token
from tests.decoder.qwen3_tts_reference import DECODER, write_reference
from tests.decoder.speaker_encoders import CONFIG as ENCODER
from tests.decoder.speaker_encoders import reference_vector
from tests.llm import qwen3_tts_checkpoints as checkpoints
from tests.llm.qwen3_tts_checkpoints import Reference, edit_config
from tests.tts.family_checkpoints import (
    QWEN3_TTS_CODEC,
    SNAC_CODEC,
    write_qwen3_tts_family,
)
from tests.tts.family_services import CASES, Running, configured
from tests.tts.http.http_serving import HttpServing, run_with_http
from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    flush,
    hum,
    reason_of,
    run_conversation,
    run_with_server,
    say,
    session_config,
    wav,
)
from tts.config.server import ServerConfig
from tts.engine.client import AudioBlock, EncodedClip, SpeechJob
from tts.errors import PreconditionError
from tts.factory import Service, create_service
from tts.families.base import Checkpoint, SpeechFamily
from tts.families.registry import find_family
from tts.ipc.codec import bundle, decode_from_engine, decode_from_front_end, encode
from tts.ipc.messages import Encoded, Speak
from tts.speech.types import AudioChunk, SamplingOverrides, SpeechRequest, overridden
from tts.v1 import speech_pb2 as pb
from tts.voices.folder import VoiceFolder
from tts.voices.types import Voice, VoicePrompt

SIZE = 151_936
PAD, BOS, EOS = 151_671, 151_672, 151_673
CODEC_PAD, CODEC_BOS, END = 2148, 2149, 2150
THINK, NOTHINK, BEGIN, CLOSE = 2154, 2155, 2156, 2157
CHINESE, ENGLISH, SICHUAN, VIVIAN, ERIC = 2055, 2050, 2062, 3065, 2875
SPOKEN_BY = Voice("vivian", speaker="vivian")
ROLE = [(151_644, None), (77_091, None), (198, None)]
CODES = [tuple(range(first, first + 7)) for first in (0, 8, 3)]
HELLO = [(BOS, CODEC_PAD), (14_990, CODEC_PAD), (EOS, CODEC_PAD), (PAD, CODEC_BOS)]

on_service = pytest.mark.parametrize(
    "running",
    [case for case in CASES if case.name == "qwen3_tts"],
    indirect=True,
    ids=lambda case: case.name,
    scope="session",
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_tts_family(tmp_path_factory.mktemp("qwen3_tts") / "model")


def family_of(written: Path, folder: Path, *path: str, **keys: Any) -> SpeechFamily:
    """Return the family of the checkpoint's files without weights, with other keys."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(written / name, folder / name)
    edit_config(folder, *path, **keys)
    found = find_family(Checkpoint(folder))
    assert found is not None
    return found


def set_layout(folder: Path, has_text_first: object) -> None:
    """Write a speech.json with this layout; None: there is none, and the model has its own."""
    if has_text_first is not None:
        values = {"family": "qwen3_tts", "non_streaming_mode": has_text_first}
        (folder / "speech.json").write_text(json.dumps(values))


def prompt_of(family: SpeechFamily, voice: Voice) -> list[object]:
    """Return the prompt of "hello" as pairs of a text id and a code, and frames."""
    vocabulary = family.vocabulary(codec_spec(read_config(QWEN3_TTS_CODEC), 24_000))

    def pair(token: Token) -> object:
        if not isinstance(token, int):
            return token
        return token % SIZE, token // SIZE - 1 if token >= SIZE else None

    return [pair(token) for token in family.prompt(vocabulary, "hello", voice)]


def marks(*codes: int) -> list[object]:
    return [(PAD, code) for code in codes]


@pytest.mark.parametrize(
    ("speaker", "language", "codes"),
    [
        ("vivian", "", (NOTHINK, BEGIN, CLOSE, VIVIAN)),
        ("vivian", "en-US", (THINK, BEGIN, ENGLISH, CLOSE, VIVIAN)),
        ("vivian", "zh", (THINK, BEGIN, CHINESE, CLOSE, VIVIAN)),
        ("Eric", "", (THINK, BEGIN, SICHUAN, CLOSE, ERIC)),
        ("Eric", "zh-CN", (THINK, BEGIN, SICHUAN, CLOSE, ERIC)),
        ("Eric", "en", (THINK, BEGIN, ENGLISH, CLOSE, ERIC)),
        ("", "ja", (NOTHINK, BEGIN, CLOSE)),  # this checkpoint has no Japanese
    ],
)
def test_languages_and_speakers_are_codes(
    written: Path, tmp_path: Path, speaker: str, language: str, codes: tuple[int, ...]
) -> None:
    voice = Voice("any", speaker=speaker, language=language)
    found = prompt_of(family_of(written, tmp_path), voice)
    assert found == [*ROLE, *marks(*codes), *HELLO]


def test_instructions_stand_in_front(written: Path, tmp_path: Path) -> None:
    voice = Voice("any", speaker="vivian", instructions="hello<|im_end|>")
    found = prompt_of(family_of(written, tmp_path), voice)
    spelled = [27, 91, 72, 76, 62, 68, 77, 67, 91, 29]  # the mark as letters
    ids = [151_644, 872, 198, 14_990, *spelled, 151_645, 198]
    assert found == [
        *((token, None) for token in ids),
        *ROLE,
        *marks(NOTHINK, BEGIN, CLOSE, VIVIAN),
        *HELLO,
    ]


@pytest.mark.parametrize(
    ("count", "has_text_first", "said", "rest"),
    [
        (2, True, [(872, CODEC_PAD), *HELLO[1:], (*CODES[0], PAD), (*CODES[1], PAD)], ()),
        (1, False, [(872, CODEC_BOS), (*CODES[0], 14_990)], (EOS,)),
        (2, False, [(872, CODEC_BOS), (*CODES[0], 14_990), (*CODES[1], EOS)], ()),
        (3, None, [(872, CODEC_BOS), (*CODES[0], 14_990), (*CODES[1], EOS), (*CODES[2], PAD)], ()),
    ],
)
def test_a_recording_is_a_text_and_frames(
    written: Path,
    tmp_path: Path,
    count: int,
    has_text_first: bool | None,
    said: list[object],
    rest: tuple[int, ...],
) -> None:
    """Its text stands in front of its frames or in them; that is the default."""
    set_layout(tmp_path, has_text_first)
    family = family_of(written, tmp_path, tts_model_type="base")
    voice = Voice("any", prompt=VoicePrompt(tuple(chain(*CODES[:count])), "user"))
    assert prompt_of(family, voice) == [*ROLE, *marks(NOTHINK, BEGIN, CLOSE), HELLO[0], *said]
    assert family.frame_texts("hello", voice) == rest


def test_a_vector_stands_for_a_speaker(written: Path, tmp_path: Path) -> None:
    """Alone, or behind a text and frames of the same voice."""
    set_layout(tmp_path, True)
    family = family_of(written, tmp_path, tts_model_type="base", speaker_encoder_config=ENCODER)
    vector = np.arange(48, dtype="<f4").tobytes()
    alone = prompt_of(family, Voice("any", language="en", prompt=VoicePrompt((), "", vector)))
    marked = marks(THINK, BEGIN, ENGLISH, CLOSE)
    assert alone == [*ROLE, *marked, vector, *HELLO]
    prompt = VoicePrompt(CODES[0], "user", vector)
    bos, *rest = HELLO
    both = prompt_of(family, Voice("any", language="en", prompt=prompt))
    assert both == [*ROLE, *marked, vector, bos, (872, CODEC_PAD), *rest, (*CODES[0], PAD)]


@pytest.mark.parametrize("kind", ["custom_voice", "voice_design", "base"])
@pytest.mark.parametrize("has_text_first", [None, True, False])
def test_a_text_stands_in_front_of_the_frames_or_in_them(
    written: Path, tmp_path: Path, kind: str, has_text_first: bool | None
) -> None:
    """The defaults of the package differ."""
    set_layout(tmp_path, has_text_first)
    family = family_of(written, tmp_path, tts_model_type=kind)
    found = prompt_of(family, SPOKEN_BY if kind == "custom_voice" else Voice("default"))
    own = (VIVIAN,) if kind == "custom_voice" else ()
    opening = [*ROLE, *marks(NOTHINK, BEGIN, CLOSE, *own)]
    texts = family.frame_texts("hello hello", Voice("default"))
    if has_text_first if has_text_first is not None else kind != "base":
        assert (found, texts) == ([*opening, *HELLO], ())
    else:
        assert found == [*opening, HELLO[0], (14_990, CODEC_BOS)]
        assert texts == (*family.tokenizer.encode(" hello"), EOS)


@pytest.mark.parametrize("value", ["yes", 1])
def test_an_unknown_layout_is_an_error(written: Path, tmp_path: Path, value: object) -> None:
    set_layout(tmp_path, value)
    with pytest.raises(CheckpointError, match=r"speech\.json: non_streaming_mode must be true or"):
        family_of(written, tmp_path)


@pytest.mark.parametrize(
    ("keys", "voices", "traits"),
    [
        ({}, ("vivian", "eric"), (True, False, False)),
        ({"tts_model_size": "0b6"}, ("vivian", "eric"), (False, False, False)),
        ({"tts_model_type": "voice_design"}, ("default",), (True, False, True)),
        ({"tts_model_type": "base"}, ("default",), (False, True, True)),
    ],
)
def test_variants_take_what_they_were_trained_on(
    written: Path,
    tmp_path: Path,
    keys: dict[str, Any],
    voices: tuple[str, ...],
    traits: tuple[bool, ...],
) -> None:
    family = family_of(written, tmp_path, **keys)
    own = family.traits
    assert tuple(voice.name for voice in family.voices().voices) == voices
    assert family.voices().voices[0].language_codes == ("zh", "en")
    assert own.sampling == SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
    assert (own.takes_instructions, own.takes_codes, own.invents_voices) == traits


PUBLISHED = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.9, "top_k": 50}
PUBLISHED |= {"top_p": 1.0, "max_new_tokens": 8192, "subtalker_dosample": True}
PUBLISHED |= {"subtalker_temperature": 0.9, "subtalker_top_p": 1.0, "subtalker_top_k": 50}


@pytest.mark.parametrize(
    ("values", "first", "later"),
    [
        (None, (0.9, 50, 1.0), (0.9, 50, 1.0)),
        (PUBLISHED, (0.9, 50, 1.0), (0.9, 50, 1.0)),
        ({"temperature": 0.7, "top_k": 9}, (0.7, 9, 1.0), (0.9, 50, 1.0)),
        (
            {"top_p": 0.8, "subtalker_temperature": 0.5, "subtalker_top_k": 7},
            (0.9, 50, 0.8),
            (0.5, 7, 1.0),
        ),
        ({"subtalker_dosample": False, "subtalker_top_p": 0.9}, (0.9, 50, 1.0), (0.0, 50, 0.9)),
        ({"do_sample": False}, (0.0, 50, 1.0), (0.9, 50, 1.0)),
    ],
)
def test_each_kind_of_codes_has_settings_of_the_checkpoint(
    written: Path,
    tmp_path: Path,
    values: dict[str, Any] | None,
    first: tuple[float, int, float],
    later: tuple[float, int, float],
) -> None:
    if values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    temperature, top_k, top_p = first
    assert family_of(written, tmp_path).sampling() == SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=1.05,
        later_codes=CodeSampling(*later),
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"subtalker_top_k": "many"}, "subtalker_top_k must be a number"),
        ({"subtalker_top_p": 0}, r"generation_config.json: top_p must be in \(0, 1\]"),
    ],
)
def test_wrong_settings_are_an_error(
    written: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        family_of(written, tmp_path).sampling()


def test_settings_of_a_request_hold_for_all_codes() -> None:
    own = SamplingParams(temperature=0.7, top_k=9, later_codes=CodeSampling(0.5, 7, 0.9))
    found = overridden(own, {"temperature": 0.0, "top_p": 0.8, "min_p": 0.1})
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.0, 9, 0.8, 0.1)
    assert found.later_codes == CodeSampling(0.0, 7, 0.8)


def test_an_unknown_speaker_is_an_error(written: Path, tmp_path: Path) -> None:
    family = family_of(written, tmp_path)
    with pytest.raises(CheckpointError, match="no speaker bob; there are: vivian, Eric"):
        prompt_of(family, Voice("any", speaker="bob"))


TALKER = ("talker_config",)


@pytest.mark.parametrize(
    ("path", "keys", "message"),
    [
        ((), {"tts_model_type": "singing"}, "tts_model_type='singing' is not supported"),
        ((), {"tts_eos_token_id": None}, "tts_eos_token_id=None must be a whole number"),
        (TALKER, {"codec_bos_id": "x"}, "codec_bos_id='x' must be a whole number"),
        (TALKER, {"code_predictor_config": 1}, "code_predictor_config must be an object"),
        (TALKER, {"spk_id": {}}, "a model of named voices must have spk_id"),
        (TALKER, {"spk_id": {"a": 3072}}, "spk_id must have a code below 3072 for each name"),
        (TALKER, {"spk_id": {"a/b": 1}}, "the speaker 'a/b' is no name of a voice"),
        (TALKER, {"codec_language_id": [1]}, "codec_language_id must have a code below 3072"),
        (TALKER, {"spk_is_dialect": {"Eric": "x"}}, "x of Eric is no known language"),
    ],
)
def test_a_wrong_configuration_is_an_error(
    written: Path, tmp_path: Path, path: tuple[str, ...], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of(written, tmp_path, *path, **keys)


@pytest.mark.parametrize(
    ("codec", "found"),
    [
        (SNAC_CODEC, "frames of 7 below 4096"),
        (
            QWEN3_TTS_CODEC
            | {"decoder_config": QWEN3_TTS_CODEC["decoder_config"] | {"num_quantizers": 5}},
            "frames of 5 below 16",
        ),
    ],
)
def test_a_wrong_codec_is_an_error_before_the_model_is_loaded(
    written: Path, tmp_path: Path, codec: dict[str, object], found: str
) -> None:
    family_of(written, tmp_path)  # there are no weights
    (tmp_path / "speech_tokenizer").mkdir()
    (tmp_path / "speech_tokenizer" / "config.json").write_text(json.dumps(codec))
    message = f"qwen3_tts: the language model writes frames of 7 codes below 16, codec .* {found}"
    with pytest.raises(CheckpointError, match=message):
        create_service(configured(tmp_path))


def test_a_missing_codec_is_an_error(written: Path, tmp_path: Path) -> None:
    family_of(written, tmp_path)
    with pytest.raises(CheckpointError, match="qwen3_tts needs its codec: put it into"):
        create_service(configured(tmp_path))


@on_service
@pytest.mark.parametrize("penalty", [None, 1.8])
def test_greedy_codes_are_those_of_the_reference(
    running: Running, monkeypatch: pytest.MonkeyPatch, penalty: float | None
) -> None:
    """Repeated first codes are penalised by 1.05 unless the request says otherwise."""
    synthesizer = running.service.synthesizer
    assert synthesizer is not None
    for name, value in {"TEXT_IDS": SIZE, "PAD": PAD, "END": END, "CODEBOOKS": 7}.items():
        monkeypatch.setattr(checkpoints, name, value)
    voice = Voice("mine", speaker="Eric", language="en", instructions="hello")
    prompt = running.service.prompts.speech_prompt("hello.", voice)
    model = Reference.read(running.folder)
    model.weights["talker.codec_head.weight"][16:] = 0  # as far as it is allowed
    model.weights["talker.codec_head.weight"][END] = 0

    penalise = RepetitionPenaltyLogitsProcessor(1.05 if penalty is None else penalty)

    def adjust(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        return penalise(torch.tensor([generated], dtype=torch.long), logits[None].clone())[0]

    async def listen() -> tuple[int, ...]:
        codes: tuple[int, ...] = ()
        sampling = SamplingOverrides(temperature=0.0, max_tokens=7 * 12, repetition_penalty=penalty)
        request = SpeechRequest("hello.", voice=voice, sampling=sampling)
        async for event in synthesizer.stream(request):
            if isinstance(event, AudioChunk):
                codes = event.carry
        return codes

    found, frames = asyncio.run(listen()), model.frames(prompt, 12, adjust)
    assert len(frames) == 12
    assert penalty is None or frames != model.frames(prompt, 12)
    assert found == tuple(code for frame in frames for code in frame[:7])


@on_service
def test_a_checkpoint_may_choose_the_likeliest_codes(running: Running, tmp_path: Path) -> None:
    """Both kinds of codes are those of a request with a temperature of 0."""
    folder = tmp_path / "model"
    shutil.copytree(running.folder, folder)
    switches = {"do_sample": False, "subtalker_dosample": False}
    (folder / "generation_config.json").write_text(json.dumps(switches))
    own = create_service(configured(folder))
    sampled = SamplingOverrides(max_tokens=70, seed=1)
    greedy = SamplingOverrides(max_tokens=70, temperature=0.0)
    plain, chosen = codes_of(running.service, sampled), codes_of(running.service, greedy)
    assert len(chosen) == 70
    assert codes_of(own, sampled) == chosen != plain
    asyncio.run(own.client.close())


def codes_of(
    service: Service, sampling: SamplingOverrides, voice: Voice = SPOKEN_BY
) -> tuple[int, ...]:
    """Return the codes of a short text."""
    synthesizer = service.synthesizer
    assert synthesizer is not None

    async def listen() -> tuple[int, ...]:
        codes: tuple[int, ...] = ()
        request = SpeechRequest("hello.", voice=voice, sampling=sampling)
        async for event in synthesizer.stream(request):
            if isinstance(event, AudioChunk):
                codes = event.carry
        return codes

    return asyncio.run(listen())


@on_service
def test_instructions_change_speech(running: Running) -> None:
    async def ask(served: Serving) -> None:
        plain = await collect_speech(served, "Hello.", max_tokens=70)
        glad = await collect_speech(served, "Hello.", max_tokens=70, instructions="Be glad.")
        again = await collect_speech(served, "Hello.", max_tokens=70, instructions="Be glad.")
        assert plain.data != glad.data == again.data
        request = pb.SynthesizeRequest(
            input=pb.SynthesisInput(text="Hello."),
            config=pb.SynthesisConfig(instructions="x" * 2001),
        )
        error = await error_of(served.speech.Synthesize(request))
        assert "config.instructions" in str(error.details()) + str(error.trailing_metadata())

    run_with_server(running.service, ask)


@on_service
def test_instructions_over_http(running: Running) -> None:
    async def ask(served: HttpServing) -> None:
        plain = await served.speak(voice="eric")
        glad = await served.speak(voice="eric", instructions="Be glad.", other=1)
        assert plain.status_code == glad.status_code == 200
        assert plain.content != glad.content
        assert glad.headers["x-ignored-fields"] == "other"

    run_with_http(running.service, ask)


def test_a_small_model_refuses_instructions(tmp_path: Path) -> None:
    folder = write_qwen3_tts_family(tmp_path / "model", tts_model_size="0b6")
    service = create_service(configured(folder))

    async def ask(served: Serving) -> None:
        request = pb.SynthesizeRequest(
            input=pb.SynthesisInput(text="Hello."), config=pb.SynthesisConfig(instructions="Sing.")
        )
        error = await error_of(served.speech.Synthesize(request))
        assert reason_of(error) == "INSTRUCTIONS_UNAVAILABLE"

    run_with_server(service, ask)
    asyncio.run(service.client.close())


def test_a_base_model_speaks_like_a_recording(tmp_path: Path) -> None:
    """Its codec encodes the clip; a model of named voices does not take one."""
    codec = {"num_quantizers": 7, "codebook_size": 16}
    folder = write_qwen3_tts_family(tmp_path / "model", tts_model_type="base")
    shutil.rmtree(folder / "speech_tokenizer")
    write_reference(folder / "speech_tokenizer", **DECODER | codec)
    service = create_service(configured(folder))
    synthesizer = service.synthesizer
    assert synthesizer is not None
    clip = wav(hum(1.1, 24_000), 24_000)
    prompt = asyncio.run(synthesizer.cloner.from_clip(clip, None, "hello"))
    assert len(prompt.codes) == 330 * 7

    async def ask(served: Serving) -> None:
        voice = pb.VoiceSelection(prompt=pb.VoicePrompt(audio=wav(hum(1.1)), transcript="hello"))
        cloned = await collect_speech(served, "Hello.", voice=voice, max_tokens=70)
        plain = await collect_speech(served, "Hello.", max_tokens=70)
        assert cloned.data != plain.data
        assert len(cloned.data) == len(plain.data)

    run_with_server(service, ask)
    asyncio.run(service.client.close())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Base model with a speaker encoder, and with that of its codec."""
    folder = tmp_path_factory.mktemp("base") / "model"
    write_qwen3_tts_family(folder, tts_model_type="base", speaker_encoder_config=ENCODER)
    shutil.rmtree(folder / "speech_tokenizer")
    codec = {"num_quantizers": 7, "codebook_size": 16}
    write_reference(folder / "speech_tokenizer", **DECODER | codec)
    return folder


def test_a_recording_without_a_transcript_is_a_vector(base: Path, tmp_path: Path) -> None:
    """Its speech is that of the reference behind a prompt with the vector of other code; created
    voices keep it.
    """
    own = ServerConfig(voice_folder=str(tmp_path / "voices"))
    service = create_service(configured(base), own)
    synthesizer = service.synthesizer
    assert synthesizer is not None
    samples = hum(1.1, 24_000)
    clip = wav(samples, 24_000)
    prompt = asyncio.run(synthesizer.cloner.from_clip(clip, None, ""))
    assert (prompt.codes, prompt.transcript) == ((), "")
    tensors = load_file(base / "model.safetensors")
    heard = {k: v for k, v in tensors.items() if k.startswith("speaker_encoder.")}
    expected = reference_vector(heard, read_prompt_audio(clip, 24_000), ENCODER)
    found = np.frombuffer(prompt.vector, "<f4")
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    both = asyncio.run(synthesizer.cloner.from_clip(clip, None, "hello"))
    assert (len(both.codes), both.transcript, both.vector) == (330 * 7, "hello", prompt.vector)

    async def ask(served: Serving) -> None:
        voice = pb.VoiceSelection(prompt=pb.VoicePrompt(audio=clip))
        cloned = await collect_speech(served, "Hello.", voice=voice, max_tokens=70)
        again = await collect_speech(served, "Hello.", voice=voice, max_tokens=70)
        plain = await collect_speech(served, "Hello.", max_tokens=70)
        assert cloned.data == again.data != plain.data
        created = pb.CreateVoiceRequest(voice_id="anna", prompt=pb.VoicePrompt(audio=clip))
        created.consent = "yes"
        await served.speech.CreateVoice(created)
        kept = await collect_speech(
            served, "Hello.", voice=pb.VoiceSelection(name="anna"), max_tokens=70
        )
        assert kept.data == cloned.data

    run_with_server(service, ask)
    asyncio.run(service.client.close())
    (stored,) = VoiceFolder(tmp_path / "voices").marks()
    voice = VoiceFolder(tmp_path / "voices").read(stored)
    assert voice.prompt == prompt
    assert voice.codec.endswith("+48")


def test_vectors_and_texts_cross_processes() -> None:
    vector = np.arange(48, dtype="<f4").tobytes()
    request = Request("r", (1, vector, (2, 3)), SamplingParams(frame_texts=(4, 5)))
    sent = Speak("front", 3, SpeechJob(request, StreamingOptions(chunk_sizes=(7,))))
    received = decode_from_front_end(encode(sent))
    assert received == sent
    assert isinstance(received, Speak)
    assert received.job.request.sampling.frame_texts == (4, 5)
    answer = Encoded(3, EncodedClip((1, 2), vector))
    assert decode_from_engine(bundle([encode(answer)])) == [answer]


@pytest.mark.parametrize("codes", [(), tuple(chain(*CODES[:2]))])
def test_codes_behind_a_vector_are_those_of_the_reference(
    base: Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...]
) -> None:
    """Without and with a recording's codes; the text is in the frames."""
    for name, value in {"TEXT_IDS": SIZE, "PAD": PAD, "END": END, "CODEBOOKS": 7}.items():
        monkeypatch.setattr(checkpoints, name, value)
    service = create_service(configured(base))
    vector = np.random.default_rng(0).normal(size=48).astype("<f4").tobytes()
    voice = Voice("mine", prompt=VoicePrompt(codes, "hello" if codes else "", vector))
    prompt = service.prompts.speech_prompt("hello.", voice)
    assert vector in prompt
    assert service.prompts.family is not None
    texts = service.prompts.family.frame_texts("hello.", voice)
    assert texts[-1] == EOS
    model = Reference.read(base)
    model.weights["talker.codec_head.weight"][16:] = 0  # as far as it is allowed
    model.weights["talker.codec_head.weight"][END] = 0
    sampling = SamplingOverrides(temperature=0.0, max_tokens=7 * 8, repetition_penalty=1.0)
    frames = model.frames(prompt, 8, texts=texts)
    found = codes_of(service, sampling, voice)
    assert found == tuple(code for frame in frames for code in frame[:7])
    wrong = replace(voice, prompt=VoicePrompt((), "", vector[4:]))
    with pytest.raises(RequestError, match="or a vector of 48 finite numbers"):
        codes_of(service, sampling, wrong)
    asyncio.run(service.client.close())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enc_dim": 32}, "'speaker_encoder.fc.weight' has shape"),
        ({"enc_channels": []}, "enc_kernel_sizes and enc_dilations cannot be used"),
        (None, "lacks 'speaker_encoder.blocks.0.conv.weight'"),
    ],
)
def test_a_speaker_encoder_that_cannot_be_used_is_an_error(
    base: Path, tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    """Before the language model is loaded, which has no weights here."""
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    heard = {k: v for k, v in tensors.items() if k.startswith("speaker_encoder.")}
    save_file(heard if change else {"other": torch.ones(1)}, folder / "model.safetensors")
    edit_config(folder, speaker_encoder_config=ENCODER | (change or {}))
    with pytest.raises((CheckpointError, DecoderConfigError), match=message):
        create_service(configured(folder))


def test_an_eager_beginning_has_the_texts_of_its_sentence(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rest continues with the texts that follow, whatever the beginning itself had."""
    service = create_service(configured(base))
    family, requests = service.prompts.family, list[Request]()
    assert family is not None
    speak_job = service.client.speak

    def speaking(job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        requests.append(job.request)
        return speak_job(job)

    monkeypatch.setattr(service.client, "speak", speaking)

    async def ask(served: Serving) -> None:
        config = session_config(max_tokens=7 * 400)
        config.config.eager = 2
        words = say("One two three four five six, seven eight.")
        responses = await run_conversation(served, config, words, flush("f"))
        assert responses[-1].HasField("done")

    run_with_server(service, ask)
    first, second = requests
    voice = Voice("any")
    opening, sentence = "One two three four five six,", "One two three four five six, seven eight."
    assert first.sampling.frame_texts == family.frame_texts(opening, voice)
    frames = [token for token in second.prompt_ids if isinstance(token, tuple)]
    assert len(frames) > 2
    texts = family.frame_texts(sentence, voice)
    padded = (*texts, *(PAD for _ in frames))
    assert tuple(frame[-1] for frame in frames) == padded[: len(frames)]
    assert second.sampling.frame_texts == texts[len(frames) :]
    asyncio.run(service.client.close())


@on_service
def test_named_voices_take_no_recording(running: Running) -> None:
    synthesizer = running.service.synthesizer
    assert synthesizer is not None
    with pytest.raises(PreconditionError):
        asyncio.run(synthesizer.cloner.from_clip(wav(hum(1.0)), None, "hello"))


def test_missing_codebooks_are_an_error(tmp_path: Path) -> None:
    folder = write_qwen3_tts_family(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["talker.code_predictor.lm_head.5.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="the weights do not have 7 codebooks"):
        create_service(configured(folder))

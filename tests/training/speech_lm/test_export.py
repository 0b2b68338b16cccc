"""Exported toy weights in the service: the trained networks, streams, voices, clips, words."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

import tts
from decoder import DecodeRequest, StreamState, create_decoder, read_prompt_audio, render
from decoder.codecs.source_filter.modules import SpeechCodec
from llm import CheckpointError, RequestError
from tests.decoder.toys import windows_of
from tests.fakes import LlamaShape, random_llama
from tests.training.speech_lm.tokens import CODEBOOK, KNOWN, write_tables
from tests.tts.family_services import configured
from tests.tts.serving import Serving, error_of, run_with_server
from training.llama import ModelConfig
from training.speech_codec.checkpoint import DECODER, VOICE_ENCODER, halved, read, write
from training.speech_codec.config import DESIGNS, save_config
from training.speech_lm.documents import spelled
from training.speech_lm.export import main as export
from training.speech_lm.speaker import Speaker
from training.speech_lm.vocabulary import (
    BRITISH_NAME,
    FIRST_SYMBOL,
    SPANISH,
    SPELLED,
    Symbols,
    build_tokenizer,
)
from training.speech_lm.writer import tokens_of, tokens_of_phonemes, tokens_of_spanish
from training.vocabulary import FIRST_CODE, PHONEMES, START_OF_SPEECH
from tts.checkpoint.tokenizer import TextTokenizer
from tts.errors import InvalidRequestError, Precondition, PreconditionError
from tts.factory import Service, create_service
from tts.riva.stubs.common_pb2 import LINEAR_PCM
from tts.riva.stubs.tts_pb2 import SynthesizeSpeechRequest, ZeroShotData
from tts.riva.stubs.tts_pb2_grpc import RivaSpeechSynthesisStub
from tts.speech.types import SamplingOverrides, SpeechRequest, TimestampGranularity
from tts.text.ipa import marked
from tts.text.lexicon.entries import Alphabet, Pronunciation
from tts.text.segmenter import split_text
from tts.voices.types import Voice, VoicePrompt

TOY = DESIGNS["toy"]
ROWS = {"bf_one": [9, 8, 7, 6], "af_heart": [1, 2, 3, 4], "am_michael": [40, 41, 42, 43]}
SERVED = {"run_model_test_mode": False, "max_length": 768}
MARKED = {"token": "<|start_of_speech|>", "letters": "é", "phonemes": ""}
SIZES = ModelConfig(CODEBOOK, 128, 2, 2, 1, 384, max_tokens=768)


def audible(codec: SpeechCodec) -> SpeechCodec:
    """Random weights that make every part audible, and mean values of some noise."""
    for block in codec.decoder.blocks:
        torch.nn.init.constant_(block.scale, 1.0)
    torch.nn.init.normal_(codec.decoder.pitch.weight, std=0.1)
    with torch.no_grad():
        codec.voice_encoder.even.momentum = 1.0
        codec.voice(torch.randn(8, 20 * TOY.hop) * torch.rand(8, 20 * TOY.hop) * 0.1)
    return codec.eval()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights as training leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        codec = audible(SpeechCodec(TOY))
    model = random_llama(LlamaShape(128, 2, 2, 1, 384), FIRST_CODE + CODEBOOK, seed=0)
    write(halved(model), folder / "lm.safetensors")
    (folder / "lm.json").write_text(json.dumps(asdict(SIZES)))
    (folder / "voices.json").write_text(json.dumps(ROWS))
    decoder = {f"{DECODER}{k}": v for k, v in codec.decoder.state_dict().items()}
    write(halved(decoder), folder / "toy.safetensors")
    voices = {f"{VOICE_ENCODER}{k}": v for k, v in codec.voice_encoder.state_dict().items()}
    write(halved(voices), folder / "voices.safetensors")
    save_config(TOY, folder / "toy.json")
    write_tables(folder / "package")
    return folder


def export_to(runs: Path, out: Path) -> None:
    flags = ["--lm", runs / "lm.safetensors", "--codec", runs / "toy.safetensors"]
    flags += ["--voice-encoder", runs / "voices.safetensors", "--config", runs / "toy.json"]
    flags += ["--package", runs / "package", "--out", out]
    export(list(map(str, flags)))


@pytest.fixture(scope="module")
def folder(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("voice") / "voice"
    export_to(runs, out)
    return out


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    service = create_service(configured(folder, **SERVED))
    yield service
    asyncio.run(service.client.close())


@pytest.fixture(scope="module")
def speaker(runs: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    """Training's own way to speak, with the codec's weights as they were exported."""
    rounded = tmp_path_factory.mktemp("rounded") / "toy.safetensors"
    exported = read(folder / "codec" / "model.safetensors")
    write(exported, rounded)
    return Speaker(runs / "lm.safetensors", rounded, runs / "toy.json", rounded)


def request(text: str = "bad cab", seed: int = 3, **values: object) -> SpeechRequest:
    sampling = SamplingOverrides(seed=seed, min_tokens=40, max_tokens=40)
    return SpeechRequest(text, sampling=sampling, **values)  # type: ignore[arg-type]


def said(service: Service, wanted: SpeechRequest) -> bytes:
    assert service.synthesizer is not None
    return asyncio.run(service.synthesizer.synthesize(wanted)).audio


def test_files_are_small_and_named(folder: Path) -> None:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "speech.json",
        "tokenizer.json", "tokenizer_config.json", "voices.json", "codec/config.json",
        "codec/model.safetensors",
    }  # fmt: skip
    codec = load_file(folder / "codec" / "model.safetensors")
    assert {name.split(".")[0] for name in codec} == {"decoder", "voice_encoder"}
    kinds = {name: value.dtype for name, value in codec.items()}
    assert kinds["decoder.blocks.0.ff_in.weight"] == torch.int8
    assert kinds["voice_encoder.input.weight"] == torch.float16
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    voices = json.loads((folder / "voices.json").read_text())
    assert [voice["name"] for voice in voices["voices"]] == ["hazel", "owen", "bf_one"]
    assert voices["default"] == "hazel"
    assert voices["voices"][2]["language_codes"] == ["en-GB"]


def test_the_services_decoder_is_the_trained_network(folder: Path, speaker: Speaker) -> None:
    """In blocks: float32 sums in another order, which the phase of pulses adds up."""
    decoder = create_decoder(folder / "codec")
    codes = np.random.default_rng(0).integers(0, CODEBOOK, 80).tolist()
    voice = ROWS["af_heart"]
    with torch.inference_mode():
        whole = speaker.codec.decode(torch.tensor([codes]), torch.tensor([voice]))[0].numpy()
    options = replace(decoder.spec.recommended, silent_codes=0)  # these codes begin with sound
    windows = windows_of(decoder.spec, options, codes, prompt_codes=voice)
    state = StreamState()
    got = np.concatenate([render(decoder, [DecodeRequest(w, state)])[0] for w in windows])
    assert len(windows) > 4
    assert whole.std() > 0.005
    assert np.abs(got - whole).mean() < 2.5e-5
    assert np.abs(got - whole).max() < 5e-3


def test_prompts_are_those_of_training(service: Service) -> None:
    prompts, voices = service.prompts, service.synthesizer.voices
    hazel = voices.get("hazel")
    assert hazel.prompt == VoicePrompt((1, 2, 3, 4))
    row = [FIRST_CODE + code for code in (1, 2, 3, 4)]
    wanted = [*row, *tokens_of("Bad cab."), START_OF_SPEECH]
    assert list(prompts.speech_prompt("Bad cab.", hazel)) == wanted
    word = spelled(Symbols(KNOWN).places("ðˈəd")).tolist()
    assert word[0] == SPELLED
    got = prompts.speech_prompt(f"a {marked('ˈðəd')}, b", hazel)
    assert list(got) == [*row, *b"a ", *word, *b", b", START_OF_SPEECH]
    alone = prompts.speech_prompt(marked("bˈad"), hazel)
    phonemes = tokens_of_phonemes("bˈad", Symbols(KNOWN))
    assert list(alone) == [*row, *phonemes, START_OF_SPEECH]


@pytest.fixture(scope="module")
def bilingual(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of a model that also has a Spanish voice."""
    folder = tmp_path_factory.mktemp("bilingual")
    for path in runs.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "voices.json").unlink()
    (folder / "voices.json").write_text(json.dumps(ROWS | {"ef_lucia": [5, 6, 7, 8]}))
    export_to(folder, folder / "voice")
    service = create_service(configured(folder / "voice", **SERVED))
    yield service
    asyncio.run(service.client.close())


def test_a_language_chooses_its_voice_which_reads_its_letters(bilingual: Service) -> None:
    synthesizer, prompts = bilingual.synthesizer, bilingual.prompts
    assert synthesizer is not None
    voice = synthesizer.voices.choose("", "es-MX")
    assert (voice.name, voice.language_codes) == ("lucia", ("es",))
    row = [FIRST_CODE + code for code in (5, 6, 7, 8)]
    (text,) = (
        s.text
        for s in split_text(
            "¡Ñandúes en Łódź: 21 años!", synthesizer.settings.traits.text_options(None, voice)
        )
    )
    assert text == "Ñandúes en Łódź: veintiún años!"
    wanted = tokens_of_spanish("Ñandúes en Lódz: veintiún años!")
    assert list(prompts.speech_prompt(text, voice)) == [*row, *wanted, START_OF_SPEECH]
    greek = prompts.speech_prompt("Ñu Αθήνα ó πñ 日本", voice)
    assert list(greek) == [*row, *tokens_of_spanish("Ñu  ó piñ "), START_OF_SPEECH]
    word = spelled(Symbols(KNOWN).places("ˈod")).tolist()
    got = prompts.speech_prompt(f"ñ {marked('ˈod')}", voice)
    assert list(got) == [*row, *tokens_of_spanish("ñ "), *word, START_OF_SPEECH]
    said_in_spanish = said(bilingual, request("adiós", voice=voice))
    assert said_in_spanish != said(bilingual, request("adios", voice=voice))


def test_letters_of_other_scripts_are_left_out_with_a_warning(bilingual: Service) -> None:
    synthesizer = bilingual.synthesizer
    assert synthesizer is not None
    for name in ("hazel", "lucia"):
        voice = synthesizer.voices.get(name)
        results = [
            asyncio.run(synthesizer.synthesize(request(text, voice=voice))).result
            for text in ("bad Привет", "Привет")
        ]
        lost = "6 letter(s) that this voice cannot read were left out"
        assert lost in results[0].warnings
        assert set(results[1].warnings) == {lost, "the text holds nothing that can be spoken"}


def test_english_is_read_as_before_next_to_another_language(bilingual: Service) -> None:
    synthesizer, prompts = bilingual.synthesizer, bilingual.prompts
    assert synthesizer is not None
    hazel = synthesizer.voices.get("hazel")
    (text,) = (
        s.text
        for s in split_text(
            "A café, 21 miles.", synthesizer.settings.traits.text_options(None, hazel)
        )
    )
    assert text == "A cafe, twenty-one miles."
    assert SPANISH not in prompts.speech_prompt(text, hazel)
    with pytest.raises(InvalidRequestError, match="speaks en-US"):
        synthesizer.voices.choose("hazel", "es")
    own = Voice("own", prompt=VoicePrompt((1, 2, 3, 4)), language="es")
    assert SPANISH in prompts.speech_prompt("sí", own)


def test_without_a_spanish_voice_spanish_is_no_language_of_it(folder: Path) -> None:
    assert "languages" not in json.loads((folder / "speech.json").read_text())
    assert "spanish" not in (folder / "tokenizer.json").read_text()


def test_codes_are_those_of_the_trained_model(service: Service, speaker: Speaker) -> None:
    """At temperature 0, where int8 weights leave the likeliest token what it is, mostly."""
    model, row = speaker.model, ROWS["af_heart"]
    ids = torch.tensor([[*(FIRST_CODE + c for c in row), *tokens_of("bad"), START_OF_SPEECH]])
    with torch.inference_mode():
        for _ in range(12):
            scores = model(ids).logits[0, -1]
            scores[:FIRST_CODE] = -torch.inf
            ids = torch.cat((ids, scores.argmax()[None, None]), 1)
    wanted = (ids[0, -12:] - FIRST_CODE).tolist()
    heard: list[int] = []

    async def listen() -> None:
        assert service.synthesizer is not None
        sampling = SamplingOverrides(temperature=0.0, min_tokens=12, max_tokens=12)
        found = await service.synthesizer.synthesize(SpeechRequest("bad", sampling=sampling))
        for chunk in found.chunks:
            heard.extend(chunk.carry[-chunk.token_count :])

    asyncio.run(listen())
    assert len(heard) == len(wanted)
    assert np.mean(np.array(heard) == wanted) > 0.7


def test_streams_unary_calls_and_crowds_give_the_same_audio(service: Service) -> None:
    synthesizer = service.synthesizer
    assert synthesizer is not None
    alone = said(service, request())
    assert alone == said(service, request())
    assert alone != said(service, request(seed=4))
    assert len(alone) == 40 * TOY.hop * 2

    async def streamed(wanted: SpeechRequest) -> bytes:
        parts = [getattr(event, "data", b"") async for event in synthesizer.stream(wanted)]
        return b"".join(parts)

    async def crowd() -> list[bytes]:
        others = [request(f"bed {n}", seed=n) for n in range(7)]
        return await asyncio.gather(*map(streamed, [*others, request()]))

    together = asyncio.run(crowd())
    assert together[-1] == alone
    assert len(set(together)) == 8


def test_voices_differ_by_name_and_a_clip_gives_its_codes(
    service: Service, speaker: Speaker
) -> None:
    synthesizer = service.synthesizer
    assert synthesizer is not None
    owen = synthesizer.voices.get("owen")
    assert said(service, request(voice=owen)) != said(service, request())
    noise = np.random.default_rng(2).normal(0, 0.1, 60_000).astype(np.float32)
    clip = io.BytesIO()
    soundfile.write(clip, noise, TOY.sample_rate, format="WAV", subtype="FLOAT")
    prompt = asyncio.run(synthesizer.cloner.from_clip(clip.getvalue(), None, ""))
    heard = read_prompt_audio(clip.getvalue(), TOY.sample_rate)
    assert list(prompt.codes) == speaker.voice_of(heard)
    assert said(service, request(voice=Voice("own", prompt=prompt)))


def test_a_voice_of_another_model_is_refused(service: Service) -> None:
    synthesizer = service.synthesizer
    assert synthesizer is not None
    with pytest.raises(RequestError, match="has 3 speech tokens, a voice of this model has 4"):
        synthesizer.cloner.from_codes((1, 2, 3))
    with pytest.raises(RequestError, match="create it from its recording again"):
        said(service, request(voice=Voice("old", prompt=VoicePrompt((1,) * 75, "hello"))))


def test_word_times_need_an_aligner(service: Service) -> None:
    with pytest.raises(PreconditionError) as caught:
        said(service, request(timestamps=TimestampGranularity.WORD))
    assert caught.value.reason is Precondition.WORD_TIMESTAMPS


def test_a_phrase_may_be_given_in_ipa(service: Service) -> None:
    plain = said(service, request("The cab, bad."))
    spoken = said(
        service,
        request("The cab, bad.", pronunciations=(Pronunciation("cab", "fˈab", Alphabet.IPA),)),
    )
    assert spoken != plain
    with pytest.raises(InvalidRequestError, match="'x' stands for no phoneme") as caught:
        said(service, request(pronunciations=(Pronunciation("cab", "xab", Alphabet.IPA),)))
    (violation,) = caught.value.violations
    assert violation.field == "config.pronunciations[0].pronunciation"


def test_symbols_are_read_as_phonemes(folder: Path) -> None:
    tokenizer, known = TextTokenizer(folder / "tokenizer.json"), Symbols(KNOWN)
    ids = [FIRST_SYMBOL + place for place in known.places("bˈad z")]
    assert tokenizer.decode(ids) == "b ˈ a d / z "
    assert tokenizer.encode("bad z") == list(b"bad z")
    assert tokenizer.control_id("<|phonemes|>") == PHONEMES
    assert tokenizer.control_id(BRITISH_NAME) == SPELLED + 1


def test_the_teachers_symbols_have_different_texts() -> None:
    letters = (
        "AIOQSTWYabcdefhijklmnopqrstuvwxyzɑɐɒæβɔɕçɖðʤəɚɛɜɟɡɥɨɪʝɯɰŋɳɲɴøɸθœɹɾɻʁɽʂʃʈʧʊʋʌɣɤχʎʒʔˈˌː"
    )
    known = Symbols(
        {symbol: 1 + place for place, symbol in enumerate(' .,;:!?—…"()“”ᵊᵻ' + letters)}
    )
    build_tokenizer(known)
    used = [phoneme for phoneme in known.phonemes() if phoneme]
    assert len(used) == len(set(used)) > 50
    assert {"oʊ", "dʒ", "ɾ", "ˈ", "ɐ"} <= set(used)


def test_the_command_says_with_it(folder: Path, tmp_path: Path) -> None:
    with tts.load(folder) as voice:
        assert set(voice.voices) == {"hazel", "owen", "bf_one"}
        speech = voice.say("bad cab", voice="owen", seed=1, max_audio_s=1.0)
        assert speech.sample_rate == 24_000
        assert (
            speech.samples.tobytes()
            == voice.say("bad cab", voice="owen", seed=1, max_audio_s=1.0).samples.tobytes()
        )
        path = speech.save(tmp_path / "clip.wav")
        assert len(voice.clone(path).say("cab", seed=1, max_audio_s=1.0).samples)


def test_riva_takes_phonemes_and_recordings_without_a_transcript(service: Service) -> None:
    """The claim of docs/riva.md about models that read phonemes and need no transcript."""
    clip = np.random.default_rng(0).normal(size=24_000, scale=3_000).astype("<i2").tobytes()
    asked = SynthesizeSpeechRequest(
        text="bad cab",
        sample_rate_hz=8_000,
        custom_dictionary="cab  dˈəf",
        custom_configuration={"seed": "3", "max_tokens": "10"},
        zero_shot_data=ZeroShotData(audio_prompt=clip, encoding=LINEAR_PCM, sample_rate_hz=24_000),
    )

    async def ask(served: Serving) -> None:
        stub = RivaSpeechSynthesisStub(served.channel)
        assert (await stub.Synthesize(asked)).audio
        assert b"".join([part.audio async for part in stub.SynthesizeOnline(iter([asked]))])
        asked.custom_dictionary = "cab  ʘ"
        error = await error_of(stub.Synthesize(asked))
        assert "custom_dictionary[0]: 'ʘ' stands for no phoneme" in str(error.details())

    run_with_server(service, ask)


def test_weights_that_do_not_belong_together_are_errors(runs: Path, tmp_path: Path) -> None:
    files = ("lm.safetensors", "lm.json", "voices.json", "toy.safetensors", "voices.safetensors")
    for name in files:
        (tmp_path / name).write_bytes((runs / name).read_bytes())
    (tmp_path / "package").symlink_to(runs / "package")
    values = json.loads((runs / "toy.json").read_text())
    (tmp_path / "toy.json").write_text(json.dumps(values | {"levels": [4, 4]}))
    with pytest.raises(ValueError, match="writes 64 codes"):
        export_to(tmp_path, tmp_path / "out")
    (tmp_path / "toy.json").write_text(json.dumps(values))
    for file, part in (("toy", "decoder"), ("voices", "voice_encoder")):
        path = tmp_path / f"{file}.safetensors"
        kept = path.read_bytes()
        write({"coder.content.norm.weight": torch.ones(2)}, path)
        with pytest.raises(ValueError, match=rf"{file}.safetensors has no {part}"):
            export_to(tmp_path, tmp_path / "out")
        path.write_bytes(kept)


def test_one_file_may_have_both_parts_and_others(runs: Path, folder: Path, tmp_path: Path) -> None:
    for path in runs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    both = {"coder.content.norm.weight": torch.ones(2)}
    for name in ("toy.safetensors", "voices.safetensors"):
        both |= load_file(runs / name)
        (tmp_path / name).unlink()
    for name in ("toy.safetensors", "voices.safetensors"):
        write(both, tmp_path / name)
    export_to(tmp_path, tmp_path / "out")
    own, wanted = (load_file(f / "codec" / "model.safetensors") for f in (tmp_path / "out", folder))
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[name], wanted[name]) for name in wanted)


def folder_without(folder: Path, name: str, parent: Path) -> Path:
    """Return a folder with links to all files of a voice but one."""
    own = parent / "voice"
    own.mkdir()
    for path in folder.iterdir():
        if path.name != name:
            (own / path.name).symlink_to(path)
    return own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_code": "x"}, "first_code must be a token's number"),
        ({"symbols": "abc"}, "symbols must be a list"),
        ({"colour": 1}, "sonant has no colour"),
        ({"languages": ["es"]}, "must be such as"),
        ({"languages": {"es": "<|start_of_speech|>"}}, "must be such as"),
        ({"languages": {"es": MARKED | {"letters": ["é", 1]}}}, "must be such as"),
        ({"languages": {"es": {"token": MARKED["token"], "letters": "é"}}}, "must be such as"),
        ({"languages": {"es": MARKED, "es-MX": MARKED}}, "must be such as"),
        ({"languages": {"en-GB": MARKED}}, "languages, besides English, must"),
        ({"languages": {"": MARKED}}, "languages, besides English, must"),
        (
            {"languages": {"es": MARKED | {"token": "<|none|>"}}},
            r"tokenizer.json has no token <\|none\|>",
        ),
        ({"first_symbol": 10**9}, "the tokens of symbols must be below first_code"),
        ({"first_code": 400}, "the language model writes frames of 1 codes below 112"),
    ],
)
def test_a_broken_speech_file_is_named(
    folder: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    own = folder_without(folder, "speech.json", tmp_path)
    values = json.loads((folder / "speech.json").read_text())
    (own / "speech.json").write_text(json.dumps(values | changes))
    with pytest.raises(CheckpointError, match=message):
        create_service(configured(own, **SERVED))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([1, 2, 3], "'hazel' has 3 speech tokens, a voice of this model has 4"),
        ([1, 2, 3, 64], r"voice 'hazel': speech tokens must be in 0\.\.63"),
    ],
)
def test_a_broken_row_of_voices_is_named(
    folder: Path, tmp_path: Path, codes: list[int], message: str
) -> None:
    own = folder_without(folder, "voices.json", tmp_path)
    values = json.loads((folder / "voices.json").read_text())
    values["voices"][0]["codes"] = codes
    (own / "voices.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=rf"voices\.json: .*{message}"):
        create_service(configured(own, **SERVED))

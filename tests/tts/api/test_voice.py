"""The Python API on the built-in voice: the audio of gRPC, from any thread or event loop."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch

import tts
from decoder import AudioDecoder, create_decoder, read_prompt_audio
from decoder.codecs.source_filter.modules import FiniteScalarQuantizer
from llm import CheckpointError, ConfigError, EngineStoppedError, FinishReason
from tests.deadlines import HANG_S
from tests.fakes import wait_until_idle
from tests.tts.serving import hum, run, serving, wav
from tts.api.audio import Speech
from tts.api.load import LIMITS, load, load_service
from tts.api.request import SpeechOptions
from tts.api.running import RunningService
from tts.api.suffixes import SUFFIXES
from tts.api.voice import LoadedVoice
from tts.config.defaults import embedded_folder
from tts.errors import InvalidRequestError, PreconditionError, VoiceNotFoundError
from tts.factory import Service
from tts.say import main
from tts.text.lexicon.files import load_lexicon
from tts.v1 import speech_pb2 as pb

TEXT = "Good morning. This is a test."
GREETING, SHORT = "Good morning.", "A test."
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Service:
    """The built-in voice, with a lexicon whose words no other test says."""
    path = tmp_path_factory.mktemp("lexicon") / "words.txt"
    path.write_text("tomato\t/təˈmɑːtoʊ/\nGIF\tJH IH1 F\nplinth\tcolumn\n")
    return load_service({"lexicon": str(path)})


@pytest.fixture(scope="module")
def voice(embedded: Service) -> Iterator[LoadedVoice]:
    with LoadedVoice(RunningService(embedded)) as loaded:
        yield loaded
        run(wait_until_idle(embedded.client))


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> Iterator[LoadedVoice]:
    """A voice with random weights, for what does not depend on them."""
    with load(tiny_checkpoint) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def plain(voice: LoadedVoice) -> Speech:
    """TEXT with seed 7, with the times of its words."""
    return voice.say(TEXT, seed=7, timestamps="word")


def emphasised(level: str) -> str:
    return f"<speak>You must <emphasis level='{level}'>never</emphasis> open it.</speak>"


@pytest.fixture(scope="module")
def stressed_by(voice: LoadedVoice) -> Callable[[str], Speech]:
    """Speak a sentence with an emphasised word, once for each level."""

    @functools.cache
    def say(level: str) -> Speech:
        return voice.say(emphasised(level), seed=7, markup="ssml", timestamps="word")

    return say


def test_the_same_seed_gives_the_same_bytes_as_a_unary_call(
    voice: LoadedVoice, embedded: Service
) -> None:
    config = pb.SynthesisConfig(
        audio_format=pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_F32LE),
        voice=pb.VoiceSelection(name="owen"),
    )
    config.sampling.seed = 7
    request = pb.SynthesizeRequest(config=config, input=pb.SynthesisInput(text=GREETING))

    async def ask() -> pb.SynthesizeResponse:
        async with serving(embedded) as served:
            return await served.speech.Synthesize(request)

    answer = run(ask())
    speech = voice.say(GREETING, voice="owen", seed=7)
    assert speech.samples.tobytes() == answer.audio
    assert speech.samples.dtype == np.float32
    assert speech.samples.flags.writeable
    assert speech.sample_rate == answer.started.audio_format.sample_rate_hertz == voice.sample_rate
    assert speech.seed == answer.started.seed == 7
    assert speech.finish_reason is FinishReason.STOP
    assert speech.duration_s == len(speech.samples) / voice.sample_rate > 0.5


def test_streamed_parts_join_to_the_whole_audio(voice: LoadedVoice, plain: Speech) -> None:
    whole = plain
    parts = list(voice.stream(TEXT, seed=7, timestamps="word"))
    assert np.array_equal(np.concatenate([part.samples for part in parts]), whole.samples)
    assert len([part for part in parts if len(part.samples)]) > 2
    ends = np.cumsum([len(part.samples) for part in parts])
    assert [part.sample_offset for part in parts] == [0, *ends[:-1]]
    assert tuple(word for part in parts for word in part.words) == whole.words
    assert [word.word for word in whole.words] == TEXT.split()
    assert whole.words[-1].end_s <= whole.duration_s


def test_another_pitch_keeps_the_times_and_the_timbre(voice: LoadedVoice, plain: Speech) -> None:
    for pitch in (5.0, -5.0):
        moved = voice.say(TEXT, voice="hazel", seed=7, pitch=pitch)
        assert len(moved.samples) == len(plain.samples)
        before, after = periods_of(plain.samples), periods_of(moved.samples)
        both = (before > 0) & (after > 0)
        assert both.sum() > 20
        assert np.median(before[both] / after[both]) == pytest.approx(2 ** (pitch / 12), rel=0.03)
        change_db = envelope_db(moved.samples) - envelope_db(plain.samples)
        assert np.abs(change_db - change_db.mean()).mean() < 1.5


def test_a_part_of_a_document_has_another_pitch(voice: LoadedVoice) -> None:
    source = "<speak><s>Good morning.</s> <prosody pitch='+5st'>This is a test.</prosody></speak>"
    flat = source.replace("+5st", "medium")
    plain, high = (voice.say(text, seed=7, markup="ssml") for text in (flat, source))
    parts = list(voice.stream(source, seed=7, markup="ssml"))
    assert np.array_equal(np.concatenate([part.samples for part in parts]), high.samples)
    assert len(high.samples) == len(plain.samples)
    begin = sum(len(part.samples) for part in parts if part.text_end <= source.index("</s>"))
    assert 0 < begin < len(plain.samples)
    assert np.array_equal(high.samples[:begin], plain.samples[:begin])
    before, after = (periods_of(speech.samples[begin:]) for speech in (plain, high))
    both = (before > 0) & (after > 0)
    assert np.median(before[both] / after[both]) == pytest.approx(2 ** (5 / 12), rel=0.03)


@pytest.mark.parametrize(
    ("level", "lengths", "gains_db"),
    [("strong", (1.1, 1.4), (2.5, 5.0)), ("reduced", (0.7, 0.95), (-5.0, -2.5))],
)
def test_an_emphasised_word_is_longer_and_louder_and_the_others_stay(
    voice: LoadedVoice,
    stressed_by: Callable[[str], Speech],
    level: str,
    lengths: tuple[float, float],
    gains_db: tuple[float, float],
) -> None:
    source = emphasised(level)
    plain, stressed = stressed_by("none"), stressed_by(level)
    rate = voice.sample_rate
    for before, after in zip(plain.words, stressed.words, strict=True):
        length = (after.end_s - after.start_s) / (before.end_s - before.start_s)
        old, new = (
            speech.samples[round(word.start_s * rate) : round(word.end_s * rate)]
            for speech, word in ((plain, before), (stressed, after))
        )
        if before.word == "never":
            assert lengths[0] < length < lengths[1]
            gain_db = 10 * np.log10(np.mean(new**2) / np.mean(old**2))
            assert gains_db[0] < gain_db < gains_db[1]
        else:
            assert length == pytest.approx(1.0)
    added = len(stressed.samples) - len(plain.samples)
    first, last = plain.words[0], plain.words[-1]
    begin, end = round((first.end_s - 0.02) * rate), round((last.start_s + 0.02) * rate)
    assert np.array_equal(stressed.samples[:begin], plain.samples[:begin])
    assert np.array_equal(stressed.samples[end + added :], plain.samples[end:])
    parts = list(voice.stream(source, seed=7, markup="ssml", timestamps="word"))
    assert np.array_equal(np.concatenate([part.samples for part in parts]), stressed.samples)
    capped = voice.say(source, seed=7, markup="ssml", max_audio_s=plain.duration_s)
    assert len(capped.samples) == min(len(stressed.samples), len(plain.samples))


def test_words_and_segments_end_with_emphasised_speech_that_is_cut(
    voice: LoadedVoice, stressed_by: Callable[[str], Speech]
) -> None:
    source, whole = emphasised("strong"), stressed_by("strong").words
    for longest_s in (whole[2].end_s, whole[-1].start_s):
        longest: SpeechOptions = {"seed": 7, "markup": "ssml", "max_audio_s": longest_s}
        cut = voice.say(source, timestamps="word", **longest)
        timed = voice.say(source, timestamps="segment", **longest)
        assert cut.finish_reason is FinishReason.LENGTH
        assert all(word.start_s < cut.duration_s for word in cut.words)
        assert cut.words[-1].end_s <= cut.duration_s + 1e-6
        assert timed.segments[-1].end_s <= timed.duration_s + 1e-6


def periods_of(samples: np.ndarray) -> np.ndarray:
    """Return the periods in samples at 24 kHz, by autocorrelation, one for 20 ms; 0: no voice."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, 1200)[::480].astype(np.float64)
    found = np.fft.irfft(np.abs(np.fft.rfft(frames, 2400)) ** 2)[:, :480]
    shares = found / np.maximum(found[:, :1], 1e-9) / (1 - np.arange(480) / 1200)
    shares[:, :60] = 0  # above 400 Hz
    is_peak = (shares >= np.roll(shares, 1, 1)) & (shares >= np.roll(shares, -1, 1))
    best = (shares * is_peak).max(1, keepdims=True)
    period = ((shares >= 0.9 * best) & is_peak).argmax(1)
    is_voiced = (best[:, 0] > 0.7) & (found[:, 0] > 0.01 * found[:, 0].max())
    return np.where(is_voiced, period, 0)


def envelope_db(samples: np.ndarray) -> np.ndarray:
    """Return the mean spectrum up to 8 kHz in dB, smoothed over 580 Hz."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, 1024)[::256] * np.hanning(1024)
    spectrum = np.abs(np.fft.rfft(frames)).mean(0)
    return 20 * np.log10(np.convolve(spectrum, np.ones(25) / 25, "same")[12:340])


def test_segments_have_times(voice: LoadedVoice) -> None:
    whole = voice.say(TEXT, seed=7, timestamps="segment")
    parts = list(voice.stream(TEXT, seed=7, timestamps="segment"))
    assert [TEXT[s.text_start : s.text_end].strip() for s in whole.segments] == [
        "Good morning.",
        "This is a test.",
    ]
    assert tuple(segment for part in parts for segment in part.segments) == whole.segments


def test_marks_inside_a_sentence_have_the_times_of_words(voice: LoadedVoice) -> None:
    source = (
        "<speak><s>Go from <mark name='here'/> here, to <mark name='there'/>there!</s>"
        "<mark name='end'/></speak>"
    )
    whole = voice.say(source, seed=7, markup="ssml")
    parts = list(voice.stream(source, seed=7, markup="ssml", timestamps="word"))
    words = {word.word: word.start_s for part in parts for word in part.words}
    assert [(mark.kind.value, mark.name, mark.time_s) for mark in whole.marks] == [
        ("sentence", "", 0.0),
        ("mark", "here", words["here,"]),
        ("mark", "there", words["there!"]),
        ("mark", "end", whole.duration_s),
    ]
    assert 0 < words["here,"] < words["there!"] < whole.duration_s
    assert tuple(mark for part in parts for mark in part.marks) == whole.marks
    assert whole.words == ()
    plain = voice.say("Go from here, to there!", seed=7)
    assert np.array_equal(plain.samples, whole.samples)  # marks do not change the speech
    with pytest.raises(InvalidRequestError, match="markup: 'html' must be one of 'ssml', 'tags'"):
        voice.say(source, markup="html")  # type: ignore[arg-type]


def level_db(samples: np.ndarray) -> float:
    """Return the level of the parts of 20 ms that are not silent."""
    frames = samples[: len(samples) // 480 * 480].reshape(-1, 480).astype(np.float64)
    power = (frames**2).mean(1)
    return float(10 * np.log10(power[power > 1e-3 * power.max()].mean()))


def test_turns_of_a_dialogue_have_one_level(voice: LoadedVoice) -> None:
    """Alone these voices differ by about 10 dB."""
    turns = [
        ("hazel", "Did the parcel arrive?"),
        ("vera", "It did, I put it on the table."),
        ("thea", "Then let us open it."),
    ]
    speech = voice.say(turns, seed=3, pause_s=0.25)
    assert [mark.name for mark in speech.marks] == ["hazel", "vera", "thea"]
    begins = [round(mark.time_s * speech.sample_rate) for mark in speech.marks]
    ends = [begin - speech.sample_rate // 4 for begin in begins[1:]]
    levels = [level_db(speech.samples[b:e]) for b, e in zip(begins, [*ends, None], strict=True)]
    assert max(levels) - min(levels) < 2


def test_a_clone_speaks_in_a_dialogue(tiny: LoadedVoice, tiny_checkpoint: Path) -> None:
    with load(tiny_checkpoint) as other:
        clone = tiny.clone(wav(hum(1.5)), "hello there")
        speech = tiny.say([(clone, "Hi."), ("owen", "Oh."), ("", "Ah.")], seed=1)
        assert [mark.name for mark in speech.marks] == ["prompt", "owen", "hazel"]
        parts = list(tiny.stream([(clone, "Hi."), ("owen", "Oh."), ("", "Ah.")], seed=1))
        assert np.array_equal(np.concatenate([part.samples for part in parts]), speech.samples)
        assert tuple(mark for part in parts for mark in part.marks) == speech.marks
        with pytest.raises(InvalidRequestError, match=r"turns\[1\]\.voice: is a voice of another"):
            tiny.say([("hazel", "Hi."), (other, "Oh.")])
        with pytest.raises(InvalidRequestError, match=r"turns\[0\]\.text: is empty"):
            tiny.say([("hazel", "")])
        with pytest.raises(InvalidRequestError, match="markup: is for a text"):
            tiny.say([("hazel", "Hi.")], markup="tags")
        with pytest.raises(InvalidRequestError, match="pause_s: is for the turns"):
            tiny.say("Hi.", pause_s=1.0)


def test_truncation_is_reported(voice: LoadedVoice) -> None:
    whole = voice.say(TEXT, seed=7, max_audio_s=0.5)
    *_, last = voice.stream(TEXT, seed=7, max_audio_s=0.5)
    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.duration_s <= 0.5
    assert whole.warnings
    assert last.warnings == whole.warnings


def test_each_option_has_its_effect(tiny: LoadedVoice) -> None:
    def say(**options: Any) -> Speech:
        return tiny.say(TEXT, max_tokens=40, **{"seed": 7, **options})

    plain = say()
    assert say(speaking_rate=0.5).duration_s > 1.5 * plain.duration_s
    assert np.abs(say(gain_db=-6.0).samples).max() < 0.6 * np.abs(plain.samples).max()
    assert say(sample_rate=8_000).sample_rate == 8_000
    assert say(seed=8).samples.tobytes() != plain.samples.tobytes()
    assert say(language="en-US").samples.tobytes() == plain.samples.tobytes()
    other = {"prepend_prompt_speech_tokens": "rolling", "chunk_size": [5], "buffer": 20}
    assert say(**other).samples.tobytes() != plain.samples.tobytes()
    respelled = say(pronunciations={"test": "long example"})
    assert respelled.samples.tobytes() != plain.samples.tobytes()


def test_a_lexicon_is_spoken_as_the_pronunciations_of_a_request_are(
    voice: LoadedVoice, embedded: Service
) -> None:
    """The built-in voice reads phonemes: they reach its prompt."""
    found = voice.say("A tomato on a plinth.", seed=7)
    assert [(said.phrase, said.spoken, said.alphabet.value) for said in found.pronunciations] == [
        ("tomato", "təˈmɑːtoʊ", "ipa"),
        ("plinth", "column", "letters"),
    ]
    asked = {"phonemes": {"tomato": "təˈmɑːtoʊ"}, "pronunciations": {"plinth": "column"}}
    assert voice.say("A tomato on a plinth.", seed=7, **asked).samples.tobytes() == (
        found.samples.tobytes()
    )
    other = voice.say("A tomato on a plinth.", seed=7, phonemes={"tomato": "təˈmeɪtoʊ"})
    assert other.samples.tobytes() != found.samples.tobytes()
    *_, last = voice.stream("A GIF.", seed=7)
    (said,) = last.pronunciations
    assert (said.phrase, said.spoken) == ("GIF", "dʒˈɪf")
    assert voice.say("A tomahto.", seed=7).pronunciations == ()


def test_the_built_in_voice_speaks_spanish(voice: LoadedVoice) -> None:
    text = "Son las 9:45, señor."
    found = voice.say(text, language="es-MX", seed=7)
    assert not found.warnings
    assert found.samples.tobytes() == voice.say(text, voice="lucia", seed=7).samples.tobytes()
    assert found.samples.tobytes() != voice.say(text, voice="diego", seed=7).samples.tobytes()
    in_english = voice.say(text, voice="lucia+hazel", seed=7)
    assert in_english.samples.tobytes() != (
        voice.say(text, voice="lucia+hazel", language="es", seed=7).samples.tobytes()
    )


def test_a_clone_keeps_its_voice_in_another_language(voice: LoadedVoice, plain: Speech) -> None:
    clone = voice.clone(wav(plain.samples, plain.sample_rate))
    said = {
        language: speaker.say("No es así.", language=language, seed=7).samples.tobytes()
        for language, speaker in (("es", clone), ("", clone), ("es-ES", voice))
    }
    assert len(set(said.values())) == 3


def test_sounds_of_spanish_are_the_nearest_ones_in_english(voice: LoadedVoice) -> None:
    said = [
        voice.say("The loch.", phonemes={"loch": ipa}, seed=7).samples.tobytes()
        for ipa in ("lɑx", "lɑh", "lɑk")
    ]
    assert said[0] == said[1] != said[2]


def test_a_lexicon_with_a_sound_that_the_voice_lacks_is_refused(
    embedded: Service, tmp_path: Path
) -> None:
    path = tmp_path / "words.txt"
    path.write_text("Xhosa\t/ǁɔsə/\n")
    with pytest.raises(ConfigError, match=r"words\.txt:1: 'ǁ' stands for no phoneme"):
        load_lexicon(path, embedded.prompts.pronounced, ascii_only=True)
    with pytest.raises(ConfigError, match="is not a file"):
        load(lexicon=[tmp_path / "none.txt"])


def test_a_cloned_voice_follows_its_clip(voice: LoadedVoice, plain: Speech, tmp_path: Path) -> None:
    path = plain.save(tmp_path / "clip.wav")
    cloned = voice.clone(path, TEXT).say(SHORT, seed=7)
    assert cloned.samples.tobytes() != voice.say(SHORT, seed=7).samples.tobytes()
    without_words = voice.clone(path, "").say(SHORT, seed=7)
    assert np.array_equal(without_words.samples, cloned.samples)


def telephone(samples: np.ndarray, rate: int) -> bytes:
    """Return what a telephone leaves of a clip: 300 to 3,400 Hz, 8 bits at 8 kHz."""
    narrow = soxr.resample(samples, rate, 8_000)
    spectrum, hz = np.fft.rfft(narrow), np.fft.rfftfreq(len(narrow), 1 / 8_000)
    spectrum[(hz < 300) | (hz > 3400)] = 0
    file = BytesIO()
    soundfile.write(file, np.fft.irfft(spectrum), 8_000, format="WAV", subtype="ULAW")
    return file.getvalue()


@pytest.fixture(scope="module", params=["hazel", "hugh"])
def named(request: pytest.FixtureRequest, voice: LoadedVoice, plain: Speech) -> tuple[str, Speech]:
    """The name of a voice, and TEXT in it; the first voice is the default."""
    if request.param == "hazel":
        return request.param, plain
    return request.param, voice.say(TEXT, seed=7, voice=request.param)


@pytest.fixture(scope="module")
def codec() -> AudioDecoder:
    return create_decoder(embedded_folder() / "codec")


@pytest.mark.parametrize("rate", [24_000, 16_000, 11_025, 8_000, "telephone"])
def test_a_clip_is_nearest_to_the_row_of_the_voice_that_speaks(
    named: tuple[str, Speech], codec: AudioDecoder, rate: int | str
) -> None:
    name, speech = named
    samples, own = speech.samples, speech.sample_rate
    data = (
        wav(soxr.resample(samples, own, rate), rate)
        if isinstance(rate, int)
        else telephone(samples, own)
    )
    stored = json.loads((embedded_folder() / "voices.json").read_text())["voices"]
    rows = {entry["name"]: entry["codes"] for entry in stored}
    quantizer = FiniteScalarQuantizer(codec.spec.voice_levels)
    heard = quantizer.values(torch.tensor(codec.encode(read_prompt_audio(data, own))))
    values = quantizer.values(torch.tensor([*rows.values()]))
    gaps = (values - heard).square().mean((1, 2))
    assert [*rows][int(gaps.argmin())] == name
    assert len(rows) == 30


def test_a_clip_is_a_path_or_bytes(tiny: LoadedVoice, tmp_path: Path) -> None:
    def say(speaker: LoadedVoice, **options: Any) -> bytes:
        return speaker.say(TEXT, seed=7, max_tokens=40, **options).samples.tobytes()

    path, transcript = tmp_path / "clip.wav", "hello there"
    path.write_bytes(wav(hum(1.5)))
    by_path = tiny.clone(path, transcript)
    by_bytes = asyncio.run(tiny.aclone(path.read_bytes(), transcript))
    assert say(by_path) == say(by_bytes) != say(tiny)
    assert say(by_path, voice="owen") == say(tiny, voice="owen")
    with pytest.raises(FileNotFoundError):
        tiny.clone(tmp_path / "none.wav", transcript)


def test_a_model_that_needs_a_transcript_refuses_a_clip_without(
    tiny: LoadedVoice, tmp_path: Path
) -> None:
    path = tiny.say("Hello there.", seed=1, max_tokens=60).save(tmp_path / "clip.wav")
    with pytest.raises(InvalidRequestError, match="transcript"):
        tiny.clone(path, "")


@pytest.mark.parametrize("suffix", [*SUFFIXES])
def test_saved_files_can_be_read(plain: Speech, tmp_path: Path, suffix: str) -> None:
    path = plain.save(tmp_path / f"x{suffix}")
    headerless = {"s16le": 2, "f32le": 4, "mulaw": 1, "alaw": 1}
    if (width := headerless.get(SUFFIXES[suffix])) is not None:
        assert path.stat().st_size == width * len(plain.samples)
    else:
        samples, rate = soundfile.read(path)
        assert len(samples) / rate == pytest.approx(plain.duration_s, abs=0.1)


def test_a_wav_file_equals_that_of_the_command_line(plain: Speech, tmp_path: Path) -> None:
    path = plain.save(tmp_path / "api.wav")
    assert main(["-q", "--seed", "7", TEXT, "-o", str(tmp_path / "say.wav")]) == 0
    assert path.read_bytes() == (tmp_path / "say.wav").read_bytes()


def test_unknown_formats_are_refused(plain: Speech, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"x\.doc.*\.wav"):
        plain.save(tmp_path / "x.doc")
    with pytest.raises(InvalidRequestError, match=r"vorbis.*flac"):
        plain.save(tmp_path / "x.wav", encoding="vorbis")
    assert plain.save(tmp_path / "x.doc", encoding="flac").read_bytes()[:4] == b"fLaC"


def test_several_event_loops_and_threads_can_share_a_voice(tiny: LoadedVoice) -> None:
    expected = tiny.say(TEXT, seed=7, max_tokens=40).samples
    found: list[np.ndarray] = []

    async def several() -> None:
        speeches = await asyncio.gather(*(tiny.asay(TEXT, seed=7, max_tokens=40) for _ in range(3)))
        found.extend(speech.samples for speech in speeches)
        parts = [part.samples async for part in tiny.astream(TEXT, seed=7, max_tokens=40)]
        found.append(np.concatenate(parts))

    threads = [threading.Thread(target=asyncio.run, args=(several(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(np.array_equal(samples, expected) for samples in found)


def test_closing_a_stream_frees_its_resources(voice: LoadedVoice, embedded: Service) -> None:
    text = "One two three four five six seven eight nine ten. " * 20

    async def leave() -> None:
        parts = voice.astream(text)
        await anext(parts)
        task = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    for _ in voice.stream(text):
        break
    asyncio.run(leave())
    run(wait_until_idle(embedded.client))


def test_a_cancelled_call_stops(voice: LoadedVoice, embedded: Service) -> None:
    async def give_up() -> None:
        task = asyncio.ensure_future(voice.asay("One two three. " * 2000))
        while not (await embedded.client.status()).running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run(give_up())
    run(wait_until_idle(embedded.client))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": -1}, InvalidRequestError, "seed"),
        ({"speaking_rate": 9.0}, InvalidRequestError, "speaking_rate"),
        ({"pitch": -13}, InvalidRequestError, "pitch: must be in"),
        ({"timestamps": "phone"}, InvalidRequestError, "timestamps.*'segment', 'word'"),
        ({"prepend_prompt_speech_tokens": "x"}, InvalidRequestError, "'rolling'"),
        ({"voice": "x"}, VoiceNotFoundError, "no voice 'x'; there are: audrey"),
        ({"language": "de"}, VoiceNotFoundError, "language de"),
        (
            {"voice": "owen", "language": "de"},
            InvalidRequestError,
            "language: voice .owen. speaks en",
        ),
        ({"loudness": 1}, TypeError, "unknown options: loudness"),
    ],
)
def test_wrong_options_are_refused(
    voice: LoadedVoice, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        voice.say(TEXT, **options)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        next(voice.stream(TEXT, **options))  # type: ignore[arg-type]


def test_a_text_without_words_is_refused(voice: LoadedVoice) -> None:
    with pytest.raises(InvalidRequestError, match="is empty"):
        voice.say("  ")


def test_voices_are_listed(voice: LoadedVoice) -> None:
    assert {"hazel", "owen", "edith"} <= set(voice.voices)


def test_closing_ends_running_requests(tiny_checkpoint: Path) -> None:
    ends: list[object] = []
    voice = load(tiny_checkpoint)
    parts = voice.stream("One. " * 2000, seed=1)
    next(parts)

    def read_on() -> None:
        try:
            ends.append([part.sample_offset for part in parts])
        except EngineStoppedError as error:
            ends.append(error)
        except RuntimeError as error:  # closed between two parts
            ends.append(str(error))

    reader = threading.Thread(target=read_on)
    reader.start()
    voice.close()
    reader.join()
    (end,) = ends
    assert isinstance(end, list | EngineStoppedError) or end == "the voice is closed"


def test_closing(tiny_checkpoint: Path) -> None:
    async def scenario() -> LoadedVoice:
        async with load(tiny_checkpoint, max_batch_size=2) as loaded:
            await loaded.asay("Hi.", max_tokens=8)
            return loaded

    voice = asyncio.run(scenario())
    left_open = voice.stream("Hi.")
    voice.close()
    with pytest.raises(RuntimeError, match="the voice is closed"):
        voice.say("Hi.")
    with pytest.raises(RuntimeError, match="the voice is closed"):
        next(left_open)


def test_closing_in_several_threads_at_once(tiny_checkpoint: Path) -> None:
    voice = load(tiny_checkpoint)
    with ThreadPoolExecutor(4) as threads:
        for closed in [threads.submit(voice.close) for _ in range(8)]:
            closed.result()


def test_warnings_about_the_chunking_of_load_are_in_the_log_only(tiny_checkpoint: Path) -> None:
    with load(tiny_checkpoint, chunk_size=[2], buffer=0) as voice:
        plain = voice.say("Hi.", seed=1, max_tokens=8)
        asked = voice.say("Hi.", seed=1, max_tokens=8, buffer=0)
    assert [warning for warning in asked.warnings if "buffer" in warning]
    assert not [warning for warning in plain.warnings if "buffer" in warning]


def test_options_of_load_are_configuration_fields(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="max_batch_size"):
        load(tiny_checkpoint, max_batch_size=0)
    with pytest.raises(ConfigError, match="max_batch_sise"):
        load(tiny_checkpoint, max_batch_sise=2)
    with pytest.raises((CheckpointError, ConfigError), match="nowhere"):
        load("nowhere/at/all")
    with load(tiny_checkpoint, model={"served_model_name": "mine"}, chunk_size=[4]) as voice:
        assert repr(voice) == "<LoadedVoice of mine>"
        *_, last = voice.stream("Hi.", max_tokens=12, seed=1)
        assert last.sample_offset > 0


def test_a_text_only_model_is_refused(text_checkpoint: Path) -> None:
    with pytest.raises(PreconditionError, match="writes text only"):
        load(text_checkpoint)


PROGRAM = """
import sys
import tts
voice, streaming = (tts.load(sys.argv[1]) for _ in range(2))
voice.say("Hi.", max_tokens=8)
parts = streaming.stream("One. " * 500)
next(parts)
"""


def test_a_program_ends_without_closing(tiny_checkpoint: Path) -> None:
    """It has a voice that is not closed, and another one with a stream that is held."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tiny_checkpoint],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=HANG_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTED = """
import sys
import tts
for part in tts.load(sys.argv[1]).stream("One two. " * 5000):
    print(flush=True)
"""


def test_an_interrupted_program_has_the_exit_status_of_an_interrupt(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, tiny_checkpoint]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=HANG_S)
    assert program.returncode == -signal.SIGINT
    assert errors.splitlines()[-1] == "KeyboardInterrupt"


def test_the_package_root_exports_its_documented_names() -> None:
    assert len(set(tts.__all__)) == len(tts.__all__)
    assert [name for name in tts.__all__ if not hasattr(tts, name)] == []
    assert set(tts.__all__) <= set(dir(tts))
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = tts.lode  # type: ignore[attr-defined]


def test_the_text_length_of_a_local_call_is_not_limited() -> None:
    assert LIMITS.max_text_characters == LIMITS.max_stream_characters == 2**31 - 1

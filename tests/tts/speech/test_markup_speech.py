"""Documents that are spoken: breaks, turns, positions, limits, what is not available."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm import FinishReason
from tests.tts.ramp import RATE, SEEDED, RampClient, build, collect_speech, run
from tts.errors import InvalidRequestError, VoiceNotFoundError
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import SegmentTime, SpeechRequest, TimestampGranularity
from tts.text.markup.document import Document
from tts.text.markup.ssml import read_ssml
from tts.text.markup.tags import read_tags

TWO = "<speak>The first sentence is here.<break time='300ms'/>A second one follows.</speak>"


def heard(synthesizer: Synthesizer, markup: Document, **values: Any) -> Any:
    return collect_speech(synthesizer, markup.source, markup=markup, **values)


def ssml(inside: str, **options: bool) -> Document:
    return read_ssml(f"<speak>{inside}</speak>", **options)


def samples_of(found: Any) -> np.ndarray:
    return np.frombuffer(found.data, dtype="<i2")


def test_a_document_of_plain_text_has_the_audio_of_the_text(synthesizer: Synthesizer) -> None:
    plain = collect_speech(synthesizer, "One sentence. And another & more.")
    marked = heard(synthesizer, ssml("One sentence. And another &amp; more."))
    assert marked.data == plain.data
    assert marked.result.spoken_text == plain.result.spoken_text
    assert marked.result.warnings == ()


@pytest.mark.parametrize("rate", [16_000, 44_100])
def test_a_break_is_silence_of_exactly_its_length(
    synthesizer: Synthesizer, client: RampClient, rate: int
) -> None:
    found = heard(synthesizer, read_ssml(TWO), sample_rate=rate)
    without = collect_speech(
        synthesizer, "The first sentence is here. A second one follows.", sample_rate=rate
    )
    assert abs(found.num_samples - without.num_samples - round(0.3 * rate)) <= 2
    first = sum(c.sample_count for c in found.chunks if c.text_end <= TWO.index("<break"))
    silent = samples_of(found)[first : first + round(0.3 * rate)]
    assert not silent.any()
    if rate == RATE:
        assert np.array_equal(
            np.delete(samples_of(found), np.s_[first : first + 4800]), samples_of(without)
        )


def test_chunks_have_the_positions_of_the_source(synthesizer: Synthesizer) -> None:
    found = heard(synthesizer, read_ssml(TWO))
    texts = dict.fromkeys(TWO[chunk.text_start : chunk.text_end] for chunk in found.chunks)
    assert list(texts) == [
        "The first sentence is here.",
        "<break time='300ms'/>",
        "A second one follows.",
    ]
    assert [chunk.sequence for chunk in found.chunks] == list(range(len(found.chunks)))
    for a, b in pairwise(found.chunks):
        assert b.sample_offset == a.sample_offset + a.sample_count


def test_segment_times_count_breaks(synthesizer: Synthesizer) -> None:
    markup = read_ssml(TWO)
    request = SpeechRequest(
        TWO, markup=markup, sampling=SEEDED, timestamps=TimestampGranularity.SEGMENT
    )

    async def collect() -> list[Any]:
        return [event async for event in synthesizer.stream(request)]

    first, second = (e for e in run(collect()) if isinstance(e, SegmentTime))
    assert (first.index, second.index) == (0, 1)
    assert second.start_s == pytest.approx(first.end_s + 0.3)
    assert TWO[second.text_start : second.text_end] == "A second one follows."


def test_a_break_lasts_as_long_at_another_rate_and_when_silence_is_trimmed(
    synthesizer: Synthesizer,
) -> None:
    for values in ({"speaking_rate": 2.0}, {"trim_silence": True}, {"gain_db": -6.0}):
        short, long = (
            heard(synthesizer, ssml(f"One here.<break time='{time}'/>Two here."), **values)
            for time in ("1ms", "1001ms")
        )
        assert long.num_samples - short.num_samples == RATE


def test_rate_and_volume_of_a_part(synthesizer: Synthesizer) -> None:
    plain = heard(synthesizer, ssml("Say one. Say two."))
    slow = heard(synthesizer, ssml("Say one. <prosody rate='50%'>Say two.</prosody>"))
    first = plain.chunks[0].sample_count
    assert slow.num_samples > plain.num_samples * 1.3
    assert samples_of(slow)[:first].tolist() == samples_of(plain)[:first].tolist()
    loud = heard(synthesizer, ssml("<prosody volume='-6.0206dB'>Say one.</prosody> Say two."))
    split = sum(c.sample_count for c in loud.chunks if c.segment_index == 0)
    a, b = samples_of(loud), samples_of(plain)
    assert len(a) == len(b)
    assert np.abs(a[:split] * 2 - b[:split]).max() <= 2
    assert np.array_equal(a[split:], b[split:])


def test_a_part_in_another_voice(synthesizer: Synthesizer, client: RampClient) -> None:
    default, other = (voice.name for voice in synthesizer.voices.voices()[:2])
    found = heard(synthesizer, read_tags(f"Say one. [voice:{other}]Say two. [voice:]Say three."))
    alone = [
        client_prompt(synthesizer, name, text)
        for name, text in ((default, "Say one."), (other, "Say two."), (default, "Say three."))
    ]
    assert [job.request.prompt_ids for job in client.jobs] == alone
    assert [job.carry is None for job in client.jobs] == [True, True, True]
    assert found.result.finish_reason is FinishReason.STOP


def client_prompt(synthesizer: Synthesizer, name: str, text: str) -> tuple[int, ...]:
    return synthesizer._prompts.speech_prompt(text, synthesizer.voices.get(name))


def test_sentences_and_paragraphs_end_segments(
    synthesizer: Synthesizer, client: RampClient
) -> None:
    found = heard(synthesizer, ssml("<p><s>one\n\ntwo</s><s>three</s></p>four"))
    assert len(client.jobs) == 3
    assert found.result.spoken_text == "one two three four"


def test_the_longest_audio_includes_breaks(synthesizer: Synthesizer) -> None:
    found = heard(synthesizer, ssml("One.<break time='9s'/>Two."), max_audio_s=2.0)
    assert found.num_samples == 2 * RATE
    assert found.result.finish_reason is FinishReason.LENGTH
    assert found.result.warnings == ("a break hit the audio cap",)


def test_what_is_not_available_is_refused_or_skipped(synthesizer: Synthesizer) -> None:
    pitch = "<prosody pitch='high'>a word</prosody>"
    phoneme = "<phoneme ph='w日d'>a word</phoneme>"
    voice = "<voice name='nemo'>a word</voice>"
    for inside, error, message in (
        (
            pitch,
            InvalidRequestError,
            "column 30: the pitch cannot .*: this model's codec is 'ramp'",
        ),
        (phoneme, InvalidRequestError, "line 1, column .*: '日' is no sign of the International"),
        (voice, VoiceNotFoundError, "no voice 'nemo'"),
    ):
        with pytest.raises(error, match=message):
            heard(synthesizer, ssml(inside))
        skipped = heard(synthesizer, ssml(inside, lenient=True))
        assert skipped.data == collect_speech(synthesizer, "a word").data
        (warning,) = skipped.result.warnings
        assert message.rsplit(": ", maxsplit=1)[-1] in warning
        assert warning.count("column") == 1


def test_phonemes_are_respelled_for_a_model_that_reads_letters(synthesizer: Synthesizer) -> None:
    found = heard(synthesizer, ssml("A <phoneme ph='wɜːd'>word</phoneme>."))
    assert found.data == collect_speech(synthesizer, "A werd.").data
    (warning,) = found.result.warnings
    assert warning.endswith(": this model reads letters, the phonemes are spoken: werd")


def test_what_has_no_effect_is_a_warning(synthesizer: Synthesizer) -> None:
    found = heard(synthesizer, ssml("One <mark name='m'/><emphasis>word</emphasis>."))
    assert found.result.warnings == (
        "line 1, column 38: emphasis has no effect: this model has no word times",
    )


def test_a_document_without_words(synthesizer: Synthesizer) -> None:
    found = heard(synthesizer, ssml("<break time='1s'/>"))
    assert found.num_samples == RATE
    assert not samples_of(found).any()
    assert found.result.warnings == ("the text holds nothing that can be spoken",)


def test_random_voices_are_kept(client: RampClient, tiny_checkpoint: Path) -> None:
    plain = build(client, tiny_checkpoint)
    traits = replace(plain.settings.traits, invents_voices=True)
    inventing = build(client, tiny_checkpoint, traits=traits)
    default, other = (voice.name for voice in plain.voices.voices()[:2])
    heard(inventing, read_tags(f"One. [voice:{other}]Two. [voice:{default}]Three."))
    first, second, third = client.jobs
    assert not first.prompt_codes
    assert not second.prompt_codes
    assert third.prompt_codes

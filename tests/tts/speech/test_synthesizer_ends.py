"""Ends of requests: caps, cancellation, engine errors; and refused values with their messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from decoder import (
    AudioEncoding,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
)
from llm import FinishReason
from tests.tts.ramp import (
    RATE,
    SEEDED,
    TEXT,
    RampClient,
    build,
    collect_speech,
    run,
)
from tts.errors import (
    InvalidRequestError,
    NotAvailableError,
    PreconditionError,
    SynthesisError,
)
from tts.families.base import FamilyTraits
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import (
    AudioChunk,
    ChunkingOverrides,
    SamplingOverrides,
    SpeechRequest,
    TimestampGranularity,
)
from tts.text.clean import TextError
from tts.text.segmenter import SegmentMode

# --- ends


def test_a_model_without_an_end_token_is_capped_per_segment(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    client.is_endless = True
    heard = collect_speech(synthesizer, "Short. A somewhat longer sentence.")
    assert heard.result.finish_reason is FinishReason.LENGTH
    assert heard.result.warnings == (
        "segment 0 hit the audio cap",
        "segment 1 hit the audio cap",
    )
    caps = [job.request.sampling.max_tokens for job in client.jobs]
    assert caps == [88, 219]  # 2 s and 0.25 s per character, at 25 codes per second


def test_the_token_limit_of_the_model_applies(client: RampClient, tiny_checkpoint: Path) -> None:
    collect_speech(
        build(client, tiny_checkpoint, traits=FamilyTraits(max_codes=50)),
        "A somewhat longer sentence.",
    )
    assert client.jobs[0].request.sampling.max_tokens == 50


def test_the_context_is_never_overrun(client: RampClient, tiny_checkpoint: Path) -> None:
    collect_speech(build(client, tiny_checkpoint, max_seq_len=60), "A somewhat longer sentence.")
    request = client.jobs[0].request
    assert len(request.prompt_ids) + request.sampling.max_tokens == 60


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ({"sampling": SamplingOverrides(seed=1, max_tokens=100)}, 100),
        ({"max_audio_s": 3.0}, 75),
        ({"max_audio_s": 3.0, "speaking_rate": 2.0}, 150),
    ],
)
def test_the_duration_limit_of_a_request_applies(
    client: RampClient, synthesizer: Synthesizer, values: dict[str, Any], codes: int
) -> None:
    client.is_endless = True
    heard = collect_speech(synthesizer, **values)
    assert len(client.spoken) == codes
    assert heard.result.finish_reason is FinishReason.LENGTH
    assert heard.result.warnings[-1].endswith("hit the audio cap")


def test_the_duration_limit_of_the_server_applies(
    client: RampClient, tiny_checkpoint: Path
) -> None:
    client.is_endless = True
    heard = collect_speech(build(client, tiny_checkpoint, max_audio_s=1.0), max_audio_s=5.0)
    assert heard.num_samples == RATE


def test_min_tokens_reach_the_engine(client: RampClient, synthesizer: Synthesizer) -> None:
    collect_speech(synthesizer, "Hi.", sampling=SamplingOverrides(min_tokens=20, seed=0))
    assert client.jobs[0].request.sampling.min_tokens == 20


def test_closing_the_iterator_closes_that_of_the_engine(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    async def leave_early() -> None:
        events = synthesizer.stream(SpeechRequest(TEXT, sampling=SEEDED))
        async for event in events:
            if isinstance(event, AudioChunk):
                assert client.num_open == 1
                break
        await events.aclose()

    run(leave_early())
    assert client.num_open == 0
    assert len(client.jobs) == 1


def test_cancelling_the_task_closes_the_engines_iterator(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    async def cancel() -> None:
        client.gate.clear()
        task = asyncio.ensure_future(synthesizer.synthesize(SpeechRequest(TEXT)))
        await asyncio.sleep(0.01)
        assert client.num_open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel())
    assert client.num_open == 0


def test_an_engine_error_ends_the_request_and_the_next_is_served(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    client.ends_with = FinishReason.ERROR
    with pytest.raises(SynthesisError, match="request mine: the pages burnt"):
        collect_speech(synthesizer, request_id="mine")
    assert client.num_open == 0
    assert collect_speech(synthesizer).result.finish_reason is FinishReason.STOP


def test_a_request_cancelled_by_the_engine_ends_as_cancelled(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    client.ends_with = FinishReason.CANCELLED
    heard = collect_speech(synthesizer)
    assert heard.result.finish_reason is FinishReason.CANCELLED
    assert len(client.jobs) == 1


# --- what is refused


@pytest.mark.parametrize("text", ["", "  \n\t "])
def test_empty_text_is_refused(synthesizer: Synthesizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"input\.text: is empty"):
        collect_speech(synthesizer, text)


def test_control_characters_are_refused_before_anything_starts(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    with pytest.raises(InvalidRequestError, match=r"^input\.text: .*U\+0000"):
        collect_speech(synthesizer, "fine so far. \x00")
    assert client.jobs == []


@pytest.mark.parametrize("encoding", [AudioEncoding.PCM_S16LE, AudioEncoding.WAV])
def test_text_without_words_gives_an_empty_result_and_a_warning(
    client: RampClient, synthesizer: Synthesizer, encoding: AudioEncoding
) -> None:
    heard = collect_speech(synthesizer, "\U0001f389 \U0001f44d", encoding=encoding)
    assert heard.num_samples == 0
    assert heard.result.warnings == ("the text holds nothing that can be spoken",)
    assert heard.result.finish_reason is FinishReason.STOP
    assert len(heard.data) == (44 if encoding is AudioEncoding.WAV else 0)
    assert client.jobs == []


def test_dropped_characters_are_reported_in_a_warning(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    heard = collect_speech(synthesizer, "Hello 你好.")
    assert heard.result.warnings == ("2 letter(s) that this voice cannot read were left out",)
    assert len(client.jobs) == 1


def test_text_that_does_not_fit_into_one_call_is_refused(synthesizer: Synthesizer) -> None:
    async def first_event() -> None:
        request = SpeechRequest("many words " * 40, segment_mode=SegmentMode.NONE)
        await anext(synthesizer.stream(request))

    with pytest.raises(TextError, match="one segment of 200 characters"):
        run(first_event())


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"speaking_rate": 0.2}, "speaking_rate"),
        ({"speaking_rate": float("nan")}, "speaking_rate"),
        ({"gain_db": 17.0}, "volume_gain_db"),
        ({"gain_db": -97.0}, "volume_gain_db"),
        ({"max_audio_s": 0.0}, "max_audio_duration"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"priority": 1001}, "priority"),
        ({"sampling": SamplingOverrides(temperature=2.5)}, "sampling.temperature"),
        ({"sampling": SamplingOverrides(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": SamplingOverrides(top_p=0.0)}, "sampling.top_p"),
        ({"sampling": SamplingOverrides(top_k=-1)}, "sampling.top_k"),
        ({"sampling": SamplingOverrides(min_p=1.0)}, "sampling.min_p"),
        ({"sampling": SamplingOverrides(repetition_penalty=0.0)}, "sampling.repetition_penalty"),
        ({"sampling": SamplingOverrides(repetition_window=-1)}, "sampling.repetition_window"),
        ({"sampling": SamplingOverrides(max_tokens=0)}, "sampling.max_tokens"),
        ({"sampling": SamplingOverrides(min_tokens=5, max_tokens=4)}, "sampling.min_tokens"),
        ({"sampling": SamplingOverrides(seed=2**64)}, "sampling.seed"),
    ],
)
def test_numbers_out_of_range_name_their_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SpeechRequest("hi", **values)
    assert [v.field for v in caught.value.violations] == [f"config.{field}"]


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SpeechRequest(speaking_rate=9.0, gain_db=99.0, sampling=SamplingOverrides(top_k=-1))
    assert len(caught.value.violations) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sample_rate": 11_025, "encoding": AudioEncoding.OGG_OPUS}, r"audio_format.*11025 Hz"),
        ({"sample_rate": 1}, r"audio_format.*outside"),
        ({"chunking": ChunkingOverrides(chunk_sizes=(0,))}, r"chunking.*chunk_size 0"),
        ({"chunking": ChunkingOverrides(chunk_sizes=())}, r"chunking.*empty"),
        ({"chunking": ChunkingOverrides(buffer=-1)}, r"chunking.*buffer -1"),
    ],
)
def test_formats_and_chunking_that_cannot_work_are_refused(
    synthesizer: Synthesizer, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        collect_speech(synthesizer, **values)


def test_an_encoding_that_was_not_built_is_not_available(
    synthesizer: Synthesizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tts.speech.run.supported_encodings", lambda: (AudioEncoding.WAV,))
    with pytest.raises(NotAvailableError, match="mp3"):
        collect_speech(synthesizer, encoding=AudioEncoding.MP3)


def test_word_timings_are_refused_without_an_aligner(synthesizer: Synthesizer) -> None:
    with pytest.raises(PreconditionError, match="word timings"):
        collect_speech(synthesizer, timestamps=TimestampGranularity.WORD)


def test_a_requests_own_chunking_replaces_what_it_names(
    client: RampClient, synthesizer: Synthesizer
) -> None:
    chunking = ChunkingOverrides(
        chunk_sizes=(5,), block_causal=True, prepend=PrependPromptSpeechTokens.ROLLING
    )
    heard = collect_speech(synthesizer, "Hi there.", chunking=chunking)
    assert client.jobs[0].streaming == StreamingOptions(
        chunk_sizes=(5,),
        buffer=3,
        masks=MaskPolicy(block_causal=True),
        prepend=PrependPromptSpeechTokens.ROLLING,
    )
    assert [chunk.token_count for chunk in heard.chunks][:-1] == [5, 5, 5, 5]


def test_unusual_chunking_gives_a_warning(synthesizer: Synthesizer) -> None:
    chunking = ChunkingOverrides(prepend=PrependPromptSpeechTokens.ROLLING, buffer=0)
    assert (
        "rolling prompt codes" in collect_speech(synthesizer, chunking=chunking).result.warnings[0]
    )

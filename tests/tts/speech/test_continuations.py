"""Continuation of an earlier request: its codes are context, positions continue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.decoder.small_codecs import audio_of
from tests.tts.family_services import CASES, Running
from tests.tts.ramp import RampClient, collect_speech
from tests.tts.serving import (
    Serving,
    SpeechResponses,
    error_of,
    fields_of,
    run_with_server,
    session_config,
    stream_request,
)
from tests.tts.serving import collect_speech as collect_over_grpc
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import ChunkingOverrides
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb

TEXTS = ("Hello there.", "Good bye.")
CONFIG: dict[str, Any] = {
    "sampling": common_pb2.SamplingParams(temperature=0.0),  # so that seeds do not matter
    "chunking": pb.ChunkingConfig(chunk_sizes=[14], buffer=490),
    "audio_format": pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_F32LE),
}


ORPHEUS = next(case for case in CASES if case.name == "orpheus")
"""Its codec adds noise that is keyed by position, in frames of seven tokens."""
on_orpheus = pytest.mark.parametrize("running", [ORPHEUS], indirect=True, ids=["orpheus"])


def continued(first: SpeechResponses, **values: Any) -> dict[str, Any]:
    """Return the fields of a request that continues the other."""
    last = first.audio[-1]
    return {
        **CONFIG,
        "buffer_speech_tokens": last.buffer_speech_tokens,
        "stream_token_offset": last.stream_token_offset,
        **values,
    }


@on_orpheus
def test_the_decoder_continues_from_the_carried_codes(running: Running) -> None:
    synthesizer, decoder = running.service.synthesizer, running.decoder()
    assert synthesizer is not None
    chunking = ChunkingOverrides(chunk_sizes=(14,), buffer=490)
    options = chunking.over(synthesizer.settings.streaming)

    async def ask(served: Serving) -> None:
        first = await collect_over_grpc(served, TEXTS[0], **CONFIG)
        second = await collect_over_grpc(served, TEXTS[1], **continued(first))
        before = list(first.audio[-1].buffer_speech_tokens.tokens)
        both = list(second.audio[-1].buffer_speech_tokens.tokens)
        assert both[: len(before)] == before
        codes, start = both[len(before) :], {"carry": before, "token_offset": len(before)}
        expected = audio_of(decoder, codes, options, **start)
        np.testing.assert_allclose(np.frombuffer(second.data, "<f4"), expected, atol=1e-5)
        restarted = await collect_over_grpc(
            served, TEXTS[1], **continued(first, stream_token_offset=0)
        )
        assert len(restarted.data) == len(second.data)
        assert np.abs(np.frombuffer(restarted.data, "<f4") - expected).max() > 1e-3

    run_with_server(running.service, ask)


@on_orpheus
def test_every_chunk_has_the_offset_for_a_continuation(running: Running) -> None:
    async def ask(served: Serving) -> None:
        first = await collect_over_grpc(served, TEXTS[0], **CONFIG)
        second = await collect_over_grpc(served, TEXTS[1], **continued(first))
        spoken = 0
        for chunk in (*first.audio, *second.audio):
            spoken += chunk.token_count
            assert chunk.stream_token_offset == spoken
        assert second.audio[0].token_offset == 0

    run_with_server(running.service, ask)


@pytest.mark.parametrize("running", CASES, indirect=True, ids=lambda case: case.name)
def test_any_offset_that_is_taken_can_be_rendered(running: Running) -> None:
    async def ask(served: Serving) -> None:
        codec = served.server.host.service.codec
        assert codec is not None
        most = (2**31 - 1) // codec.codes_per_frame * codec.codes_per_frame
        values = {"buffer_speech_tokens": pb.SpeechTokens(), "stream_token_offset": most}
        values |= {"sampling": common_pb2.SamplingParams(max_tokens=14)}
        spoken = await collect_over_grpc(served, TEXTS[0], voice=running.case.selection, **values)
        count = sum(chunk.token_count for chunk in spoken.audio)
        assert spoken.audio[-1].stream_token_offset == most + count

    run_with_server(running.service, ask)


@on_orpheus
@pytest.mark.parametrize(
    "values",
    [
        {"stream_token_offset": -7},
        {"stream_token_offset": 2**31},
        {"stream_token_offset": 8},  # no whole frame
    ],
)
def test_invalid_offsets_are_refused(running: Running, values: dict[str, int]) -> None:
    async def ask(served: Serving) -> None:
        values_ = {"buffer_speech_tokens": pb.SpeechTokens(), **values}
        error = await error_of(served.speech.SynthesizeStream(stream_request(**values_)))
        assert set(fields_of(error)) == {"config.stream_token_offset"}

    run_with_server(running.service, ask)


@on_orpheus
def test_an_offset_requires_a_buffer(running: Running) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.StreamingSynthesize(iter([session_config(stream_token_offset=7)]))
        assert fields_of(await error_of(call)) == ["config.synthesis.stream_token_offset"]

    run_with_server(running.service, ask)


def test_later_segments_count_from_the_offset(client: RampClient, synthesizer: Synthesizer) -> None:
    heard = collect_speech(synthesizer, carry=(1, 2), token_offset=500)
    first, second, *_ = client.jobs
    length = len(client.codes_of(first.request))
    assert (first.token_offset, second.token_offset) == (500, 500 + length)
    assert heard.chunks[-1].next_token_offset == 500 + len(client.spoken)

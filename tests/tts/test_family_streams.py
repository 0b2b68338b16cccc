"""All ways of streaming, for each kind of codec and frame that a speech family has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.decoder.codecs import audio_of
from tests.tts.families import CASES, Running, exactly
from tests.tts.serving import (
    Serving,
    converse,
    error_of,
    fields_of,
    flush,
    hear,
    say,
    serve_and,
    session_config,
    unary_request,
)
from tts.v1 import speech_pb2 as pb

pytestmark = pytest.mark.parametrize(
    "running", CASES, indirect=True, ids=lambda case: case.name, scope="session"
)


def test_every_way_of_asking_gives_the_same_samples(running: Running) -> None:
    async def ask(served: Serving) -> None:
        values = {"voice": running.case.selection, "max_tokens": 42}
        streamed = await hear(served, "Hello there.", **values)
        whole = await served.speech.Synthesize(unary_request("Hello there.", **values))
        messages = (session_config(**values), say("Hello "), say("there."), flush("f"))
        typed = await converse(served, *messages)
        assert len(streamed.data) > 0
        assert whole.audio == streamed.data
        assert b"".join(r.audio.data for r in typed if r.HasField("audio")) == streamed.data
        assert whole.done.finish_reason == streamed.done.finish_reason

    serve_and(running.service, ask)


def test_codes_and_samples_belong_together(running: Running) -> None:
    """The codes that a stream tells are those it was rendered from, to the last sample."""
    case, spec = running.case, running.service.codec
    assert spec is not None
    settings = running.service.synthesizer
    assert settings is not None
    options = replace(settings.settings.streaming, buffer=210)

    async def ask(served: Serving) -> None:
        chunking = pb.ChunkingConfig(buffer=210)
        raw = pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_F32LE)
        values = {"voice": case.selection, "max_tokens": 77, "chunking": chunking}
        spoken = await hear(served, "Hello there.", audio_format=raw, **values)
        codes = list(spoken.audio[-1].buffer_speech_tokens.tokens)
        assert len(codes) % spec.codes_per_frame == 0
        assert spoken.done.usage.output_tokens in (len(codes), len(codes) + 1)  # with the end
        assert running.vocabulary.codes(running.vocabulary.token_ids(codes)) == tuple(codes)
        prompt = () if case.voices else case.codes
        expected = audio_of(running.decoder(), codes, options, prompt_codes=prompt)
        assert len(expected) == len(codes) * spec.samples_per_code
        np.testing.assert_array_equal(np.frombuffer(spoken.data, "<f4"), expected)

    serve_and(running.service, ask)


def test_the_chunk_sizes_change_no_length(running: Running) -> None:
    async def ask(served: Serving) -> None:
        lengths = set()
        for sizes in ([7], [14, 28]):
            chunking = pb.ChunkingConfig(chunk_sizes=sizes, buffer=28)
            values = {"voice": running.case.selection, "max_tokens": 56, "chunking": chunking}
            lengths.add(len((await hear(served, "Hello there.", **values)).data))
        assert len(lengths) == 1

    serve_and(running.service, ask)


def wrong_fields(running: Running, **values: Any) -> list[str]:
    """The fields that a request is refused for."""
    found: list[str] = []

    async def ask(served: Serving) -> None:
        values.setdefault("voice", running.case.selection)
        found.extend(fields_of(await error_of(served.speech.Synthesize(unary_request(**values)))))

    serve_and(running.service, ask)
    return found


def test_masks_need_attention(running: Running) -> None:
    """A codec of convolutions refuses them; the others sound different with them."""
    masked = pb.ChunkingConfig(
        chunk_sizes=[14], buffer=21, block_causal=True, prepend_prompt_speech_tokens_causal=True
    )
    if running.vocabulary.codes_per_frame > 1:
        assert wrong_fields(running, chunking=masked) == ["config.chunking"]
        return

    async def ask(served: Serving) -> None:
        prompt = pb.VoiceSelection(prompt_tokens=pb.SpeechTokens(tokens=range(0, 60_000, 3000)))
        heard = set()
        never, once, rolling = 1, 2, 3
        for causal, mode in ((False, rolling), (True, rolling), (True, once), (True, never)):
            chunking = pb.ChunkingConfig()
            chunking.CopyFrom(masked)
            chunking.block_causal = causal
            chunking.prepend_prompt_speech_tokens = mode
            values = {"voice": prompt, "chunking": chunking, **exactly(35)}
            heard.add((await hear(served, "Hello there.", **values)).data)
        assert len(heard) == 4
        assert len(set(map(len, heard))) == 1

    serve_and(running.service, ask)


def test_half_a_frame_is_refused_by_name(running: Running) -> None:
    if running.vocabulary.codes_per_frame == 1:
        return
    half = pb.SpeechTokens(tokens=[1, 2, 3])
    voice = pb.VoiceSelection(prompt_tokens=half)
    assert wrong_fields(running, voice=voice) == ["config.voice.prompt_tokens"]
    assert wrong_fields(running, buffer_speech_tokens=half) == ["config.buffer_speech_tokens"]
    odd = pb.ChunkingConfig(chunk_sizes=[7, 10])
    assert wrong_fields(running, chunking=odd) == ["config.chunking"]


def test_a_stream_is_continued_without_a_seam(running: Running) -> None:
    """What one request spoke last is the next one's left context: no first block again."""
    case = running.case

    async def ask(served: Serving) -> None:
        chunking = pb.ChunkingConfig(buffer=28)
        values = {"voice": case.selection, "chunking": chunking, **exactly(42)}
        first = await hear(served, "Hello there.", **values)
        carried = first.audio[-1].buffer_speech_tokens
        assert len(carried.tokens) == 28
        fresh = await hear(served, "And more.", **values)
        carried_on = await hear(served, "And more.", buffer_speech_tokens=carried, **values)
        assert len(carried_on.data) == len(fresh.data)
        assert carried_on.data != fresh.data

    serve_and(running.service, ask)

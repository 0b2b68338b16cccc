"""Streaming calls for each kind of codec and frame of the speech families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoder import AttentionKind
from tests.decoder.small_codecs import audio_of
from tests.tts.family_services import CASES, Running, exactly
from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    fields_of,
    flush,
    run_conversation,
    run_with_server,
    say,
    session_config,
    unary_request,
)
from tts.v1 import speech_pb2 as pb

pytestmark = pytest.mark.parametrize(
    "running", CASES, indirect=True, ids=lambda case: case.name, scope="session"
)


def test_every_call_gives_the_same_samples(running: Running) -> None:
    async def ask(served: Serving) -> None:
        values = {"voice": running.case.selection, "max_tokens": 42}
        streamed = await collect_speech(served, "Hello there.", **values)
        whole = await served.speech.Synthesize(unary_request("Hello there.", **values))
        messages = (session_config(**values), say("Hello "), say("there."), flush("f"))
        typed = await run_conversation(served, *messages)
        assert len(streamed.data) > 0
        assert whole.audio == streamed.data
        assert b"".join(r.audio.data for r in typed if r.HasField("audio")) == streamed.data
        assert whole.done.finish_reason == streamed.done.finish_reason

    run_with_server(running.service, ask)


def test_reported_codes_are_those_of_the_samples(running: Running) -> None:
    """The reported codes decode to the samples of the stream, to the last one."""
    case, spec = running.case, running.service.codec
    assert spec is not None
    settings = running.service.synthesizer
    assert settings is not None
    options = replace(settings.settings.streaming, buffer=210)

    async def ask(served: Serving) -> None:
        chunking = pb.ChunkingConfig(buffer=210)
        raw = pb.AudioFormat(encoding=pb.AUDIO_ENCODING_PCM_F32LE)
        values = {"voice": case.selection, "max_tokens": 77, "chunking": chunking}
        spoken = await collect_speech(served, "Hello there.", audio_format=raw, **values)
        codes = list(spoken.audio[-1].buffer_speech_tokens.tokens)
        assert len(codes) % spec.codes_per_frame == 0
        assert spoken.done.usage.output_tokens in (len(codes), len(codes) + 1)  # with the end
        assert running.vocabulary.codes(running.vocabulary.token_ids(codes)) == tuple(codes)
        decoder, prompt = running.decoder(), case.prompt_codes
        expected = audio_of(decoder, codes, options, prompt_codes=prompt)
        assert len(expected) == len(codes) * spec.samples_per_code
        np.testing.assert_array_equal(np.frombuffer(spoken.data, "<f4"), expected)

    run_with_server(running.service, ask)


def test_chunk_sizes_do_not_change_the_length(running: Running) -> None:
    async def ask(served: Serving) -> None:
        lengths = set()
        for sizes in ([7], [14, 28]):
            chunking = pb.ChunkingConfig(chunk_sizes=sizes, buffer=28)
            values = {"voice": running.case.selection, "max_tokens": 56, "chunking": chunking}
            lengths.add(len((await collect_speech(served, "Hello there.", **values)).data))
        assert len(lengths) == 1

    run_with_server(running.service, ask)


def wrong_fields(running: Running, **values: Any) -> list[str]:
    """Return the fields that a request is refused for."""
    found: list[str] = []

    async def ask(served: Serving) -> None:
        values.setdefault("voice", running.case.selection)
        found.extend(fields_of(await error_of(served.speech.Synthesize(unary_request(**values)))))

    run_with_server(running.service, ask)
    return found


def test_masks_need_attention(running: Running) -> None:
    """A convolutional codec refuses masks; they change the audio of other codecs."""
    masked = pb.ChunkingConfig(
        chunk_sizes=[14], buffer=21, block_causal=True, prepend_prompt_speech_tokens_causal=True
    )
    assert running.service.codec is not None
    if running.service.codec.attention is AttentionKind.CAUSAL:
        pytest.skip("masks have no effect on a causal codec")
    if not running.service.codec.can_mask:
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
            heard.add((await collect_speech(served, "Hello there.", **values)).data)
        assert len(heard) == 4
        assert len(set(map(len, heard))) == 1

    run_with_server(running.service, ask)


def test_the_error_for_half_a_frame_names_the_field(running: Running) -> None:
    if running.vocabulary.codes_per_frame == 1:
        return
    half = pb.SpeechTokens(tokens=[1, 2, 3])
    voice = pb.VoiceSelection(prompt_tokens=half)
    assert wrong_fields(running, voice=voice) == ["config.voice.prompt_tokens"]
    assert wrong_fields(running, buffer_speech_tokens=half) == ["config.buffer_speech_tokens"]
    odd = pb.ChunkingConfig(chunk_sizes=[7, 10])
    assert wrong_fields(running, chunking=odd) == ["config.chunking"]


def test_a_stream_is_continued_without_a_discontinuity(running: Running) -> None:
    """The last codes of one request are the left context of the next: there is no first block."""
    case = running.case

    async def ask(served: Serving) -> None:
        chunking = pb.ChunkingConfig(buffer=28)
        values = {"voice": case.selection, "chunking": chunking, **exactly(42)}
        first = await collect_speech(served, "Hello there.", **values)
        carried = first.audio[-1].buffer_speech_tokens
        assert len(carried.tokens) == 28
        fresh = await collect_speech(served, "And more.", **values)
        carried_on = await collect_speech(
            served, "And more.", buffer_speech_tokens=carried, **values
        )
        assert len(carried_on.data) == len(fresh.data)
        assert carried_on.data != fresh.data

    run_with_server(running.service, ask)

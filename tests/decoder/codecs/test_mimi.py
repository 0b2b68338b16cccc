"""Mimi: equality with transformers, causality, measured field, and state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder import (
    AttentionKind,
    AudioDecoder,
    DecoderConfigError,
    DecodeRequest,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
    validate_streaming,
)
from tests.decoder.small_codecs import audio_of, changed_frames, random_codes, write_mimi
from tests.decoder.toys import windows_of

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6
FRAMES = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mimi")
    return folder, write_mimi(folder)


@pytest.fixture(scope="module")
def mimi(checkpoint: tuple[Path, Any]) -> AudioDecoder:
    return create_decoder(checkpoint[0])


@pytest.fixture(scope="module")
def stateful(checkpoint: tuple[Path, Any]) -> AudioDecoder:
    return create_decoder(checkpoint[0], options={"stateful": True})


@torch.inference_mode()
def reference_audio(reference: Any, codes: list[int], num_codebooks: int) -> np.ndarray:
    rows = torch.tensor(codes).view(1, -1, num_codebooks).transpose(1, 2)
    return reference.decode(rows).audio_values[0, 0].numpy()


def kept_audio(
    decoder: AudioDecoder, codes: list[int], options: StreamingOptions, **start: object
) -> np.ndarray:
    """Render a stream block by block with its state."""
    state = StreamState()
    windows = windows_of(decoder.spec, options, codes, **start)
    return np.concatenate([render(decoder, [DecodeRequest(w, state)])[0] for w in windows])


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return (
        left.shape == right.shape and np.abs(left - right).max() < MAX_ERROR * np.abs(right).max()
    )


def test_facts_of_the_published_checkpoint() -> None:
    from decoder.codecs.mimi.decoder import mimi_config, mimi_spec

    spec = mimi_spec(mimi_config({}, 8), 24_000)
    assert (spec.samples_per_frame, spec.codes_per_second, spec.codebook_size) == (1920, 100, 2048)
    assert (spec.attention, spec.right_field, spec.num_codebooks) == (AttentionKind.CAUSAL, 0, 8)
    assert spec.receptive_field == 8 * 1001


@pytest.mark.parametrize("num_codebooks", [None, 3, 1])
def test_audio_equals_the_reference(checkpoint, num_codebooks) -> None:
    folder, reference = checkpoint
    decoder = create_decoder(folder, options={"num_codebooks": num_codebooks})
    codes = random_codes(decoder, FRAMES)
    assert same(audio_of(decoder, codes), reference_audio(reference, codes, num_codebooks or 4))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_residual_layers": 2},
        {"codebook_dim": 32, "vector_quantization_hidden_dimension": 32},
        {"num_semantic_quantizers": 2, "head_dim": 8},
    ],
)
def test_variants_equal_the_reference(tmp_path, changes) -> None:
    reference = write_mimi(tmp_path, **changes)
    decoder = create_decoder(tmp_path)
    codes = random_codes(decoder, 12)
    assert same(audio_of(decoder, codes), reference_audio(reference, codes, 4))


def test_the_stated_field_is_the_measured_one(mimi) -> None:
    spec = mimi.spec
    assert (spec.receptive_field, spec.right_field) == (4 * 10, 0)
    assert {changed_frames(mimi, FRAMES, at=at) for at in (0, 5, 20)} == {(0, 10)}


def test_streamed_equals_whole_when_the_buffer_covers_the_field(mimi) -> None:
    codes = random_codes(mimi, FRAMES)
    whole = audio_of(mimi, codes)
    assert same(audio_of(mimi, codes, StreamingOptions((4, 12), buffer=40)), whole)
    assert not same(audio_of(mimi, codes, StreamingOptions((4, 12), buffer=36)), whole)


@pytest.mark.parametrize("sizes", [(4,), (8, 4, 12), (40, 4)])
@pytest.mark.parametrize("buffer", [0, 8])
def test_a_kept_state_is_the_whole_past(mimi, stateful, sizes, buffer) -> None:
    codes = random_codes(mimi, FRAMES)
    got = kept_audio(stateful, codes, StreamingOptions(sizes, buffer=buffer))
    assert same(got, audio_of(mimi, codes))


def test_a_kept_state_begins_with_the_voice_prompt_or_the_carry(mimi, stateful) -> None:
    """The first window is rendered completely, so that the state includes its context."""
    prompt, codes = random_codes(mimi, 6, seed=1), random_codes(mimi, 20)
    once = StreamingOptions((8,), prepend=PrependPromptSpeechTokens.ONCE)
    whole = audio_of(mimi, prompt + codes)[6 * 80 :]
    assert same(kept_audio(stateful, codes, once, prompt_codes=prompt), whole)
    carried = StreamingOptions((8,), buffer=24)
    got = kept_audio(stateful, codes, carried, carry=prompt, token_offset=24)
    assert same(got, whole)


def test_streams_with_a_state_need_no_buffer(mimi, stateful) -> None:
    options = StreamingOptions((4,), buffer=4, prepend=PrependPromptSpeechTokens.ONCE)
    assert len(validate_streaming(options, mimi.spec)) == 2
    assert validate_streaming(options, stateful.spec) == []


def test_masks_change_nothing(mimi) -> None:
    codes = random_codes(mimi, 12)
    masks = MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)
    plain, masked = StreamingOptions((8,), 16), StreamingOptions((8,), 16, masks)
    assert np.array_equal(audio_of(mimi, codes, plain), audio_of(mimi, codes, masked))


def test_streams_in_one_call_keep_their_own_states(stateful) -> None:
    options = StreamingOptions((4,))
    rows = [random_codes(stateful, 6, seed) for seed in range(2)]
    states = [StreamState(), StreamState()]
    windows = [windows_of(stateful.spec, options, codes) for codes in rows]
    got: list[list[np.ndarray]] = [[], []]
    for start in range(0, 6, 2):  # two windows of each stream in a call, as in the service
        ready = [
            DecodeRequest(windows[i][start + step], states[i]) for i in (0, 1) for step in (0, 1)
        ]
        for i, samples in zip((0, 0, 1, 1), render(stateful, ready), strict=True):
            got[i].append(samples)
    for codes, parts in zip(rows, got, strict=True):
        assert np.array_equal(np.concatenate(parts), kept_audio(stateful, codes, options))


def test_a_failed_call_leaves_the_states_as_they_were(stateful) -> None:
    codes = random_codes(stateful, 4)
    first, second, *_ = windows_of(stateful.spec, StreamingOptions((4,)), codes)
    state = StreamState()
    with pytest.raises(DecoderConfigError, match="does not follow the stream's state"):
        render(stateful, [DecodeRequest(first, state), DecodeRequest(first, state)])
    assert state == StreamState()
    parts = [render(stateful, [DecodeRequest(window, state)])[0] for window in (first, second)]
    options = StreamingOptions((4,))
    assert np.array_equal(np.concatenate(parts), kept_audio(stateful, codes[:8], options))


@pytest.mark.parametrize(
    ("key", "value"), [("noise_seed", 1), ("crossfade_ms", 5), ("look_ahead", 4)]
)
def test_options_without_meaning_are_refused(checkpoint, key, value) -> None:
    with pytest.raises(DecoderConfigError, match=f"codec 'mimi' does not support '{key}'"):
        create_decoder(checkpoint[0], options={key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_causal_conv": False}, "use_causal_conv is False, but only True is supported"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000.0"),
        ({"upsample_groups": 1}, "upsample_groups is 1, but only 512"),
        ({"num_semantic_quantizers": 9}, "num_codebooks must be at least 9"),
    ],
)
def test_variants_that_are_not_computed(changes, message) -> None:
    from decoder.codecs.mimi.decoder import mimi_config

    with pytest.raises(DecoderConfigError, match=message):
        mimi_config(changes, 8)


def test_an_older_configuration_gives_its_frame_rate() -> None:
    from decoder.codecs.mimi.decoder import mimi_config

    assert mimi_config({"frame_rate": 12.5}, 8).upsampling == 2
    assert mimi_config({"frame_rate": 6.25}, 8).hop == 3840

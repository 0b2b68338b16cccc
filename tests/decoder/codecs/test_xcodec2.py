"""XCodec2 and NeuCodec: equality with transformers, masks, prompts, no time positions."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decoder import (
    AttentionKind,
    AudioDecoder,
    DecoderConfigError,
    DecodeRequest,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    attention_mask,
    create_decoder,
    render,
)
from tests.closeness import error
from tests.decoder.small_codecs import (
    audio_of,
    changed_frames,
    random_codes,
    write_neucodec,
    write_xcodec2,
)
from tests.decoder.toys import windows_of

MAX_ERROR = 1e-5  # of the loudest sample; float32 sums in another order differ by 1e-6
CODES = 60


class Codec(NamedTuple):
    name: str
    folder: Path
    reference: Any
    decoder: AudioDecoder


@pytest.fixture(scope="module", params=["xcodec2", "neucodec"])
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tmp_path_factory.mktemp(request.param)
    write = {"xcodec2": write_xcodec2, "neucodec": write_neucodec}[request.param]
    reference = write(folder)
    return Codec(request.param, folder, reference, create_decoder(folder))


@torch.inference_mode()
def reference_audio(codec: Codec, codes: list[int], mask: np.ndarray | None = None) -> np.ndarray:
    rows = torch.tensor(codes)[None, None]
    latents = codec.reference.quantizer.from_codes(rows.transpose(1, 2))
    attend = None if mask is None else torch.from_numpy(mask)[None, None]
    return codec.reference.acoustic_decoder(latents, attention_mask=attend)[0, 0].numpy()


def test_facts_of_the_published_checkpoints() -> None:
    """Defaults of both configurations, without building the networks."""
    from decoder.codecs.xcodec2.decoder import xcodec2_config, xcodec2_spec

    for name, rate, hop in (("xcodec2", 16_000, 320), ("neucodec", 24_000, 480)):
        config = xcodec2_config(name, {})
        spec = xcodec2_spec(name, {}, config)
        assert (spec.sample_rate, spec.samples_per_code, spec.codebook_size) == (rate, hop, 65_536)
        assert (spec.codes_per_second, spec.attention) == (50, AttentionKind.BIDIRECTIONAL)
        assert (config.input_size, config.num_layers, config.hidden_size) == (2048, 12, 1024)


def test_audio_equals_the_reference(codec) -> None:
    codes = random_codes(codec.decoder, CODES)
    rows = torch.tensor(codes)[None, None]
    with torch.inference_mode():
        expected = codec.reference.decode(rows).audio_values[0, 0].numpy()
    got = audio_of(codec.decoder, codes)
    assert got.shape == expected.shape
    assert error(got, expected) < MAX_ERROR


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("look_ahead", [0, 3])
def test_masked_windows_equal_the_masked_reference(codec, flags, look_ahead) -> None:
    """A window with prompt, history and look-ahead, with the mask of its flags."""
    options = StreamingOptions(
        (4, 6),
        buffer=8,
        masks=MaskPolicy(block_causal=flags[0], prepend_prompt_speech_tokens_causal=flags[1]),
        prepend=PrependPromptSpeechTokens.ROLLING,
        look_ahead=look_ahead,
    )
    prompt = random_codes(codec.decoder, 10, seed=1)
    codes = random_codes(codec.decoder, 30)
    hop = int(codec.decoder.spec.samples_per_code)
    for window in windows_of(codec.decoder.spec, options, codes, prompt_codes=prompt):
        mask = attention_mask(window, AttentionKind.BIDIRECTIONAL)
        expected = reference_audio(codec, list(window.codes), mask)
        (got,) = render(codec.decoder, [DecodeRequest(window)])
        first = (window.prompt_len + window.history_len) * hop
        assert window.skip_samples == first
        assert error(got, expected[first : first + len(got)]) < MAX_ERROR


def test_masks_change_samples(codec) -> None:
    codes = random_codes(codec.decoder, 30)
    plain = StreamingOptions((5,), buffer=10)
    masked = StreamingOptions(
        (5,),
        buffer=10,
        masks=MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True),
    )
    heard = [audio_of(codec.decoder, codes, options) for options in (plain, masked)]
    assert error(*heard) > 100 * MAX_ERROR


def test_windows_of_different_masks_share_a_batch(codec) -> None:
    masks = MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)
    codes = random_codes(codec.decoder, 30)
    windows = [
        windows_of(codec.decoder.spec, StreamingOptions((3, 5), buffer=6, masks=m), codes)[3]
        for m in (masks, MaskPolicy())
    ]
    together = codec.decoder.run(codec.decoder.inputs(windows))
    apart = [codec.decoder.decode([window]) for window in windows]
    assert error(together, torch.cat(apart)) < MAX_ERROR


def test_codes_have_no_time_positions(codec) -> None:
    """A stream that starts at a later position gives the same samples, bit for bit."""
    codes = random_codes(codec.decoder, 20)
    late = audio_of(codec.decoder, codes, token_offset=1000)
    assert np.array_equal(audio_of(codec.decoder, codes), late)


def test_every_code_affects_every_other(codec) -> None:
    assert (codec.decoder.spec.receptive_field, codec.decoder.spec.right_field) == (None, None)
    assert changed_frames(codec.decoder, CODES, at=20) == (20, CODES - 1 - 20)


def test_a_stream_loses_no_sample(codec) -> None:
    codes = random_codes(codec.decoder, 43)
    streamed = audio_of(codec.decoder, codes, codec.decoder.spec.recommended)
    assert len(streamed) == 43 * codec.decoder.spec.samples_per_code
    assert np.isfinite(streamed).all()


def first_layout(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the decoder's tensors under the names of the codec's first publication."""
    names = {
        "quantizer.project_out": "generator.quantizer.project_out",
        "acoustic_decoder.fc": "fc_post_a",
        "acoustic_decoder.norm": "generator.backbone.final_layer_norm",
        "acoustic_decoder.head.linear": "generator.head.out",
        "input_layernorm": "att_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "att.c_proj",
        "acoustic_decoder.layers": "generator.backbone.transformers",
        "acoustic_decoder": "generator.backbone",
    }
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(("acoustic_decoder.", "quantizer.project_out")):
            continue
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            joined = name.replace("self_attn.q_proj", "att.c_attn")
            found[replaced(joined, names)] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            found[replaced(name, names)] = tensor
    return found


def replaced(text: str, names: dict[str, str]) -> str:
    return reduce(lambda done, pair: done.replace(*pair), names.items(), text)


def test_the_first_publications_names_are_known(codec, tmp_path) -> None:
    """A pickle with additional parts, the format in which NeuCodec was first published."""
    tensors = first_layout(load_file(codec.folder / "model.safetensors"))
    assert "generator.backbone.transformers.1.att.c_attn.weight" in tensors
    torch.save({**tensors, "CodecEnc.conv.weight": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    config = (codec.folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    decoder = create_decoder(tmp_path, allow_pickle=True)
    codes = random_codes(decoder, 20)
    assert np.array_equal(audio_of(decoder, codes), audio_of(codec.decoder, codes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, but only 4"),
        ({"hidden_size": 48}, "hidden_size is 48 but must be a multiple of 32"),
        ({"output_sampling_rate": 22_049}, "a code is 22049/50 samples, not a whole number"),
    ],
)
def test_variants_that_are_not_computed(changes, message) -> None:
    from decoder.codecs.xcodec2.decoder import xcodec2_config

    with pytest.raises(DecoderConfigError, match=message):
        xcodec2_config("neucodec", {"num_attention_heads": 4, **changes})

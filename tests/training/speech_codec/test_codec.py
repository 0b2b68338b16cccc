"""The codec's networks: streaming equals whole, voices condition, costs are what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoder import DecoderConfigError
from decoder.codecs.embedded.modules import CodecConfig
from decoder.codecs.source_filter.config import SpeechCodecConfig
from decoder.codecs.source_filter.modules import SpeechCodec
from training.speech_codec import cost
from training.speech_codec.checkpoint import eighth_bits, halved, load, read, write
from training.speech_codec.config import DESIGNS, load_config, save_config

TOY = DESIGNS["toy"]


def codec_of(config: SpeechCodecConfig) -> SpeechCodec:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        codec = SpeechCodec(config)
        for block in codec.decoder.blocks:  # so that every block is heard
            torch.nn.init.constant_(block.scale, 1.0)
    return codec.eval()


def noise(codes: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, codes * TOY.hop, generator=generator) / 10


@torch.inference_mode()
def test_voice_tokens_are_of_the_codebook_and_codes_give_samples() -> None:
    codec = codec_of(TOY)
    voice, tokens = codec.voice(noise(5))
    assert tokens.shape == (2, TOY.voice_tokens)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < TOY.codebook_size
    codes = torch.arange(18).view(2, 9)
    samples = codec.decode(codes, tokens)
    assert samples.shape == (2, 9 * TOY.hop)
    values = codec.quantizer.values(codes)
    assert torch.allclose(samples, codec.decoder(values, voice), atol=1e-5)


@torch.inference_mode()
def test_a_sample_depends_on_the_codes_that_the_config_says() -> None:
    codec, at, count = codec_of(TOY), 4, 40
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(TOY.codebook_size, (1, count), generator=generator)
    tokens = torch.zeros(1, TOY.voice_tokens, dtype=torch.long)
    other = codes.clone()
    other[:, at] = (other[:, at] + 17) % TOY.codebook_size
    torch.nn.init.zeros_(codec.decoder.pitch.weight)  # a phase would pass on every change for ever
    changed = (codec.decode(codes, tokens) != codec.decode(other, tokens))[0].nonzero().flatten()
    assert int(changed.min()) // TOY.hop == at - TOY.ahead
    assert at < int(changed.max()) // TOY.hop <= at + TOY.receptive_field


@torch.inference_mode()
def test_another_voice_gives_other_samples_of_the_same_codes() -> None:
    codec = codec_of(TOY)
    codes = torch.zeros(1, 5, dtype=torch.long)
    voices = [torch.full((1, TOY.voice_tokens), number) for number in (0, 9)]
    first, second = (codec.decode(codes, voice) for voice in voices)
    assert not torch.allclose(first, second, atol=1e-3)


def test_the_shipped_decoders_cost_is_that_of_its_products() -> None:
    config = CodecConfig()
    per_frame = 6 * (4 * 384**2 + 2 * 384 * 1152) + 384 * 2 * 2 * 321 + 5 * 384
    attention = 2 * 6 * 384 * 17 * 2
    assert cost.shipped(config) == pytest.approx(50 * (per_frame + attention))


def test_the_design_costs_little_more_than_the_shipped_decoder() -> None:
    assert cost.designed(DESIGNS["source_free"]) <= 1.6 * cost.shipped(CodecConfig())


def test_files_of_trials_are_read(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    save_config(TOY, path)
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"codebooks": 1, "excitation": True}))
    assert load_config(path) == TOY
    path.write_text(json.dumps(values | {"codebooks": 2}))
    with pytest.raises(DecoderConfigError, match="codebooks is 2"):
        load_config(path)


def test_a_wider_decoder_costs_more() -> None:
    assert cost.designed(replace(TOY, decoder_ff=64)) > cost.designed(TOY)


@torch.inference_mode()
def test_weights_come_back_in_half_precision_and_nearly_in_8_bits(tmp_path: Path) -> None:
    codec = codec_of(TOY)
    state = halved(codec.state_dict())
    save_config(TOY, tmp_path / "toy.json")
    write(state, tmp_path / "half.safetensors")
    write(eighth_bits(state), tmp_path / "small.safetensors")
    half, small = (
        load(tmp_path / f"{name}.safetensors", tmp_path / "toy.json") for name in ("half", "small")
    )
    for name, value in codec.state_dict().items():
        assert torch.allclose(half.state_dict()[name], value, atol=1e-3, rtol=1e-3)
        coarse = small.state_dict()[name]
        assert (coarse - value).abs().max() <= value.abs().max() / 127 + 1e-3
    assert not list(tmp_path.glob("*.tmp"))
    assert set(read(tmp_path / "small.safetensors")) == set(state)
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("half", "small")]
    assert sizes[1] < sizes[0]

"""The embedded codec: files, options, batched decoding, encoding.

Folder: config.json (sizes of `CodecConfig`, "type", "hop", "streaming") and model.safetensors
(names of `EmbeddedCodec`, float16 on disk). The encoder is loaded at the first `encode`, because
most processes never use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoder.base import (
    AttentionKind,
    CodecSpec,
    DecoderConfigError,
    DecodeWindow,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
)
from decoder.clips import checked_clip
from decoder.codecs.common import built
from decoder.codecs.embedded.modules import CodecConfig, EmbeddedCodec
from decoder.codecs.embedded.render import EmbeddedRenderer
from decoder.cuda.devices import own_stream
from decoder.registry import WEIGHTS_FILE, CodecSource
from decoder.streaming import validate_streaming
from decoder.window_inputs import PaddedNetwork, PaddedRows

ENCODE_CODES = 256  # codes per encoder call, without the margins


class EmbeddedDecoder(PaddedNetwork):
    """Codec `embedded`: one FSQ codebook, transformer, inverse STFT, no delay."""

    supported_options = frozenset({"token_rate_hz", "max_batch", "pcm_format"})

    def __init__(self, spec: CodecSpec, codec: EmbeddedCodec, source: CodecSource) -> None:
        self.spec = spec
        self.options = source.options
        self._codec = codec
        self._source = source
        self.device = source.device
        self._encoder: EmbeddedCodec | None = None
        self._renderer = EmbeddedRenderer(codec)
        self._encoding = own_stream(source.device)

    @classmethod
    def create(cls, source: CodecSource) -> EmbeddedDecoder:
        """Create from a source; raises DecoderConfigError for an invalid file, tensor or rate."""
        if source.weights is None and not source.test_mode:
            raise DecoderConfigError(
                f"codec 'embedded' needs weights: name a codec folder with {WEIGHTS_FILE}"
            )
        config = CodecConfig.from_dict(dict(source.config))
        _check_rates(config, source)
        codec = _load(config, source, part="decoder")
        codec = codec.to(source.device).eval()
        if source.device != "cpu":
            use_bfloat16(codec)
        return cls(codec_spec(config, source), codec, source)

    def decode(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """See AudioDecoder.decode. Raises CodeRangeError for an invalid code."""
        _check_positions(windows)
        return super().decode(windows)

    def render(self, rows: PaddedRows) -> Tensor:
        """See PaddedNetwork.render."""
        return self._renderer.render(rows)

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """Encode mono float32 [S] at the codec's rate to ceil(S / hop) codes, in pieces of bounded
        size.

        Raises AudioFormatError for an empty, non-finite or multi-channel clip.
        """
        samples = checked_clip(samples)
        with self._encoding():
            if self._encoder is None:
                self._encoder = self._load_encoder()
            return _encode(self._encoder, torch.from_numpy(samples).to(self._source.device))

    def _load_encoder(self) -> EmbeddedCodec:
        if not self.spec.can_encode:
            raise DecoderConfigError("this codec's weights hold no encoder")
        codec = _load(self._codec.config, self._source, part="encoder")
        return codec.to(self._source.device).eval()


def _check_positions(windows: Sequence[DecodeWindow]) -> None:
    for window in windows:
        first = window.positions[0]
        if window.positions != tuple(range(first, first + len(window.codes))):
            raise DecoderConfigError("positions of a window must follow each other")


def use_bfloat16(codec: EmbeddedCodec) -> None:
    """Convert the weights of the decoder's body to bfloat16; spectra and inverse STFT stay in
    float32.
    """
    codec.decoder.input.to(torch.bfloat16)
    codec.decoder.body.to(torch.bfloat16)


def codec_spec(config: CodecConfig, source: CodecSource) -> CodecSpec:
    """Return the spec of an embedded codec."""
    spec = CodecSpec(
        name="embedded",
        sample_rate=config.sample_rate,
        samples_per_code=Fraction(config.hop),
        codebook_size=config.codebook_size,
        receptive_field=config.receptive_field,
        attention=AttentionKind.BIDIRECTIONAL if config.right_window else AttentionKind.CAUSAL,
        can_encode=source.weights is None or _has_encoder(source.weights),
        recommended=recommended_streaming(source.config.get("streaming", {})),
    )
    try:
        validate_streaming(spec.recommended, spec)
    except DecoderConfigError as error:
        raise DecoderConfigError(f"codec config: streaming: {error}") from error
    return spec


def recommended_streaming(values: Mapping[str, Any]) -> StreamingOptions:
    """Read the "streaming" object of a codec's config.json; an unknown key is an error."""
    causal = "prepend_prompt_speech_tokens_causal"
    known = {"chunk_sizes", "buffer", "block_causal", "prepend", causal}
    if not isinstance(values, Mapping):
        raise DecoderConfigError(f"codec config: streaming {values!r} is not an object")
    if surplus := sorted(set(values) - known):
        raise DecoderConfigError(f"codec config: unknown key streaming.{surplus[0]}")
    sizes = values.get("chunk_sizes")
    if not isinstance(sizes, list | None):
        raise DecoderConfigError(f"codec config: streaming.chunk_sizes {sizes!r} is not a list")
    try:
        prepend = PrependPromptSpeechTokens(values.get("prepend", "never"))
    except ValueError as error:
        raise DecoderConfigError(f"codec config: streaming.prepend: {error}") from None
    return StreamingOptions(
        chunk_sizes=None if sizes is None else tuple(sizes),
        buffer=values.get("buffer", 0),
        masks=MaskPolicy(bool(values.get("block_causal")), bool(values.get(causal))),
        prepend=prepend,
    )


def _check_rates(config: CodecConfig, source: CodecSource) -> None:
    hop = source.config.get("hop", config.hop)
    if hop != config.hop:
        raise DecoderConfigError(f"codec config: hop is {hop} but the sizes give {config.hop}")
    rate, wanted = config.sample_rate / config.hop, source.options.token_rate_hz
    if wanted is not None and not math.isclose(wanted, rate, rel_tol=1e-6):
        raise DecoderConfigError(
            f"audio_decoder_config: token_rate_hz is {wanted:g} but the codec's rate is {rate:g}"
        )


def _read_tensors(weights: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, without it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="pt") as file:
            names = [name for name in sorted(file.keys()) if name.startswith(prefix)]
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise DecoderConfigError(f"cannot read codec weights {weights}: {error}") from error


def _has_encoder(weights: Path) -> bool:
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as file:
        return any(name.startswith("encoder.") for name in sorted(file.keys()))


def _load(config: CodecConfig, source: CodecSource, part: str) -> EmbeddedCodec:
    """Return the codec on the CPU with one part's weights (the other part is not used)."""
    try:
        codec = built(lambda: EmbeddedCodec(config, with_encoder=part == "encoder"), source)
    except (RuntimeError, TypeError, ValueError) as error:  # errors of torch for invalid sizes
        reason = str(error).partition("\n")[0]
        raise DecoderConfigError(f"codec config: the sizes are too large: {reason}") from error
    if source.weights is None:
        return codec
    tensors = _read_tensors(source.weights, part + ".")
    try:
        getattr(codec, part).load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise DecoderConfigError(f"codec weights {source.weights}: {reason}") from error
    return codec


@torch.inference_mode()
def _encode(codec: EmbeddedCodec, samples: Tensor) -> tuple[int, ...]:
    """Encode piece by piece; margins as wide as the encoder's context make the result exact."""
    config = codec.config
    hop, total = config.hop, math.ceil(len(samples) / config.hop)
    mel_margin = math.ceil(config.mel_n_fft / 2 / hop) + 1
    margin = config.encoder_layers * config.encoder_window + mel_margin
    padded = torch.nn.functional.pad(samples, (0, max(total, mel_margin) * hop - len(samples)))
    codes: list[int] = []
    for start in range(0, total, ENCODE_CODES):
        end = min(start + ENCODE_CODES, total)
        first, last = max(start - margin, 0), min(end + margin, len(padded) // hop)
        piece = codec.encode(padded[None, first * hop : last * hop])[1][0]
        codes += piece[start - first : end - first].tolist()
    return tuple(codes)

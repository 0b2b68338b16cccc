"""Audio decoders: codes in, float32 samples out; streaming windows and sample formats.

Independent of language models. Importing the package imports no torch: codecs load on demand. The
names of `decoder.pcm`, which needs numpy, are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from decoder.base import (
    AttentionKind,
    AudioDecoder,
    AudioFormatError,
    CodecSpec,
    CodeRangeError,
    DecoderConfigError,
    DecodeRequest,
    DecoderError,
    DecoderOptions,
    DecodeWindow,
    EncoderUnavailableError,
    MaskPolicy,
    PcmFormat,
    PrependPromptSpeechTokens,
    SpeakerEncoder,
    StreamingOptions,
    StreamState,
)
from decoder.batching import DecodeResult, Renderer, render
from decoder.blending import blend_voices
from decoder.identity import codec_identity
from decoder.registry import (
    DecoderArchitecture,
    create_decoder,
    create_speaker_encoder,
    register_decoder,
    supported_decoders,
    with_graphs,
)
from decoder.streaming import (
    DecoderStream,
    attention_mask,
    sample_index,
    validate_streaming,
)

if TYPE_CHECKING:
    from decoder.pcm import (
        MAX_SPEAKING_RATE,
        MIN_SPEAKING_RATE,
        AudioEncoder,
        AudioEncoding,
        AudioFormat,
        HeaderPatch,
        LevelMatcher,
        LoudnessNormalizer,
        PromptAudioLimits,
        Resampler,
        SilenceTrimmer,
        StreamMarker,
        TimeStretcher,
        Watermark,
        apply_patches,
        check_output_format,
        create_encoder,
        decode_samples,
        encode_samples,
        finalize_header,
        finalize_wav_header,
        gain_factor,
        nearest_rate,
        read_prompt_audio,
        resample,
        stretch_part,
        supported_encodings,
        to_s16,
    )

__all__ = [
    "MAX_SPEAKING_RATE",
    "MIN_SPEAKING_RATE",
    "AttentionKind",
    "AudioDecoder",
    "AudioEncoder",
    "AudioEncoding",
    "AudioFormat",
    "AudioFormatError",
    "CodeRangeError",
    "CodecSpec",
    "DecodeRequest",
    "DecodeResult",
    "DecodeWindow",
    "DecoderArchitecture",
    "DecoderConfigError",
    "DecoderError",
    "DecoderOptions",
    "DecoderStream",
    "EncoderUnavailableError",
    "HeaderPatch",
    "LevelMatcher",
    "LoudnessNormalizer",
    "MaskPolicy",
    "PcmFormat",
    "PrependPromptSpeechTokens",
    "PromptAudioLimits",
    "Renderer",
    "Resampler",
    "SilenceTrimmer",
    "SpeakerEncoder",
    "StreamMarker",
    "StreamState",
    "StreamingOptions",
    "TimeStretcher",
    "Watermark",
    "apply_patches",
    "attention_mask",
    "blend_voices",
    "check_output_format",
    "codec_identity",
    "create_decoder",
    "create_encoder",
    "create_speaker_encoder",
    "decode_samples",
    "encode_samples",
    "finalize_header",
    "finalize_wav_header",
    "gain_factor",
    "nearest_rate",
    "read_prompt_audio",
    "register_decoder",
    "render",
    "resample",
    "sample_index",
    "stretch_part",
    "supported_decoders",
    "supported_encodings",
    "to_s16",
    "validate_streaming",
    "with_graphs",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("decoder.pcm"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

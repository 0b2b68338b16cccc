"""Sample formats: float32 samples to and from bytes.

formats (s16le, f32le, mu-law, A-law, gain) · resampling · time_stretch (speaking rate) · encoders
(streams in any format or container) · silence · loudness · levels ·
prompt_audio (checks of untrusted clips)
"""

from decoder.pcm.encoders import (
    AudioEncoder,
    HeaderPatch,
    apply_patches,
    check_output_format,
    create_encoder,
    finalize_header,
    finalize_wav_header,
    nearest_rate,
    supported_encodings,
)
from decoder.pcm.formats import (
    AudioEncoding,
    AudioFormat,
    decode_samples,
    encode_samples,
    gain_factor,
    to_s16,
)
from decoder.pcm.levels import LevelMatcher
from decoder.pcm.loudness import LoudnessNormalizer
from decoder.pcm.prompt_audio import PromptAudioLimits, read_prompt_audio
from decoder.pcm.resampling import Resampler, resample
from decoder.pcm.silence import SilenceTrimmer
from decoder.pcm.time_stretch import (
    MAX_SPEAKING_RATE,
    MIN_SPEAKING_RATE,
    TimeStretcher,
    stretch_part,
)
from decoder.pcm.watermark import StreamMarker, Watermark

__all__ = [
    "MAX_SPEAKING_RATE",
    "MIN_SPEAKING_RATE",
    "AudioEncoder",
    "AudioEncoding",
    "AudioFormat",
    "HeaderPatch",
    "LevelMatcher",
    "LoudnessNormalizer",
    "PromptAudioLimits",
    "Resampler",
    "SilenceTrimmer",
    "StreamMarker",
    "TimeStretcher",
    "Watermark",
    "apply_patches",
    "check_output_format",
    "create_encoder",
    "decode_samples",
    "encode_samples",
    "finalize_header",
    "finalize_wav_header",
    "gain_factor",
    "nearest_rate",
    "read_prompt_audio",
    "resample",
    "stretch_part",
    "supported_encodings",
    "to_s16",
]

"""Preparation of recordings for encoders: checks, and padding of the last frame with silence."""

from __future__ import annotations

import numpy as np

from decoder.base import AudioFormatError, CodecSpec


def checked_clip(samples: np.ndarray) -> np.ndarray:
    """Return mono samples as float32 [S].

    Raises AudioFormatError for an empty, non-finite or multi-channel clip.
    """
    clip = np.asarray(samples, dtype=np.float32)
    if clip.ndim != 1 or not len(clip):
        raise AudioFormatError(f"a clip is one row of samples, not of shape {clip.shape}")
    if not np.isfinite(clip).all():
        raise AudioFormatError("the clip holds values that are not finite")
    return clip


def whole_frames(samples: np.ndarray, spec: CodecSpec) -> np.ndarray:
    """Pad mono float32 [S] at the codec's rate to [F * samples_per_frame].

    Raises AudioFormatError as `checked_clip` does.
    """
    clip = checked_clip(samples)
    return np.pad(clip, (0, -len(clip) % int(spec.samples_per_frame)))

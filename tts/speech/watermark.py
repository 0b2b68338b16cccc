"""The watermark of generated audio: PerTh of the package resemble-perth, an optional dependency."""

from __future__ import annotations

import warnings
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO

import numpy as np

from decoder import Watermark
from llm import ConfigError

RATE = 32_000  # Hz; the network's own, at which the package does not resample


def load_watermark() -> Watermark:
    """Return the watermark; its network is loaded, to run on the CPU.

    Raises ConfigError if the package or one that it needs is missing.
    """
    import torch

    with warnings.catch_warnings(), redirect_stdout(StringIO()):  # standard output may be audio
        warnings.simplefilter("ignore")  # about pkg_resources
        try:
            # Its root replaces this class by None if an import fails.
            perth = import_module("perth.perth_net.perth_net_implicit.perth_watermarker")
        except ImportError as error:
            raise ConfigError(
                f"watermark cannot be loaded: {error}; "
                "install the extra 'watermark': pip install 'sonant[watermark]'"
            ) from error
        network = perth.PerthImplicitWatermarker()

    def apply(clip: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(network.apply_watermark(clip, sample_rate=RATE), dtype=np.float32)

    return Watermark(apply, RATE)

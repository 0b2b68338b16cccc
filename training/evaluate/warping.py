"""Dynamic time warping of two sounds: which place of one is which place of the other."""

from __future__ import annotations

import numpy as np
import torch
from torchaudio.functional import create_dct, melscale_fbanks

from benchmarks.understood import Clip

HOP_S, WINDOW_S = 0.005, 0.025
BANDS, CEPSTRA = 40, 13
LOWEST = 1e-8  # of a band's power


def features(clip: Clip) -> np.ndarray:
    """Return cepstra and their changes in every 5 ms, of mean 0 and deviation 1: [T, 26]."""
    rate = clip.sample_rate
    hop, size = round(HOP_S * rate), 1 << (round(WINDOW_S * rate) - 1).bit_length()
    sound = torch.from_numpy(np.ascontiguousarray(clip.samples, np.float32))
    window = torch.hann_window(round(WINDOW_S * rate))
    spectrum = torch.stft(
        sound, size, hop, len(window), window, pad_mode="constant", return_complex=True
    )
    power = spectrum.abs().square().T
    mel = melscale_fbanks(size // 2 + 1, 60.0, min(8000.0, rate / 2), BANDS, rate)
    cepstra = (power @ mel).clamp_min(LOWEST).log() @ create_dct(CEPSTRA, BANDS, "ortho")
    found = torch.cat((cepstra, torch.gradient(cepstra, dim=0)[0]), 1)
    return ((found - found.mean(0)) / found.std(0).clamp_min(1e-6)).numpy()


class Warping:
    """A function from seconds of one sound to seconds of another that says the same."""

    def __init__(self, first: np.ndarray, second: np.ndarray) -> None:
        """`first`, `second`: `features` [T, F] and [U, F]."""
        path = cheapest_path(distances(first, second))
        at = np.unique(path[:, 0], return_inverse=True)[1]
        self._seconds = np.bincount(at, path[:, 1]) / np.bincount(at) * HOP_S

    def __call__(self, second: float) -> float:
        """Return the place in the second sound."""
        places = np.arange(len(self._seconds)) * HOP_S
        return float(np.interp(second, places, self._seconds))


def distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the Euclidean distances of all pairs of rows."""
    squares = np.square(first).sum(1)[:, None] + np.square(second).sum(1)
    return np.sqrt(np.maximum(squares - 2 * first @ second.T, 0))


def cheapest_path(costs: np.ndarray) -> np.ndarray:
    """Return the path [P, 2] from the first to the last pair with the lowest sum of costs, by steps
    of one in either direction or in both, of which a diagonal one counts twice."""
    rows, columns = costs.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0.0
    for diagonal in range(rows + columns - 1):  # cells of one diagonal do not depend on each other
        i = np.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1))
        j = diagonal - i
        straight = np.minimum(total[i, j + 1], total[i + 1, j])
        both = total[i, j] + 2 * costs[i, j]
        total[i + 1, j + 1] = np.minimum(straight + costs[i, j], both)
    i, j, path = rows, columns, []
    while i and j:
        path.append((i - 1, j - 1))
        here = costs[i - 1, j - 1]
        steps = (
            (total[i - 1, j - 1] + 2 * here, i - 1, j - 1),
            (total[i - 1, j] + here, i - 1, j),
            (total[i, j - 1] + here, i, j - 1),
        )
        _, i, j = min(steps)
    return np.array(path[::-1])

"""Change of the speaking rate without a change of pitch, streaming: WSOLA.

    input    ...[----frame k----]......   starts near k * hop * rate, moved by up to +-search
                        |                 to where it best continues frame k - 1
    output   [k-1: falling half + k: rising half][k: falling half + k+1: ...]

Frames are two hops long under a Hann window, so overlapping halves add up to one. The moved
start is the one whose frame correlates best (normalised) with what followed the previous frame
in the input. Every decision depends on absolute positions and complete frames only: the output
does not depend on the division of the input.

Source: Verhelst and Roelands, "An overlap-add technique based on waveform similarity (WSOLA)",
ICASSP 1993.
"""

from __future__ import annotations

import numpy as np

from decoder.base import AudioFormatError

MIN_SPEAKING_RATE, MAX_SPEAKING_RATE = 0.25, 4.0
HOP_S = 0.0125  # half a frame: two to five periods of a voice fit into 25 ms
SEARCH_S = 0.0085  # +-: a little over one period of a low voice (60 Hz)


def stretch_part(
    samples: np.ndarray, part: tuple[int, int], rate: float, sample_rate: int
) -> tuple[np.ndarray, int]:
    """Return samples [start, end) of float32 [S] at `rate` times their speed, and the index where
    the rest continues without a seam.

    That index is near the end; near the end of all samples the last frame stays as it is.
    """
    start, end = part
    stretcher = TimeStretcher(rate, sample_rate)
    output = stretcher.process_until(samples[start:], end - start)
    return output, start + stretcher.num_played


class TimeStretcher:
    """Plays mono float32 at `rate` times its speed; rate 1 passes through bit for bit.

    In total it emits round(num_in / rate) samples, the last ones in `finish`.
    """

    def __init__(self, rate: float, sample_rate: int) -> None:
        if not MIN_SPEAKING_RATE <= rate <= MAX_SPEAKING_RATE:
            raise AudioFormatError(
                f"speaking rate {rate:g} is outside [{MIN_SPEAKING_RATE}, {MAX_SPEAKING_RATE}]"
            )
        self._rate = rate
        self._hop = max(8, round(HOP_S * sample_rate))
        self._search = max(4, round(SEARCH_S * sample_rate))
        length = 2 * self._hop
        self._fft_size = 1 << (length + 2 * self._search - 1).bit_length()
        phase = np.arange(self._hop, dtype=np.float64) / self._hop
        self._rise = np.sin(0.5 * np.pi * phase).astype(np.float32) ** 2
        self._fall = np.float32(1) - self._rise
        self._reset()

    def _reset(self) -> None:
        self._input = np.zeros(0, dtype=np.float32)
        self._input_start = 0  # absolute position of self._input[0]
        self._num_in = self._num_out = 0
        self._num_frames = 0
        self._next_natural = 0  # where the input continues after the newest frame's first half
        self._tail = np.zeros(0, dtype=np.float32)  # the newest frame's second half, unwindowed

    def process(self, samples: np.ndarray) -> np.ndarray:
        """Process float32 [S]; return the samples that are ready (possibly none)."""
        if self._rate == 1.0:
            return samples
        self._num_in += len(samples)
        self._input = np.concatenate([self._input, samples.astype(np.float32, copy=False)])
        return self._run()

    def process_until(self, samples: np.ndarray, end: int) -> np.ndarray:
        """Process the first samples of a stream up to about `end`, if there are enough behind it.

        `num_played` is then where the input continues without a seam.
        """
        self._input = samples
        parts = [np.zeros(0, dtype=np.float32)]
        while self._nominal() < end and self._needed_end() <= len(samples):
            parts.append(self._next_frame())
        return np.concatenate(parts)

    @property
    def num_played(self) -> int:
        """Number of input samples that the frames' output stands for."""
        return self._next_natural

    def finish(self) -> np.ndarray:
        """Return the rest, to the exact length; afterwards the stretcher can be used again."""
        if self._rate == 1.0:
            return np.zeros(0, dtype=np.float32)
        missing = round(self._num_in / self._rate) - self._num_out
        parts = [np.zeros(0, dtype=np.float32)]
        while (held := sum(map(len, parts))) < missing:
            silence = np.zeros(self._needed_end() - self._input_end(), dtype=np.float32)
            self._input = np.concatenate([self._input, silence])
            parts.append(self._run())
            assert sum(map(len, parts)) > held
        self._reset()
        return np.concatenate(parts)[: max(missing, 0)]

    def _input_end(self) -> int:
        return self._input_start + len(self._input)

    def _nominal(self) -> int:
        return round(self._num_frames * self._hop * self._rate)

    def _needed_end(self) -> int:
        """Return the input length that the next frame requires."""
        last = max(self._nominal() + self._search, self._next_natural)
        return last + 2 * self._hop

    def _run(self) -> np.ndarray:
        parts = [np.zeros(0, dtype=np.float32)]
        while self._needed_end() <= self._input_end():
            parts.append(self._next_frame())
        self._forget()
        output = np.concatenate(parts)
        self._num_out += len(output)
        return output

    def _next_frame(self) -> np.ndarray:
        """Place one frame; return the `hop` samples that are complete with it."""
        hop = self._hop
        start = self._best_start()
        frame = self._slice(start, start + 2 * hop)
        head = frame[:hop]
        if self._num_frames:
            head = self._tail * self._fall + head * self._rise
        self._tail = frame[hop:].copy()
        self._next_natural = start + hop
        self._num_frames += 1
        return head

    def _best_start(self) -> int:
        """Return the start near the nominal one whose frame best continues the last one."""
        nominal, length = self._nominal(), 2 * self._hop
        if self._num_frames == 0:
            return 0
        first = max(0, nominal - self._search)
        region = self._slice(first, nominal + self._search + length)
        target = self._slice(self._next_natural, self._next_natural + length)
        num_starts = len(region) - length + 1
        spectrum = np.fft.rfft(region, self._fft_size)
        spectrum *= np.conj(np.fft.rfft(target, self._fft_size))
        likeness = np.fft.irfft(spectrum, self._fft_size)[:num_starts]
        energy = np.cumsum(np.square(region, dtype=np.float64))
        energy = energy[length - 1 :] - np.concatenate([[0.0], energy[: num_starts - 1]])
        score = likeness / np.sqrt(np.maximum(energy, 0.0) + 1e-6)
        return first + int(np.argmax(score))

    def _slice(self, start: int, end: int) -> np.ndarray:
        return self._input[start - self._input_start : end - self._input_start]

    def _forget(self) -> None:
        """Drop input that no later frame uses, to keep the buffer short."""
        keep_from = min(max(0, self._nominal() - self._search), self._next_natural)
        drop = min(keep_from - self._input_start, len(self._input))
        if drop > 0:
            self._input = self._input[drop:].copy()
            self._input_start += drop

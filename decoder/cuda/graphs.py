"""`CapturedDecoder`: a codec whose usual decode calls are captured once and then replayed.

    window shapes of the configured schedule × batch sizes 1, 2, 4, 8, 12 … max_batch ──▶ graphs
    decode(5 windows of a known shape) ──▶ buffers of 8 rows ──▶ one launch ──▶ the first 5 rows

Rows beyond the windows hold old values: rows are independent of each other. Other shapes (the
last block of a stream, a client's own chunking) are rendered without graphs; a
codec that supports padding uses `PaddedGraphs`, which cover nearly all shapes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoder.base import (
    AudioDecoder,
    DecodeWindow,
    PrependPromptSpeechTokens,
    StreamingOptions,
)
from decoder.cuda.devices import URGENT
from decoder.streaming import DecoderStream, check_windows
from decoder.window_inputs import WindowInputs, WindowNetwork, tensor_float32

logger = logging.getLogger(__name__)

WARM_UP_RUNS = 2  # before a capture: libraries choose their kernels and allocate memory
SCHEDULE_BLOCKS = 32  # blocks of a stream, after which its windows no longer grow

GraphRecorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Function that captures work; returns a function that replays it, and its output tensor."""


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One captured decode call for a fixed number of rows."""

    inputs: WindowInputs  # fixed device tensors
    replay: Callable[[], None]
    output: Tensor  # [B, S], overwritten by the next replay


class CapturedDecoder(AudioDecoder):
    """Decoder with the same samples as `network`, if its kernels do not depend on the number of
    rows.

    Not thread-safe: `decode` must be called on one thread and one stream, on which its result must
    be read before the next call.
    """

    def __init__(self, network: WindowNetwork, record: GraphRecorder) -> None:
        self.spec, self.options, self.device = network.spec, network.options, network.device
        self.num_replays = 0
        self._network = network
        self._record = record
        self._captured_calls: dict[tuple[Hashable, int], CapturedCall] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._network!r}, graphs={len(self._captured_calls)})"

    @property
    def num_graphs(self) -> int:
        """Number of captured calls."""
        return len(self._captured_calls)

    def capture(self, windows: Sequence[DecodeWindow]) -> None:
        """Capture the shapes of these windows for all batch sizes, largest first."""
        with self.log_duration(), torch.inference_mode():
            for size in reversed(batch_sizes(self.options.max_batch)):
                for window in windows:
                    inputs = self._network.inputs([window] * size)
                    self._add((_key(inputs), size), inputs)

    @contextmanager
    def log_duration(self) -> Iterator[None]:
        """Log the duration of a capture."""
        started_s = time.perf_counter()
        yield
        logger.info(
            "codec %s: %d graphs captured in %.1f s",
            self.spec.name,
            self.num_graphs,
            time.perf_counter() - started_s,
        )

    def _add(self, key: tuple[Hashable, int], inputs: WindowInputs) -> None:
        if key not in self._captured_calls:
            fixed = inputs.to(self.device)
            with nullcontext() if self.device == "cpu" else tensor_float32():
                replay, output = self._record(lambda: self._run(fixed))
            self._captured_calls[key] = CapturedCall(fixed, replay, output)

    def _run(self, inputs: WindowInputs) -> Tensor:
        """Do the work of a captured call on its fixed inputs."""
        return self._network.run(inputs)

    def decode(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """See AudioDecoder.decode."""
        check_windows(self, windows)
        inputs = self._network.inputs(windows)
        size = next(s for s in batch_sizes(self.options.max_batch) if s >= len(windows))
        recording = self._captured_calls.get((_key(inputs), size))
        if recording is None:
            return self._network.decode(windows)
        with torch.inference_mode():
            for fixed, given in zip(recording.inputs.tensors, inputs.tensors, strict=True):
                pinned = given.pin_memory() if fixed.is_cuda else given
                fixed[: len(windows)].copy_(pinned, non_blocking=True)
            recording.replay()
        self.num_replays += 1
        return recording.output[: len(windows)]

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """See AudioDecoder.encode."""
        return self._network.encode(samples)


def _key(inputs: WindowInputs) -> Hashable:
    """Return the key of a capture, without the number of rows."""
    return inputs.key, tuple((t.dtype, t.shape[1:]) for t in inputs.tensors)


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return powers of two, from 8 on also the numbers half-way between them, and `max_batch`."""
    powers = [2**n for n in range(max_batch.bit_length())]
    sizes = [*powers, *(size + size // 2 for size in powers if size >= 8)]
    return (*sorted(size for size in sizes if size < max_batch), max_batch)


def schedule_windows(decoder: AudioDecoder, options: StreamingOptions) -> list[DecodeWindow]:
    """Return one window of every shape that a stream has before its last block.

    There are windows without a voice prompt, and with one that is no shorter than the buffer.
    """
    prompts = [0] if options.prepend is PrependPromptSpeechTokens.NEVER else [0, options.buffer]
    windows = [window for size in prompts for window in _windows(decoder, options, size)]
    return list({window.shape: window for window in windows}.values())


def _windows(
    decoder: AudioDecoder, options: StreamingOptions, prompt_size: int
) -> list[DecodeWindow]:
    sizes = options.chunk_sizes
    if sizes is None:
        return []
    num_codes = sum(sizes[min(block, len(sizes) - 1)] for block in range(SCHEDULE_BLOCKS))
    stream = DecoderStream(decoder.spec, options, prompt_codes=(0,) * prompt_size)
    return stream.push((0,) * (num_codes + options.look_ahead))[:SCHEDULE_BLOCKS]


class CudaRecorder:
    """Captures CUDA graphs, which share one memory pool and one stream of the current device.

    Captured kernels have a high priority: a kernel keeps the priority of the stream of its capture.
    They are short, and latency depends on them; model steps with a higher priority would produce
    codes that are not rendered in time.

    The stream is used by this recorder only. PyTorch has 32 streams per priority and then reuses
    them, and cuBLAS has one workspace per stream: products captured on one stream must not run
    concurrently.
    """

    def __init__(self, device: str) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(torch.device(device), priority=URGENT)

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture work; see `GraphRecorder`. Waits for the device, which must be otherwise idle."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay, output

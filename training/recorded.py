"""A training step as one CUDA graph.

A step of many small networks is thousands of kernels, which take longer to launch one by one than
to run. A graph launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_STEPS = 3  # on the stream of the recording, before it


class Recorded:
    """A step that is recorded at its first use and replayed with other values.

    It must not read the values of tensors on the host. Parameters and the optimisers' state must
    stay in the same memory. Every replay draws other random numbers.
    """

    def __init__(self, step: Callable[..., dict[str, Tensor]], given: Sequence[Tensor]) -> None:
        """`given`: arguments of the first steps. Raises RuntimeError where the step cannot be
        recorded."""
        self._given = [value.clone() for value in given]
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                step(*self._given)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.graph(self._graph, stream=stream):
            self._found = step(*self._given)

    def __call__(self, *given: Tensor) -> dict[str, Tensor]:
        """Return what a step finds, in tensors that the next step overwrites."""
        for own, value in zip(self._given, given, strict=True):
            own.copy_(value)
        self._graph.replay()
        return self._found

"""Registry of the built-in kernels: the layer that each replaces, and the set that a session uses.

Each computes the same as its counterpart in `llm.layers`, up to rounding, and tests compare them.
This module does not import triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PDL_CAPABILITY = (9, 0)  # the first with programmatic dependent launch


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel."""

    name: str
    reference: str  # the layer or function that computes the same
    is_product: bool = False  # replaces the vendor's BLAS
    is_experimental: bool = False


KERNELS = (
    Kernel("normalise", "llm.layers.decoder.RMSNorm"),
    Kernel("gate", "llm.layers.decoder.silu_and_multiply"),
    Kernel("rotate_heads", "llm.layers.decoder.SelfAttention"),
    Kernel("attend_frame", "llm.layers.depth.DepthFrames"),
    Kernel("product", "llm.layers.linear.FloatLinear", is_product=True),
    Kernel("gated_product", "llm.layers.decoder.GatedMLP", is_product=True),
    # Of float8: one or two rows with sums in float16, more by torch with one scale of the matrix.
    Kernel("scaled_product", "llm.layers.linear.Float8Linear", is_product=True),
    # Of rows that decode: by default over float8 pages, with the same kernels as the next two.
    Kernel("attend_float8_pages", "llm.attention.gathered.GatheredBackend"),
    Kernel(
        "attend_few_rows",
        "llm.attention.gathered.GatheredBackend",
        is_experimental=True,
    ),
    Kernel(
        "attend_many_rows",
        "llm.attention.gathered.GatheredBackend",
        is_experimental=True,
    ),
    # The head of a large vocabulary, for more rows than `product`.
    Kernel(
        "multiply_rows",
        "llm.layers.decoder.LogitsHead",
        is_product=True,
        is_experimental=True,
    ),
    Kernel(
        "multiply_split",
        "llm.layers.linear.FloatLinear",
        is_product=True,
        is_experimental=True,
    ),
    Kernel(
        "project_heads",
        "llm.layers.decoder.SelfAttention",
        is_product=True,
        is_experimental=True,
    ),
)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The kernels in use, and their launch level."""

    kernels: tuple[Kernel, ...] = ()
    launch_level: int = 0
    """Programmatic dependent launch. 1: a kernel may start when its predecessor is about to end; 2:
    when it begins, and loads weights until it needs the predecessor's results.
    """

    @classmethod
    def choose(cls, *, vendor_blas: bool, experimental: bool, launch_level: int) -> KernelSet:
        """Return the kernels for a CUDA device."""
        chosen = tuple(
            kernel
            for kernel in KERNELS
            if not (kernel.is_product and vendor_blas)
            and not (kernel.is_experimental and not experimental)
        )
        return cls(chosen, launch_level)

    def __contains__(self, name: object) -> bool:
        return any(kernel.name == name for kernel in self.kernels)

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self.kernels)

    def __bool__(self) -> bool:
        return bool(self.kernels)

    def __str__(self) -> str:
        return ", ".join(kernel.name for kernel in self.kernels) or "none"

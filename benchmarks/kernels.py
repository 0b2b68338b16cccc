"""Bandwidth of products of a few rows: built-in kernels with several tile sizes, and cuBLAS.

Every time is of one product inside a CUDA graph of many, with separate weights that exceed the
cache, as in a decode step. GB/s count the weights only. A step is all of a model except attention:
a lower bound of a captured decode step. `--tune` first tries tile sizes for each product and prints
the fastest: the rules in `llm.kernels.tuning` are derived from them. With `--float8` the matrices
of the layers are float8, and cuBLAS stands for the rounding of the rows and torch's product. With
`--packed` they are packed, and it stands for the kernel of many rows.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.kernel_shapes import (
    FLOAT8,
    MODELS,
    PACKED,
    Product,
    ProductMethod,
    WeightsOfProduct,
    step_microseconds,
)
from benchmarks.report import Figure, Report, arguments, publish
from llm.kernels.blocks import Blocks
from llm.kernels.registry import KernelSet

ROWS = (1, 2)
MAX_ERROR = 0.02
VENDOR = ProductMethod()


def methods(item: Product, rows: int) -> Iterator[ProductMethod]:
    """Return methods with tiles of 64 to 256 bytes a thread, one per program or shared by a few
    programs; of a packed matrix the only one.
    """
    if item.packed:
        yield ProductMethod(item.blocks(rows))
        return
    block_in = item.num_in & -item.num_in
    block_in = min(block_in if block_in >= 512 else 1024, 2048)
    for warps, block_out in itertools.product((4, 8, 16), (1, 2, 4, 8, 16)):
        width = item.weight_width
        per_thread = item.parts * block_out * item.num_in * width / (warps * 32)
        if not 24 * width <= per_thread <= 256 or (warps == 16 and per_thread > 128):
            continue
        if rows > 2 and per_thread > 128:
            continue
        tiles = -(-item.num_out // block_out)
        for per_processor in (0, 1, 2, 4):
            programs = per_processor * 132
            if programs * 3 > tiles * 2 or (not programs and tiles > 30_000):
                continue
            if per_processor * warps > 16 or (rows > 2 and programs and per_thread > 64):
                continue
            yield ProductMethod(Blocks(block_out, block_in, warps, programs))


@dataclass(frozen=True, slots=True)
class Work:
    """Measured models and numbers of rows."""

    models: tuple[str, ...]
    rows: tuple[int, ...]
    form: str = ""  # of the layers' matrices

    @property
    def products(self) -> list[tuple[Product, int]]:
        """Return each product with each number of rows."""
        items = [item for model in self.models for item in MODELS[model].products_in(self.form)]
        return list(itertools.product(items, self.rows))


def compile_share(share: int, shares: int, work: Work) -> None:
    """Run every n-th method once, so that its kernel is compiled and cached on disk."""
    everything = [(i, rows, method) for i, rows in work.products for method in methods(i, rows)]
    for item, rows, method in everything[share::shares]:
        WeightsOfProduct(item, rows, 1).call(method)
    torch.cuda.synchronize()


def compile_all(work: Work, workers: int) -> None:
    """Compile in several processes at once."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=compile_share, args=(share, workers, work))
        for share in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def tune(work: Work) -> None:
    """Print the fastest methods, and the times of the rule's and the vendor's method."""
    for item, rows in work.products:
        weights = WeightsOfProduct(item, rows)
        timed = [
            (weights.microseconds(method), str(method))
            for method in methods(item, rows)
            if weights.error(method) < MAX_ERROR
        ]
        chosen = ProductMethod(item.blocks(rows))
        timed += [(weights.microseconds(method), f"({method})") for method in (chosen, VENDOR)]
        best = "; ".join(
            f"{us:.2f} us {method}" for us, method in [*sorted(timed[:-2])[:3], *timed[-2:]]
        )
        print(f"{item.model} {item.name}, {rows} rows: {best}", file=sys.stderr, flush=True)


def figures(work: Work) -> Iterator[Figure]:
    """Measure the selected methods, and whole steps."""
    for item, rows in work.products:
        weights = WeightsOfProduct(item, rows)
        blocks = item.blocks(rows)
        for name, method in (("cuBLAS", VENDOR), ("own", ProductMethod(blocks))):
            speed = item.weight_bytes / weights.microseconds(method) / 1e3
            note = str(method) if method.blocks else ""
            figure = f"{item.model} {item.name}, {rows} rows, {name}"
            yield Figure(figure, (speed,), "GB/s", note=note)
    for model, rows in itertools.product(work.models, work.rows):
        for name, kernels in sets().items():
            step = step_microseconds(model, rows, kernels, form=work.form)
            yield Figure(f"{model} step, {rows} rows, {name}", (step,), "us")


def sets() -> dict[str, KernelSet]:
    """Return kernel sets by the switches that enable them."""
    found = {
        "vendor BLAS": KernelSet.choose(vendor_blas=True, experimental=False, launch_level=0),
        "own": KernelSet.choose(vendor_blas=False, experimental=False, launch_level=0),
    }
    for level in (0, 1, 2):
        kernels = KernelSet.choose(vendor_blas=False, experimental=True, launch_level=level)
        found[f"experimental, level {level}"] = kernels
    return found


def main() -> int:
    """Run the benchmark; see the module."""
    parser = arguments(__doc__ or "", repeat=9)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tune", action="store_true", help="try many ways to cut each product")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="numbers of rows")
    parser.add_argument("--float8", action="store_true", help="float8 matrices in the layers")
    parser.add_argument("--packed", choices=list(PACKED), help="packed matrices in the layers")
    options = parser.parse_args()
    form = options.packed or (FLOAT8 if options.float8 else "")
    work = Work(tuple(options.models), tuple(options.rows), form)
    if options.tune:
        compile_all(work, options.workers)
        tune(work)
    return publish(Report("kernels", tuple(figures(work))))


if __name__ == "__main__":
    sys.exit(main())

"""Run the tests of equal bits once for each configuration of this machine's libraries.

    python -m tests.processors           every combination of the variables below, all these tests
    python -m tests.processors --list    the combinations that this processor has

torch, MKL and oneDNN choose their kernels by the processor. Their variables select those of
another one. MKL also checks the vendor: on an AMD processor its variable changes little, which is
why `order_changing` replaces the BLAS by one whose sums depend on the number of rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
THREADS, BLAS = "SONANT_TEST_THREADS", "SONANT_TEST_BLAS"
OWN, ORDER_CHANGING = "own", "order-changing"

Settings = Mapping[str, str]

LAYER = "tests/llm/layers/test_layers.py::test_a_row_does_not_depend_on_its_neighbours"
MODEL = "tests/llm/pipeline/test_invariance.py::test_"
QUICK = (
    *(f"{LAYER}[{name}-shape1]" for name in ("float32", "bfloat16", "int8")),
    "tests/llm/lora/test_lora.py::test_rows_of_an_adapted_layer_do_not_see_each_other",
    f"{MODEL}logits_do_not_change_a_bit[float32]",
    f"{MODEL}log_probabilities_do_not_change_a_bit",
    *(f"{MODEL}a_cached_prefix_changes_nothing[{name}]" for name in ("float32", "bfloat16")),
    "tests/decoder/test_invariants.py::test_audio_does_not_depend_on_other_streams_of_a_batch",
    "tests/decoder/test_batching.py::test_published_codecs_render_a_window_alone_and_in_a_batch_alike[write_snac]",
    "tests/tts/speech/test_aligner.py::test_streamed_equals_the_whole",
)
"""Tests of what libraries compute. Weights in other formats only go through products that are ours,
whose results for other processors `tests/llm/kernels/test_products.py` compares.
"""
ALL = (
    *QUICK,
    LAYER,
    "tests/llm/pipeline/test_invariance.py",
    "tests/llm/kernels/test_products.py",
    "tests/llm/lora/test_lora.py",
    "tests/decoder/test_invariants.py",
    "tests/decoder/test_batching.py",
    "tests/tts/speech/test_synthesizer.py",
)


def _choices() -> dict[str, tuple[str, ...]]:
    """Return values of each variable on this processor; the empty one leaves it unset."""
    capability = torch.backends.cpu.get_cpu_capability()
    has_avx512, has_avx2 = capability == "AVX512", capability in ("AVX2", "AVX512")
    avx512, avx2 = has_avx512 * ("AVX512",), has_avx2 * ("AVX2",)
    return {
        "ATEN_CPU_CAPABILITY": ("default", *map(str.lower, (*avx2, *avx512))),
        "MKL_ENABLE_INSTRUCTIONS": (*avx2, *avx512),
        "ONEDNN_MAX_CPU_ISA": (*avx2, ""),
        THREADS: ("1", "2"),
    }


def combinations() -> Iterator[Settings]:
    """Iterate over combinations of the variables, and the replacement with either number of
    threads.
    """
    choices = _choices()
    for values in itertools.product(*choices.values()):
        yield {name: value for name, value in zip(choices, values, strict=True) if value}
    for threads in choices[THREADS]:
        yield {BLAS: ORDER_CHANGING, THREADS: threads}


def quick_combinations() -> Iterator[Settings]:
    """Iterate over the values of all variables at once, on two threads.

    Each variable is of another library: every value of each is there once, and one run has none,
    which is that of the last values of torch and of oneDNN. The replacement follows in its process.
    """
    choices = {name: values for name, values in _choices().items() if name != THREADS}
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):
        choices[name] = choices[name][:-1]
    yield {BLAS: f"{OWN},{ORDER_CHANGING}", THREADS: "2"}
    for values in itertools.zip_longest(*choices.values(), fillvalue=""):
        pairs = zip(choices, values, strict=True)
        yield {name: value for name, value in pairs if value} | {THREADS: "2"}


def title(settings: Settings) -> str:
    """Return one word for each variable."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


RUN_EACH = f"""
import os, sys, pytest
from tts.cli.program import end_process
statuses = []
for blas in os.environ.get("{BLAS}", "{OWN}").split(","):
    os.environ["{BLAS}"] = blas
    statuses.append(pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]]))
end_process(max(statuses))
"""
"""Its end frees no objects one by one, which would take a second."""


def run(settings: Settings, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run tests in a separate process, once for each BLAS; its output is captured."""
    known = {*_choices(), BLAS}
    environment = {name: value for name, value in os.environ.items() if name not in known}
    environment["OMP_WAIT_POLICY"] = "passive"  # threads that spin stop other tests' processes
    return subprocess.run(
        [sys.executable, "-c", RUN_EACH, *tests],
        env=environment | dict(settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    """Print a line for each combination; return 1 if a test failed in one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--list", action="store_true", help="print the combinations and run none")
    only_lists = parser.parse_args().list
    status = 0
    for settings in combinations():
        if only_lists:
            print(title(settings))
            continue
        ended = run(settings, ALL)
        lines = ended.stdout.strip().splitlines() or ["no output"]
        print(f"{title(settings)}: {lines[-1]}", flush=True)
        if ended.returncode:
            status = 1
            print(ended.stdout[-4000:], ended.stderr[-2000:])
    return status


if __name__ == "__main__":
    sys.exit(main())

"""The core in process, on random models of published sizes or a checkpoint.

    decode      one greedy sequence: tokens per second, and the share of the memory bandwidth of a
                large copy on the same device that reading the model takes
    batch       the same for 256 sequences of one length
    throughput  256 requests at once, 100 to 1,024 tokens in and out (nano-vllm's bench.py), and the
                time of steps with prompts, of others, and between them
    gaps        idle time of the device between two decode steps, with one row and with a full batch
    steps       the lengths of throughput again with other prompts: duration of a step by its number
                of rows and of steps with prompts, and the kernels of full decode steps (under the
                profiler)
    cancel      time until the pages of a cancelled request are free
    memory      memory of the process without weights and KV pages
    prefill     peak memory of the largest prefill as a share of the plan
    starts      seconds until an engine is made in a new process, without kernels on disk that
                Triton or NVRTC compiled, and with them; those of FlashInfer stay on disk
    peers       transformers and, where it is installed, vLLM on the same shapes; on a CPU in
                float32, compared with this engine

Configuration flags go to the engine. A run may be cut off (--limit-s): then the tokens until then
count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.core_steps import gaps, steps, time_by_kind
from benchmarks.core_subject import Sizes, Subject, warm_jobs
from benchmarks.engine_load import (
    Load,
    Run,
    decode_jobs,
    pipeline_of,
    release_memory,
    run,
    running,
    throughput_jobs,
)
from benchmarks.packed_shapes import GPU_BITS, KINDS
from benchmarks.report import Figure, Report, arguments, publish, until_interrupted
from benchmarks.server_metrics import least_bound
from benchmarks.shapes import SHAPES, Shape
from llm import set_product_threads
from llm.runner.model_runner import ModelRunner
from tests.llm.runner.largest_prefill import largest_prefill
from tts.config.flags import add_config_flags
from tts.config.pipeline import AudioGenerationConfig
from tts.config.sources import flag_values

PARTS = (
    *("decode", "batch", "throughput", "gaps", "steps", "cancel", "memory", "prefill"),
    *("starts", "peers"),
)
MADE = "engine made"
DEFAULT_SHAPES = ("llasa-1b", "orpheus-3b", "qwen3-0.6b", "llama-1b")
DECODE_BARS = {"llasa-1b": 950.0, "orpheus-3b": 450.0, "llama-3b Q4_0": 1000.0}
THROUGHPUT_BARS = {"qwen3-0.6b": 26_000.0, "llama-1b": 30_000.0}
"""Tokens per second on one H200, as those of `DECODE_BARS`."""
MEMORY_BAR_GB = 1.5
PREFILL_BAR = 1.1
CANCEL_BAR_MS = 5.0  # in addition to one step
CANCELS, CANCEL_PERIOD_S = 32, 0.01  # number of cancellations, and time between them
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
WARM_UP_TOKENS = 32


def bandwidth(device: torch.device, repeat: int = 5) -> float:
    """Measure bytes per second that a large copy reads and writes."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(repeat + 1):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - started)
    num_bytes = 2 * source.nbytes
    del source, target
    release_memory()  # else the engine's memory would lie in parts of theirs
    return num_bytes / min(times)


def synchronize(device: torch.device) -> None:
    """Wait for the queued work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decode(subject: Subject) -> Iterator[Figure]:
    """Measure one greedy sequence."""
    return _decode(subject, 1, "one sequence", DECODE_BARS)


def batch(subject: Subject) -> Iterator[Figure]:
    """Measure as many sequences as the throughput test has, all of one length."""
    rows = subject.sizes.requests
    return _decode(subject, rows, f"{rows} sequences", {})


def _decode(
    subject: Subject, rows: int, how_many: str, bars: Mapping[str, float]
) -> Iterator[Figure]:
    """Measure decoding. The first run warms up; prefill is not counted."""
    sizes, name = subject.sizes, subject.shape.name
    warm_up, jobs = (
        decode_jobs(rows, subject.vocab_size, sizes.prompt_len, num_tokens)
        for num_tokens in (WARM_UP_TOKENS, sizes.num_tokens)
    )
    run(subject.engine, warm_up, sizes.limit_s)
    runs = [run(subject.engine, jobs, sizes.limit_s) for _ in range(sizes.repeat)]
    rates = tuple(done.decode_tokens_per_s for done in runs)
    context = sizes.prompt_len + sizes.num_tokens // 2
    runner, shape = pipeline_of(subject.engine).runner, subject.shape
    kv_bytes = rows * context * shape.kv_values * runner.kv_cache_dtype.itemsize
    step_bytes = _weight_bytes(runner, shape, rows) + kv_bytes
    cut = "" if all(done.is_whole for done in runs) else f"; cut off after {sizes.limit_s:g} s"
    yield Figure(
        f"{name}: decode, {how_many}",
        rates,
        "tokens/s",
        bars.get(name) if subject.has_bars else None,
        at_least=True,
        note=f"greedy, {sizes.prompt_len} tokens in, {sizes.num_tokens} out{cut}",
    )
    yield Figure(f"{name}: step, {how_many}", tuple(1000 * rows / rate for rate in rates), "ms")
    yield Figure(
        f"{name}: share of the bandwidth, {how_many}",
        tuple(100 * rate / rows * step_bytes / subject.bandwidth for rate in rates),
        "%",
        note=f"{step_bytes / 1e9:.2f} GB a step, copies move {subject.bandwidth / 1e12:.2f} TB/s",
    )


def _weight_bytes(runner: ModelRunner, shape: Shape, rows: int) -> int:
    """Return the bytes of the weights that a step of so many rows reads."""
    encoding = runner.loaded_model.encoding
    if encoding.packed and runner.model_config.on_cpu:
        return runner.weights_bytes
    if encoding.packed and shape.packed:
        layer_bits, head_bits = GPU_BITS[shape.packed]
        num_others = shape.num_weights - shape.num_head_weights
        return int(num_others * layer_bits + shape.num_head_weights * head_bits) // 8
    head_bytes = shape.num_head_weights * (1 if encoding.int8 else encoding.dtype.itemsize)
    num_others = shape.num_weights_read(rows) - shape.num_head_weights
    return head_bytes + num_others * encoding.matrix_bytes


def throughput(subject: Subject) -> Iterator[Figure]:
    """Measure all requests at once, after a few short ones for warm-up."""
    sizes, name = subject.sizes, subject.shape.name
    jobs, engine = warm_jobs(subject), subject.engine
    before = engine.stats()
    done = run(engine, jobs, sizes.limit_s)
    after = engine.stats()
    yield Figure(
        f"{name}: {sizes.requests} requests",
        (done.tokens_per_s,),
        "tokens/s",
        THROUGHPUT_BARS.get(name) if subject.has_bars else None,
        at_least=True,
        note=_how_much(done, sum(job.num_tokens for job in jobs), sizes),
    )
    yield from time_by_kind(name, before, after, done.wall_s)


def _how_much(done: Run, asked: int, sizes: Sizes) -> str:
    low, high = sizes.lengths
    lengths = f"{low} to {high} tokens in and out"
    if done.is_whole:
        return f"{lengths}; {done.num_tokens} tokens in {done.wall_s:.2f} s"
    return f"{lengths}; cut off after {done.wall_s:.1f} s: {done.num_tokens} of {asked} tokens"


def cancel(subject: Subject) -> Iterator[Figure]:
    """Cancel some of a full engine's sequences in turn, at any phase of a step."""
    engine, rows = subject.engine, subject.sizes.requests
    length = pipeline_of(engine).max_seq_len - subject.sizes.prompt_len
    load = Load(engine, decode_jobs(rows, subject.vocab_size, subject.sizes.prompt_len, length))
    try:
        load.wait_until(lambda: engine.stats().decoding == rows)
        before, started = engine.stats(), time.perf_counter()
        for request_id in load.ids[:CANCELS]:
            engine.cancel(request_id)
            time.sleep(CANCEL_PERIOD_S)
        load.wait_until(lambda: engine.stats().decoding == rows - len(load.ids[:CANCELS]))
        after, seconds = engine.stats(), time.perf_counter() - started
    finally:
        load.stop()
    took, past = after.sequences.cancel_s, before.sequences.cancel_s
    count = took.count - past.count
    step_ms = 1000 * seconds / (after.steps - before.steps)
    seen = accumulate(now - then for now, then in zip(took.counts, past.counts, strict=True))
    bounds = (*took.bounds, math.inf)
    most_ms = 1000 * least_bound(dict(zip(bounds, seen, strict=True)), 99)
    yield Figure(
        f"{subject.shape.name}, {rows} rows: cancel to pages free",
        (1000 * (took.total - past.total) / count,),
        "ms",
        round(step_ms + CANCEL_BAR_MS, 1) if subject.has_bars else None,
        note=f"mean of {count}, p99 at most {most_ms:g} ms; a step takes {step_ms:.1f} ms",
    )


def memory(subject: Subject, before_bytes: int) -> Iterator[Figure]:
    """Measure the additional device memory, without weights and KV pages."""
    plan = pipeline_of(subject.engine).memory_plan
    used = used_bytes(subject.device)
    held, own = used - before_bytes, plan.weights_bytes + plan.kv_bytes
    note = f"weights {plan.weights_bytes / 1e9:.2f} GB, KV {plan.kv_bytes / 1e9:.2f} GB"
    if subject.device.type == "cuda":
        allocated = torch.cuda.memory_allocated(subject.device) - own
        note += f"; tensors {allocated / 1e9:.2f} GB of it"
    else:
        note += f"; the process has {used / 1e9:.2f} GB"
    yield Figure(
        f"{subject.shape.name}: memory besides weights and KV",
        ((held - own) / 1e9,),
        "GB",
        MEMORY_BAR_GB if subject.has_bars else None,
        note=note,
    )


def prefill(subject: Subject) -> Iterator[Figure]:
    """Measure a prefill with as few prompts as possible, and one with as many as there are rows."""
    runner = pipeline_of(subject.engine).runner
    peaks = [
        subject.engine.run_on_engine(partial(largest_prefill, runner, rows)).result()
        for rows in (1, runner.max_running_requests)
    ]
    worst = max(peaks, key=lambda peak: peak.taken)
    yield Figure(
        f"{subject.shape.name}: largest prefill: peak / estimate",
        (worst.ratio,),
        "x",
        PREFILL_BAR if subject.has_bars else None,
        note=worst.amounts,
    )


def used_bytes(device: torch.device) -> int:
    """Return the used memory of the device, of all processes; on the CPU the resident memory of
    this one.
    """
    if device.type == "cuda":
        place = torch.cuda._parse_visible_devices()[device.index or 0]  # starts no CUDA
        query = ["nvidia-smi", f"--id={place}", "--query-gpu=memory.used"]
        query.append("--format=csv,noheader,nounits")
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def compare(
    shape: Shape, device: torch.device, sizes: Sizes, values: dict[str, Any]
) -> Iterator[Figure]:
    """Measure transformers and vLLM, and on a CPU this engine with the same job."""
    vocab_size = int(shape.values["vocab_size"])
    (job,) = decode_jobs(1, vocab_size, sizes.prompt_len, sizes.num_tokens)
    tokens = sizes.crowd_tokens
    crowds = [decode_jobs(count, vocab_size, tokens, tokens) for count in sizes.crowds]
    mixed = []
    if device.type == "cuda":  # on a CPU they would take hours
        mixed = throughput_jobs(sizes.requests, vocab_size, sizes.lengths)
    ways = peers.PeerMethods(job, sizes.caches, crowds, sizes.repeat, mixed, sizes.vllm_python)
    return peers.compare(shape, device, ways, values)


def starts(argv: Sequence[str], models: Sequence[Sequence[str]]) -> Iterator[Figure]:
    """Run a command line with the flags of each model in two new processes, the first without
    compiled kernels on disk, also those of other models.

    Raises `ValueError` when a process prints no figures.
    """
    for flags in models:
        command = [sys.executable, "-m", "benchmarks.core", *argv, *flags, "--part", "memory"]
        with tempfile.TemporaryDirectory() as folder:
            for kernels in ("no kernels on disk", "kernels on disk"):
                environ = {**os.environ, "TRITON_CACHE_DIR": folder}
                done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=False)
                for found in json.loads(done.stdout)["figures"]:
                    if found["name"].endswith(MADE):
                        yield Figure(f"{found['name']}, {kernels}", tuple(found["values"]), "s")


def measure(
    shape: Shape, parts: Sequence[str], sizes: Sizes, values: dict[str, Any], profile: Path | None
) -> Iterator[Figure]:
    """Measure one shape: first the engine, then, after its shutdown, its peers."""
    device = torch.device(values["model"]["device_specs"][0])
    before_bytes = used_bytes(device)
    run_parts: dict[str, Callable[[Subject], Iterator[Figure]]] = {
        "decode": decode,
        "batch": batch,
        "throughput": throughput,
        "gaps": gaps,
        "steps": steps,
        "cancel": cancel,
        "memory": lambda subject: memory(subject, before_bytes),
        "prefill": prefill,
    }
    wanted = [part for name, part in run_parts.items() if name in parts]
    if wanted:
        speed = bandwidth(device) * len(set(values["model"]["device_specs"]))
        started = time.perf_counter()
        with (
            tempfile.TemporaryDirectory() as folder,
            running(shape, Path(folder), values) as engine,
        ):
            yield Figure(f"{shape.name}: {MADE}", (time.perf_counter() - started,), "s")
            subject = Subject(shape, device, engine, speed, sizes, profile)
            for part in wanted:
                yield from part(subject)
    if "peers" in parts:
        yield from compare(shape, device, sizes, values)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    sizes = Sizes()
    options = arguments("Decode speed of the core.", repeat=sizes.repeat, has_model=False)
    options.add_argument("--model", type=Path, help="checkpoint folder, in place of the shapes")
    options.add_argument("--shape", nargs="+", choices=SHAPES, default=list(DEFAULT_SHAPES))
    packed = "four-bit checkpoints of Llama shapes"
    options.add_argument("--packed", nargs="+", choices=KINDS, help=packed)
    options.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on the CPU")
    options.add_argument("--tokens", type=int, default=sizes.num_tokens, help="of one sequence")
    options.add_argument("--requests", type=int, default=sizes.requests, help="at once")
    options.add_argument("--lengths", type=int, nargs=2, default=sizes.lengths, help="LOW HIGH")
    options.add_argument("--limit-s", type=float, default=sizes.limit_s, help="of all requests")
    options.add_argument("--trace-s", type=float, default=sizes.trace_s, help="under the profiler")
    options.add_argument("--profile", type=Path, help="folder in which traces of gaps are kept")
    options.add_argument("--caches", nargs="*", choices=peers.CACHES, default=sizes.caches)
    options.add_argument("--crowds", type=int, nargs="*", help="of the peer (64 on a GPU)")
    options.add_argument("--crowd-tokens", type=int, default=sizes.crowd_tokens, help="in and out")
    options.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM")
    options.usage = "%(prog)s [options] [any flag of the configuration, as tts.serve takes it]"
    add_config_flags(options, AudioGenerationConfig)
    return options


def encoding_of(kind: str) -> dict[str, Any]:
    """Return the configuration of a packed format."""
    return {"model": {"quantization_encoding": kind.lower()}}


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(given)
    torch.set_num_threads(args.threads)
    set_product_threads(args.threads)
    crowds = Sizes().crowds if torch.device(args.device).type == "cuda" else ()
    sizes = Sizes(
        num_tokens=args.tokens,
        requests=args.requests,
        lengths=tuple(args.lengths),
        limit_s=args.limit_s,
        trace_s=args.trace_s,
        caches=tuple(args.caches),
        crowds=crowds if args.crowds is None else tuple(args.crowds),
        crowd_tokens=args.crowd_tokens,
        repeat=args.repeat,
        vllm_python=args.vllm_python,
    )
    values = AudioGenerationConfig.merged(
        {"model": {"device_specs": [args.device]}}, flag_values(args, AudioGenerationConfig)
    )
    shapes = [Shape.read(args.model)] if args.model else [SHAPES[name] for name in args.shape]
    subjects = [(shape, values) for shape in shapes]
    if args.packed:
        subjects = [
            (shape.in_format(kind), AudioGenerationConfig.merged(encoding_of(kind), values))
            for shape in shapes
            for kind in args.packed
        ]
    measured = (
        figure
        for shape, own in subjects
        for figure in measure(shape, args.part, sizes, own, args.profile)
    )
    shape_flags = [[]] if args.model else [["--shape", name] for name in args.shape]
    kind_flags = [["--packed", kind] for kind in args.packed or ()] or [[]]
    models = [own + packed for own in shape_flags for packed in kind_flags]
    first = starts(given, models) if "starts" in args.part else ()
    figures = until_interrupted(chain(first, measured))
    return publish(Report("core", tuple(figures)))


if __name__ == "__main__":
    sys.exit(main())

"""transformers and vLLM on the same shape, device and tokens, for comparison.

`generate` at batch 1 with its dynamic cache, with its static cache and compilation; and
`generate_batch`, its continuous batching over a paged cache. In bfloat16 on a GPU, in float32 on a
CPU. There this engine runs the same job in the same process and on as many threads, in each format,
alone and in a batch; each rate is divided by the best of transformers for one sequence.

vLLM needs an environment of its own and runs as a process of it (`vllm_peer`), where it is
installed or where an interpreter is named: one sequence, the same batches, and on a GPU the
requests of the part throughput.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine_load import (
    MAX_LENGTH,
    Job,
    decode_jobs,
    release_memory,
    run,
    running,
)
from benchmarks.report import Figure
from benchmarks.shapes import Shape
from tts.config.pipeline import AudioGenerationConfig
from tts.factory import cpu_threads

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

CACHES = ("dynamic", "static")
BLOCK_SIZE = 256  # tokens; transformers' own default
CPU_ENCODINGS = ("float32", "bfloat16", "int8")
CPU_ROWS = (1, 8)  # sequences of this engine at once
VLLM_S = 1800.0  # longest run of vLLM: it compiles for minutes


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of one method, and a note."""

    tokens_per_s: float
    note: str
    is_alone: bool = False  # whether it is for one sequence


def create(shape: Shape, device: torch.device) -> PreTrainedModel:
    """Create transformers' model of this shape with the checkpoint's weights, or random ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    options["dtype"] = torch.bfloat16 if device.type == "cuda" else torch.float32
    if shape.checkpoint is not None:
        model: Any = AutoModelForCausalLM.from_pretrained(shape.checkpoint, **options)
        model.to(device)
    else:
        values = dict(shape.values)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with device:
            model = AutoModelForCausalLM.from_config(config, **options)
    model.generation_config.pad_token_id = 0
    return model.eval()


def greedy(num_tokens: int, **options: Any) -> GenerationConfig:
    """Return a configuration for exactly so many tokens, each the likeliest."""
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **options,
    )


def alone(model: PreTrainedModel, job: Job, cache: str, repeat: int) -> Rate:
    """Measure one sequence; the second of two warm-up calls runs what the first has compiled."""
    ids = torch.tensor([job.prompt_ids], device=model.device)
    config = greedy(job.num_tokens, cache_implementation=cache)
    walls = [_timed(model, ids, config) for _ in range(repeat + 2)]
    note = f"sdpa, {cache} cache, prefill of {len(job.prompt_ids)} included; "
    note += f"first call {walls[0]:.1f} s"
    return Rate(job.num_tokens / min(walls[2:]), note, is_alone=True)


def _timed(model: PreTrainedModel, ids: torch.Tensor, config: GenerationConfig) -> float:
    started = time.perf_counter()
    generate: Any = model.generate
    tokens = generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))
    num_new = tokens[0, ids.shape[1] :].tolist()  # waits for the device
    if len(num_new) != config.max_new_tokens:
        raise RuntimeError(f"{len(num_new)} tokens instead of {config.max_new_tokens}")
    return time.perf_counter() - started


def together(model: PreTrainedModel, jobs: Sequence[Job]) -> Rate:
    """Measure jobs of one length by `generate_batch`, without the creation of its cache and
    graphs.
    """
    from transformers import ContinuousBatchingConfig

    num_tokens, longest = jobs[0].num_tokens, max(len(job.prompt_ids) for job in jobs)
    blocks_each = -(-(longest + num_tokens) // BLOCK_SIZE) + 1
    generate_batch: Any = model.generate_batch
    outputs = generate_batch(
        inputs=[list(job.prompt_ids) for job in jobs],
        generation_config=greedy(num_tokens),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=blocks_each * len(jobs) + 1, max_batch_tokens=8192
        ),
    ).values()
    made = sum(len(output.generated_tokens) for output in outputs)
    if made != num_tokens * len(jobs):
        errors = {output.error for output in outputs if output.error}
        raise RuntimeError(f"{made} tokens instead of {num_tokens * len(jobs)}; {errors}")
    start = min(output.created_time for output in outputs)
    end = max(output.lifespan[1] for output in outputs)
    note = f"{longest} tokens in, {num_tokens} out; {model.config._attn_implementation}"
    return Rate(made / (end - start), note)


def compare(
    shape: Shape, device: torch.device, ways: PeerMethods, values: Mapping[str, Any]
) -> Iterator[Figure]:
    """Compare transformers and vLLM, without methods that fail, and on a CPU this engine with the
    configuration `values`.
    """
    yield from vllm_figures(shape, device, ways)
    best = 0.0
    for name, found in measure(shape, device, ways):
        if isinstance(found, str):
            print(f"{shape.name}: {name}: {found}", file=sys.stderr)
            continue
        yield Figure(f"{shape.name}: {name}", (found.tokens_per_s,), "tokens/s", note=found.note)
        best = max(best, found.tokens_per_s) if found.is_alone else best
    if device.type == "cpu":
        yield from _ours(shape, ways, values, best)


def vllm_figures(shape: Shape, device: torch.device, ways: PeerMethods) -> Iterator[Figure]:
    """Measure vLLM in a process of its own, if an interpreter has it."""
    program = ways.vllm_python or (sys.executable if find_spec("vllm") else None)
    if program is None:
        print(f"{shape.name}: vLLM is not installed here; see --vllm-python", file=sys.stderr)
        return
    loads: dict[str, Sequence[Job]] = {"one sequence": [ways.job]}
    loads |= {f"{len(jobs)} requests": jobs for jobs in ways.crowds}
    if ways.mixed:
        loads[f"{len(ways.mixed)} requests of mixed lengths"] = ways.mixed
    try:
        found = run_vllm(str(program), shape, device, loads, ways.repeat)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"{shape.name}: vLLM: {error}", file=sys.stderr)
        return
    for name, rates in found["rates"].items():
        if isinstance(rates, str):
            print(f"{shape.name}: vLLM, {name}: {rates}", file=sys.stderr)
            continue
        yield Figure(
            f"{shape.name}: vLLM, {name}", tuple(rates), "tokens/s", note=_note(found, loads[name])
        )


def _note(found: Mapping[str, Any], jobs: Sequence[Job]) -> str:
    lengths = (
        {len(job.prompt_ids) for job in jobs},
        {job.num_tokens for job in jobs},
    )
    texts = [
        f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}" for sizes in lengths
    ]
    return f"vLLM {found['version']}, prefill included, {texts[0]} tokens in, {texts[1]} out"


def run_vllm(
    program: str,
    shape: Shape,
    device: torch.device,
    loads: Mapping[str, Sequence[Job]],
    repeat: int,
) -> dict[str, Any]:
    """Run the loads on vLLM, by this interpreter; return the rates of `vllm_peer`.

    vLLM has its defaults, but for the prefix cache, which would spare the prompts of later runs.

    The output of vLLM goes to standard error. Raises `RuntimeError` when it fails, and
    `subprocess.TimeoutExpired`.
    """
    options: dict[str, Any] = {
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "max_model_len": MAX_LENGTH,
        "enable_prefix_caching": False,  # the runs repeat their prompts
        "seed": 0,
    }
    if shape.checkpoint is None:
        options["load_format"] = "dummy"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        jobs = {
            "model": str(shape.write(place / "model")),
            "options": options,
            "loads": [
                {"name": name, "repeat": repeat, "requests": [asdict(job) for job in own]}
                for name, own in loads.items()
            ],
        }
        (place / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        # Next to the script are modules with the names of Python's own, such as `trace`.
        script = shutil.copy(Path(__file__).with_name("vllm_peer.py"), place)
        command = [program, str(script), str(place / "jobs.json"), str(place / "rates.json")]
        done = subprocess.run(command, stdout=sys.stderr.fileno(), timeout=VLLM_S, check=False)
        if done.returncode:
            raise RuntimeError(f"it ended with status {done.returncode}")
        found: dict[str, Any] = json.loads((place / "rates.json").read_text(encoding="utf-8"))
        return found


def _ours(
    shape: Shape, ways: PeerMethods, values: Mapping[str, Any], best: float
) -> Iterator[Figure]:
    """Measure this engine on the CPU, each format in turn; `best` is transformers' rate.

    It uses as many threads, divided as in the server: all of them compute products.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(cpu_threads(num_threads))
    try:
        yield from _formats(shape, ways, values, best, f"prefill included, {num_threads} threads")
    finally:
        torch.set_num_threads(num_threads)


def _formats(
    shape: Shape, ways: PeerMethods, values: Mapping[str, Any], best: float, note: str
) -> Iterator[Figure]:
    for encoding in CPU_ENCODINGS:
        own = {"model": {"quantization_encoding": encoding}}
        merged = AudioGenerationConfig.merged(values, own)
        with (
            tempfile.TemporaryDirectory() as folder,
            running(shape, Path(folder), merged) as engine,
        ):
            for rows in CPU_ROWS:
                jobs = ways.jobs(int(shape.values["vocab_size"]), rows)
                rates = [run(engine, jobs).tokens_per_s for _ in range(ways.repeat + 1)][1:]
                name = f"{shape.name}: {encoding}, {rows} at once"
                yield Figure(name, tuple(rates), "tokens/s", note=note)
                if best:
                    ratio, of = max(rates) / best, "one sequence, its faster cache"
                    yield Figure(f"{name}, of transformers", (ratio,), "x", note=of)


@dataclass(frozen=True, slots=True)
class PeerMethods:
    """Measured methods: one job with each cache, and batches of jobs.

    vLLM also runs the jobs of `mixed` lengths; `vllm_python` is an interpreter that has it (None:
    this one, if it has).
    """

    job: Job
    caches: Sequence[str]
    crowds: Sequence[Sequence[Job]]
    repeat: int
    mixed: Sequence[Job] = ()
    vllm_python: Path | None = None

    def jobs(self, vocab_size: int, count: int) -> list[Job]:
        """Return so many jobs of the job's length, each with its own prompt."""
        return decode_jobs(count, vocab_size, len(self.job.prompt_ids), self.job.num_tokens)


def measure(
    shape: Shape, device: torch.device, ways: PeerMethods
) -> Iterator[tuple[str, Rate | str]]:
    """Iterate over methods and rates; for a method that fails, the reason."""
    yield from _rates(create(shape, device), ways)
    torch.compiler.reset()
    release_memory()


def _rates(model: PreTrainedModel, ways: PeerMethods) -> Iterator[tuple[str, Rate | str]]:
    for cache in ways.caches:
        one = partial(alone, model, ways.job, cache, ways.repeat)
        yield f"transformers, {cache} cache", attempt(one)
    for jobs in ways.crowds:
        yield f"transformers, {len(jobs)} requests", attempt(partial(together, model, jobs))


def attempt(measured: Callable[[], Rate]) -> Rate | str:
    """Return the measurement, or the reason of its failure: errors of other packages are not
    fatal.
    """
    try:
        return measured()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]

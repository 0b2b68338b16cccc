"""The benchmark of the core at small sizes, and the calculation of its figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import core, core_steps, decode_interference, peers, trace
from benchmarks.codec_calls import kinds_of
from benchmarks.core_subject import Sizes
from benchmarks.engine_load import Job, Load, decode_jobs, run, running, throughput_jobs
from benchmarks.packed_shapes import KINDS
from benchmarks.shapes import SHAPES, TOY, Shape, llama
from decoder import DecodeRequest, Renderer, create_decoder
from llm import Engine
from tests.llm.llama_checkpoints import all_logits, write_llama

pytestmark = pytest.mark.usefixtures("only_new_objects")

SMALL = Sizes(
    num_tokens=24,
    requests=4,
    lengths=(3, 9),
    trace_s=0.02,
    crowds=(2,),
    crowd_tokens=5,
    repeat=2,
)
VALUES = {"model": {"device_specs": ["cpu"], "kv_cache": {"num_pages": 40}}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(TOY, tmp_path_factory.mktemp("toy"), VALUES) as engine:
        yield engine


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_reads_what_the_model_has(shape: Shape) -> None:
    model = peers.create(shape, torch.device("meta"))
    assert shape.num_weights == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_shape_is_measured(tmp_path: Path, kind: str) -> None:
    """Random logits are neither flat nor infinite, and a step reads the packed weights."""
    values = llama(hidden=256, inner=512, layers=2, heads=4, kv_heads=2, head_dim=64, vocab=512)
    shape = Shape("toy", values).in_format(kind)
    figures = list(core.measure(shape, ["decode"], SMALL, VALUES, None))
    _, rate, _, share = figures
    assert rate.name == f"toy {kind}: decode, one sequence"
    assert min(rate.values) > 0
    logits = all_logits(shape.write(tmp_path), [5, 6, 7])
    assert 0.1 < logits.std() < 100
    assert share.note.startswith("0.00 GB a step")


def test_keys_and_values_of_a_token() -> None:
    assert SHAPES["llama-1b"].kv_values * 2 == 32 * 1024  # bytes in bfloat16
    assert SHAPES["qwen3-0.6b"].kv_values * 2 == 112 * 1024


def test_the_throughput_jobs_are_the_published_ones() -> None:
    jobs = throughput_jobs(256, 151_936, (100, 1024))
    assert sum(job.num_tokens for job in jobs) == 133_966
    assert sum(len(job.prompt_ids) for job in jobs) == 142_827
    assert max(len(job.prompt_ids) + job.num_tokens for job in jobs) < 2304


def test_jobs_run_to_their_length(engine: Engine) -> None:
    done = run(engine, [Job((1, 2, 3), 7), Job((4,), 12)])
    assert (done.num_tokens, done.is_whole) == (19, True)
    assert 0 < done.tokens_per_s < 19 / done.wall_s * 1.001
    assert done.decode_tokens_per_s > 0


def test_a_run_is_cut_off(engine: Engine) -> None:
    done = run(engine, decode_jobs(2, 512, 4, 2000), limit_s=0.1)
    assert not done.is_whole
    assert 0 <= done.num_tokens < 4000
    assert engine.stats().used_pages == 0


def test_a_load_that_ends_never_gets_there(engine: Engine) -> None:
    load = Load(engine, [Job((1,), 2)])
    with pytest.raises(RuntimeError, match="never got there"):
        load.wait_until(lambda: False, limit_s=5.0)
    load.stop()


# --- the trace


def event(cat: str, start: float, end: float, name: str = "k", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}


def step(number: int, start: float, *kernels: tuple[float, float]) -> list[dict[str, Any]]:
    """Return a range of 20 us that launches kernels, which run later."""
    name = f"sonant.{'mixed_batch' if number == 2 else 'token_generation'}"
    events = [event("user_annotation", start, start + 20, name)]
    for place, kernel in enumerate(kernels):
        correlation = 10 * number + place
        at = start + 1 + place
        events.append(event("cuda_runtime", at, at + 1, "launch", correlation=correlation))
        events.append(event("kernel", *kernel, correlation=correlation))
    return events


def test_gaps_are_between_the_kernels_of_two_steps() -> None:
    events = [
        *step(1, 0, (10, 20), (22, 40)),
        *step(2, 100, (70, 80), (80, 100)),
        *step(3, 200, (105, 110), (109, 190)),  # two streams at once
        event("gpu_memcpy", 100, 102, correlation=99),
        event("kernel", 500, 600, correlation=98),  # without a launch
    ]
    found = trace.device_times(events)
    assert found.num_steps == 3
    assert found.gaps == (30, 5)
    assert found.gap == 17.5
    assert found.kernels_per_step == 2
    assert found.busy_share == pytest.approx((10 + 18 + 30 + 2 + 85) / 180)
    assert found.step_share == pytest.approx((30 + 30 + 85) / 180)
    assert found.kernels == (trace.KernelTime("k", (10 + 18 + 10 + 20 + 5 + 81) / 3, 2),)


def test_kernels_are_named_without_their_arguments() -> None:
    events = [*step(1, 0, (10, 20), (22, 40)), *step(2, 100, (120, 130), (130, 160))]
    names = iter(["void few<int, 2>(float*)", "_decode_kernel"] * 2)
    events = [e | {"name": next(names)} if e["cat"] == "kernel" else e for e in events]
    found = trace.device_times(events).kernels
    assert found == (trace.KernelTime("_decode_kernel", 24, 1), trace.KernelTime("few", 10, 1))
    figures = list(core_steps.kernel_figures("toy, 2 rows", found, "0.1 GB of keys and values"))
    assert [(figure.name, figure.value, figure.note) for figure in figures] == [
        (
            "toy, 2 rows: kernels of a step",
            34,
            "2 with 0.1 GB of keys and values, under the profiler",
        ),
        ("toy, 2 rows: _decode_kernel", 24, "1 of a step"),
        ("toy, 2 rows: few", 10, "1 of a step"),
    ]


def test_one_step_is_no_trace() -> None:
    with pytest.raises(ValueError, match="1 steps"):
        trace.device_times(step(1, 0, (10, 20)))


# --- the command


def test_the_core_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traces = tmp_path / "not" / "yet"
    sizes = ["--tokens=24", "--requests=4", "--lengths", "3", "9", "--repeat=2", "--trace-s=0.02"]
    parts = ["--part", "decode", "batch", "throughput", "gaps", "steps", "cancel", "memory"]
    parts += ["prefill"]
    limits = ["--model.kv-cache.num-pages=40", "--max-batch-input-tokens=256"]
    given = [*sizes, *parts, *limits, f"--profile={traces}"]
    assert core.main(["--shape", "toy", "--device=cpu", *given]) == 0
    figures = {f["name"]: f for f in json.loads(capsys.readouterr().out)["figures"]}
    by_rows = [name for name in figures if re.match(r"toy: step, \d to \d rows", name)]
    assert by_rows
    prompts = figures["toy: step with prompts"]
    assert re.match(r"\d+ steps of \d+ tokens, \d+ ms in all", prompts["note"])
    assert min(figures[name]["value"] for name in (*by_rows, "toy: step with prompts")) > 0
    assert [name for name in figures if name not in by_rows] == [
        "toy: engine made",
        "toy: decode, one sequence",
        "toy: step, one sequence",
        "toy: share of the bandwidth, one sequence",
        "toy: decode, 4 sequences",
        "toy: step, 4 sequences",
        "toy: share of the bandwidth, 4 sequences",
        "toy: 4 requests",
        "toy: steps with prompts, in all",
        "toy: steps without prompts, in all",
        "toy: between steps, in all",
        "toy, 1 rows: gap between steps",
        "toy, 1 rows: device busy",
        "toy, 4 rows: gap between steps",
        "toy, 4 rows: device busy",
        "toy: step with prompts",
        "toy, 4 rows: cancel to pages free",
        "toy: memory besides weights and KV",
        "toy: largest prefill: peak / estimate",
    ]
    for rows, how_many in ((1, "one sequence"), (4, "4 sequences")):
        rates, steps = (figures[f"toy: {n}, {how_many}"]["values"] for n in ("decode", "step"))
        assert [1000 * rows / rate for rate in rates] == steps
        assert 0 < figures[f"toy: share of the bandwidth, {how_many}"]["value"] < 100
    all_requests = figures["toy: 4 requests"]
    assert (found := re.search("3 to 9 tokens in and out; (\\d+) tokens in", all_requests["note"]))
    kinds = ("steps with prompts", "steps without prompts", "between steps")
    by_kind = [figures[f"toy: {kind}, in all"]["value"] for kind in kinds]
    assert min(by_kind) > 0
    assert sum(by_kind) == pytest.approx(int(found[1]) / all_requests["value"])
    cancelled = figures["toy, 4 rows: cancel to pages free"]
    assert "mean of 4, p99 at most " in cancelled["note"]
    assert cancelled["value"] > 0
    assert 0 < figures["toy, 1 rows: device busy"]["value"] <= 100
    assert 0 < figures["toy: largest prefill: peak / estimate"]["value"] < 10
    assert {path.name for path in traces.iterdir()} == {"toy-1.json", "toy-4.json"}


def test_memory_counts_weights_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "used_bytes", lambda device: 0)
    found = []
    for encoding in ("float32", "int8"):
        values = {"model": VALUES["model"] | {"quantization_encoding": encoding}}
        _, figure = core.measure(TOY, ["memory"], SMALL, values, None)
        found.append(-1e9 * figure.value)
    matrices = TOY.num_weights - TOY.num_head_weights
    assert found[0] - found[1] > 2 * matrices


@pytest.mark.long
def test_two_starts_are_new_processes(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--shape toy --device cpu --max-length 64 --model.kv-cache.num-pages 20"
    assert core.main([*small.split(), "--part", "starts"]) == 0
    found = {f["name"]: f["value"] for f in json.loads(capsys.readouterr().out)["figures"]}
    made = "toy: engine made"
    assert list(found) == [f"{made}, no kernels on disk", f"{made}, kernels on disk"]
    assert min(found.values()) > 0


def test_the_first_start_of_each_model_has_no_kernels_on_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With processes that compile a kernel, and leave one file for it, in place of engines."""
    run = subprocess.run
    program = """
import json, os, pathlib, sys
kernel = pathlib.Path(os.environ["TRITON_CACHE_DIR"]) / "kernel"
figures = [{"name": f"{sys.argv[1]}: engine made", "values": [float(kernel.exists())]}]
kernel.touch()
print(json.dumps({"figures": figures}))
"""

    def run_program(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if command[0] != sys.executable:
            return run(command, **options)
        args = core.parser().parse_args(command[3:])
        (shape,), (kind,) = args.shape, args.packed
        assert args.part == ["memory"]
        return run([sys.executable, "-c", program, f"{shape} {kind}"], **options)

    monkeypatch.setattr(subprocess, "run", run_program)
    given = "--shape toy llama-3b --packed Q4_0 GPTQ --device cpu --part starts"
    assert core.main(given.split()) == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    names = [f"{shape} {kind}" for shape in ("toy", "llama-3b") for kind in ("Q4_0", "GPTQ")]
    assert [(figure["name"], figure["value"]) for figure in found] == [
        (f"{name}: engine made, {kernels}", value)
        for name in names
        for kernels, value in (("no kernels on disk", 0.0), ("kernels on disk", 1.0))
    ]


PEERS = [
    "toy: transformers, dynamic cache",
    "toy: transformers, static cache",
    "toy: transformers, 2 requests",
]


def test_the_peers_and_this_engine_are_measured() -> None:
    """On the CPU: each format, alone and in a batch, each also relative to the peers' best."""
    figures = {f.name: f for f in core.compare(TOY, torch.device("cpu"), SMALL, VALUES)}
    cases = [
        f"{encoding}, {rows} at once"
        for encoding in ("float32", "bfloat16", "int8")
        for rows in (1, 8)
    ]
    ours = [f"toy: {case}{what}" for case in cases for what in ("", ", of transformers")]
    assert list(figures) == PEERS + ours
    assert all(figure.value > 0 for figure in figures.values())
    best = max(figures[name].value for name in PEERS[:2])
    for case in cases:
        rates, ratio = figures[f"toy: {case}"], figures[f"toy: {case}, of transformers"]
        assert len(rates.values) == SMALL.repeat
        assert ratio.value == pytest.approx(max(rates.values) / best)


VLLM = '''
"""What the benchmark uses of vLLM, as documented: its lengths, and no model."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.24.0"
CALLS = Path(__file__).with_name("calls.json")
print("INFO: output that is no result")


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert ignore_eos and not detokenize
        self.temperature, self.max_tokens = temperature, max_tokens


class LLM:
    def __init__(self, model, *, skip_tokenizer_init, **options):
        assert skip_tokenizer_init
        assert (Path(model) / "config.json").exists()
        self.calls = [options]

    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert not use_tqdm
        pairs = list(zip(prompts, sampling_params, strict=True))
        self.calls.append([[p["prompt_token_ids"], s.max_tokens, s.temperature] for p, s in pairs])
        CALLS.write_text(json.dumps(self.calls))
        if len(prompts) == 3:
            raise RuntimeError("no room")
        made = [SimpleNamespace(token_ids=[0] * s.max_tokens) for _, s in pairs]
        return [SimpleNamespace(outputs=[one]) for one in made]
'''


def test_vllm_gets_the_same_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A module in its place records what it is asked for. A load that fails is reported."""
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (one,), three = decode_jobs(1, 512, 16, 24), decode_jobs(3, 512, 5, 5)
    mixed = throughput_jobs(4, 512, (3, 9))
    ways = peers.PeerMethods(one, (), (three,), 2, mixed, Path(sys.executable))
    figures = list(peers.vllm_figures(TOY, torch.device("cuda"), ways))
    assert [(figure.name, len(figure.values)) for figure in figures] == [
        ("toy: vLLM, one sequence", 2),
        ("toy: vLLM, 4 requests of mixed lengths", 2),
    ]
    assert figures[0].note == "vLLM 0.24.0, prefill included, 16 tokens in, 24 out"
    assert re.search(r"\d to \d tokens in, \d to \d out", figures[1].note)
    options, *calls = json.loads((tmp_path / "calls.json").read_text())
    assert options == {
        "dtype": "bfloat16",
        "max_model_len": 2304,
        "enable_prefix_caching": False,
        "seed": 0,
        "load_format": "dummy",
    }
    asked = [
        [[list(job.prompt_ids), job.num_tokens, job.temperature] for job in jobs]
        for jobs in ([one], [one], [one], three, mixed, mixed, mixed)
    ]
    assert calls == asked
    printed = capfd.readouterr()
    assert "toy: vLLM, 3 requests: RuntimeError: no room" in printed.err
    assert "no result" not in printed.out


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (None, "toy: vLLM is not installed here"),
        (Path("/no/such/python"), "toy: vLLM: .*No such file"),
        (Path(sys.executable), "toy: vLLM: it ended with status 1"),
    ],
)
def test_without_vllm_the_reason_is_printed(
    capfd: pytest.CaptureFixture[str], program: Path | None, reason: str
) -> None:
    ways = peers.PeerMethods(decode_jobs(1, 512, 4, 4)[0], (), (), 1, (), program)
    assert list(peers.vllm_figures(TOY, torch.device("cpu"), ways)) == []
    assert re.search(reason, capfd.readouterr().err)


def test_the_peer_of_a_checkpoint_has_its_weights(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "mine", head_dim=None)
    shape = Shape.read(folder)
    assert (shape.name, shape.head_dim) == ("mine", 16)
    twin = peers.create(shape, torch.device("cpu"))
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(twin.get_input_embeddings().weight, weights["model.embed_tokens.weight"])
    assert shape.num_weights == sum(p.numel() for p in twin.parameters())


@pytest.mark.long
def test_a_checkpoint_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_llama(tmp_path / "mine", head_dim=None)
    threads = torch.get_num_threads()
    sizes = ["--tokens=8", "--repeat=1", "--caches", "dynamic", f"--threads={threads}"]
    flags = ["--device=cpu", "--max-length=64", "--model.kv-cache.num-pages=20"]
    assert core.main(["--model", str(folder), "--part", "decode", "peers", *sizes, *flags]) == 0
    names = [figure["name"] for figure in json.loads(capsys.readouterr().out)["figures"]]
    assert names[:2] == ["mine: engine made", "mine: decode, one sequence"]
    assert "mine: int8, 8 at once, of transformers" in names


def test_a_peer_that_fails_is_reported() -> None:
    def fails() -> peers.Rate:
        raise RuntimeError("no room\nat all")

    assert peers.attempt(fails) == "RuntimeError: no room"


def test_the_decoder_is_called_at_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step, or after its pause, by a clock that stands still in between."""
    clock = SimpleNamespace(now_s=0.0)
    clock.perf_counter = lambda: clock.now_s
    monkeypatch.setattr(decode_interference, "time", clock)
    decoder = create_decoder("ramp", test_mode=True)
    (window,) = kinds_of(decoder, decoder.spec.recommended)["full"]
    hook = decode_interference.DecodeInterferenceHook(Renderer(decoder), [DecodeRequest(window)])

    def num_calls(rest: float | None) -> int:
        """Return the number of calls in five steps; the first step ends earlier calls."""
        before, hook.rest = hook.num_calls, rest
        for _ in range(5):
            hook.after_step(0)
        return hook.num_calls - before

    assert [num_calls(None), num_calls(0.0), num_calls(13.0)] == [0, 4, 1]
    clock.now_s += 10**6
    assert [num_calls(13.0), num_calls(None)] == [1, 0]


def test_blocks_of_kept_states_need_no_earlier_ones() -> None:
    """A first block has no context, so that any stream can begin with it."""
    options = {"stateful": True}
    decoder = create_decoder("nanocodec", options=options, test_mode=True)
    kinds = kinds_of(decoder, decoder.spec.recommended)
    assert {kind: len(window.codes) for kind, (window,) in kinds.items()} == {
        "first": 8,
        "full": 32,
    }


def test_steps_are_measured_with_concurrent_decoding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_interference, "SPAN_S", 0.1)
    monkeypatch.setattr(
        decode_interference, "SETTLE_S", 0.05
    )  # sequences end soon on a fast machine
    assert (
        decode_interference.main(
            ["--shape", "toy", "--device", "cpu", "--rows", "2", "--repeat", "1"]
        )
        == 0
    )
    alone, paced, without = json.loads(capsys.readouterr().out)["figures"]
    assert (alone["name"], alone["unit"]) == ("toy, 2 rows: step, alone", "ms")
    assert alone["value"] > 0
    assert paced["name"] == "toy, 2 rows: step later, calls at rest 13"
    assert without["name"] == "toy, 2 rows: step later, calls without rest"
    for figure in (paced, without):
        assert re.match(r"a call of \d+ blocks takes \S+ ms, \d+ % of", figure["note"])


def test_a_step_is_not_measured_with_sequences_that_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = decode_interference.DecodeInterferenceHook(
        Renderer(create_decoder("ramp", test_mode=True)), []
    )
    jobs = decode_jobs(2, 512, 4, 30)
    monkeypatch.setattr(decode_interference, "SPAN_S", 2.0)
    with pytest.raises(RuntimeError, match="a sequence ended while it was measured"):
        decode_interference.Subject(engine, hook, jobs).watch(None)
    monkeypatch.setattr(decode_interference, "SPAN_S", 0.1)
    lasting = decode_interference.lasting_jobs(engine, 2)
    assert decode_interference.Subject(engine, hook, lasting).watch(None).step_ms > 0
    assert len(lasting) == 2

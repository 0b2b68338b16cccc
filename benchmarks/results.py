"""`python -m benchmarks.results FOLDER`: the JSON of benchmarks as one page, on standard output.

Each file of the folder becomes a section, in the order of their names: command, machine, date and
table; no figures are typed by hand. For one kind of machine, all in one command:

    python -m benchmarks.results FOLDER --run gpu --into benchmarks/RESULTS.md

runs the benchmarks of that kind which have no file in the folder yet, one after the other, and
replaces their sections of the page; the others stay. Only what has failed runs again next time.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.report import HEADER, Figure, Machine, Report

TITLE = """# Results

Written by `python -m benchmarks.results FOLDER` from the JSON that the commands below printed;
`--run gpu`, `several_engines`, `two_gpus`, `four_gpus` or `cpu` runs those of a kind of machine,
and `--into benchmarks/RESULTS.md` replaces their sections. The value of a row is the median of its
runs, `range` their least and greatest; one run has no range.

Shapes are published sizes with random weights (`benchmarks/shapes.py`; llasa-1b is Llama 1B with a
vocabulary of 193,800). Served are, as a, Llasa 1B with XCodec2; as b, Orpheus 3B with SNAC."""

QUICK = "--pdl-level 2 --use-experimental-kernels true"
OVERLAP = f"--enable-overlap-scheduler {QUICK}"
STEPS = "--step-s 6 --warm-up-s 6.4 --repeat 1 --clients 8"
SERVED = f"{STEPS} -- {OVERLAP} --front-ends 4"
QWEN = (
    "--shape qwen --part alone rate streams --alone 15 --start 256 --most 512 --closeness 0.2 "
    f"{SERVED} --chunk-size 16,16,32,64"
)
PACED = f"{SERVED} --pace-streams"
STATEFUL = """--audio-decoder-config '{"stateful": true}'"""
SIXTY_FOUR = """--audio-decoder-config '{"stateful": true, "max_batch": 64}'"""
EARLY = """--audio-decoder-config '{"first_look_ahead": 0}'"""
FLOAT8 = "--model.quantization-encoding float8_e4m3fn"
FLOAT8_PAGES = "--model.kv-cache.kv-cache-format float8_e4m3fn"
ENGINES = "serve --shape a --part streams --gpus 1"
SHARED = (
    "--step-s 6 --warm-up-s 6.4 --repeat 1 --clients 16 -- "
    f"{OVERLAP} --front-ends 8 {EARLY} --chunk-size 10,15,22,33,50 --pace-streams"
)
STARTS = f"--part starts {OVERLAP} --max-batch-size 256 --max-length 1024"
KINDS: dict[str, dict[str, str]] = {
    "gpu": {
        "batch_invariance": "batch_invariance --requests 64 --tokens 48 "
        f"{OVERLAP} --max-batch-size 64",
        "decode_interference": "decode_interference --rows 64 --repeat 1 "
        f"{QUICK} --max-batch-size 64 --max-length 4096",
        "core": "core --shape llasa-1b --part decode gaps cancel prefill --tokens 256 "
        f"--trace-s 0.5 {OVERLAP} --max-batch-size 256 --max-length 2048",
        "core_memory": "core --shape llasa-1b --part memory "
        f"{OVERLAP} --max-batch-size 256 --max-length 2048",
        "core_256": "core --shape llama-1b qwen3-0.6b --part throughput --limit-s 12 "
        f"{OVERLAP} --max-batch-size 256 --max-length 2048",
        "core_decode": "core --shape llasa-1b orpheus-3b qwen3-0.6b --part decode --tokens 256 "
        f"--repeat 3 {QUICK} --max-batch-size 8 --max-length 2048",
        "core_gaps": "core --shape llasa-1b --part decode gaps --tokens 256 --repeat 2 "
        f"{OVERLAP} --max-batch-size 256 --max-length 2048",
        "peers": "core --shape llasa-1b --part decode throughput peers --tokens 128 --repeat 2 "
        f"--crowds 64 256 {OVERLAP} --max-batch-size 256 --max-length 2304",
        "steps_06b": "core --shape qwen3-0.6b --part throughput gaps steps --limit-s 12 "
        f"{OVERLAP} --max-batch-size 256 --max-length 2304",
        "packed_3b": "core --shape llama-3b --packed Q4_0 GPTQ Q4_K --part decode --tokens 256 "
        f"--repeat 3 {OVERLAP} --max-batch-size 2 --max-length 1024",
        "packed_3b_256": "core --shape llama-3b --packed Q4_0 --part throughput --limit-s 40 "
        f"{OVERLAP} --max-batch-size 256 --max-length 2304",
        "float8_pages": f"core --shape llama-3b llasa-1b {FLOAT8} {FLOAT8_PAGES} "
        "--part decode throughput --limit-s 16 "
        f"--repeat 2 {OVERLAP} --max-batch-size 256 --max-length 2304",
        "starts_float8": f"core --shape llama-3b {FLOAT8} {STARTS}",
        "starts_packed": f"core --shape llama-3b --packed Q4_0 {STARTS}",
        "frames": f"frames {QUICK}",
        "prompts": f"prompts --shape llasa-1b --repeat 4 {QUICK}",
        "sampling": "sampling",
        "codec_calls_xcodec2": "codec_calls --codec xcodec2",
        "codec_calls_qwen": "codec_calls --codec qwen3_tts --codec qwen3_tts_stateful",
        "serve_a": "serve --shape a --part alone streams cancel --alone 15 --start 600 --most 900 "
        f"--closeness 0.25 {SERVED} {EARLY}",
        "serve_a_default": f"serve --shape a --part alone --alone 15 {STEPS} -- {OVERLAP}",
        **{
            f"first_sound_{shape}": f"serve --shape {shape} --part alone --alone 15 --repeat 1 "
            f"--clients 8 -- {OVERLAP} {EARLY} --front-ends 0"
            for shape in "ab"
        },
        "first_sound_b_front_end": "serve --shape b --part alone --alone 15 --repeat 1 --clients 8 "
        f"-- {OVERLAP} {EARLY}",
        "first_sound_b_float8": "serve --shape b --part alone --alone 15 --repeat 1 --clients 8 "
        f"-- {OVERLAP} {EARLY} {FLOAT8} {FLOAT8_PAGES} --front-ends 0",
        "streams_a": "serve --shape a --part streams --start 800 --most 1000 --closeness 0.05 "
        f"{SERVED} {EARLY}",
        "streams_a_long": "serve --shape a --part streams --start 850 --most 1200 --closeness 0.05 "
        f"{SERVED} {EARLY} --chunk-size 10,15,22,33,50",
        "streams_b": "serve --shape b --part streams --start 340 --most 340 --closeness 0.2 "
        f"{SERVED} {EARLY}",
        "streams_b_paced": "serve --shape b --part streams --start 340 --most 440 --closeness 0.1 "
        f"{PACED} {EARLY}",
        "streams_b_float8": "serve --shape b --part streams --start 420 --most 520 "
        f"--closeness 0.1 {PACED} {EARLY} {FLOAT8} {FLOAT8_PAGES}",
        "serve_a_paced": "serve --shape a --part alone streams --alone 15 --start 900 --most 900 "
        f"--closeness 0.25 {PACED} {EARLY}",
        "serve_csm": f"serve --shape csm --part alone streams --alone 15 --start 256 --most 400 "
        f"--closeness 0.2 {SERVED}",
        "serve_qwen": f"serve {QWEN}",
        "serve_qwen_stateful": f"serve {QWEN} {STATEFUL}",
        "serve_qwen_paced": "serve --shape qwen --part alone rate streams --alone 15 --start 400 "
        f"--most 400 --closeness 0.3 {PACED} --max-batch-size 400 "
        f"--chunk-size 16,16,32,64,128 {SIXTY_FOUR}",
        "serve_gaps": f"serve --shape a --part gaps --start 200 {SERVED}",
        "serve_voice": "serve --shape voice --part alone streams --alone 15 --start 128 "
        f"--most 128 {SERVED}",
    },
    "several_engines": {  # of one GPU, for which NVIDIA's Multi-Process Service runs
        "streams_a_two": f"{ENGINES} --replicas 2 --start 700 --most 1500 --closeness 0.03 "
        f"{SHARED}",
        "streams_a_two_float8": f"{ENGINES} --replicas 2 --start 800 --most 1800 --closeness 0.03 "
        f"{SHARED} {FLOAT8} {FLOAT8_PAGES}",
        "streams_a_three": f"{ENGINES} --replicas 3 --start 1300 --most 1600 --closeness 0.02 "
        f"{SHARED}",
        "streams_a_three_float8": f"{ENGINES} --replicas 3 --start 1500 --most 2000 "
        f"--closeness 0.02 {SHARED} {FLOAT8} {FLOAT8_PAGES}",
    },
    "two_gpus": {
        name: f"core {arguments} --part decode throughput --limit-s 20 --repeat 3 "
        f"{OVERLAP} --max-batch-size 256 --max-length 2304"
        for name, arguments in {
            "experts_one": "--shape qwen3-30b-a3b",
            "experts_two": "--shape qwen3-30b-a3b --model.device-specs cuda:0,cuda:1 --ep-size 2",
            "float8_1b": f"--shape llasa-1b {FLOAT8}",
            "float8_3b": f"--shape llama-3b {FLOAT8}",
            "tensor_parallel_3b_one": "--shape llama-3b",
            "tensor_parallel_3b_two": "--shape llama-3b --model.device-specs cuda:0,cuda:1",
            "tensor_parallel_8b_one": "--shape llama-8b",
            "tensor_parallel_8b_two": "--shape llama-8b --model.device-specs cuda:0,cuda:1",
        }.items()
    }
    | {"roles": f"roles {QUICK}"},
    "four_gpus": {
        "experts_four": "core --shape qwen3-30b-a3b --ep-size 4 --model.device-specs "
        "cuda:0,cuda:1,cuda:2,cuda:3 --part decode throughput --limit-s 20 --repeat 3 "
        f"{OVERLAP} --max-batch-size 256 --max-length 2304",
        "replicas_one": "serve --shape a --part streams --start 900 --most 1150 --closeness 0.15 "
        f"{SERVED} {EARLY}",
        # 3.6 and 3.9 times the 731 that one held on that machine
        "replicas_four": "serve --shape a --part streams --replicas 4 --start 2632 --most 2851 "
        "--closeness 0.05 --step-s 6 --warm-up-s 6.4 --repeat 1 --clients 32 -- "
        f"{OVERLAP} --front-ends 16 {EARLY}",
    },
    "cpu": {
        "cpu_cold_start": "cold_start",
        "cpu_first_audio": "first_audio",
        "cpu_front_end": "front_end",
        "cpu_host": "host",
        "cpu_idle": "idle",
        "cpu_ipc_latency": "ipc_latency --repeat 200",
        "cpu_memory": "memory",
        "packed_3b_cpu": "core --shape llama-3b --packed Q4_0 --part decode memory --device cpu "
        "--tokens 32 --repeat 3 --max-batch-size 1 --max-length 512",
        "pacing_a": "pacing --shape a --plain --streams 720 820 900",
        "pacing_a_long": "pacing --shape a --plain --streams 720 820 900 "
        "--chunk-size 10,15,22,33,50",
        "pacing_b": "pacing --shape b --streams 240 280 340",
        "pacing_qwen": "pacing --shape qwen --streams 192 256 350",
        "cpu_scheduler": "scheduler",
        "cpu_speed": "speed",
        "cpu_streams": "streams",
    },
}
"""Arguments of each section's benchmark, by the kind of machine and the section's name."""


def run_kind(kind: str, folder: Path) -> list[str]:
    """Run the benchmarks of a kind that have no file in the folder; return those that failed.

    A missed bar is no failure.
    """
    failed = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in KINDS[kind].items():
        path = folder / f"{name}.json"
        if path.exists():
            continue
        module, *arguments = shlex.split(command)
        print(f"{name}: python -m benchmarks.{command}", file=sys.stderr, flush=True)
        program = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
        done = subprocess.run(program, stdout=subprocess.PIPE, check=False)
        partial = path.with_suffix(".part")
        partial.write_bytes(done.stdout)
        try:
            read(partial)
        except ValueError:
            print(f"{name} failed with status {done.returncode}", file=sys.stderr)
            failed.append(name)
            partial.unlink()
        else:
            partial.rename(path)
    return failed


def read(path: Path) -> Report:
    """Read the report that a benchmark printed. Raises `ValueError` for another file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        figures = tuple(
            Figure(
                name=found["name"],
                values=tuple(found["values"]),
                unit=found["unit"],
                bar=found["bar"],
                at_least=found["at_least"],
                note=found["note"],
            )
            for found in record["figures"]
        )
        machine = Machine(**{**record["machine"], "gpus": tuple(record["machine"]["gpus"])})
        name, command, date = record["benchmark"], record["command"], record["date"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what a benchmark printed: {error!r}") from error
    return Report(name, figures, machine, command, date)


def section(title: str, report: Report) -> Iterator[str]:
    """Iterate over the lines of one report."""
    yield f"## {title}"
    yield ""
    yield f"`{report.command}`, {report.date}, on {report.machine}."
    yield ""
    yield _row(HEADER)
    yield _row(("---",) * len(HEADER))
    yield from (_row(figure.cells()) for figure in report.figures)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sections(folder: Path) -> dict[str, str]:
    """Return the sections of a folder's reports by title. Raises `ValueError` without reports."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} has no *.json")
    return {path.stem: "\n".join(section(path.stem, read(path))) for path in paths}


def page(folder: Path) -> str:
    """Return the whole page. Raises `ValueError` for a folder without reports."""
    return "\n\n".join((TITLE, *sections(folder).values())) + "\n"


def sections_of(text: str) -> dict[str, str]:
    """Return the sections of a page by title."""
    _, *found = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return {own.partition("\n")[0].removeprefix("## "): own.strip() for own in found}


def merged(text: str, found: Mapping[str, str]) -> str:
    """Return a page with these sections in place of its own, new ones at the end."""
    return "\n\n".join((TITLE, *{**sections_of(text), **found}.values())) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The JSON of benchmarks as one page.")
    parser.add_argument("folder", type=Path, help="with the files, *.json")
    parser.add_argument("--run", choices=KINDS, help="run the benchmarks of this machine first")
    parser.add_argument("--into", type=Path, help="page whose sections are replaced")
    args = parser.parse_args(argv)
    failed = run_kind(args.run, args.folder) if args.run else []
    try:
        if args.into is None:
            print(page(args.folder), end="")
        else:
            before = args.into.read_text(encoding="utf-8") if args.into.exists() else ""
            args.into.write_text(merged(before, sections(args.folder)), encoding="utf-8")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""vLLM on the jobs of a file: run by an interpreter that has vLLM, which may have no Sonant.

    PYTHON benchmarks/vllm_peer.py JOBS.json RATES.json

`benchmarks.peers` writes the first file and reads the second; this one imports vLLM and the
standard library only.

    jobs     model: a folder; options: further arguments of `vllm.LLM`; loads, each with name,
             repeat, and requests with prompt_ids, num_tokens and temperature
    rates    version; rates: by name of the load the tokens per second of each run after the first,
             or the reason of a failure
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def measure(jobs: dict[str, Any]) -> dict[str, Any]:
    """Create the model once and measure all loads; a load that fails does not end the others."""
    import vllm

    model = vllm.LLM(model=jobs["model"], skip_tokenizer_init=True, **jobs["options"])
    rates: dict[str, list[float] | str] = {}
    for load in jobs["loads"]:
        try:
            runs = [timed(vllm, model, load["requests"]) for _ in range(load["repeat"] + 1)]
            rates[load["name"]] = runs[1:]
        except Exception as error:
            rates[load["name"]] = f"{type(error).__name__}: {error}".splitlines()[0]
    return {"version": vllm.__version__, "rates": rates}


def timed(vllm: Any, model: Any, requests: list[dict[str, Any]]) -> float:
    """Return tokens per second of all requests together, prefill included.

    Tokens are drawn with the seed of the engine: a seed of each request would make vLLM draw row by
    row.
    """
    prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
    sampling = [
        vllm.SamplingParams(
            temperature=request["temperature"],
            max_tokens=request["num_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        for request in requests
    ]
    started_s = time.perf_counter()
    outputs = model.generate(prompts, sampling, use_tqdm=False)
    wall_s = time.perf_counter() - started_s
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    asked = sum(request["num_tokens"] for request in requests)
    if made != asked:
        raise RuntimeError(f"{made} tokens instead of {asked}")
    return made / wall_s


if __name__ == "__main__":  # vLLM starts processes that import this module
    found = measure(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")

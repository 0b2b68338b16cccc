"""`TextGenerationPipeline`: forward, bitmask, sample, results for one scheduled batch.

    execute(batch):  forward ─> bitmask ─> sample ─┬─> StepOutput
                        ^── next step ─────────────┘   (num_steps > 1: no scheduling between)

It makes no scheduling decisions. A row that sampled a stop id may compute until the turn ends;
the scheduler discards the later tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llm.batch import (
    ForwardMode,
    ModelInputs,
    ModelOutputs,
    ScheduledBatch,
    ScheduledRow,
    StepOutput,
    host_tokens,
)
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.request import Token, TokenLogprob, as_ids
from llm.sampling.log_probabilities import LogProbabilities, round_logprob
from llm.structured.bitmask import needs_tokens


class TextGenerationPipeline(TextGenerationPipelineInterface):
    """Pipeline that returns the results of every batch from the call that runs it."""

    def run(self, batch: ScheduledBatch) -> StepOutput:
        """Run a batch's forwards and sample for its sampling rows; wait for the results."""
        with self.runner.session.profiler.step(batch.mode), torch.inference_mode():
            if not batch.rows:
                idle = self._stream.launch(lambda: self.runner.forward_idle().logits)
                self._stream.download(idle).wait()
                return StepOutput({})
            speculation = self.speculation
            if speculation is not None and batch.num_steps > 1:
                return with_rounded_scores(self, speculation.execute(batch))
            if speculation is not None:
                speculation.ingest(batch)
            turn = _MultiStepRun(self, batch)
            while not turn.has_ended:
                turn.step()
            output = turn.output()
        if output.logprobs or output.prompt_logprobs:
            return with_rounded_scores(self, output)
        return output

    @property
    def overlap_active(self) -> bool:
        """False: every batch is finished by the call that runs it."""
        return False

    def has_pending_outputs(self) -> bool:
        """False: see `overlap_active`."""
        return False


def with_rounded_scores(
    pipeline: TextGenerationPipelineInterface, output: StepOutput
) -> StepOutput:
    """Return the output with log-probabilities rounded to `sampling.out_dtype`."""
    name = pipeline.pipeline_config.sampling.out_dtype
    if name == "float32":
        return output
    dtype: torch.dtype = getattr(torch, name)

    def entries(
        found: Mapping[str, tuple[TokenLogprob, ...]],
    ) -> dict[str, tuple[TokenLogprob, ...]]:
        return {
            name: tuple(round_logprob(e, dtype) for e in those) for name, those in found.items()
        }

    return replace(
        output,
        logprobs=entries(output.logprobs),
        prompt_logprobs=entries(output.prompt_logprobs),
    )


class _MultiStepRun:
    """The forwards of one batch."""

    def __init__(self, pipeline: TextGenerationPipelineInterface, batch: ScheduledBatch) -> None:
        self._pipeline = pipeline
        self._runner = runner = pipeline.runner
        self._structured = pipeline.structured
        self._scores = pipeline.prompt_scores
        self._embeddings = pipeline.embeddings
        self._vectors: dict[str, tuple[bytes, ...]] = {}
        self._prompts = () if batch.mode is ForwardMode.DECODE else batch.rows
        self._reads_prompts = self._scores.is_enabled or self._embeddings.spec is not None
        self._failures: dict[str, str] = {}
        self._prompt_logprobs: dict[str, tuple[TokenLogprob, ...]] = {}
        self._num_steps = batch.num_steps
        self._rows = [row for row in batch.rows if row.generates]
        self._is_scored = any(row.sampling.top_logprobs is not None for row in self._rows)
        self._has_grammar = any(row.sampling.json_schema for row in self._rows)
        self._inputs = runner.prepare(batch)
        self._sampled: list[Tensor] = []  # of each step: int32 [rows]
        self._logprobs: list[tuple[TokenLogprob | None, ...]] = []  # of each step, if requested
        # Tokens on the host, by row. Reading them from a GPU blocks, so they are read only where
        # needed.
        self._tokens: list[list[Token]] = [[] for _ in self._rows]
        self._reads_each_step = runner.device.type == "cpu" or any(
            runner.token_sampler.needs_tokens(row.sampling) or needs_tokens(row)
            for row in self._rows
        )
        self.has_ended = False

    def step(self) -> None:
        """Run one forward and sample for the sampling rows."""
        runner, rows = self._runner, self._rows
        if not rows:
            self._read_prompts(runner.forward(self._inputs))
            self.has_ended = True
            return
        if self._has_grammar:
            outputs, token_ids = self._run_with_grammar()
        else:
            plan = runner.token_sampler.prepare(rows, len(self._sampled), self._tokens)
            reads_logits = self._is_scored or self._reads_prompts
            outputs, token_ids = runner.step(self._inputs, plan, reads_logits=reads_logits)
        if self._reads_prompts and not self._sampled:
            self._read_prompts(outputs)
        if self._is_scored:
            entries = score_tokens(self._pipeline, rows, self._inputs, outputs, token_ids)
            self._logprobs.append(entries)
        self._sampled.append(token_ids)
        if self._reads_each_step:
            for tokens, token in zip(self._tokens, host_tokens(token_ids), strict=True):
                tokens.append(token)
        if len(self._sampled) == self._num_steps or self._have_all_stopped():
            self.has_ended = True
        else:
            self._inputs = runner.prepare_next(token_ids, self._inputs)

    def _run_with_grammar(self) -> tuple[ModelOutputs, Tensor]:
        """Run a forward and sample. Masks are computed while the forward runs."""
        runner, rows = self._runner, self._rows
        outputs = runner.forward(self._inputs)
        mask = self._structured.mask(rows, list(map(as_ids, self._tokens)))
        self._failures.update(mask.failures)
        plan = runner.token_sampler.prepare(rows, len(self._sampled), self._tokens, mask.tokens)
        return outputs, runner.sample_tokens(outputs, plan)

    def _read_prompts(self, outputs: ModelOutputs) -> None:
        if self._scores.is_enabled:
            self._prompt_logprobs = self._scores.score(self._prompts, outputs)
        if self._embeddings.spec is not None:
            self._vectors = self._embeddings.take(self._prompts, self._inputs, outputs)

    def _have_all_stopped(self) -> bool:
        """Whether every row is known to have sampled a stop id in this turn."""
        return all(
            not row.sampling.ignore_eos and not set(row.sampling.stop_token_ids).isdisjoint(tokens)
            for row, tokens in zip(self._rows, self._tokens, strict=True)
        )

    def output(self) -> StepOutput:
        """Return all sampled tokens of every row, in order."""
        if not self._sampled:
            return StepOutput({}, prompt_logprobs=self._prompt_logprobs, embeddings=self._vectors)
        tokens, count = self._tokens, len(self._rows)
        if not self._reads_each_step:
            sampled = host_tokens(torch.cat(self._sampled))  # row by row of each step
            tokens = [sampled[place::count] for place in range(count)]
        pairs = zip(self._rows, tokens, strict=True)
        token_ids = {row.request_id: tuple(own) for row, own in pairs}
        logprobs = {}
        for place, row in enumerate(self._rows):
            entries = [by_row[place] for by_row in self._logprobs]
            if entries and row.sampling.top_logprobs is not None:
                logprobs[row.request_id] = tuple(entry for entry in entries if entry is not None)
        return StepOutput(token_ids, logprobs, self._failures, self._prompt_logprobs)


def score_tokens(
    pipeline: TextGenerationPipelineInterface,
    rows: Sequence[ScheduledRow],
    inputs: ModelInputs,
    outputs: ModelOutputs,
    token_ids: Tensor,
) -> tuple[TokenLogprob | None, ...]:
    """Return log-probabilities of the tokens [B] sampled for `rows`, None where not requested.

    Those of frames [B, K] are of their first codes. The host waits for the device when a row
    requests them.
    """
    wanted = [row.sampling.top_logprobs for row in rows]
    if all(top_n is None for top_n in wanted):
        return (None,) * len(rows)
    if token_ids.dim() > 1:
        token_ids = token_ids[:, 0]
    # The model skips rows with 0, while 0 in a request means: the chosen token only.
    found = pipeline.runner.loaded_model.compute_log_probabilities(
        pipeline.runner.session,
        inputs,
        outputs,
        token_ids,
        [0 if top_n is None else max(top_n, 1) for top_n in wanted],
        [False] * len(wanted),
    )
    chosen = token_ids.tolist()
    return tuple(
        None if entry is None else _token_logprob(token, entry, top_n or 0)
        for token, entry, top_n in zip(chosen, found, wanted, strict=True)
    )


def _token_logprob(token: int, found: LogProbabilities, top_n: int) -> TokenLogprob:
    logprob, best = found.token_log_probabilities[-1], found.top_log_probabilities[-1]
    assert logprob is not None  # a sampled token always has a predecessor
    assert best is not None
    return TokenLogprob(token, logprob, tuple(best.items())[:top_n])

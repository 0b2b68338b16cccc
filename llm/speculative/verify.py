"""`SpeculativeDecoding`: draft some tokens of each row, verify them in one forward, keep a prefix.

    rows t                drafts d1 d2 d3        target is fed    t   d1  d2  d3
                                                 its logits say   x1  x2  x3  x4
    x1 = d1, x2 = d2, x3 ≠ d3: the step yields x1 x2 x3; at least one token, at most one more than
    were drafted

The keys and values of rejected tokens are overwritten when the next step feeds those positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow, StepOutput
from llm.config import SpeculativeConfig
from llm.request import TokenLogprob
from llm.runner.model_runner import ModelRunner
from llm.sampling.log_probabilities import log_probabilities
from llm.speculative.acceptance import RULES, Drafted, plan_rows
from llm.speculative.draft import DraftModel, DraftStep
from llm.speculative.metrics import AcceptanceCounter, SpeculativeDecodingMetrics
from llm.structured.bitmask import StructuredOutput, needs_tokens


class SpeculativeDecoding:
    """Speculative decoding for the target of `runner`.

    Rows whose next token must be known first are not drafted.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        runner: ModelRunner,
        draft: DraftModel,
        structured: StructuredOutput,
    ) -> None:
        self.runner = runner
        self.draft = draft
        self.structured = structured
        self.rule = RULES[config.rejection_strategy]
        self.own_stream = config.rejection_strategy == "residual"
        self.counter = AcceptanceCounter(config.num_speculative_tokens)

    def metrics(self) -> SpeculativeDecodingMetrics:
        """Statistics of drafts so far."""
        return self.counter.snapshot()

    def ingest(self, batch: ScheduledBatch) -> None:
        """Feed the draft model a batch in which nothing is drafted."""
        self.draft.ingest(batch)

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Run a decode batch: up to `num_steps` tokens for each row, one forward of the target."""
        num_drafted = batch.num_steps - 1
        steps = self.draft.propose(batch.rows, num_drafted, own_stream=self.own_stream)
        turn = _Verification(self, batch.rows, steps)
        while turn.live:
            turn.step()
        return turn.output()


class _Verification:
    """One forward of the target, and its logits position by position while drafts are accepted."""

    def __init__(
        self, owner: SpeculativeDecoding, rows: Sequence[ScheduledRow], steps: list[DraftStep]
    ) -> None:
        self._owner = owner
        self._rows = rows
        self._steps = steps
        drafts = zip(*(step.token_ids for step in steps), strict=True)
        self._drafts = [() if needs_tokens(row) else d for row, d in zip(rows, drafts, strict=True)]
        self._logits, self._offsets = self._forward()
        self._index = 0
        self._tokens: list[list[int]] = [[] for _ in rows]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in rows]
        self._failures: dict[str, str] = {}
        self.live = list(range(len(rows)))  # rows whose drafts were accepted so far

    def _forward(self) -> tuple[Tensor, tuple[int, ...]]:
        """Return logits of every fed token, and the offset of each row."""
        runner = self._owner.runner
        fed = tuple(
            row._replace(token_ids=(*row.token_ids, *draft))
            for row, draft in zip(self._rows, self._drafts, strict=True)
        )
        inputs = runner.prepare(ScheduledBatch(fed, ForwardMode.EXTEND))
        inputs.logit_rows = None
        inputs.logit_offsets = inputs.forward_batch.row_offsets
        return runner.forward(inputs).logits, inputs.logit_offsets

    def step(self) -> None:
        """Choose the next token of each live row; rows whose draft was accepted stay live."""
        live, index = self.live, self._index
        rows = [self._rows[row] for row in live]
        logits = self._logits[[self._offsets[row] + index for row in live]]
        tokens = self._choose(rows, logits)
        self._note_logprobs(rows, logits, tokens)
        self._index += 1
        self.live = []
        for row, token in zip(live, tokens.tolist(), strict=True):
            self._tokens[row].append(token)
            draft, is_over = self._drafts[row], _ends(self._rows[row], token)
            if index < len(draft) and token == draft[index] and not is_over:
                self.live.append(row)
            else:
                self._count(row, is_over)

    def _choose(self, rows: list[ScheduledRow], logits: Tensor) -> Tensor:
        owner, index = self._owner, self._index
        sampled = [self._tokens[row] for row in self.live]
        mask = owner.structured.mask(rows, sampled)
        self._failures.update(mask.failures)
        plan = owner.runner.sampler.prepare(rows, index, sampled, mask.tokens)
        tokens = owner.runner.sampler.sample(logits, plan).long()
        places = [n for n, row in enumerate(self.live) if index < len(self._drafts[row])]
        if not places:
            return tokens
        step = self._steps[index]
        here = torch.tensor(places, device=logits.device)
        there = torch.tensor([self.live[place] for place in places], device=logits.device)
        drafted = Drafted(
            rows=[rows[place] for place in places],
            index=index,
            token_ids=torch.tensor(step.token_ids, device=logits.device)[there],
            draft_logits=step.logits[there],
            draft_distribution=plan_rows(step.plan, step.logits, there),
            target_logits=logits[here],
            target_distribution=plan_rows(plan, logits, here),
            target_tokens=tokens[here],
        )
        tokens[here] = owner.rule(drafted)
        return tokens

    def _count(self, row: int, is_over: bool) -> None:
        """Count a row's draft that ended: rejected, used up, or past the end of the sequence."""
        draft, tokens = self._drafts[row], self._tokens[row]
        num_accepted = sum(token == guess for token, guess in zip(tokens, draft, strict=False))
        num_drafted = min(len(draft), len(tokens)) if is_over else len(draft)
        self._owner.counter.add(num_drafted, num_accepted)

    def _note_logprobs(self, rows: list[ScheduledRow], logits: Tensor, tokens: Tensor) -> None:
        for place, row in enumerate(rows):
            top_n = row.sampling.top_logprobs
            if top_n is not None:
                token = tokens[place, None]
                found = log_probabilities(logits[place, None], token, top_n)
                best = found.top_log_probabilities[0] or {}
                entry = TokenLogprob(
                    int(token), found.token_log_probabilities[0], tuple(best.items())
                )
                self._logprobs[self.live[place]].append(entry)

    def output(self) -> StepOutput:
        """Return the output of the step."""
        token_ids, logprobs = {}, {}
        for row, tokens, entries in zip(self._rows, self._tokens, self._logprobs, strict=True):
            token_ids[row.request_id] = tuple(tokens)
            if entries:
                logprobs[row.request_id] = tuple(entries)
        return StepOutput(token_ids, logprobs, self._failures)


def _ends(row: ScheduledRow, token: int) -> bool:
    sampling = row.sampling
    return not sampling.ignore_eos and token in sampling.stop_token_ids

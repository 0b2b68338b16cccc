"""`PromptScores`: log-probabilities of a prompt's own tokens (`echo`), chunk by chunk.

chunk     t0 t1 t2 │ t3 t4          a token is scored by the logits of the one before it;
logits    l0 l1 l2 │ l3 l4          l2 is kept until t3 is fed
entries   –  l0 l1 │ l2 l3
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm.batch import ModelOutputs, ScheduledRow
from llm.errors import RequestError
from llm.request import Request, TokenLogprob
from llm.sampling.log_probabilities import log_probabilities

ROW_BLOCK = 256  # rows of logits normalised at once: a prompt has many, a vocabulary is wide


class PromptScores:
    """Keeps one row of logits for each prompt that is half fed."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._last: dict[str, Tensor] = {}  # [1, V]

    def admit(self, request: Request) -> None:
        """Raise `RequestError` for an echo while `enable_echo` is off. Thread-safe."""
        if request.sampling.echo and not self._enabled:
            raise RequestError("echo needs enable_echo")

    def release(self, request_id: str) -> None:
        """Forget a request; harmless when nothing is known of it."""
        self._last.pop(request_id, None)

    def score(
        self, rows: Sequence[ScheduledRow], outputs: ModelOutputs
    ) -> dict[str, tuple[TokenLogprob, ...]]:
        """Entries of every echoing row of a forward, one for each token fed."""
        found = {}
        for index, row in enumerate(rows):
            if row.echoes:
                start, end = outputs.logit_offsets[index : index + 2]
                found[row.request_id] = self._score(row, outputs.logits[start:end])
        return found

    def _score(self, row: ScheduledRow, logits: Tensor) -> tuple[TokenLogprob, ...]:
        tokens = torch.tensor(row.token_ids, device=logits.device)
        entries: list[TokenLogprob] = []
        if row.start == 0:
            entries.append(TokenLogprob(row.token_ids[0], None))
        else:
            entries += _entries(self._last[row.request_id], tokens[:1], row)
        entries += _entries(logits[:-1], tokens[1:], row)
        if row.samples:
            self.release(row.request_id)
        else:
            self._last[row.request_id] = logits[-1:].clone()
        return tuple(entries)


def _entries(logits: Tensor, tokens: Tensor, row: ScheduledRow) -> list[TokenLogprob]:
    """Of tokens [n] under logits [n, V]."""
    top_n = row.sampling.top_logprobs or 0
    entries = []
    for block, chosen in zip(logits.split(ROW_BLOCK), tokens.split(ROW_BLOCK), strict=True):
        found = log_probabilities(block, chosen, top_n)
        pairs = zip(found.token_log_probabilities, found.top_log_probabilities, strict=True)
        entries += [
            TokenLogprob(token, logprob, tuple((best or {}).items()))
            for token, (logprob, best) in zip(chosen.tolist(), pairs, strict=True)
        ]
    return entries

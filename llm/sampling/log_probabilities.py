"""Log-probabilities of chosen tokens and of the best ones, under the raw logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llm.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Log-probabilities of one request's tokens in one forward, the sampled one last.

    The entry of the first token of a prompt is None.
    """

    token_log_probabilities: tuple[float | None, ...]
    top_log_probabilities: tuple[Mapping[int, float] | None, ...]  # best first


def log_probabilities(logits: Tensor, token_ids: Tensor, top_n: int) -> LogProbabilities:
    """Compute those of token_ids [R] under logits [R, V], each with its `top_n` alternatives."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, token_ids.long().view(-1, 1)).flatten().tolist()
    best = torch.topk(logprobs, top_n, dim=-1)
    alternatives = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return LogProbabilities(
        tuple(chosen),
        tuple(dict(zip(ids, values, strict=True)) for ids, values in alternatives),
    )


def with_unpredicted_first(found: LogProbabilities) -> LogProbabilities:
    """Prepend an empty entry for a prompt's first token."""
    return LogProbabilities(
        (None, *found.token_log_probabilities), (None, *found.top_log_probabilities)
    )


def round_logprob(entry: TokenLogprob, dtype: torch.dtype) -> TokenLogprob:
    """Return an entry with its numbers rounded to another format."""

    def rounded(value: float) -> float:
        return float(torch.tensor(value).to(dtype))

    own = None if entry.logprob is None else rounded(entry.logprob)
    return TokenLogprob(entry.token_id, own, tuple((t, rounded(v)) for t, v in entry.top))

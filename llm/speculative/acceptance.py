"""Acceptance rules: four ways to choose the token at the position of a drafted one.

A rule reads the target's logits at the drafted position and returns the token to continue with; the
draft is accepted when that is the drafted one. Where a request is greedy, all rules choose the
target's best token.

greedy              the token that the target samples with its own random number: the result is
                    that of decoding without a draft, token for token where a row's logits do
                    not depend on how many tokens are fed with it (on a CPU)
residual            the drafted token with probability min(1, p / q), else one from max(p − q, 0):
                    the target's distribution (Leviathan et al. 2023, Chen et al. 2023), accepted
                    as often as any rule can that keeps it
typical-acceptance  the drafted token unless it is much less likely than the target's entropy makes
                    plausible (Cai et al. 2024), else one of the target's: not its distribution
logit-comparison    the drafted token if the target's logit of it is not below the draft's, else
                    one of the target's: not its distribution
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.sampling.logits import Method, pick
from llm.sampling.rng import uniforms
from llm.sampling.sampler import SamplingPlan, distribution, method_of

ACCEPT_STREAM = 0x8CB92BA72F3D8DD7  # selects another stream of random numbers of a seed
TYPICAL_THRESHOLD = 0.09  # epsilon of the paper, whose square root is delta
TYPICAL_FACTOR = 0.3


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafted tokens of n rows at one position, and the target's distributions."""

    rows: Sequence[ScheduledRow]
    index: int  # tokens generated earlier in this step
    token_ids: Tensor  # int64 [n]
    draft_logits: Tensor  # [n, V]
    draft_distribution: Callable[[], Tensor]  # float64 [n, V]
    target_logits: Tensor  # [n, V]
    target_distribution: Callable[[], Tensor]  # float64 [n, V]
    target_tokens: Tensor  # int64 [n], sampled independently of the draft

    def uniform(self, stream: int = 0) -> Tensor:
        """Return float64 [n, 1] random numbers."""
        seeds = [row.sampling.seed ^ stream for row in self.rows]
        numbers = uniforms(seeds, [len(row.output_ids) + self.index for row in self.rows])
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self.token_ids.device)[:, None]


Rule = Callable[[Drafted], Tensor]
"""Function from drafted tokens to the tokens to keep, int64 [n]."""


def greedy(drafted: Drafted) -> Tensor:
    """Apply the rule of that name; see the module."""
    return drafted.target_tokens


def residual(drafted: Drafted) -> Tensor:
    """Apply the rule of that name; see the module."""
    target, draft = drafted.target_distribution(), drafted.draft_distribution()
    tokens = drafted.token_ids[:, None]
    share = target.gather(1, tokens) / draft.gather(1, tokens)
    is_accepted = drafted.uniform(ACCEPT_STREAM) < share
    others = (target - draft).clamp_(min=0)
    # Equal distributions leave nothing to draw from, and never reject.
    others = torch.where(others.sum(1, keepdim=True) > 0, others, target)
    return torch.where(is_accepted, tokens, pick(others, drafted.uniform())).flatten()


def typical_acceptance(drafted: Drafted) -> Tensor:
    """Apply the rule of that name; see the module."""
    target = drafted.target_distribution()
    entropy = -torch.special.xlogy(target, target).sum(1)
    floor = (TYPICAL_FACTOR * torch.exp(-entropy)).clamp(max=TYPICAL_THRESHOLD)
    likely = target.gather(1, drafted.token_ids[:, None]).flatten()
    return _without_greedy_rows(drafted, likely >= floor)


def logit_comparison(drafted: Drafted) -> Tensor:
    """Apply the rule of that name; see the module."""
    tokens = drafted.token_ids[:, None]
    own = drafted.target_logits.gather(1, tokens) >= drafted.draft_logits.gather(1, tokens)
    possible = drafted.target_distribution().gather(1, tokens) > 0
    return _without_greedy_rows(drafted, (own & possible).flatten())


def _without_greedy_rows(drafted: Drafted, is_accepted: Tensor) -> Tensor:
    greedy_rows = torch.tensor(
        [method_of(row.sampling)[0] is Method.GREEDY for row in drafted.rows],
        device=is_accepted.device,
    )
    return torch.where(is_accepted & ~greedy_rows, drafted.token_ids, drafted.target_tokens)


RULES: dict[str, Rule] = {
    "greedy": greedy,
    "residual": residual,
    "typical-acceptance": typical_acceptance,
    "logit-comparison": logit_comparison,
}


def plan_rows(plan: SamplingPlan, logits: Tensor, places: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes the distribution of some rows of a plan."""
    return lambda: distribution(logits, plan)[places]

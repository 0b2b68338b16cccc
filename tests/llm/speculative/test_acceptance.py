"""The distribution of sampled tokens, drafted or not: against exact probabilities."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from llm.batch import ScheduledRow
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import SamplingParams
from llm.sampling.sampler import Sampler, distribution
from llm.speculative.acceptance import RULES, Drafted
from tests.llm.llama_checkpoints import batch, pipeline_config, random_ids, row, write_llama

NUM_ROWS, NUM_IDS, NUM_DRAWS = 250, 5, 1500
FEW_IDS = ((10, 10 + NUM_IDS),)


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Return Pearson's statistic divided by its degrees of freedom: about 1 for a true
    hypothesis.
    """
    total = sum(counts.values())
    assert set(counts) <= set(expected)
    terms = [(counts[key] - total * p) ** 2 / (total * p) for key, p in expected.items()]
    return sum(terms) / (len(terms) - 1)


def exact_pairs(
    pipeline: TextGenerationPipeline, prompt: list[int]
) -> dict[tuple[int, ...], float]:
    """Return the probability of each pair of next tokens, from the model itself."""
    sampling = SamplingParams(temperature=1.2, allowed_ranges=FEW_IDS)

    def next_token(tokens: list[int]) -> list[float]:
        asked = row(tokens, [1], sampling=sampling)
        outputs = pipeline.runner.forward(pipeline.runner.prepare(batch(asked)))
        plan = pipeline.runner.sampler.prepare([asked])
        return distribution(outputs.next_token_logits, plan)[0, 10 : 10 + NUM_IDS].tolist()

    return {
        (10 + first, 10 + second): p * q
        for first, p in enumerate(next_token(prompt))
        for second, q in enumerate(next_token([*prompt, 10 + first]))
    }


def drawn_pairs(pipeline: TextGenerationPipeline, prompt: list[int]) -> Counter[tuple[int, ...]]:
    """Return the first two tokens after the prompt, drafted and verified, with a seed for each
    row.
    """
    found: Counter[tuple[int, ...]] = Counter()
    for start in range(0, NUM_DRAWS, NUM_ROWS):
        turn: list[ScheduledRow] = []
        for n in range(NUM_ROWS):
            sampling = SamplingParams(temperature=1.2, seed=start + n, allowed_ranges=FEW_IDS)
            turn.append(row(prompt[-1:], [n + 1], len(prompt) - 1, sampling=sampling))
            turn[-1] = turn[-1]._replace(request_id=str(n))
        fed = [r._replace(token_ids=tuple(prompt[:-1]), start=0, samples=False) for r in turn]
        pipeline.execute(batch(*[r._replace(is_extend=True) for r in fed]))
        first = pipeline.execute(batch(*turn, num_steps=3)).token_ids
        short = [r for r in turn if len(first[r.request_id]) == 1]
        second = {}
        if short:
            more = [
                r._replace(
                    token_ids=first[r.request_id], start=r.start + 1, output_ids=first[r.request_id]
                )
                for r in short
            ]
            second = pipeline.execute(batch(*more, num_steps=2)).token_ids
        for r in turn:
            tokens = (*first[r.request_id], *second.get(r.request_id, ()))
            found[tokens[:2]] += 1
    return found


def _continued(fed: ScheduledRow, tokens: tuple[int, ...]) -> ScheduledRow:
    return fed._replace(token_ids=tokens, start=fed.start + 1, output_ids=tokens)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two models that often disagree."""
    folder = tmp_path_factory.mktemp("unlike")
    keys: dict[str, Any] = {"num_hidden_layers": 1, "initializer_range": 0.15}
    return write_llama(folder / "a", seed=1, **keys), write_llama(folder / "b", seed=2, **keys)


@pytest.mark.parametrize(
    ("strategy", "is_exact"),
    [
        ("greedy", True),
        ("residual", True),
        ("typical-acceptance", False),
        ("logit-comparison", False),
    ],
)
def test_sampled_tokens_have_the_targets_distribution(
    unlike: tuple[Path, Path], strategy: str, is_exact: bool
) -> None:
    """1,500 draws of two tokens against the 25 exact probabilities; the same test detects a rule
    that is known to change the distribution.
    """
    values = pipeline_config(
        unlike[0],
        num_pages=NUM_ROWS + 2,
        max_batch_size=NUM_ROWS,
        draft_model={"model_path": str(unlike[1])},
        speculative={"rejection_strategy": strategy, "num_speculative_tokens": 2},
    )
    pipeline = TextGenerationPipeline(values)
    prompt = random_ids(6, 96, seed=4)
    counts = drawn_pairs(pipeline, prompt)
    assert sum(counts.values()) == NUM_DRAWS
    statistic = chi_square(counts, exact_pairs(pipeline, prompt))
    assert (statistic < 2) if is_exact else (statistic > 4)  # 24 degrees: 2 is one in 400
    metrics = pipeline.spec_decode_metrics()
    assert metrics is not None
    assert 0.1 < metrics.acceptance_rates[0] < 0.95


def test_the_residual_rule_by_itself() -> None:
    """Drawn from q, verified with p: the kept tokens are distributed as p."""
    count, vocab = 8_000, 6
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05, 0.0], dtype=torch.float64).expand(count, vocab)
    q = torch.tensor([0.1, 0.1, 0.5, 0.1, 0.0, 0.2], dtype=torch.float64).expand(count, vocab)
    rows = [row([1], [1], sampling=SamplingParams(seed=seed)) for seed in range(count)]
    generator = torch.Generator().manual_seed(0)
    guesses = torch.multinomial(q, 1, generator=generator).flatten()
    nothing = torch.zeros(0)
    kept = RULES["residual"](
        Drafted(rows, 0, guesses, nothing, lambda: q, nothing, lambda: p, guesses)
    )
    counts = Counter((int(token),) for token in kept)
    exact = {(token,): float(p[0, token]) for token in range(5)}
    assert chi_square(counts, exact) < 2
    # No rule that keeps p accepts more often than Σ min(p, q).
    accepted = (kept == guesses).double().mean()
    assert accepted == pytest.approx(float(torch.minimum(p[0], q[0]).sum()), abs=0.02)


def test_the_typical_rule_by_itself() -> None:
    """A draft is kept from 0.09 on, or from 0.3 × e^-entropy on if that is less."""
    vocab = 1000
    few = torch.zeros(vocab, dtype=torch.float64)
    few[:4] = torch.tensor([0.8, 0.1, 0.08, 0.02])  # entropy 0.69: 0.15, so 0.09 holds
    many = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
    many[:2] += torch.tensor([0.25, -0.75]) / vocab  # entropy 6.9: 0.0003, which 1 has not
    p = torch.stack([few] * 4 + [many] * 3)
    guesses = torch.tensor([0, 1, 2, 5, 0, 1, 7])
    targets = torch.full_like(guesses, 999)
    params = [SamplingParams(seed=n) for n in range(7)]
    params[-1] = SamplingParams(temperature=0)  # greedy: the target's token
    rows = [row([1], [1], sampling=one) for one in params]
    nothing = torch.zeros(0)
    kept = RULES["typical-acceptance"](
        Drafted(rows, 0, guesses, nothing, lambda: p, nothing, lambda: p, targets)
    )
    assert kept.tolist() == [0, 1, 999, 999, 0, 999, 999]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2, temperature=1.5),
        SamplingParams(temperature=0),
        SamplingParams(allowed_ranges=((2, 5), (7, 9)), stop_token_ids=(11,), top_p=0.9),
        SamplingParams(
            allowed_cycle=(((0, 3),), ((3, 6),), ((2, 5), (7, 9))), stop_token_ids=(11,)
        ),
        SamplingParams(repetition_penalty=3.0, top_k=6, top_p=0.8),
    ],
)
def test_the_distribution_is_what_the_sampler_draws_from(sampling: SamplingParams) -> None:
    count, vocab = 2000, 12
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)).expand(count, vocab)
    rows = []
    for seed in range(count):
        params = SamplingParams(
            **{name: getattr(sampling, name) for name in SamplingParams.__slots__} | {"seed": seed}
        )
        rows.append(row([1], [1], sampling=params, output_ids=(3, 4)))
    sampler = Sampler(vocab, torch.device("cpu"))
    plan = sampler.prepare(rows)
    found = distribution(logits, plan)
    assert torch.allclose(found.sum(1), torch.ones(count, dtype=torch.float64))
    drawn = Counter((int(token),) for token in sampler.sample(logits, plan))
    exact = {(token,): float(p) for token, p in enumerate(found[0]) if p > 0}
    assert set(drawn) <= set(exact)
    if len(exact) > 1:
        assert chi_square(drawn, exact) < 3

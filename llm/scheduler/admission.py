"""`RequestRules`: checks that a model can run a request, before the request is queued."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from llm.errors import RequestError
from llm.request import Request

MAX_PRIORITY = 1000  # largest absolute value
NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, frequency, presence


def check_switches(request: Request, *, penalties: bool, min_tokens: bool) -> None:
    """Raise `RequestError` when a request needs a feature that is switched off."""
    sampling = request.sampling
    asked = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if asked != NO_PENALTIES and not penalties:
        raise RequestError("penalties are switched off here (sampling.enable_penalties)")
    if sampling.min_tokens and not min_tokens:
        raise RequestError("minimum lengths are switched off here (sampling.enable_min_tokens)")


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The model's vocabulary, maximum length and stop ids."""

    vocab_size: int
    max_length: int  # prompt and generated tokens
    eos_token_ids: frozenset[int]

    def apply(self, request: Request) -> Request:
        """Return the request with the model's stop ids added to its own. Raises `RequestError`."""
        self._check(request)
        sampling = request.sampling
        stops, ranges = sampling.stop_token_ids, sampling.all_ranges
        # Stop ids bypass the allowed ranges; one that the caller has excluded must stay excluded.
        added = sorted(
            token
            for token in self.eos_token_ids.difference(stops)
            if not ranges or any(start <= token < end for start, end in ranges)
        )
        if not added:
            return request
        sampling = dataclasses.replace(sampling, stop_token_ids=(*stops, *added))
        return dataclasses.replace(request, sampling=sampling)

    def _check(self, request: Request) -> None:
        ids, sampling, size = request.prompt_ids, request.sampling, self.vocab_size
        ends = [end for _, end in sampling.all_ranges]
        longest = self.max_length - 1
        checks = (
            (len(ids) <= longest, f"the prompt has {len(ids)} tokens; at most {longest} fit"),
            (
                len(ids) + sampling.min_tokens <= self.max_length,
                f"the prompt has {len(ids)} tokens and min_tokens is {sampling.min_tokens}; "
                f"together at most {self.max_length} fit",
            ),
            (self._has(*ids), f"a prompt id is not in the vocabulary of {size}"),
            (self._has(*sampling.stop_token_ids), f"a stop id is not in the vocabulary of {size}"),
            (max(ends, default=0) <= size, f"allowed ranges go beyond the vocabulary of {size}"),
            (
                (sampling.top_logprobs or 0) <= size,
                f"top_logprobs exceeds the vocabulary of {size}",
            ),
            (abs(request.priority) <= MAX_PRIORITY, f"priority must be within ±{MAX_PRIORITY}"),
        )
        for holds, message in checks:
            if not holds:
                raise RequestError(message)

    def _has(self, *token_ids: int) -> bool:
        return min(token_ids, default=0) >= 0 and max(token_ids, default=0) < self.vocab_size

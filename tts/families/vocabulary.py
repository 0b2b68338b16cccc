"""Speech tokens of a language model: mapping of token ids and codes, and control tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from llm import CheckpointError, RequestError, SamplingParams
from tts.checkpoint.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Names of a checkpoint's speech tokens."""

    code: str  # with {} in place of the code
    start: str
    end: str


class SpeechVocabulary:
    """Mapping of codes and token ids, with separate tokens for each position of a frame.

    `positions[k][code]` is the token of `code` at position k of a frame; a codec with one code per
    frame has one position. Consecutive ids, the usual case, need no table.
    """

    def __init__(self, positions: Sequence[Sequence[int]], start_id: int, end_id: int) -> None:
        ids = list(chain.from_iterable(positions))
        if not ids or len(set(ids)) != len(ids) or len({len(p) for p in positions}) != 1:
            raise CheckpointError("two codes share a token, or there are no code tokens")
        self.start_id = start_id
        self.end_id = end_id
        self.codebook_size = len(positions[0])
        self.codes_per_frame = len(positions)
        self._base = ids[0]
        self._num_ids = len(ids)
        is_contiguous = all(i == self._base + k for k, i in enumerate(ids))
        self._ids = () if is_contiguous else tuple(ids)
        self._codes = {i: k % self.codebook_size for k, i in enumerate(self._ids)}
        self._ranges = tuple(_ranges(position) for position in positions)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: TextTokenizer, tokens: SpeechTokens, codebook_size: int
    ) -> SpeechVocabulary:
        """Look up one token per code by name. Raises CheckpointError for a missing one."""
        codes = [
            tokenizer.control_id(tokens.code.replace("{}", str(code)))
            for code in range(codebook_size)
        ]
        return cls([codes], tokenizer.control_id(tokens.start), tokenizer.control_id(tokens.end))

    def __repr__(self) -> str:
        kind = "table" if self._ids else f"base {self._base}"
        frames = f"{self.codes_per_frame} x " if self.codes_per_frame > 1 else ""
        return f"SpeechVocabulary({frames}{self.codebook_size} codes, {kind})"

    def constrain(self, sampling: SamplingParams) -> SamplingParams:
        """Return `sampling` limited to codes at their positions, and the end between frames."""
        if self.codes_per_frame == 1:
            return replace(sampling, stop_token_ids=(self.end_id,), allowed_ranges=self._ranges[0])
        return replace(sampling, stop_token_ids=(self.end_id,), allowed_cycle=self._ranges)

    def whole_frames(self, num_codes: int) -> int:
        """Return the number of codes rounded down to whole frames."""
        return num_codes - num_codes % self.codes_per_frame

    def codes(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the codes of the speech tokens in `token_ids`, in order; other ids are skipped."""
        if self._ids:
            known = self._codes
            return tuple([known[i] for i in token_ids if i in known])
        base, size, end = self._base, self.codebook_size, self._base + self._num_ids
        return tuple([(i - base) % size for i in token_ids if base <= i < end])

    def token_ids(self, codes: Iterable[int]) -> tuple[int, ...]:
        """Return the token ids of codes, the first of which begins a frame.

        Raises RequestError for a code outside the codebook and for an incomplete frame.
        """
        given, size, positions = tuple(codes), self.codebook_size, self.codes_per_frame
        if given and not (min(given) >= 0 and max(given) < size):
            raise RequestError(f"speech tokens must be in 0..{size - 1}")
        if len(given) % positions:
            raise RequestError(f"speech tokens must be whole frames of {positions}")
        indices = (size * (n % positions) + code for n, code in enumerate(given))
        if self._ids:
            return tuple(self._ids[index] for index in indices)
        return tuple(self._base + index for index in indices)


def _ranges(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges that cover exactly these ids."""
    ranges: list[tuple[int, int]] = []
    for token_id in sorted(ids):
        if ranges and ranges[-1][1] == token_id:
            ranges[-1] = (ranges[-1][0], token_id + 1)
        else:
            ranges.append((token_id, token_id + 1))
    return tuple(ranges)

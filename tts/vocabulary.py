"""Which tokens of a language model are speech: token id ↔ code, and the marks around speech."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llm import CheckpointError, RequestError
from tts.checkpoint import SpeechDescription
from tts.tokenizer import TextTokenizer


class SpeechVocabulary:
    """Codes as token ids. Consecutive ids, the usual case, need no table."""

    def __init__(self, code_ids: Sequence[int], start_id: int, end_id: int) -> None:
        if len(set(code_ids)) != len(code_ids) or not code_ids:
            raise CheckpointError("two codes share a token, or there are no code tokens")
        self.start_id = start_id
        self.end_id = end_id
        self.codebook_size = len(code_ids)
        self._base = code_ids[0]
        is_contiguous = all(i == self._base + k for k, i in enumerate(code_ids))
        self._ids = () if is_contiguous else tuple(code_ids)
        self._codes = {i: code for code, i in enumerate(self._ids)}
        self.allowed_ranges = _ranges(code_ids)
        """Half-open id ranges of the codes, for `llm.SamplingParams.allowed_ranges`."""

    @classmethod
    def from_tokenizer(
        cls, tokenizer: TextTokenizer, description: SpeechDescription, codebook_size: int
    ) -> SpeechVocabulary:
        """Look the code tokens up by name; CheckpointError names the first that is missing."""
        name = description.code_token
        return cls(
            [tokenizer.control_id(name.format(code)) for code in range(codebook_size)],
            tokenizer.control_id(description.start_of_speech),
            tokenizer.control_id(description.end_of_speech),
        )

    def __repr__(self) -> str:
        kind = "table" if self._ids else f"base {self._base}"
        return f"SpeechVocabulary({self.codebook_size} codes, {kind})"

    def codes(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Codes of the speech tokens among `token_ids`, in order; other ids are left out."""
        if self._ids:
            return tuple(self._codes[i] for i in token_ids if i in self._codes)
        base, end = self._base, self._base + self.codebook_size
        return tuple(i - base for i in token_ids if base <= i < end)

    def token_ids(self, codes: Iterable[int]) -> tuple[int, ...]:
        """Token ids of codes; RequestError for a code outside the codebook."""
        given = tuple(codes)
        if given and not (min(given) >= 0 and max(given) < self.codebook_size):
            raise RequestError(f"speech tokens must be in 0..{self.codebook_size - 1}")
        if self._ids:
            return tuple(self._ids[code] for code in given)
        return tuple(self._base + code for code in given)


def _ranges(ids: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Half-open ranges that cover exactly these ids."""
    ranges: list[tuple[int, int]] = []
    for token_id in sorted(ids):
        if ranges and ranges[-1][1] == token_id:
            ranges[-1] = (ranges[-1][0], token_id + 1)
        else:
            ranges.append((token_id, token_id + 1))
    return tuple(ranges)

"""Conversion of sampling parameters by row, as tensors or lists, to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llm.request import SamplingParams

Numbers = Tensor | Sequence[int] | Sequence[float]

PENALTIES = (
    "repetition_penalties",
    "frequency_penalties",
    "presence_penalties",
    "token_histories",
)


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Sampling parameters of B rows."""

    temperatures: list[float]
    top_ps: list[float]
    top_ks: list[int]
    penalties: list[list[float]]  # repetition, frequency, presence: [B] each
    histories: list[list[int]]  # [B]; empty without penalties

    @classmethod
    def read(
        cls,
        num_rows: int,
        temperatures: Numbers | None,
        top_ps: Numbers | None,
        top_ks: Numbers | None,
        penalty_params: Mapping[str, Any] | None,
    ) -> RowParameters:
        given = penalty_params or {}
        missing = [name for name in PENALTIES if name not in given]
        if penalty_params is not None and missing:
            raise ValueError(f"penalty_params lacks {', '.join(missing)}")
        neutral = dict(zip(PENALTIES, (1.0, 0.0, 0.0), strict=False))
        return cls(
            _floats(temperatures, 1.0, num_rows),
            _floats(top_ps, 1.0, num_rows),
            [max(int(value), 0) for value in _floats(top_ks, 0, num_rows)],
            [_floats(given.get(name), value, num_rows) for name, value in neutral.items()],
            [list(history) for history in given.get("token_histories", ())],
        )

    def of(self, place: int, seed: int) -> SamplingParams:
        """Return the parameters of one row."""
        repetition, frequency, presence = (values[place] for values in self.penalties)
        return SamplingParams(
            temperature=self.temperatures[place],
            top_p=self.top_ps[place],
            top_k=self.top_ks[place],
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
            seed=seed,
        )


def integers(values: Numbers) -> list[int]:
    """Return integers on the host."""
    numbers = values.tolist() if isinstance(values, Tensor) else values
    return [int(number) for number in numbers]


def _floats(values: Numbers | None, default: float, count: int) -> list[float]:
    if values is None:
        return [default] * count
    numbers = values.tolist() if isinstance(values, Tensor) else list(values)
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers for {count} rows")
    return [float(number) for number in numbers]

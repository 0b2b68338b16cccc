"""The rows of steps on their way to other ranks: of a known request only what has changed.

A row refers to all pages and tokens of its request, which grow with every step. `RowEncoder`
(rank 0) sends a request's first row whole, later ones as a `RowChange`; `RowDecoder` (the others)
keeps the pages and tokens that it has got, and returns whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from llm.batch import ScheduledRow
from llm.request import Token
from llm.sequence import FUTURE_TOKEN


class RowChange(NamedTuple):
    """A row of a request whose first row was sent before. Other fields are those of that row."""

    request_id: str
    token_ids: tuple[Token, ...]
    start: int
    is_extend: bool
    samples: bool
    new_pages: tuple[int, ...]
    num_kept: int  # of the output tokens that were sent: the others stood for later ones
    new_output_ids: tuple[Token, ...]


class _Sent(NamedTuple):
    """What the other ranks have of a request."""

    row: ScheduledRow
    num_pages: int
    num_outputs: int  # without tokens that are not known yet


class RowEncoder:
    """Encodes rows, in the order of their steps."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}

    def encode(self, rows: Iterable[ScheduledRow]) -> tuple[ScheduledRow | RowChange, ...]:
        """Return the rows of one step, whole ones or their changes."""
        return tuple([self._encode(row) for row in rows])

    def _encode(self, row: ScheduledRow) -> ScheduledRow | RowChange:
        sent = self._sent.get(row.request_id)
        outputs, pages = row.output_ids, row.pages
        num_outputs, num_pages = len(outputs), len(pages)
        while num_outputs and outputs[num_outputs - 1] == FUTURE_TOKEN:
            num_outputs -= 1
        self._sent[row.request_id] = _Sent(row, num_pages, num_outputs)
        if (
            sent is None
            or sent.row.pages is not pages  # claimed again after a preemption
            or sent.row.output_ids is not outputs
            or sent.row.sampling is not row.sampling
        ):
            return row
        return RowChange(
            row.request_id,
            row.token_ids,
            row.start,
            row.is_extend,
            row.samples,
            tuple(pages[sent.num_pages : num_pages]),
            sent.num_outputs,
            tuple(outputs[sent.num_outputs :]),
        )

    def forget(self, request_id: str) -> None:
        """Send the next row of this id whole: the request has ended."""
        self._sent.pop(request_id, None)


class RowDecoder:
    """Decodes rows, in the order of their steps. A step's rows are valid until the next one."""

    def __init__(self) -> None:
        self._rows: dict[str, Any] = {}  # first rows, whose pages and output tokens grow

    def decode(self, rows: Iterable[ScheduledRow | RowChange]) -> tuple[ScheduledRow, ...]:
        """Return whole rows."""
        return tuple([self._decode(row) for row in rows])

    def _decode(self, row: ScheduledRow | RowChange) -> ScheduledRow:
        if isinstance(row, ScheduledRow):
            self._rows[row.request_id] = row
            return row
        first = self._rows[row.request_id]
        first.pages.extend(row.new_pages)
        first.output_ids[row.num_kept :] = row.new_output_ids
        return ScheduledRow(
            row.request_id,
            row.token_ids,
            row.start,
            first.pages,
            row.is_extend,
            row.samples,
            first.sampling,
            first.output_ids,
            first.lora,
            first.embeds,
        )

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._rows.pop(request_id, None)

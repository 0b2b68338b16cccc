"""Ranks of a group in the threads of one process, connected by gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from llm.parallel.process_group import ProcessGroup

T = TypeVar("T")


def on_ranks(size: int, folder: Path, work: Callable[[ProcessGroup], T]) -> list[T]:
    """Run `work` on `size` ranks; return the results in rank order. Raises the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"

    def run(rank: int) -> None:
        try:
            group = ProcessGroup(rank, size, meeting, torch.device("cpu"))
            results[rank] = work(group)
            group.minimum(0)  # no rank closes before the others have ended
            group.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not errors:
            thread.join(timeout=0.05)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]

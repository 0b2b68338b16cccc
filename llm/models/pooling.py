"""Detection of embedding models, and pooling of their vectors.

A checkpoint computes embeddings if its architecture has no language-model head (`Qwen3Model` and
the like), or if it has the layout of sentence-transformers: modules.json lists a Transformer, a
Pooling and perhaps a Normalize.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.config.architectures import find_architecture
from llm.errors import CheckpointError
from llm.models.hf_config import HuggingFaceConfig

if TYPE_CHECKING:
    from torch import Tensor

MODULES_FILE = "modules.json"


class Pooling(Enum):
    """The vector of a text that represents it."""

    FIRST = "pooling_mode_cls_token"
    MEAN = "pooling_mode_mean_tokens"
    LAST = "pooling_mode_lasttoken"


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """Pooling of one checkpoint. The default is that of a decoder without modules.json."""

    pooling: Pooling = Pooling.LAST  # the only token that attends to all others
    normalizes: bool = True  # to length 1

    def pool(self, hidden: Tensor) -> Tensor:
        """Return float32 [H] of the vectors [T, H] of a whole text, after the final norm."""
        wide = hidden.double()
        match self.pooling:
            case Pooling.FIRST:
                pooled = wide[0]
            case Pooling.MEAN:
                pooled = wide.mean(0)
            case Pooling.LAST:
                pooled = wide[-1]
        return self.finish(pooled)

    def finish(self, vectors: Tensor) -> Tensor:
        """Return float32 vectors [..., H], normalised to length 1 if the checkpoint requires it."""
        wide = vectors.double()
        if self.normalizes:
            wide = wide / wide.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return wide.float()


def is_embedding_model(folder: Path | str) -> bool:
    """Whether a checkpoint computes embeddings rather than generating."""
    return read_pooling(folder) is not None


def read_pooling(folder: Path | str) -> PoolingSpec | None:
    """Return the pooling; None for a model that generates. Raises `CheckpointError` for unknown
    modules.
    """
    path = Path(folder) / MODULES_FILE
    if path.is_file():
        return _read_modules(path)
    config = HuggingFaceConfig.read(folder)
    # An architecture without an entry, if it runs at all, is a language model of transformers.
    architecture = find_architecture(config.architecture, config.path, runs_alone=True)
    return PoolingSpec() if architecture.is_embedding else None


def _read_modules(path: Path) -> PoolingSpec:
    found = {str(module["type"]).rpartition(".")[2]: module for module in _read(path)}
    unknown = found.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise CheckpointError(f"{path}: modules {', '.join(sorted(unknown))} are not supported")
    if "Pooling" not in found:
        raise CheckpointError(f"{path} has no Pooling")
    settings = path.parent / str(found["Pooling"]["path"]) / "config.json"
    return PoolingSpec(_read_mode(settings), normalizes="Normalize" in found)


def _read_mode(path: Path) -> Pooling:
    values = _read(path)
    modes = [key for key, value in values.items() if key.startswith("pooling_mode_") and value]
    known = [mode.value for mode in Pooling]
    if len(modes) != 1 or modes[0] not in known:
        raise CheckpointError(f"{path}: pooling {modes}; one of {', '.join(known)} is supported")
    return Pooling(modes[0])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error

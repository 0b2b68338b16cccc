"""The process's default configuration: what a `ModelRunner` falls back to that is given none.

Nothing else reads it, and whoever gives a configuration never touches it.
"""

from __future__ import annotations

from llm.config.pipeline import PipelineConfig

_default: list[PipelineConfig] = []


def set_default_config(config: PipelineConfig | None) -> None:
    """Set it, or (None) forget it."""
    _default[:] = [] if config is None else [config]


def default_config() -> PipelineConfig:
    """Raises `RuntimeError` when there is none."""
    if not _default:
        raise RuntimeError("give the runner a configuration, or call set_default_config before")
    return _default[0]

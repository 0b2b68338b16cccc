"""Fields and values that this release does not support, and the error for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llm.config.strict import StrictModel
from llm.errors import ConfigError

UNSUPPORTED_FIELDS: dict[str, str] = {
    "draft_model.data_parallel_degree": "a draft model runs in every replica of its model",
    "model.trust_remote_code": "code from checkpoints is never run",
}
"""Field (dotted path) -> why setting it to other than its default is an error in this release."""


UNSUPPORTED_VALUES: dict[str, dict[str, str]] = {
    "speculative.speculative_method": dict.fromkeys(
        ("eagle", "mtp"), "drafts come from a model of their own"
    ),
}
"""Field (dotted path) -> value -> why this value is an error in this release."""


def refuse_unavailable(
    config: StrictModel,
    fields: Mapping[str, str],
    values: Mapping[str, Mapping[str, str]],
) -> None:
    """Raise `ConfigError` for a field of `fields` that is not at its default, or a value listed.

    Entries for `model` also apply to `draft_model`.
    """
    for name, value, default in _walk(config):
        known = name.removeprefix("draft_") if name.startswith("draft_model.") else name
        reason = values.get(known, {}).get(str(value))
        if value != default:
            reason = fields.get(name) or fields.get(known) or reason
        if reason is not None:
            raise unavailable(name, value, reason)


def unavailable(name: str, value: object, reason: str) -> ConfigError:
    """Return the error for one value."""
    return ConfigError(f"{name}={value} is not available in this release: {reason}")


def _walk(section: StrictModel, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Iterate over (dotted name, value, default) of every field that was set, with those of
    sections.
    """
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in section.model_fields_set:
            yield prefix + name, value, field.get_default(call_default_factory=True)
        if isinstance(value, StrictModel):
            yield from _walk(value, f"{prefix}{name}.")

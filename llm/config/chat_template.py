"""A chat template's text, from the file that the configuration names."""

from __future__ import annotations

import json
from pathlib import Path

from llm.errors import ConfigError


def read_chat_template(chat_template: Path | None) -> str | None:
    """The template's text; None without a file.

    `~` is expanded, and a relative path starts at the working directory. Raises `ConfigError`
    naming the path when it is not a file, or cannot be read as UTF-8.
    """
    if chat_template is None:
        return None
    path = chat_template.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"chat_template={path} is not a file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read chat_template={path}: {error}") from error
    return _template_in(text)


def _template_in(text: str) -> str:
    """The value of `chat_template` when the text is a JSON object with that key; else the text."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    template = values.get("chat_template") if isinstance(values, dict) else None
    return template if isinstance(template, str) else text

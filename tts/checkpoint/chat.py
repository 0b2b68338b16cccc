"""Chat templates of checkpoints: from messages to the text of a prompt, in jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llm import CheckpointError
from tts.checkpoint.files import read_json
from tts.checkpoint.tokenizer import TextTokenizer
from tts.errors import InvalidRequestError

if TYPE_CHECKING:
    from jinja2 import Template

GUARDS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode noncharacters: never exchanged as text
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
EXTENSIONS = ("jinja2.ext.loopcontrols", "tts.checkpoint.chat_extensions.Generation")


class ChatRole(Enum):
    """Role of a message's author."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: ChatRole
    content: str


class ChatTemplate:
    """A template, rendered as by transformers: trimmed blocks, `add_generation_prompt`, no tools.

    Templates come from checkpoints, so they run in the immutable sandbox: no unsafe attributes,
    and no changes to their arguments.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._tokens = dict(tokens or {})
        self._compiled: Template | None = None

    def compiled(self) -> Template:
        """Return the template, compiled once. Raises CheckpointError when it is broken."""
        from jinja2 import TemplateError

        try:
            self._compiled = self._compiled or self._compile()
        except (TemplateError, RecursionError) as error:  # Jinja's parser calls itself
            raise CheckpointError(f"the chat template fails: {error}") from error
        return self._compiled

    def render(self, messages: Sequence[ChatMessage], **values: str) -> str:
        """Return the prompt up to the assistant's answer; `values` are variables of the template.

        Raises InvalidRequestError when the template refuses the conversation, CheckpointError
        when the template itself is broken.
        """
        from jinja2 import TemplateError

        template = self.compiled()
        turns = [{"role": m.role.value, "content": m.content} for m in messages]
        try:
            return template.render(
                messages=turns,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **{**self._tokens, **values},
            )
        except (TemplateError, TypeError) as error:
            raise CheckpointError(f"the chat template fails: {error}") from error

    def _compile(self) -> Template:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self._source)


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A control token among the parts of a message, by name."""

    name: str


MessageParts = tuple[ChatRole, Sequence[str | ControlToken]]


def encode_chat(
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    messages: Sequence[MessageParts],
    **values: str,
) -> tuple[int, ...]:
    """Encode a conversation to prompt ids, up to the assistant's answer.

    Only the template and `ControlToken` parts yield control tokens: a guard character splits
    their names in texts until the rendered prompt is encoded.
    """
    guard = _unused_guard(part for _, parts in messages for part in parts)

    def content(parts: Sequence[str | ControlToken]) -> str:
        return "".join(
            tokenizer.guarded(part, guard) if isinstance(part, str) else part.name for part in parts
        )

    guarded = [ChatMessage(role, content(parts)) for role, parts in messages]
    return tuple(tokenizer.encode_marked(template.render(guarded, **values), guard))


def _unused_guard(parts: Iterable[str | ControlToken]) -> str:
    texts = [part for part in parts if isinstance(part, str)]
    for guard in GUARDS:
        if not any(guard in text for text in texts):
            return guard
    raise InvalidRequestError.of("input.chat", "the messages hold Unicode noncharacters")


def _refuse(message: str) -> NoReturn:
    raise InvalidRequestError.of("input.chat", message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def load_chat_template(folder: Path, override: str | None = None) -> ChatTemplate | None:
    """Load the template of tokenizer_config.json or chat_template.jinja; None without either.

    `override` is the text of a template or the path of a file with one.
    """
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    source = _override(override) or _own(folder, settings)
    if not source:
        return None
    return ChatTemplate(source, {name: _token(settings.get(name)) for name in _NAMED_TOKENS})


def _override(override: str | None) -> str:
    if not override:
        return ""
    looks_like_path = "{" not in override and "\n" not in override
    if not looks_like_path:
        return override
    try:
        return Path(override).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"chat_template: {error}") from error


def _own(folder: Path, settings: Mapping[str, Any]) -> str:
    template = settings.get("chat_template")
    if isinstance(template, list):
        defaults = (t for t in template if isinstance(t, Mapping) and t.get("name") == "default")
        template = next(defaults, {}).get("template")
    if isinstance(template, str):
        return template
    file = folder / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _token(value: object) -> str:
    """Return the text of a token, which is a string or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""

"""Prompts of one checkpoint: its speech family's for speech, plain or templated ones for text.

Text is always encoded as text: nothing a user writes becomes a control token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec

from decoder import CodecSpec
from tts.chat import ChatMessage, encode_chat
from tts.errors import InvalidRequestError, Precondition, PreconditionError
from tts.families.base import Checkpoint, SpeechFamily
from tts.families.registry import find_family
from tts.tokenizer import IncrementalDetokenizer
from tts.vocabulary import SpeechVocabulary
from tts.voices import Voice

LONG_CHARACTERS = 10_000  # whose encoding takes some milliseconds

Given = ParamSpec("Given")


async def encoded(
    length: int, work: Callable[Given, tuple[int, ...]], *args: Given.args, **values: Given.kwargs
) -> tuple[int, ...]:
    """Prompt ids that `work` makes of so many characters; of many on a thread, as they may take a
    second, which is not the event loop's to give.
    """
    if length > LONG_CHARACTERS:
        return await asyncio.to_thread(work, *args, **values)
    return work(*args, **values)


class PromptBuilder:
    """Prompts of one checkpoint, for speech and for text.

    Without a family, or without a codec's `spec`, it builds text prompts only. Raises
    CheckpointError when the codec's codes are not those of the language model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: SpeechFamily | None = None,
        spec: CodecSpec | None = None,
    ) -> None:
        self.tokenizer = checkpoint.tokenizer
        self.family = family
        self.vocabulary: SpeechVocabulary | None = None
        if family is not None and spec is not None:
            self.vocabulary = family.vocabulary(spec)
        self._chat = checkpoint.chat

    @classmethod
    def load(
        cls, folder: Path, spec: CodecSpec | None = None, chat_template: str | None = None
    ) -> PromptBuilder:
        """From a checkpoint folder and the facts of its codec."""
        checkpoint = Checkpoint(folder, chat_template)
        return cls(checkpoint, find_family(checkpoint), spec)

    @property
    def can_chat(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._chat is not None

    def check_chat(self) -> None:
        """Raise CheckpointError for a chat template that is broken, before anybody chats."""
        if self._chat is not None:
            self._chat.compiled()

    def speech_prompt(self, text: str, voice: Voice) -> tuple[int, ...]:
        """Prompt ids after which the model speaks `text` (normalised) in `voice`."""
        if self.family is None or self.vocabulary is None:
            raise PreconditionError(Precondition.SPEECH, "this model writes text only")
        return self.family.prompt(self.vocabulary, text, voice)

    def text_prompt(self, prompt: str) -> tuple[int, ...]:
        """Prompt ids of plain text to go on from."""
        if not prompt:
            raise InvalidRequestError.of("input.prompt", "the prompt is empty")
        return tuple(self.tokenizer.encode(prompt, with_template=True))

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Prompt ids of a conversation, ending where the assistant begins."""
        if self._chat is None:
            raise PreconditionError(
                Precondition.CHAT_TEMPLATE, "this model has no chat template; send a prompt"
            )
        if not messages:
            raise InvalidRequestError.of("input.chat", "there are no messages")
        ids = encode_chat(self._chat, self.tokenizer, [(m.role, (m.content,)) for m in messages])
        if not ids:
            raise InvalidRequestError.of("input.chat", "the conversation is empty")
        return ids

    def detokenizer(self) -> IncrementalDetokenizer:
        """For one stream of generated ids."""
        return IncrementalDetokenizer(self.tokenizer)

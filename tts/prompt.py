"""Text + voice to the language model's prompt ids: the one place that knows a family's turns.

    embedded family   [voice] text [start of speech]                            → codes [end]
    cloned voice      [any voice] transcript [start] prompt codes [end] text [start]

Text is always encoded as text: nothing a user writes becomes a control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llm import CheckpointError
from tts.chat import ChatMessage, ChatTemplate, load_chat_template
from tts.checkpoint import SpeechDescription
from tts.errors import InvalidRequestError, Precondition, PreconditionError
from tts.tokenizer import IncrementalDetokenizer, TextTokenizer
from tts.vocabulary import SpeechVocabulary
from tts.voices import Voice

SUPPORTED_FAMILIES = ("embedded",)
GUARDS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode noncharacters: never exchanged as text


class PromptBuilder:
    """Prompts of one checkpoint, for speech and for text."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        vocabulary: SpeechVocabulary | None = None,
        description: SpeechDescription | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        if description is not None and description.family not in SUPPORTED_FAMILIES:
            raise CheckpointError(
                f"speech.json: unknown family '{description.family}'; "
                f"supported: {', '.join(SUPPORTED_FAMILIES)}"
            )
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._chat = chat
        self._any_voice_id = tokenizer.control_id(description.any_voice) if description else None

    @classmethod
    def load(
        cls,
        folder: Path,
        description: SpeechDescription | None = None,
        codebook_size: int = 0,
        chat_template: str | None = None,
    ) -> PromptBuilder:
        """From a checkpoint folder; without a description it builds text prompts only."""
        tokenizer = TextTokenizer(folder / "tokenizer.json")
        vocabulary = None
        if description is not None:
            vocabulary = SpeechVocabulary.from_tokenizer(tokenizer, description, codebook_size)
        chat = load_chat_template(folder, chat_template)
        return cls(tokenizer, vocabulary, description, chat)

    @property
    def can_chat(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._chat is not None

    def speech_prompt(self, text: str, voice: Voice) -> tuple[int, ...]:
        """Prompt ids after which the model speaks `text` (normalised) in `voice`."""
        vocabulary = self._speech()
        return (*self._opening(voice), *self.tokenizer.encode(text), vocabulary.start_id)

    def _opening(self, voice: Voice) -> tuple[int, ...]:
        """What makes the model speak in this voice: its token, or a first turn of it."""
        vocabulary, prompt = self._speech(), voice.prompt
        if prompt is None:
            return (self.tokenizer.control_id(voice.control_token),)
        assert self._any_voice_id is not None
        return (
            self._any_voice_id,
            *self.tokenizer.encode(prompt.transcript),
            vocabulary.start_id,
            *vocabulary.token_ids(prompt.codes),
            vocabulary.end_id,
        )

    def _speech(self) -> SpeechVocabulary:
        if self.vocabulary is None:
            raise PreconditionError(Precondition.SPEECH, "this model writes text only")
        return self.vocabulary

    def text_prompt(self, prompt: str) -> tuple[int, ...]:
        """Prompt ids of plain text to go on from."""
        if not prompt:
            raise InvalidRequestError.of("input.prompt", "the prompt is empty")
        return tuple(self.tokenizer.encode(prompt, with_template=True))

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Prompt ids of a conversation, ending where the assistant begins.

        Control tokens come from the template alone: where a message holds the text of one, a
        guard character splits it until the rendered prompt has been encoded.
        """
        if self._chat is None:
            raise PreconditionError(
                Precondition.CHAT_TEMPLATE, "this model has no chat template; send a prompt"
            )
        if not messages:
            raise InvalidRequestError.of("input.chat", "there are no messages")
        guard = _unused_guard(messages)
        safe = [ChatMessage(m.role, self.tokenizer.guarded(m.content, guard)) for m in messages]
        ids = tuple(self.tokenizer.encode_marked(self._chat.render(safe), guard))
        if not ids:
            raise InvalidRequestError.of("input.chat", "the conversation is empty")
        return ids

    def detokenizer(self) -> IncrementalDetokenizer:
        """For one stream of generated ids."""
        return IncrementalDetokenizer(self.tokenizer)


def _unused_guard(messages: Sequence[ChatMessage]) -> str:
    for guard in GUARDS:
        if not any(guard in message.content for message in messages):
            return guard
    raise InvalidRequestError.of("input.chat", "the messages hold Unicode noncharacters")

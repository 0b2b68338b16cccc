"""Orpheus and models in its layout: SNAC's three codebooks, seven tokens per frame, ids by a base.

    base + 1 start, + 2 end of speech; + 3 start, + 4 end of human; + 5 start, + 6 end of AI
    base + 10 + 4096 * (position in the frame) + code

    prompt           [SOH] "tara: hello" [end of text, EOH, SOA, SOS]  → codes [EOS]
    cloned voice     [SOH] transcript [… SOS] codes [EOS, EOA] [SOH] "hello" [… SOS]
    Maya1            [SOH] "<description="…"> hello" [end of text, EOH, SOA, SOS]
    Veena            [SOH, <spk_kavya>] " hello" [EOH, SOA, SOS]

The base is the id of <custom_token_0>, or the end of a tokenizer that does not name these tokens.
Each position of a frame has tokens of its own, so a mask by position keeps frames whole.
"""

from __future__ import annotations

from dataclasses import replace

from decoder import CodecSpec
from llm import CheckpointError, SamplingParams, Token
from tts.families.base import Checkpoint, FamilyTraits, SpeechFamily, SpeechVocabulary
from tts.voices.types import Voice

CODES_PER_FRAME = 7
CODEBOOK_SIZE = 4096
FIRST_CODE = 10  # relative to the base, like the next ones
START_OF_SPEECH, END_OF_SPEECH = 1, 2
START_OF_HUMAN, END_OF_HUMAN, START_OF_AI, END_OF_AI = 3, 4, 5, 6
NUM_TOKENS = FIRST_CODE + CODES_PER_FRAME * CODEBOOK_SIZE
MAX_PADDING = 1024  # unused rows of an embedding after the last code
FIRST_TOKEN = "<custom_token_0>"
EOT = "<|eot_id|>"
END_OF_TEXT = {"orpheus": (EOT,), "maya1": (EOT,), "veena": (EOT,), "vyvo": ("<|im_end|>", EOT)}

SAMPLING = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
TAGS = ("laugh", "chuckle", "sigh", "cough", "sniffle", "groan", "yawn", "gasp")
ENGLISH = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
VOICES = tuple(
    Voice(name, name.capitalize(), ("en-US",), speaker=name, is_builtin=True) for name in ENGLISH
)
TRAITS = FamilyTraits(
    codec_repository="hubertsiuzdak/snac_24khz",
    voices=VOICES,
    max_codes=300 * CODES_PER_FRAME,  # 25.6 s
    max_seq_len=8192,
    sampling=SAMPLING,
    tags=tuple(f"<{tag}>" for tag in TAGS),
    steady_loudness=True,
)


MAYA1_VOICES = tuple(
    Voice(name, name.capitalize(), (language,), speaker=description, is_builtin=True)
    for name, language, description in (
        (
            "anne",
            "en-US",
            "Female voice in her 30s with an American accent, warm and conversational",
        ),
        ("bruce", "en-GB", "Male voice in his 40s with a British accent, calm and deep"),
    )
)
MAYA1_TAGS = "laugh laugh_harder sigh chuckle gasp angry excited whisper cry scream sing snort"
MAYA1_TAGS += " exhale gulp giggle sarcastic curious"
VEENA_VOICES = tuple(
    Voice(name, name.capitalize(), ("hi-IN", "en-IN"), speaker=name, is_builtin=True)
    for name in ("kavya", "agastya", "maitri", "vinaya")
)


class OrpheusFamily(SpeechFamily):
    """Orpheus 3B and its finetunes, which select speakers by a name before the text."""

    name = "orpheus"
    names_its_tokens = True  # in the tokenizer; distinguishes it from Vyvo with the same base

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        base, end_of_text = find_base(checkpoint), find_end_of_text(checkpoint, self.name)
        if base is None or end_of_text is None:
            raise CheckpointError(
                f"{checkpoint.folder} has not the {NUM_TOKENS} tokens of {self.name}"
            )
        self._base, self._end_of_text = base, end_of_text

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        if cls.names_its_tokens and checkpoint.tokenizer.find(FIRST_TOKEN) is None:
            return False
        found = find_end_of_text(checkpoint, cls.name)
        return found is not None and find_base(checkpoint) is not None

    def own_traits(self) -> FamilyTraits:
        return TRAITS

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        self.check_codec(spec, CODEBOOK_SIZE, CODES_PER_FRAME)
        first = self._base + FIRST_CODE
        starts = range(first, first + CODES_PER_FRAME * CODEBOOK_SIZE, CODEBOOK_SIZE)
        positions = [range(start, start + CODEBOOK_SIZE) for start in starts]
        return SpeechVocabulary(positions, *self._ids(START_OF_SPEECH, END_OF_SPEECH))

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        if voice.prompt is None:
            return self._turn(text, voice.speaker)
        return (
            *self._turn(voice.prompt.transcript),
            *vocabulary.token_ids(voice.prompt.codes),
            *self._ids(END_OF_SPEECH, END_OF_AI),
            *self._turn(text),
        )

    def _turn(self, text: str, speaker: str = "") -> tuple[int, ...]:
        """Return the prompt ids of a text, up to the start of its codes."""
        return (
            *self._ids(START_OF_HUMAN),
            *self._human(text, speaker),
            *self._ids(END_OF_HUMAN, START_OF_AI, START_OF_SPEECH),
        )

    def _human(self, text: str, speaker: str) -> tuple[int, ...]:
        """Return the ids of a text and its speaker ("": the model chooses one)."""
        said = self._spoken_by(speaker, text) if speaker else text
        return (*self.tokenizer.encode(said, with_template=True), self._end_of_text)

    def _spoken_by(self, speaker: str, text: str) -> str:
        return f"{speaker}: {text}"

    def _ids(self, *offsets: int) -> tuple[int, ...]:
        return tuple(self._base + offset for offset in offsets)


class VyvoFamily(OrpheusFamily):
    """VyvoTTS on Qwen3, Llama or LFM2: the same tokens with another base, and one speaker."""

    name = "vyvo"
    names_its_tokens = False

    def own_traits(self) -> FamilyTraits:
        default = Voice("default", "Default", is_builtin=True)
        return replace(TRAITS, voices=(default,), tags=())


class Maya1Family(OrpheusFamily):
    """Maya1, whose speakers are descriptions; named by `family`, as its tokens are Orpheus'."""

    name = "maya1"

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        return False

    def own_traits(self) -> FamilyTraits:
        return replace(
            TRAITS,
            voices=MAYA1_VOICES,
            tags=tuple(f"<{tag}>" for tag in MAYA1_TAGS.split()),
            sampling=SamplingParams(temperature=0.4, top_p=0.9, repetition_penalty=1.1),
        )

    def _spoken_by(self, speaker: str, text: str) -> str:
        return f'<description="{speaker}"> {text}'


class VeenaFamily(OrpheusFamily):
    """Veena, for Hindi and English: a token for each speaker, and text without a frame."""

    name = "veena"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        for voice in VEENA_VOICES:
            self.tokenizer.control_id(speaker_token(voice.speaker))

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        named = checkpoint.tokenizer.find(speaker_token(VEENA_VOICES[0].speaker))
        return named is not None and super().matches(checkpoint)

    def own_traits(self) -> FamilyTraits:
        return replace(
            TRAITS,
            voices=VEENA_VOICES,
            tags=(),
            language="",
            sampling=SamplingParams(temperature=0.4, top_p=0.9, repetition_penalty=1.05),
        )

    def _human(self, text: str, speaker: str) -> tuple[int, ...]:
        if not speaker:
            return tuple(self.tokenizer.encode(text))
        token = self.tokenizer.control_id(speaker_token(speaker))
        return (token, *self.tokenizer.encode(f" {text}"))


def speaker_token(speaker: str) -> str:
    """Return the name of a speaker's token of Veena."""
    return f"<spk_{speaker}>"


def find_base(checkpoint: Checkpoint) -> int | None:
    """Return the base id of the family's tokens; None if the checkpoint does not have them."""
    named = checkpoint.tokenizer.find(FIRST_TOKEN)
    base = checkpoint.tokenizer.num_tokens if named is None else named
    spare = checkpoint.vocab_size - (base + NUM_TOKENS)
    is_there = spare >= 0 if named is not None else 0 <= spare <= MAX_PADDING
    return base if is_there else None


def find_end_of_text(checkpoint: Checkpoint, family: str) -> int | None:
    """Return the end-of-text token of the base language model."""
    found = map(checkpoint.tokenizer.find, END_OF_TEXT[family])
    return next((token_id for token_id in found if token_id is not None), None)

"""NeuTTS Air and Nano: NeuCodec's single codebook, phonemes instead of letters.

    user: Convert the text to speech:<|TEXT_PROMPT_START|>phonemes<|TEXT_PROMPT_END|>
    assistant:<|SPEECH_GENERATION_START|><|speech_…|> of the voice prompt  → <|speech_…|> [end]

The phonemes are those of the voice prompt's transcript, then those of the text, which espeak-ng
writes for words in letters. A voice prompt is required.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from decoder import CodecSpec
from llm import SamplingParams, Token
from tts.errors import Precondition, PreconditionError
from tts.families.base import Checkpoint, FamilyTraits, SpeechFamily, SpeechTokens, SpeechVocabulary
from tts.families.espeak import EspeakPhonemes
from tts.text.ipa import parts_of
from tts.text.lexicon.alphabets import check_signs
from tts.voices.types import Voice

ENGLISH = "en-us"
CODEBOOK_SIZE = 65_536
INSTRUCTION = "user: Convert the text to speech:"
ANSWER = "\nassistant:"
TEXT_START, TEXT_END = "<|TEXT_PROMPT_START|>", "<|TEXT_PROMPT_END|>"
TOKENS = SpeechTokens("<|speech_{}|>", "<|SPEECH_GENERATION_START|>", "<|SPEECH_GENERATION_END|>")

TRAITS = FamilyTraits(
    codec_repository="neuphonic/neucodec",
    tokens_per_character=2,  # phonemes with their stress marks; few are one token
    max_codes=1000,  # 20 s
    min_codes=50,
    max_seq_len=2048,
    sampling=SamplingParams(temperature=1.0, top_k=50),
    steady_loudness=True,
)


class NeuTTSFamily(SpeechFamily):
    """NeuTTS family: voices are reference clips, from the checkpoint's `samples` or created.

    `language` in speech.json is espeak-ng's name of a language other than US English.
    """

    name = "neutts"
    overrides = SpeechFamily.overrides | {"language"}

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._language = str(checkpoint.speech.get("language", ENGLISH))
        super().__init__(checkpoint)
        espeak = EspeakPhonemes(self._language)
        self._phonemes = lru_cache(maxsize=256)(espeak.of_text)  # transcripts repeat
        self._text_start, self._text_end = map(self.tokenizer.control_id, (TEXT_START, TEXT_END))

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        names = (TEXT_START, TEXT_END, TOKENS.end, TOKENS.code.format(0))
        return all(checkpoint.tokenizer.find(name) is not None for name in names)

    def own_traits(self) -> FamilyTraits:
        return replace(TRAITS, language=self._language)

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        self.check_codec(spec, CODEBOOK_SIZE)
        return SpeechVocabulary.from_tokenizer(self.tokenizer, TOKENS, CODEBOOK_SIZE)

    def prompt(self, vocabulary: SpeechVocabulary, text: str, voice: Voice) -> tuple[Token, ...]:
        if voice.prompt is None:
            raise PreconditionError(
                Precondition.VOICE_PROMPT, "this model requires a voice prompt: send one"
            )
        texts = filter(None, (voice.prompt.transcript, text))
        return (
            *self.tokenizer.encode(INSTRUCTION, with_template=True),
            self._text_start,
            *self.tokenizer.encode(" ".join(map(self._spoken, texts))),
            self._text_end,
            *self.tokenizer.encode(ANSWER),
            vocabulary.start_id,
            *vocabulary.token_ids(voice.prompt.codes),
        )

    def reads_ipa(self, ipa: str) -> bool:
        check_signs(ipa)
        return True

    def _spoken(self, text: str) -> str:
        """Return the phonemes of a text, in which some words may stand as phonemes already."""
        said = ""
        for letters, ipa in parts_of(text):
            inside = self._phonemes(letters) if letters.strip() else ""
            before = " " if letters[:1].isspace() else ""
            after = " " if inside and letters[-1:].isspace() else ""
            said += f"{before}{inside}{after}{ipa}"
        return said.strip()

"""Kani-TTS on LFM2: Orpheus' layout with NanoCodec's four codes for each frame.

    base + 10 + 4032 * (position in the frame) + code

    prompt      [SOH] "andrew: hello" [end of text, EOH, SOA, SOS]  → codes [EOS]

The published program lets the model write SOA and SOS itself. Base and end of text are numbers in
it, as the tokenizer does not name these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from decoder import CodecSpec
from llm import CheckpointError, SamplingParams
from tts.families.base import Checkpoint, FamilyTraits, SpeechFamily, SpeechVocabulary
from tts.families.orpheus import (
    END_OF_SPEECH,
    FIRST_CODE,
    MAX_PADDING,
    START_OF_SPEECH,
    OrpheusFamily,
)
from tts.voices.types import VOICE_ID, Voice

BASE, END_OF_TEXT = 64_400, 2
CODES_PER_FRAME, CODEBOOK_SIZE = 4, 4032
VOCABULARY = BASE + FIRST_CODE + CODES_PER_FRAME * CODEBOOK_SIZE
ARCHITECTURE = "Lfm2ForCausalLM"
MAX_FRAMES = 300  # 24 s


class KaniFamily(OrpheusFamily):
    """Kani-TTS of one or several speakers, which config.json names in `speaker_settings`."""

    name = "kani"

    def __init__(self, checkpoint: Checkpoint) -> None:
        SpeechFamily.__init__(self, checkpoint)
        self._base, self._end_of_text = BASE, END_OF_TEXT

    @classmethod
    def matches(cls, checkpoint: Checkpoint) -> bool:
        if not (checkpoint.folder / "config.json").is_file():
            return False  # only a tokenizer
        is_lfm2 = ARCHITECTURE in (checkpoint.config.get("architectures") or ())
        return is_lfm2 and 0 <= checkpoint.vocab_size - VOCABULARY <= MAX_PADDING

    def own_traits(self) -> FamilyTraits:
        return FamilyTraits(
            voices=tuple(self._speakers()) or (Voice("default", "Default", is_builtin=True),),
            max_codes=MAX_FRAMES * CODES_PER_FRAME,
            sampling=SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1),
            steady_loudness=True,
        )

    def vocabulary(self, spec: CodecSpec) -> SpeechVocabulary:
        self.check_codec(spec, CODEBOOK_SIZE, CODES_PER_FRAME)
        first = BASE + FIRST_CODE
        starts = range(first, VOCABULARY, CODEBOOK_SIZE)
        positions = [range(start, start + CODEBOOK_SIZE) for start in starts]
        return SpeechVocabulary(positions, *self._ids(START_OF_SPEECH, END_OF_SPEECH))

    def _speakers(self) -> Iterator[Voice]:
        """Yield a voice for each speaker. Raises CheckpointError for one that is no name."""
        settings = self.checkpoint.config.get("speaker_settings") or {}
        listed = settings.get("speaker_list") if isinstance(settings, dict) else None
        for speaker in listed or ():
            name = str(speaker).strip().lower().replace(" ", "_")
            if not VOICE_ID.fullmatch(name):
                raise CheckpointError(f"{self.name}: the speaker {speaker!r} is no name of a voice")
            title = name.replace("_", " ").title()
            yield Voice(name, title, speaker=str(speaker).strip(), is_builtin=True)

"""Token ids of the language model: bytes, control, symbols of sounds, codes."""

from __future__ import annotations

PAD, START_OF_SPEECH, END_OF_SPEECH, PHONEMES, END_OF_TEXT, ANY_VOICE = range(256, 262)
FIRST_VOICE, MAX_VOICES = 262, 32
FIRST_SOUND = 320
MAX_SOUNDS = 128  # some of them unused: a round number of rows in the model
FIRST_CODE = FIRST_SOUND + MAX_SOUNDS
CONTROL_TOKENS = (
    "<|pad|>",
    "<|start_of_speech|>",
    "<|end_of_speech|>",
    "<|phonemes|>",
    "<|end_of_text|>",
    "<|voice_any|>",
    *(f"<|voice_{i}|>" for i in range(MAX_VOICES)),
    *(f"<|reserved_{i}|>" for i in range(FIRST_SOUND - FIRST_VOICE - MAX_VOICES)),
)


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character of each byte value, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = {b: chr(b) for b in printable}
    others = [b for b in range(256) if b not in stand_in]
    stand_in.update({b: chr(256 + i) for i, b in enumerate(others)})
    return [stand_in[b] for b in range(256)]

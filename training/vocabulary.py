"""Token ids of the embedded voice's language model: bytes, control, voices, sounds, codes."""

from __future__ import annotations

import itertools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from training.sounds import MAX_SOUNDS, SOUNDS, spelled

PAD, START_OF_SPEECH, END_OF_SPEECH, PHONEMES, END_OF_TEXT, ANY_VOICE = range(256, 262)
FIRST_VOICE, MAX_VOICES = 262, 32
FIRST_SOUND = 320
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


def build_tokenizer(codebook_size: int) -> Tokenizer:
    """Return a tokenizer with byte-level tokens whose id is the byte, then control tokens, sounds,
    and codes.

    Sounds are only decoded: without merges no text is encoded as one.
    """
    alphabet = byte_alphabet()
    spelling = ["".join(alphabet[b] for b in spelled(i).encode()) for i in range(len(SOUNDS))]
    silent = [f"<|silent_{i}|>" for i in range(MAX_SOUNDS)]
    sounds = [a or b for a, b in itertools.zip_longest(spelling, silent)]
    vocabulary = {name: i for i, name in enumerate((*alphabet, *CONTROL_TOKENS, *sounds))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    unspoken = [name for name in sounds if name in silent]
    names = [*CONTROL_TOKENS, *unspoken, *(f"<|s_{i}|>" for i in range(codebook_size))]
    tokenizer.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    return tokenizer


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable character of each byte value, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = {b: chr(b) for b in printable}
    others = [b for b in range(256) if b not in stand_in]
    stand_in.update({b: chr(256 + i) for i, b in enumerate(others)})
    return [stand_in[b] for b in range(256)]

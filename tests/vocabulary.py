"""Token ids of the tests' language model, and its tokenizer: bytes, control tokens, codes."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD, START_OF_SPEECH, END_OF_SPEECH, PHONEMES, END_OF_TEXT, ANY_VOICE = range(256, 262)
FIRST_VOICE, MAX_VOICES = 262, 32
FIRST_CODE = 448  # the codes are the last tokens; the ids before them have no names
NAMES = (
    "<|pad|>", "<|start_of_speech|>", "<|end_of_speech|>", "<|phonemes|>", "<|end_of_text|>",
    "<|voice_any|>", *(f"<|voice_{k}|>" for k in range(MAX_VOICES)),
)  # fmt: skip


def build_tokenizer(codebook_size: int) -> Tokenizer:
    """Return a tokenizer with byte-level tokens whose id is the byte, and with so many codes."""
    codes = {f"<|s_{k}|>": FIRST_CODE + k for k in range(codebook_size)}
    names = {name: PAD + k for k, name in enumerate(NAMES)} | codes
    vocabulary = {letter: byte for byte, letter in enumerate(byte_alphabet())} | names
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names]
    )
    return tokenizer


def byte_alphabet() -> list[str]:
    """Return GPT-2's stand-in of each byte: those that print stand for themselves."""
    others = iter(range(256, 512))
    return [
        chr(byte) if chr(byte).isprintable() and chr(byte) not in " \u00ad" else chr(next(others))
        for byte in range(256)
    ]

"""Write a folder that the service loads, from the weights of codec and language model.

    python -m training.speech_lm.export --lm runs/lm/lm.safetensors \
        --codec runs/codec/source_free.safetensors --config runs/codec/source_free.json \
        --voice-encoder runs/codec/voices.safetensors --package runs/teacher/package \
        --out runs/voice
    python -m tts.say --model runs/voice -v hazel "Good morning."

voices.json and lm.json are read next to --lm, whose weights may be int8. The language model is
stored in int8 with one scale per row, the codec's decoder in int8, its encoder of voices in
float16, as its codes depend on it. The coder is left out: the service never encodes what is said.
Word times need a folder OUT/aligner, which `training.aligner` writes; MODEL_CARD.md is written by
hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from training.export import llama_config, write_json
from training.kokoro.packages import symbols
from training.kokoro.style import SPANISH
from training.llama import quantise, whole
from training.speech_codec.checkpoint import (
    DECODER,
    VOICE_ENCODER,
    eighth_bits,
    halved,
    read,
)
from training.speech_codec.config import load_config
from training.speech_lm.names import NAMES, entry
from training.speech_lm.texts import SPANISH_LETTERS
from training.speech_lm.vocabulary import (
    BRITISH_NAME,
    FIRST_SYMBOL,
    SPANISH_NAME,
    Symbols,
    build_tokenizer,
)
from training.vocabulary import END_OF_SPEECH, END_OF_TEXT, FIRST_CODE, PAD

HEAD_DIM = 64
TEMPERATURE, TOP_K = 0.6, 50
LIMIT_MB = 64.0  # of the voice that is part of the program
CHAT_TEMPLATE = (
    "<|phonemes|>{% for message in messages %}"
    "{% if message['role'] == 'system' and message['content'] == 'en-GB' %}"
    f"{BRITISH_NAME}{{% endif %}}"
    "{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|end_of_text|>{% endif %}"
)


def export_language_model(weights: Path, out: Path) -> int:
    """Write config.json and model.safetensors; the size of the codebook."""
    sizes = json.loads(weights.with_name("lm.json").read_text(encoding="utf-8"))
    state = whole(load_file(weights))
    config = llama_config(state, HEAD_DIM) | {"max_position_embeddings": sizes["max_tokens"]}
    write_json(out / "config.json", config)
    save_file(quantise(state), out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "generation_config.json", {
        "do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K, "pad_token_id": PAD,
        "eos_token_id": [END_OF_SPEECH, END_OF_TEXT],
    })  # fmt: skip
    return len(state["model.embed_tokens.weight"]) - FIRST_CODE


def export_texts(known: Symbols, out: Path, *, spanish: bool) -> None:
    """Write the tokenizer and speech.json; `spanish`: of a model that also reads Spanish."""
    build_tokenizer(known, spanish=spanish).save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|pad|>",
        "eos_token": "<|end_of_text|>", "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    values = {
        "family": "sonant", "codec": "codec", "voices": "voices.json", "max_characters": 200,
        "max_codes": 500, "first_code": FIRST_CODE, "first_symbol": FIRST_SYMBOL,
        "symbols": known.phonemes(spanish=spanish),
    }  # fmt: skip
    if spanish:
        letters = "".join(sorted(SPANISH_LETTERS))
        own = "".join(sorted({*known.phonemes(spanish=True)} - {*known.phonemes()}))
        one = {"token": SPANISH_NAME, "letters": letters, "phonemes": own}
        values["languages"] = {"es": one}
    write_json(out / "speech.json", values)


def export_voices(rows: Path, out: Path) -> bool:
    """Write voices.json: the rows of a language model's training under their own names; whether any
    speaks Spanish."""
    codes: dict[str, list[int]] = json.loads(rows.read_text(encoding="utf-8"))
    order = [*(name for name in NAMES if name in codes), *sorted(codes.keys() - NAMES)]
    voices = [entry(name, codes[name]) for name in order]
    write_json(out / "voices.json", {"default": voices[0]["name"], "voices": voices})
    return any(name in codes for name in SPANISH)


def export_codec(decoder: Path, voice_encoder: Path, config: Path, out: Path) -> None:
    """Write the codec's folder. Raises ValueError for a file without its part."""
    sizes = load_config(config)
    out.mkdir(parents=True, exist_ok=True)
    values = asdict(sizes) | {"levels": list(sizes.levels)}
    write_json(out / "config.json", {"type": "source_filter", "hop": sizes.hop, **values})
    tensors = eighth_bits(part_of(decoder, DECODER)) | part_of(voice_encoder, VOICE_ENCODER)
    own = {name: value.contiguous() for name, value in tensors.items()}
    save_file(own, out / "model.safetensors", metadata={"format": "pt"})


def part_of(weights: Path, part: str) -> dict[str, Tensor]:
    """Read the tensors whose names begin with `part`, float16. Raises ValueError for none."""
    found = {name: value for name, value in read(weights).items() if name.startswith(part)}
    if not found:
        raise ValueError(f"{weights} has no {part}*")
    return halved(found)


def export(args: argparse.Namespace) -> float:
    """Write every file but the model card; the folder's size in MB."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    codebook, known = export_language_model(args.lm, out), Symbols(symbols(args.package))
    if codebook != load_config(args.config).codebook_size:
        raise ValueError(f"{args.lm} writes {codebook} codes, {args.config} has others")
    spanish = export_voices(args.lm.with_name("voices.json"), out)
    export_texts(known, out, spanish=spanish)
    export_codec(args.codec, args.voice_encoder, args.config, out / "codec")
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e6


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("lm", "codec", "voice-encoder", "config", "package", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args(argv)
    size = export(args)
    print(f"{args.out}: {size:.1f} MB of {LIMIT_MB:.0f}")


if __name__ == "__main__":
    main()

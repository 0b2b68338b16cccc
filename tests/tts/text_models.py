"""Small random text checkpoints as transformers writes them: weights, tokenizer, chat template.

Layouts of the published ones: byte-level pieces with <|…|> tokens (Llama 3, Qwen), sentence pieces
with byte fallback (Mistral).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import normalizers as norms
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Once upon a time there was a small machine that read aloud all day.",
    "¿Qué hora es? Il est déjà tard; 東京は夜です。 Numbers: 1 23 456.",
] * 4

LLAMA_TEMPLATE = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""  # noqa: E501 - as published

QWEN_TEMPLATE = """{%- set ns = namespace(last=messages|length - 1) %}
{%- if tools %}{{- raise_exception('no tools') }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

MISTRAL_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user and assistant') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}
{%- endfor %}
"""

GPT4_SPLIT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"


def byte_level(specials: list[str], bos: str = "") -> Tokenizer:
    """Llama 3's and Qwen's kind; `bos` is put in front of every text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(GPT4_SPLIT), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    if bos:
        template = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def sentence_pieces(specials: list[str]) -> Tokenizer:
    """Mistral's kind: a space is ▁, what has no piece is spelt in bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = norms.Sequence([norms.Prepend("▁"), norms.Replace(" ", "▁")])
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        limit_alphabet=40,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer = Tokenizer.from_str(_without_added_bytes(tokenizer, byte_tokens))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _without_added_bytes(tokenizer: Tokenizer, byte_tokens: list[str]) -> str:
    """The trainer makes its special tokens added ones; bytes are ordinary pieces."""
    import json

    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in byte_tokens]
    return json.dumps(data)


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
}


def write_llama3(folder: Path) -> Path:
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>"]
    specials += ["<|end_header_id|>", "<|eot_id|>"]
    tokenizer = byte_level(specials, bos="<|begin_of_text|>")
    fast = _fast(tokenizer, LLAMA_TEMPLATE, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    ends = [tokenizer.token_to_id("<|end_of_text|>"), tokenizer.token_to_id("<|eot_id|>")]
    config = LlamaConfig(**SHAPE, vocab_size=tokenizer.get_vocab_size(), eos_token_id=ends)
    return _write(folder, config, fast)


def write_qwen3(folder: Path) -> Path:
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    fast = _fast(tokenizer, QWEN_TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    config = Qwen3Config(
        **SHAPE,
        head_dim=16,
        vocab_size=tokenizer.get_vocab_size() + 27,  # published tables are padded, too
        tie_word_embeddings=True,
        eos_token_id=[tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
    )
    return _write(folder, config, fast)


def write_mistral(folder: Path) -> Path:
    tokenizer = sentence_pieces(["<s>", "</s>", "[INST]", "[/INST]"])
    fast = _fast(tokenizer, MISTRAL_TEMPLATE, bos_token="<s>", eos_token="</s>")
    config = MistralConfig(
        **SHAPE, vocab_size=tokenizer.get_vocab_size(), sliding_window=12, eos_token_id=2
    )
    return _write(folder, config, fast)


def _fast(tokenizer: Tokenizer, template: str, **tokens: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    fast.chat_template = template
    return fast


def _write(folder: Path, config: PreTrainedConfig, fast: PreTrainedTokenizerFast) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


WRITERS: dict[str, Callable[[Path], Path]] = {
    "llama": write_llama3,
    "qwen": write_qwen3,
    "mistral": write_mistral,
}

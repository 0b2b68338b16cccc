"""Small random checkpoints of the speech families, laid out as the published ones.

config.json, tokenizer.json (ids, added tokens, pre-tokenizer, template), tokenizer_config.json and
generation_config.json have the published fields and the published ids; only the sizes inside the
language model and the codec are small, and the weights are random. Of the text vocabulary only
the bytes and a few words are there, with their own ids; the others leave holes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.decoder.small_codecs import SMALL_SOURCE_FILTER, SNAC
from tests.fakes import LlamaShape, random_llama

SHAPE = LlamaShape(hidden=32, layers=1, heads=4, kv_heads=2, intermediate=48)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}

ALPHABET = [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]
"""GPT-2's stand-ins for bytes, in the order of the ids: those that print first."""

LLAMA_TEXT_TOKENS = 128_000
LLAMA_WORDS = {
    "hello": 15339,
    "Ġhello": 24748,
    "Ċ": 198,
    "ĊĊ": 271,
    "system": 9125,
    "user": 882,
    "assistant": 78191,
    "ĠKnowledge": 33025,
    "ĠDate": 2696,
    "ĠDecember": 6790,
    "202": 2366,
    "Today": 15724,
    "26": 1627,
    "ĠJul": 10263,
    "Convert": 12281,
    "Ġthe": 279,
    "Ġtext": 1495,
    "Ġto": 311,
    "Ġspeech": 8982,
}
LLAMA_NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id"}
LLAMA_NAMED |= {8: "eom_id", 9: "eot_id", 10: "python_tag"}
LLAMA_SPECIAL = {
    f"<|{LLAMA_NAMED.get(k, f'reserved_special_token_{k}')}|>": LLAMA_TEXT_TOKENS + k
    for k in range(256)
}
LLAMA_CHAT = """{{- bos_token }}
{%- if date_string is not defined %}{% if strftime_now is defined %}
{%- set date_string = strftime_now("%d %b %Y") %}{% else %}
{%- set date_string = "26 Jul 2024" %}{% endif %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n<|eot_id|>" }}
{%- for message in messages %}
{{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\\n\\n" }}
{{- message["content"] | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}"""
LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

QWEN_TEXT_TOKENS = 151_643
QWEN_NAMED = ["endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start"]
QWEN_NAMED += ["box_end", "quad_start", "quad_end", "vision_start", "vision_end", "vision_pad"]
QWEN_NAMED += ["image_pad", "video_pad"]
QWEN_TAGS = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
QWEN_TAGS += ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
QWEN3_TAGS = ["<tool_response>", "</tool_response>", "<think>", "</think>"]
QWEN_NAMES = [f"<|{name}|>" for name in QWEN_NAMED] + QWEN_TAGS
QWEN_SPECIAL = {name: QWEN_TEXT_TOKENS + k for k, name in enumerate(QWEN_NAMES)}
QWEN3_SPECIAL = {name: QWEN_TEXT_TOKENS + k for k, name in enumerate(QWEN_NAMES + QWEN3_TAGS)}

ORPHEUS_VOCABULARY = 156_940
VYVO_QWEN3_VOCABULARY = 180_352
VYVO_QWEN3_STOP = 151_671
LFM2_TEXT_TOKENS = 64_400
VYVO_LFM2_VOCABULARY = 93_082
KANI_VOCABULARY = 80_538
LLASA_VOCABULARY = 193_800
LLASA_SPECIAL = [
    "<|TEXT_GENERATION_START|>",
    "<|TEXT_GENERATION_END|>",
    "<|TEXT_UNDERSTANDING_START|>",
    "<|TEXT_UNDERSTANDING_END|>",
    "<|SPEECH_GENERATION_START|>",
    "<|SPEECH_GENERATION_END|>",
    "<|SPEECH_UNDERSTANDING_START|>",
    "<|SPEECH_UNDERSTANDING_END|>",
]
NEUTTS_SPECIAL = [
    "<|TEXT_REPLACE|>",
    "<|TEXT_PROMPT_START|>",
    "<|TEXT_PROMPT_END|>",
    "<|SPEECH_REPLACE|>",
    "<|SPEECH_GENERATION_START|>",
    "<|SPEECH_GENERATION_END|>",
]

OUTETTS_NAMES = ["im_start", "im_end", "text_start", "text_end", "audio_start", "audio_end"]
OUTETTS_NAMES += ["word_start", "word_end", "features", "code"]
OUTETTS_NAMES += [f"t_{k / 100:.2f}" for k in range(100)]
OUTETTS_NAMES += [
    f"{name}_{k}" for name in ("energy", "spectral_centroid", "pitch") for k in range(101)
]
OUTETTS_FIRST_CODE = 128_256 + len(OUTETTS_NAMES)
OUTETTS_CODES = [f"{name}_{k}" for name in ("c1", "c2") for k in range(1025)]
QWEN3_TTS_CODEC = {
    "model_type": "qwen3_tts_tokenizer_12hz",
    "decoder_config": {
        "codebook_size": 16,
        "codebook_dim": 12,
        "latent_dim": 20,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_quantizers": 7,
        "decoder_dim": 32,
    },
}
KANI_CODEC: dict[str, object] = {"type": "nanocodec", "decoder_config": {"base_channels": 32}}
HIGGS_CODEC = {
    "model_type": "higgs_audio_v2_tokenizer",
    "target_bandwidths": [0.3, 0.7],
    "codebook_size": 16,
    "codebook_dim": 4,
    "acoustic_model_config": {
        "model_type": "dac",
        "downsampling_ratios": [8, 5, 4, 2, 3],
        "upsampling_ratios": [8, 5, 4, 2, 3],
        "decoder_hidden_size": 64,
        "hidden_size": 12,
    },
}
DAC_CODEC = {
    "model_type": "dac",
    "encoder_hidden_size": 2,
    "hidden_size": 32,
    "decoder_hidden_size": 32,
    "downsampling_ratios": [2, 4, 5, 8],
    "upsampling_ratios": [8, 5, 4, 2],
    "n_codebooks": 2,
    "codebook_size": 1024,
    "codebook_dim": 4,
    "sampling_rate": 24_000,
}

SONANT_SPECIAL = {
    "<|pad|>": 256,
    "<|start_of_speech|>": 257,
    "<|end_of_speech|>": 258,
    "<|phonemes|>": 259,
    "<|end_of_text|>": 260,
    "<|symbols|>": 262,
}
SONANT_SYMBOLS, SONANT_CODES = 320, 448
SONANT_VOICES = {"hazel": [1, 2, 3, 4], "owen": [60, 61, 62, 63]}

SNAC_CODEC = SNAC | {"codebook_size": 4096}
XCODEC2_CODEC = {
    "model_type": "xcodec2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sampling_rate": 16_000,
    "quantization_levels": [4] * 8,
    "semantic_model_config": {"model_type": "wav2vec2-bert", "hidden_size": 16},
}
NEUCODEC_CODEC = {
    **{key: value for key, value in XCODEC2_CODEC.items() if key != "sampling_rate"},
    "model_type": "neucodec",
    "input_sampling_rate": 16_000,
    "output_sampling_rate": 24_000,
}


def ramp_codec(rate: int) -> dict[str, object]:
    """A codec that can also encode: 65,536 codes of 20 ms."""
    return {"type": "ramp", "sample_rate": rate, "token_rate_hz": 50, "codebook_size": 65_536}


def write_orpheus(folder: Path) -> Path:
    """canopylabs/orpheus-3b-0.1-ft with SNAC."""
    special = LLAMA_SPECIAL | {f"<custom_token_{k}>": 128_256 + k for k in range(28_683)}
    return write(
        folder,
        llama_config(ORPHEUS_VOCABULARY, eos=[128_001, 128_008, 128_009]),
        llama_tokenizer(special),
        SNAC_CODEC,
        likely={128_258: 5.0},
    )


def write_veena(folder: Path) -> Path:
    """maya-research/Veena with SNAC: Orpheus' tokens, and one for each speaker."""
    special = LLAMA_SPECIAL | {f"<custom_token_{k}>": 128_256 + k for k in range(28_683)}
    speakers = ("kavya", "agastya", "maitri", "vinaya")
    special |= {f"<spk_{name}>": ORPHEUS_VOCABULARY + k for k, name in enumerate(speakers)}
    return write(
        folder,
        llama_config(ORPHEUS_VOCABULARY + 8, eos=[128_001, 128_008, 128_009]),
        llama_tokenizer(special),
        SNAC_CODEC,
        likely={128_258: 5.0},
    )


def write_vyvo(folder: Path) -> Path:
    """Vyvo/VyvoTTS-v0-Qwen3-0.6B with SNAC: its tokens have no names in the tokenizer."""
    config = {
        **common_config(VYVO_QWEN3_VOCABULARY),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
    }
    return write(
        folder, config, qwen_tokenizer(QWEN3_SPECIAL), SNAC_CODEC, likely={VYVO_QWEN3_STOP: 5.0}
    )


def write_vyvo_on_llama(folder: Path) -> Path:
    """Vyvo on Llama, with the special tokens and the size of Orpheus."""
    config = llama_config(ORPHEUS_VOCABULARY, eos=[128_001, 128_008, 128_009])
    return write(folder, config, llama_tokenizer(dict(LLAMA_SPECIAL)), SNAC_CODEC)


def write_vyvo_on_lfm2(folder: Path) -> Path:
    """Vyvo on LFM2-350M, which has recurrent states."""
    return write_lfm2(folder, VYVO_LFM2_VOCABULARY, SNAC_CODEC)


def write_kani(folder: Path, speakers: Sequence[str] = ("Andrew", "Katie")) -> Path:
    """nineninesix/kani-tts-400m-en with NanoCodec."""
    write_lfm2(folder, KANI_VOCABULARY, KANI_CODEC)
    config = json.loads((folder / "config.json").read_text())
    config["speaker_settings"] = {"status": "multispeaker", "speaker_list": list(speakers)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_lfm2(folder: Path, vocabulary: int, codec: Mapping[str, object]) -> Path:
    """Write an LFM2 with a codec; its tokenizer has no names for the tokens of speech."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    shape = Lfm2Config(
        vocab_size=vocabulary,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        num_hidden_layers=2,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        layer_types=["conv", "full_attention"],
        max_position_embeddings=4096,
        block_auto_adjust_ff_dim=False,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    Lfm2ForCausalLM(shape).save_pretrained(folder)
    special = {"<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7}
    special["<|reserved_490|>"] = LFM2_TEXT_TOKENS - 1
    data, settings = qwen_tokenizer(special)
    data["model"]["vocab"] = {letter: 500 + k for letter, k in data["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "codec").mkdir()
    (folder / "codec" / "config.json").write_text(json.dumps(codec), encoding="utf-8")
    return folder


def write_llasa(
    folder: Path, codec: Mapping[str, object] = XCODEC2_CODEC, *, is_tied: bool = True
) -> Path:
    """HKUSTAudio/Llasa-1B with XCodec2; larger ones may have heads of their own."""
    special = dict(LLAMA_SPECIAL)
    special |= {name: 128_256 + k for k, name in enumerate(LLASA_SPECIAL)}
    special |= {f"<|s_{k}|>": 128_264 + k for k in range(65_536)}
    config = llama_config(LLASA_VOCABULARY, eos=[128_001, 128_008, 128_009])
    config["tie_word_embeddings"] = is_tied
    return write(folder, config, llama_tokenizer(special), codec, likely={128_261: 5.0})


def write_neutts_on_llama(folder: Path) -> Path:
    """NeuTTS's tokens behind another base and tokenizer than Air's: Llama 3's."""
    special = dict(LLAMA_SPECIAL)
    special |= {name: 128_256 + k for k, name in enumerate(NEUTTS_SPECIAL)}
    special |= {f"<|speech_{k}|>": 128_262 + k for k in range(65_536)}
    config = llama_config(LLASA_VOCABULARY, eos=[128_001, 128_008, 128_009])
    return write(folder, config, llama_tokenizer(special), NEUCODEC_CODEC, likely={128_261: 5.0})


def write_neutts(folder: Path, codec: Mapping[str, object] = NEUCODEC_CODEC) -> Path:
    """neuphonic/neutts-air with NeuCodec."""
    special = dict(QWEN_SPECIAL)
    special |= {name: 151_665 + k for k, name in enumerate(NEUTTS_SPECIAL)}
    special |= {f"<|speech_{k}|>": 151_671 + k for k in range(65_536)}
    config = {
        **common_config(217_344),
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    }
    return write(folder, config, qwen_tokenizer(special), codec, likely={151_670: 5.0})


def write_outetts(folder: Path) -> Path:
    """OuteAI/Llama-OuteTTS-1.0-1B with two codebooks of DAC; the ids are not the published ones.

    Codes are frequent, and in any order.
    """
    names = [f"<|{name}|>" for name in (*OUTETTS_NAMES, *OUTETTS_CODES)]
    special = LLAMA_SPECIAL | {name: 128_256 + k for k, name in enumerate(names)}
    size = OUTETTS_FIRST_CODE + len(OUTETTS_CODES)
    likely = dict.fromkeys(range(OUTETTS_FIRST_CODE, size), 6.0)
    config = llama_config(size, eos=[128_257])
    return write(folder, config, llama_tokenizer(special), DAC_CODEC, likely)


def write_sonant(folder: Path) -> Path:
    """The built-in voice's layout: codes without names, voices as rows of codes."""
    size = SONANT_CODES + SMALL_SOURCE_FILTER.codebook_size
    codec = {"type": "source_filter", "hop": SMALL_SOURCE_FILTER.hop} | asdict(SMALL_SOURCE_FILTER)
    config = llama_config(size, eos=[258, 260]) | {"bos_token_id": None}
    write(folder, config, qwen_tokenizer(SONANT_SPECIAL), codec, likely={258: 3.0})
    speech = {"family": "sonant", "first_code": SONANT_CODES, "first_symbol": SONANT_SYMBOLS}
    speech["symbols"] = ["h", "ə", "l", "ˈ", "oʊ"]
    voices = [
        {"name": name, "language_codes": ["en-US"], "codes": codes}
        for name, codes in SONANT_VOICES.items()
    ]
    (folder / "speech.json").write_text(json.dumps(speech), encoding="utf-8")
    (folder / "voices.json").write_text(json.dumps({"default": "hazel", "voices": voices}))
    return folder


def write_csm_family(folder: Path, **keys: Any) -> Path:
    """sesame/csm-1b with seven of Mimi's codebooks, all in one file."""
    from tests.llm.csm_checkpoints import write_csm  # imports transformers

    count = 7
    ids = {"bos_token_id": 128_000, "pad_token_id": 128_002}
    ids |= {"audio_token_id": 128_002, "audio_eos_token_id": 128_003}
    sizes = {"num_codebooks": count, "text_vocab_size": 128_256, "max_position_embeddings": 2048}
    depth = {"num_codebooks": count, "max_position_embeddings": count + 1}
    given = ids | sizes | {"depth": depth, "codec": {"num_quantizers": count}} | keys
    write_csm(folder, **given)
    data, settings = llama_tokenizer(dict(LLAMA_SPECIAL))
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_qwen3_tts_family(folder: Path, **keys: Any) -> Path:
    """Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice with seven codebooks of 16 codes."""
    from tests.llm.qwen3_tts_checkpoints import write_qwen3_tts  # imports transformers

    talker: dict[str, Any] = {
        "vocab_size": 3072,
        "text_vocab_size": 151_936,
        "max_position_embeddings": 2048,
        "num_code_groups": 7,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_think_id": 2154,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "codec_language_id": {"chinese": 2055, "english": 2050, "sichuan_dialect": 2062},
        "spk_id": {"vivian": 3065, "Eric": 2875},
        "spk_is_dialect": {"vivian": False, "Eric": "sichuan_dialect"},
    }
    ids = {"im_start_token_id": 151_644, "im_end_token_id": 151_645, "tts_pad_token_id": 151_671}
    ids |= {"tts_bos_token_id": 151_672, "tts_eos_token_id": 151_673}
    predictor = {"num_code_groups": 7, "vocab_size": 16} | keys.pop("predictor", {})
    own = {"talker": talker | keys.pop("talker", {}), "predictor": predictor}
    write_qwen3_tts(folder, **ids | own | keys)
    words = {"hello": 14_990, "user": 872, "assistant": 77_091}
    data = tokenizer_json(words, QWEN3_SPECIAL, BYTE_LEVEL)
    (folder / "speech_tokenizer").mkdir()
    files = {
        "tokenizer.json": data,
        "tokenizer_config.json": {"bos_token": None, "eos_token": "<|im_end|>"},
        "speech_tokenizer/config.json": QWEN3_TTS_CODEC,
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


def write_higgs_family(folder: Path, **keys: Any) -> Path:
    """bosonai/higgs-audio-v2-generation-3B-base with seven codebooks of 16 codes."""
    from tests.llm.higgs_checkpoints import write_higgs  # imports transformers

    ids = {"vocab_size": 128_256, "bos_token_id": 128_000, "pad_token_id": 128_001}
    ids |= {"eos_token_id": 128_009, "audio_token_id": 128_016}
    ids |= {"audio_bos_token_id": 128_013, "audio_delay_token_id": 128_014}
    write_higgs(folder, **ids | {"num_codebooks": 7, "max_position_embeddings": 2048} | keys)
    added = {128_011: "scene_desc_start", 128_012: "scene_desc_end"}
    added |= {128_013: "audio_out_bos", 128_015: "audio_eos", 128_016: "AUDIO_OUT"}
    special = {name: k for name, k in LLAMA_SPECIAL.items() if k not in added}
    special |= {f"<|{name}|>": k for k, name in added.items()}
    data, settings = llama_tokenizer(special)
    (folder / "codec").mkdir()
    files = {
        "tokenizer.json": data,
        "tokenizer_config.json": settings,
        "codec/config.json": HIGGS_CODEC,
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder


def common_config(vocab_size: int) -> dict[str, object]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": SHAPE.hidden,
        "intermediate_size": SHAPE.intermediate,
        "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "head_dim": SHAPE.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def llama_config(vocab_size: int, eos: list[int]) -> dict[str, object]:
    return {
        **common_config(vocab_size),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128_000,
        "eos_token_id": eos,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA_ROPE,
    }


def llama_tokenizer(special: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Llama 3's tokenizer.json and tokenizer_config.json, with these added tokens."""
    start = "<|begin_of_text|>"
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": start, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {start: {"id": start, "ids": [128_000], "tokens": [start]}},
    }
    processor = {"type": "Sequence", "processors": [BYTE_LEVEL, template]}
    data = tokenizer_json(LLAMA_WORDS, special, processor)
    settings = {"bos_token": start, "eos_token": "<|eot_id|>", "chat_template": LLAMA_CHAT}
    return data, settings


def qwen_tokenizer(special: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Qwen's tokenizer, which adds no token in front of a text."""
    data = tokenizer_json({}, special, BYTE_LEVEL)
    return data, {"bos_token": None, "eos_token": "<|im_end|>"}


def tokenizer_json(
    words: dict[str, int], special: Mapping[str, int], processor: object
) -> dict[str, Any]:
    vocabulary = {chr(character): k for k, character in enumerate(ALPHABET)} | words
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": name, **flags, "special": True}
            for name, token_id in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": SPLIT},
                    "behavior": "Isolated",
                    "invert": False,
                },
                BYTE_LEVEL,
            ],
        },
        "post_processor": processor,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def write(
    folder: Path,
    config: Mapping[str, Any],
    tokenizer: tuple[dict[str, Any], dict[str, Any]],
    codec: Mapping[str, object],
    likely: Mapping[int, float] | None = None,
) -> Path:
    """Write all files. `likely` raises the probability of tokens that are otherwise rare."""
    (folder / "codec").mkdir(parents=True)
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer[0],
        "tokenizer_config.json": tokenizer[1],
        "generation_config.json": {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        "codec/config.json": codec,
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    weights = random_llama(SHAPE, config["vocab_size"], seed=0) | extra_weights(config)
    for token_id, factor in (likely or {}).items():
        weights["model.embed_tokens.weight"][token_id] *= factor
    save_file(weights, folder / "model.safetensors")
    return folder


def extra_weights(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """A head that is not tied, and what Qwen has beyond Llama."""
    if not config["tie_word_embeddings"]:
        return {"lm_head.weight": torch.eye(config["vocab_size"], SHAPE.hidden)}
    layer = "model.layers.0.self_attn."
    if config["model_type"] == "qwen3":
        return {f"{layer}{part}_norm.weight": torch.ones(SHAPE.head_dim) for part in "qk"}
    if config["model_type"] == "qwen2":
        sizes = {"q": SHAPE.heads, "k": SHAPE.kv_heads, "v": SHAPE.kv_heads}
        return {
            f"{layer}{part}_proj.bias": torch.linspace(-0.5, 0.5, count * SHAPE.head_dim)
            for part, count in sizes.items()
        }
    return {}

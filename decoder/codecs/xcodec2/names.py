"""Names of the tensors of XCodec2 and NeuCodec: in transformers, and in the first publications.

The first publications (HKUSTAudio/xcodec2, neuphonic/neucodec) join query, key and value in one
matrix. The order of their rotary pairs differs from transformers, which has no effect, because
queries and keys of a head are rotated alike.
"""

from __future__ import annotations

import re

from decoder.codecs.xcodec2.modules import Xcodec2Config

_FIRST_LAYOUT = (
    (r"generator\.quantizer\.(?:fsqs\.0\.)?project_out", "quantizer.project_out"),
    (r"fc_post_a", "acoustic_decoder.fc"),
    (r"generator\.backbone\.final_layer_norm", "acoustic_decoder.norm"),
    (r"generator\.backbone\.(embed|(?:prior|post)_net\.\d+\.\w+)", r"acoustic_decoder.\1"),
    (
        r"generator\.backbone\.transformers\.(\d+)\.att_norm",
        r"acoustic_decoder.layers.\1.input_layernorm",
    ),
    (
        r"generator\.backbone\.transformers\.(\d+)\.ffn_norm",
        r"acoustic_decoder.layers.\1.post_attention_layernorm",
    ),
    (
        r"generator\.backbone\.transformers\.(\d+)\.att\.c_proj",
        r"acoustic_decoder.layers.\1.self_attn.o_proj",
    ),
    (r"generator\.backbone\.transformers\.(\d+)\.(mlp\.\w+)", r"acoustic_decoder.layers.\1.\2"),
    (r"generator\.head\.out", "acoustic_decoder.head.linear"),
)
_JOINED = re.compile(r"generator\.backbone\.transformers\.(\d+)\.att\.c_attn\.weight")


def from_first_layout(name: str) -> tuple[str, ...]:
    """Return a tensor's name in transformers, or the three names of its equal parts; others
    unchanged.
    """
    if match := _JOINED.fullmatch(name):
        layer = f"acoustic_decoder.layers.{match[1]}.self_attn"
        return tuple(f"{layer}.{part}_proj.weight" for part in "qkv")
    layer, _, kind = name.rpartition(".")
    for pattern, new in _FIRST_LAYOUT:
        if match := re.fullmatch(pattern, layer):
            return (f"{match.expand(new)}.{kind}",)
    return (name,)


def xcodec2_names(config: Xcodec2Config) -> dict[str, str]:
    """Return the mapping from our layers' names to those of the published checkpoint."""
    names = {
        "codebook.projection": "quantizer.project_out",
        "input": "acoustic_decoder.fc",
        "embed": "acoustic_decoder.embed",
        "norm": "acoustic_decoder.norm",
        "spectrum": "acoustic_decoder.head.linear",
    }
    blocks = {"norm_in": "norm1", "conv_in": "conv1", "norm_out": "norm2", "conv_out": "conv2"}
    for ours, theirs in (("before", "prior_net"), ("after", "post_net")):
        for index in range(2):
            for own, other in blocks.items():
                names[f"{ours}.{index}.{own}"] = f"acoustic_decoder.{theirs}.{index}.{other}"
    inner = {
        "attention_norm": "input_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_out": "self_attn.o_proj",
        "ff_norm": "post_attention_layernorm",
        "ff_in": "mlp.fc1",
        "ff_out": "mlp.fc2",
    }
    for index in range(config.num_layers):
        for own, other in inner.items():
            names[f"layers.{index}.{own}"] = f"acoustic_decoder.layers.{index}.{other}"
    return names

"""Random checkpoints of Qwen3-TTS as they are published, and their frames by other code.

The reference is Qwen3 and the code predictor of Qwen3-Omni as transformers has them; inputs are
sums of embeddings that this module computes one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)

from llm.request import Token, paired_token
from tests.decoder.speaker_encoders import speaker_tensors

TEXT_IDS = 40
CODES = 19  # of the first codebook, with marks, speakers and languages
LATER = 11  # of the other codebooks, and sounds of the first
CODEBOOKS = 4
END = 14
PAD = 38  # tts_pad

TALKER: dict[str, Any] = {
    "vocab_size": CODES,
    "text_vocab_size": TEXT_IDS,
    "text_hidden_size": 24,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
    "attention_bias": False,
    "use_sliding_window": False,
    "num_code_groups": CODEBOOKS,
    "codec_bos_id": 11,
    "codec_pad_id": 12,
    "codec_think_id": 13,
    "codec_eos_token_id": END,
    "codec_nothink_id": 15,
    "codec_think_bos_id": 16,
    "codec_think_eos_id": 17,
    "codec_language_id": {"chinese": 18, "english": 11},
    "spk_id": {"ann": 3},
    "spk_is_dialect": {"ann": False},
}
PREDICTOR: dict[str, Any] = {
    "vocab_size": LATER,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "num_code_groups": CODEBOOKS,
}
TOP: dict[str, Any] = {
    "architectures": ["Qwen3TTSForConditionalGeneration"],
    "model_type": "qwen3_tts",
    "tokenizer_type": "qwen3_tts_tokenizer_12hz",
    "tts_model_size": "1b7",
    "tts_model_type": "custom_voice",
    "im_start_token_id": 34,
    "im_end_token_id": 35,
    "tts_pad_token_id": PAD,
    "tts_bos_token_id": 36,
    "tts_eos_token_id": 37,
}


def write_qwen3_tts(folder: Path, *, seed: int = 0, **keys: Any) -> Path:
    """Write a checkpoint; `talker` and `predictor` change their part of config.json."""
    talker, predictor = TALKER | keys.pop("talker", {}), PREDICTOR | keys.pop("predictor", {})
    folder.mkdir(parents=True, exist_ok=True)
    config = TOP | {"talker_config": talker | {"code_predictor_config": predictor}} | keys
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _random(name, shape, generator) for name, shape in _shapes(talker, predictor).items()
    }
    if encoder := config.get("speaker_encoder_config"):
        weights |= speaker_tensors(encoder, seed=seed)
    save_file(weights, folder / "model.safetensors")
    return folder


def edit_config(folder: Path, *path: str, **keys: Any) -> None:
    """Change keys of config.json, or of the object at `path` inside of it."""
    file = folder / "config.json"
    values = part = json.loads(file.read_text())
    for key in path:
        part = part[key]
    part |= keys
    file.write_text(json.dumps(values))


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator) * 0.3


def _shapes(talker: dict[str, Any], predictor: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = talker["hidden_size"], talker["text_hidden_size"]
    small, own = predictor["hidden_size"], "talker.code_predictor."
    shapes: dict[str, tuple[int, ...]] = {
        "talker.model.text_embedding.weight": (talker["text_vocab_size"], inner),
        "talker.model.codec_embedding.weight": (talker["vocab_size"], hidden),
        "talker.text_projection.linear_fc1.weight": (inner, inner),
        "talker.text_projection.linear_fc1.bias": (inner,),
        "talker.text_projection.linear_fc2.weight": (hidden, inner),
        "talker.text_projection.linear_fc2.bias": (hidden,),
        "talker.codec_head.weight": (talker["vocab_size"], hidden),
    }
    for index in range(talker["num_code_groups"] - 1):
        size = predictor["vocab_size"]
        shapes[f"{own}model.codec_embedding.{index}.weight"] = (size, hidden)
        shapes[f"{own}lm_head.{index}.weight"] = (size, small)
    if small != hidden:
        shapes[f"{own}small_to_mtp_projection.weight"] = (small, hidden)
        shapes[f"{own}small_to_mtp_projection.bias"] = (small,)
    return shapes | _layers("talker.model.", talker) | _layers(own + "model.", predictor)


def _layers(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    inner = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"{prefix}norm.weight": (hidden,)} | {
        f"{prefix}layers.{index}.{name}.weight": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }


Adjust = Callable[[list[int], Tensor], Tensor]
"""Function from the first codes so far and the logits of the next to other logits."""


@dataclass(frozen=True)
class Reference:
    """The model by other code, float32."""

    weights: dict[str, Tensor]
    talker: Qwen3Model
    predictor: Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration

    @classmethod
    def read(cls, folder: Path) -> Reference:
        """Load a checkpoint."""
        from safetensors.torch import load_file

        weights = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())["talker_config"]
        small = config["code_predictor_config"]
        # All rotary sections have the same positions, as those of a plain rotation.
        talker = Qwen3Model(Qwen3Config(**_known(config), vocab_size=1))
        rest = talker.load_state_dict(_under(weights, "talker.model."), strict=False)
        assert rest.missing_keys == ["embed_tokens.weight"]
        predictor = Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration(
            Qwen3OmniMoeTalkerCodePredictorConfig(**small)
        )
        states = _under(weights, "talker.code_predictor.")
        tables = [name for name in states if "codec_embedding" in name]
        own = {name: states[name] for name in states if name not in tables}
        rest = predictor.load_state_dict(own, strict=False)
        assert set(rest.missing_keys) == set(tables)  # they have the talker's size
        return cls(weights, talker.eval(), predictor.eval())

    def text(self, text_id: int) -> Tensor:
        """Return the projected embedding [hidden] of a text id."""
        own = self.weights
        x = own["talker.model.text_embedding.weight"][text_id]
        for number in (1, 2):
            name = f"talker.text_projection.linear_fc{number}"
            x = own[f"{name}.weight"] @ (x if number == 1 else F.silu(x)) + own[f"{name}.bias"]
        return x

    def code(self, codebook: int, code: int) -> Tensor:
        """Return the embedding [hidden] of a code."""
        if codebook == 0:
            return self.weights["talker.model.codec_embedding.weight"][code]
        name = f"talker.code_predictor.model.codec_embedding.{codebook - 1}.weight"
        return self.weights[name][code]

    def embedded(self, token: Token) -> Tensor:
        """Return the input [hidden] of a token."""
        if isinstance(token, bytes):
            return torch.frombuffer(bytearray(token), dtype=torch.float32) + self.text(PAD)
        if not isinstance(token, int):
            codes = [self.code(book, code) for book, code in enumerate(token[:-1])]
            return torch.stack(codes).sum(0) + self.text(token[-1])
        text, pair = token % TEXT_IDS, token // TEXT_IDS
        return self.text(text) + (self.code(0, pair - 1) if pair else 0)

    def logits(self, prompt: Sequence[Token], frame: Sequence[int]) -> list[Tensor]:
        """Return the logits of the codes of the frame after `prompt`, given its codes before."""
        return self._code_logits(self._state(prompt), frame)

    def _state(self, prompt: Sequence[Token]) -> Tensor:
        """Return the talker's hidden state [hidden] behind a prompt."""
        with torch.no_grad():
            inputs = torch.stack([self.embedded(token) for token in prompt])[None]
            return self.talker(inputs_embeds=inputs).last_hidden_state[0, -1]

    def _code_logits(self, state: Tensor, frame: Sequence[int]) -> list[Tensor]:
        with torch.no_grad():
            first = self.weights["talker.codec_head.weight"] @ state
            codes = [self.code(book, code) for book, code in enumerate(frame[: CODEBOOKS - 1])]
            x = torch.stack([state, *codes])
            name = "talker.code_predictor.small_to_mtp_projection"
            if f"{name}.weight" in self.weights:
                x = F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
            states = self.predictor.model(inputs_embeds=x[None]).last_hidden_state[0]
            heads = list(self.predictor.lm_head)
            return [first, *(head(s) for head, s in zip(heads, states[1:], strict=False))]

    def frames(
        self,
        prompt: Sequence[Token],
        count: int,
        adjust: Adjust | None = None,
        texts: Sequence[int] = (),
    ) -> list[tuple[int, ...]]:
        """Return greedy frames with their text ids, up to one whose first code is `END`."""
        tokens, found = [*prompt], list[tuple[int, ...]]()
        while len(found) < count:
            frame: list[int] = []
            state = self._state(tokens)
            for book in range(CODEBOOKS):
                row = self._code_logits(state, [*frame, 0])[book]
                if book == 0 and adjust is not None:
                    row = adjust([one[0] for one in found], row)
                frame.append(int(row.argmax()))
                if frame == [END]:
                    return found
            text = texts[len(found)] if len(found) < len(texts) else PAD
            found.append((*frame, text))
            tokens.append(found[-1])
        return found


def paired(text_id: int, code: int) -> int:
    """Return the token of a text id with a code."""
    return paired_token(text_id, code, TEXT_IDS)


def _known(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that Qwen3 has too."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    )  # fmt: skip
    return {name: config[name] for name in names}


def _under(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }

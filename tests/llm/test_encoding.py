"""Which number format a model gets: what is set, on which hardware."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm.config import ModelConfig, PipelineConfig, QuantizationEncoding
from llm.errors import ConfigError
from llm.models.encoding import Encoding, choose_encoding, encoding_of
from llm.models.hf_config import HuggingFaceConfig
from tests.llm.llama_checkpoints import write_llama

CPU, VOLTA, TURING, AMPERE, ADA, HOPPER = None, (7, 0), (7, 5), (8, 0), (8, 9), (9, 0)
EVERYWHERE = (CPU, VOLTA, TURING, AMPERE, ADA, HOPPER)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("setting", "dtypes"),
    [
        (None, (F32, F16, F16, BF16, BF16, BF16)),
        ("float32", (F32,) * 6),
        ("float16", (F16,) * 6),
        ("bfloat16", (BF16,) * 6),
        ("int8", (F32,) * 6),
    ],
)
def test_the_table(setting: str | None, dtypes: tuple[torch.dtype, ...]) -> None:
    """By compute capability, the CPU first."""
    encoding = None if setting is None else QuantizationEncoding(setting)
    found = [encoding_of(encoding, capability) for capability in EVERYWHERE]
    assert [e.dtype for e in found] == list(dtypes)
    assert {e.int8 for e in found} == {setting == "int8"}


@pytest.mark.parametrize("capability", EVERYWHERE)
def test_an_int8_checkpoint_stays_so_on_the_cpu_only(capability: tuple[int, int] | None) -> None:
    found = encoding_of(None, capability, is_int8=True)
    assert found.int8 == (capability is CPU)
    assert not encoding_of(QuantizationEncoding.FLOAT32, capability, is_int8=True).int8


@pytest.mark.parametrize("setting", ["float8_e4m3fn", "float4_e2m1fnx2", "gptq", "q4_k", "q4_0"])
def test_what_nothing_computes_with(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization_encoding={setting} has no kernels"):
        encoding_of(QuantizationEncoding(setting), HOPPER)


def test_a_model_asks_its_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_llama(tmp_path)
    facts = HuggingFaceConfig.read(str(folder))
    asked = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return TURING

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    on_gpu = ModelConfig(model_path=str(folder), device_specs=["cuda:1"])
    assert choose_encoding(on_gpu, facts) == Encoding(F16)
    assert asked == [torch.device("cuda:1")]
    assert (
        choose_encoding(ModelConfig(model_path=str(folder), device_specs=["cpu"]), facts).dtype
        is F32
    )
    assert len(asked) == 1


def test_float16_is_for_gpus(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    model = {"model_path": str(folder), "quantization_encoding": "float16"}
    config = PipelineConfig(model=model | {"device_specs": ["cuda:0"]})
    assert config.graph_quantization_encoding is None
    with pytest.raises(ConfigError, match="float16 runs on the GPU only"):
        PipelineConfig(model=model | {"device_specs": ["cpu"]})

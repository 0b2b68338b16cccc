"""Number format of a model, by configuration and hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llm.config import ModelConfig, PipelineConfig, QuantizationEncoding
from llm.errors import ConfigError
from llm.models.encoding import (
    Encoding,
    choose_encoding,
    encoding_of,
    with_text_encoding,
)
from llm.models.hf_config import HuggingFaceConfig
from tests.llm.llama_checkpoints import float8_checkpoint, quantize_checkpoint, write_llama

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
        ("float8_e4m3fn", (BF16, None, None, None, None, BF16)),
    ],
)
def test_the_table(setting: str | None, dtypes: tuple[torch.dtype | None, ...]) -> None:
    """By compute capability, the CPU first; None: there are no kernels."""
    encoding = None if setting is None else QuantizationEncoding(setting)
    for capability, dtype in zip(EVERYWHERE, dtypes, strict=True):
        if dtype is None:
            with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 9\.0"):
                encoding_of(encoding, capability)
        else:
            is_int8, is_float8 = setting == "int8", setting == "float8_e4m3fn"
            assert encoding_of(encoding, capability) == Encoding(dtype, is_int8, is_float8)


@pytest.mark.parametrize("capability", EVERYWHERE)
def test_a_float8_checkpoint_stays_so_where_it_can(capability: tuple[int, int] | None) -> None:
    found = encoding_of(None, capability, is_float8=True)
    assert found.float8 == (capability in (CPU, HOPPER))
    assert found.float8 or found == encoding_of(None, capability)
    assert found.name.endswith("float8_e4m3fn") == found.float8
    assert not encoding_of(QuantizationEncoding.FLOAT32, capability, is_float8=True).float8


@pytest.mark.parametrize("capability", EVERYWHERE)
def test_an_int8_checkpoint_stays_so_on_the_cpu_only(capability: tuple[int, int] | None) -> None:
    found = encoding_of(None, capability, is_int8=True)
    assert found.int8 == (capability is CPU)
    assert not encoding_of(QuantizationEncoding.FLOAT32, capability, is_int8=True).int8


@pytest.mark.parametrize("setting", ["float4_e2m1fnx2", "gptq", "q4_k", "q4_0", "q6_k"])
def test_packed_formats_need_a_newer_gpu(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization_encoding={setting} has no kernels"):
        encoding_of(QuantizationEncoding(setting), TURING, packed=(setting,))


@pytest.mark.parametrize("setting", ["float4_e2m1fnx2", "gptq", "q4_k", "q4_0", "q6_k"])
def test_a_packed_format_is_for_checkpoints_that_are_stored_so(setting: str) -> None:
    encoding = QuantizationEncoding(setting)
    for capability, dtype in ((CPU, F32), (AMPERE, BF16), (HOPPER, BF16)):
        found = encoding_of(encoding, capability, packed=("q8_0", setting))
        assert found == Encoding(dtype, packed=True)
    for stored, name in (((), "none of these formats"), (("q4_1", "q8_0"), "q4_1, q8_0")):
        with pytest.raises(ConfigError, match=f"={setting} is for .* this one is stored as {name}"):
            encoding_of(encoding, CPU, packed=stored)


@pytest.mark.parametrize("capability", EVERYWHERE)
def test_a_packed_checkpoint_stays_so_on_the_cpu_only(capability: tuple[int, int] | None) -> None:
    """Unless it is asked for: expanded matrices are faster for several rows on a GPU."""
    found = encoding_of(None, capability, packed=("awq",))
    assert found.packed == (capability is CPU)
    assert found.dtype == encoding_of(None, capability).dtype
    assert found.name.endswith("packed as they are stored") == found.packed
    for other in ("float32", "bfloat16", "int8"):
        assert not encoding_of(QuantizationEncoding(other), capability, packed=("awq",)).packed
    if capability not in (VOLTA, TURING):
        assert encoding_of(QuantizationEncoding.GPTQ, capability, packed=("awq",)).packed


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
    float8 = {"quantization_encoding": "float8_e4m3fn", "model_path": str(folder)}
    with pytest.raises(ConfigError, match=r"float8_e4m3fn needs .*, and this one has 7\.5"):
        choose_encoding(ModelConfig(**float8, device_specs=["cuda:1"]), facts)
    assert choose_encoding(ModelConfig(**float8, device_specs=["cpu"]), facts).float8
    assert len(asked) == 2


def test_float16_is_for_gpus(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    model = {"model_path": str(folder), "quantization_encoding": "float16"}
    config = PipelineConfig(model=model | {"device_specs": ["cuda:0"]})
    assert config.graph_quantization_encoding is None
    with pytest.raises(ConfigError, match="float16 runs on the GPU only"):
        PipelineConfig(model=model | {"device_specs": ["cpu"]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def text_config(folder: Path, *, device: str = "cpu", **values: Any) -> PipelineConfig:
    model = {"model_path": str(folder), "device_specs": [device], **values.pop("model", {})}
    return PipelineConfig(model=model, **values)


def test_text_on_the_cpu_gets_the_format_that_was_measured(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the chosen format, the reason, and how to choose another one."""
    config = text_config(folder)
    with caplog.at_level("INFO", "llm.config"):
        chosen = with_text_encoding(config)
    assert chosen.model.quantization_encoding == "float32"
    assert chosen.is_resolved
    assert config.model.quantization_encoding is None
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("model holds its weights as float32, the fastest format whose ")
    assert "--model.quantization-encoding float32, bfloat16 or int8 " in message


def test_a_draft_model_is_held_as_its_target_is(folder: Path) -> None:
    draft = {"model_path": str(folder), "device_specs": ["cpu"]}
    chosen = with_text_encoding(text_config(folder, draft_model=draft))
    assert chosen.draft_model is not None
    assert chosen.draft_model.quantization_encoding == "float32"
    own = with_text_encoding(
        text_config(folder, draft_model=draft | {"quantization_encoding": "int8"})
    )
    assert own.draft_model is not None
    assert own.draft_model.quantization_encoding == "int8"
    assert own.model.quantization_encoding == "float32"


def test_a_format_that_is_set_or_stored_is_kept(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "embeds").mkdir()
    (tmp_path / "other").mkdir()
    keys = json.loads((folder / "config.json").read_text())
    for name, architecture in (("embeds", "LlamaModel"), ("other", "GPT2LMHeadModel")):
        text = json.dumps(keys | {"architectures": [architecture]})
        (tmp_path / name / "config.json").write_text(text)
    alone = {"max_batch_size": 1, "model": {"kv_cache": {"enable_prefix_caching": False}}}
    for kept in (
        text_config(folder, model={"quantization_encoding": "float32"}),
        text_config(folder, model={"quantization_encoding": "int8"}),
        text_config(folder, device="cuda:0"),
        text_config(quantize_checkpoint(folder, tmp_path / "int8")),
        text_config(float8_checkpoint(folder, tmp_path / "float8", "channel")),
        text_config(tmp_path / "embeds"),
        text_config(tmp_path / "other", **alone),
    ):
        assert with_text_encoding(kept) is kept

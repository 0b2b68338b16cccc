"""Checks of resolving, their order, and values from the architecture."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from llm.config import (
    Architecture,
    PipelineConfig,
    QuantizationEncoding,
    architectures,
    resolve,
)
from llm.errors import CheckpointError, ConfigError

NAME = "OwnForCausalLM"


class Everything(PipelineConfig):
    """Check rules between fields that also hold where this release does not support one of them."""

    UNAVAILABLE: ClassVar[dict[str, str]] = {}
    UNAVAILABLE_VALUES: ClassVar[dict[str, dict[str, str]]] = {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's config.json, of an architecture that only the tests know."""
    describe(tmp_path, NAME)
    return tmp_path


def describe(folder: Path, architecture: str) -> None:
    values = {"architectures": [architecture], "max_position_embeddings": 100}
    (folder / "config.json").write_text(json.dumps(values))


def register(**values: Any) -> None:
    architectures.register_architecture(Architecture(NAME, "nowhere:Missing", **values))


def with_model(folder: Path, **values: Any) -> PipelineConfig:
    return Everything(**Everything.merged({"model": {"model_path": str(folder)}}, values))


@pytest.mark.parametrize(("has_cuda", "device"), [(False, "cpu"), (True, "cuda:0")])
def test_a_gpu_is_used_unless_a_device_is_named(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, device: str
) -> None:
    monkeypatch.setattr(resolve, "has_cuda", lambda: has_cuda)
    config = PipelineConfig(draft_model={})
    assert config.model.device_specs == [device]
    assert config.draft_model is not None
    assert config.draft_model.device_specs == [device]
    again = PipelineConfig(**config.model_dump(exclude_unset=True))
    assert again.model.model_dump() == config.model.model_dump()
    for named in ("cpu", "cuda:1"):
        model = PipelineConfig(model={"device_specs": [named]}, draft_model={})
        assert (model.model.device_specs, model.draft_model.device_specs) == ([named], [named])  # type: ignore[union-attr]
    assert PipelineConfig(defer_resolve=True).model.device_specs == ["cpu"]


def test_asking_for_a_gpu_does_not_import_torch() -> None:
    code = "from llm.config.resolve import has_cuda; has_cuda(); sys.exit('torch' in sys.modules)"
    code = f"import sys; {code}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_failures_come_in_the_order_of_the_steps(folder: Path) -> None:
    """With several errors each message names one; correcting it reveals the next."""
    (folder / "template").write_text("hello")
    config = Everything(
        custom_architectures=["a:b:c"],
        chat_template=folder / "none",
        model={"model_path": str(folder), "weight_path": [folder / "none"]},
        max_num_steps=4,
        enable_overlap_scheduler=True,
        enable_echo=True,
        draft_model={},
        pdl_level="9",
        execute_empty_batches=True,
        lora={"enable_lora": True},
        max_length=101,
        max_batch_size=9,
        max_batch_input_tokens=8,
        max_batch_total_tokens=50,
        defer_resolve=True,
    )

    def fails(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            config.resolve()
        assert not config.is_resolved

    fails("custom_architectures=a:b:c must be module or folder:module")
    config.custom_architectures = []
    fails("chat_template=.*none is not a file")
    config.chat_template = folder / "template"
    fails("model.weight_path: .*none is not a file")
    config.model.weight_path = []
    fails("max_num_steps=4 cannot be set with a draft_model")
    config.max_num_steps = 1
    fails("enable_echo=True cannot be used with a draft_model")
    config.enable_echo = False
    fails("enable_overlap_scheduler=True needs a GPU")
    config.enable_overlap_scheduler = False
    fails("pdl_level=9 must be 0, 1 or 2")
    config.pdl_level = "0"
    describe(folder, "UnknownForCausalLM")
    fails("architecture 'UnknownForCausalLM' is not supported")
    describe(folder, NAME)
    register()
    fails(f"execute_empty_batches: {NAME} cannot run empty batches")
    register(supports_empty_batches=True)
    fails(f"lora: {NAME} does not take adapters")
    register(supports_empty_batches=True, supports_lora=True)
    fails("max_length=101 exceeds the model's max_position_embeddings=100")
    config.max_length = 100
    fails("max_batch_input_tokens=8 must be at least max_batch_size=9")
    config.max_batch_size = 8
    fails("max_batch_total_tokens=50 must be at least max_length=100")
    config.max_batch_total_tokens = 100
    config.resolve()
    assert config.is_resolved


def test_a_checkpoint_must_name_an_architecture_that_there_is(folder: Path) -> None:
    describe(folder, "UnknownForCausalLM")
    with pytest.raises(CheckpointError, match="these are: LlamaForCausalLM"):
        with_model(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no architecture"):
        with_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        with_model(folder)


def test_an_architecture_overrides_unsupported_values(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register(
        required_arguments=(
            ("model.kv_cache.enable_prefix_caching", False),
            ("max_num_steps", 1),
            ("enable_chunked_prefill", True),
        )
    )
    with caplog.at_level(logging.WARNING):
        config = with_model(folder, max_num_steps=3)
    assert (config.model.kv_cache.enable_prefix_caching, config.max_num_steps) == (False, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"model.kv_cache.enable_prefix_caching=True becomes False: {NAME} needs it",
        f"max_num_steps=3 becomes 1: {NAME} needs it",
    ]


def test_force_keeps_conflicting_values_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register(required_arguments=(("max_num_steps", 1),))
    with caplog.at_level(logging.WARNING):
        config = with_model(folder, max_num_steps=3, force=True)
    assert config.max_num_steps == 3
    assert f"max_num_steps=3 is kept by force, though {NAME} needs 1" in caplog.text
    with pytest.raises(ConfigError, match="max_length=101 exceeds"):  # sizes are never forced
        with_model(folder, max_length=101, force=True)


def test_an_architecture_cannot_require_a_field_that_is_not_there(folder: Path) -> None:
    register(required_arguments=(("model.kv_cache.page", 1),))
    with pytest.raises(ConfigError, match="requires an unknown field 'model"):
        with_model(folder)


def test_an_architecture_may_hold_one_longest_sequence_only(folder: Path) -> None:
    register(needs_total_tokens_limit=True)
    assert with_model(folder).max_batch_total_tokens == 100
    assert with_model(folder, max_length=60).max_batch_total_tokens == 60


def test_the_limit_may_be_in_the_text_part_or_missing(folder: Path) -> None:
    register(length_key="n_positions")
    values = {"architectures": [NAME], "text_config": {"n_positions": 7}}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="max_length=8 exceeds the model's n_positions=7"):
        with_model(folder, max_length=8)
    stretched = {"n_positions": 7, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    for others in ({}, stretched):
        (folder / "config.json").write_text(json.dumps({"architectures": [NAME]} | others))
        assert with_model(folder, max_length=8).max_length == 8


def test_an_architecture_lists_its_encodings(folder: Path) -> None:
    register(encodings=(QuantizationEncoding.FLOAT32,))
    with pytest.raises(ConfigError, match=f"=bfloat16: {NAME} runs as float32"):
        with_model(folder, model={"quantization_encoding": "bfloat16"})
    assert with_model(folder, model={"quantization_encoding": "float32"}).is_resolved


@pytest.mark.parametrize("model", ["", "module", ":Class", "module:"])
def test_an_architecture_names_its_class(model: str) -> None:
    with pytest.raises(ConfigError, match=f"architecture 'X'.*'{model}' is no module:Class"):
        Architecture("X", model)


@pytest.mark.parametrize(
    ("encoding", "cpu", "gpu"),
    [
        ("float32", True, True),
        ("bfloat16", True, True),
        ("int8", True, False),
        ("q4_k", True, True),
        ("q4_0", True, True),
        ("q6_k", True, True),
        ("gptq", True, True),
        ("float8_e4m3fn", True, True),
        ("float4_e2m1fnx2", True, True),
    ],
)
def test_encodings_have_their_devices(encoding: str, cpu: bool, gpu: bool) -> None:
    for device, works in (("cpu", cpu), ("cuda:0", gpu)):
        model = {"quantization_encoding": encoding, "device_specs": [device]}
        if works:
            assert Everything(model=model).model.quantization_encoding == encoding
        else:
            with pytest.raises(ConfigError, match=f"model.quantization_encoding={encoding} runs"):
                Everything(model=model)


@pytest.mark.parametrize(
    "values",
    [{"enable_overlap_scheduler": True}, {"sampling": {"enable_structured_output": True}}],
)
def test_one_decode_forward_where_each_token_is_read(values: dict[str, Any]) -> None:
    on_gpu = {"model": {"device_specs": ["cuda"]}}
    assert Everything(**on_gpu, **values).max_num_steps == 1
    assert Everything(**on_gpu).max_num_steps == 10


def test_overlap_needs_a_gpu_or_force(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="enable_overlap_scheduler=True needs a GPU"):
        Everything(enable_overlap_scheduler=True)
    assert Everything(enable_overlap_scheduler=True, force=True).enable_overlap_scheduler
    assert "kept by force" in caplog.text


def test_overlap_runs_single_steps() -> None:
    on_gpu = {"device_specs": ["cuda"]}
    assert Everything(enable_overlap_scheduler=True, max_num_steps=1, model=on_gpu).is_resolved
    with pytest.raises(ConfigError, match="max_num_steps=2 must be 1 with enable_overlap"):
        Everything(enable_overlap_scheduler=True, max_num_steps=2)


def test_drafting_needs_a_model_that_drafts() -> None:
    with pytest.raises(ConfigError, match="standalone needs a draft_model"):
        Everything(speculative={})
    assert Everything(speculative={}, draft_model={}).is_resolved
    with pytest.raises(ConfigError, match=r"draft_model.*=/no/such/folder is not"):
        Everything(draft_model={"model_path": "/no/such/folder"})


@pytest.mark.parametrize(
    ("values", "penalties", "min_tokens"),
    [
        ({}, True, True),
        ({"enable_penalties": False}, False, True),
        ({"enable_min_tokens": False}, True, False),
        ({"enable_penalties": True, "enable_min_tokens": True}, True, True),
    ],
)
def test_penalties_and_minimum_lengths_are_on_unless_turned_off(
    values: dict[str, bool], penalties: bool, min_tokens: bool
) -> None:
    sampling = Everything(sampling=values).sampling
    assert (sampling.enable_penalties, sampling.enable_min_tokens) == (penalties, min_tokens)


@pytest.mark.parametrize(
    ("recommended", "penalties", "min_tokens"),
    [
        ({"temperature": 0.5, "repetition_penalty": 1.0, "min_length": 0}, False, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"presence_penalty": 0.5}, True, False),
        ({"min_new_tokens": 3}, False, True),
        ([], False, False),
    ],
)
def test_a_model_that_recommends_them_turns_them_on(
    folder: Path, recommended: Any, penalties: bool, min_tokens: bool
) -> None:
    register()
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    off = {"enable_penalties": False, "enable_min_tokens": False}
    sampling = with_model(folder, sampling=off).sampling
    assert (sampling.enable_penalties, sampling.enable_min_tokens) == (penalties, min_tokens)


def test_a_broken_recommendation_is_named(folder: Path) -> None:
    register()
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*generation_config\.json"):
        with_model(folder)


def test_penalties_with_a_draft_model_must_be_enabled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = Everything(draft_model={})
    assert not config.sampling.enable_penalties
    assert "sampling.enable_penalties is turned off" in caplog.text
    asked = Everything(draft_model={}, sampling={"enable_penalties": True})
    assert asked.sampling.enable_penalties


@pytest.mark.parametrize(
    ("text", "is_on"),
    [
        *((text, True) for text in ("true", "True", "on", "YES", "1")),
        *((text, False) for text in ("false", "FALSE", "off", "no", "0")),
    ],
)
def test_switches_are_texts(text: str, is_on: bool) -> None:
    session = RecordingSession()
    Everything(use_vendor_blas=text, use_experimental_kernels=text).configure_session(session)
    assert (session.use_vendor_blas, session.use_experimental_kernels) == (is_on, is_on)


@pytest.mark.parametrize("name", ["use_vendor_blas", "use_experimental_kernels"])
@pytest.mark.parametrize("text", ["maybe", "", "2"])
def test_other_texts_are_no_switches(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={text} must be true or false"):
        Everything(**{name: text})


class RecordingSession:
    """Records what a session would keep."""

    gpu_profiling = "unset"
    use_experimental_kernels = False
    use_vendor_blas = False
    pdl_level = -1


def test_dependent_launch_has_no_effect_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = PipelineConfig(pdl_level="2")
    assert caplog.text.count("pdl_level=2 has no effect on the CPU") == 1
    session = RecordingSession()
    config.configure_session(session)
    assert session.pdl_level == 0
    PipelineConfig(pdl_level="1", model={"device_specs": ["cuda:0"]}).configure_session(session)
    assert session.pdl_level == 1


@pytest.mark.parametrize("name", ["model", "draft_model"])
def test_flashinfer_needs_a_gpu(name: str) -> None:
    choice = {"attention_backend": "flashinfer"}
    with pytest.raises(ConfigError, match=rf"^{name}\.attention_backend=flashinfer needs a CUDA"):
        Everything(**{"speculative": {}, "draft_model": {}} | {name: choice})
    on_cuda = choice | {"device_specs": ["cuda:0"]}
    config = Everything(**{"speculative": {}, "draft_model": {}} | {name: on_cuda})
    assert getattr(config, name).attention_backend == "flashinfer"


def test_common_ids_are_kept() -> None:
    config = PipelineConfig()
    assert config.common_ids is None
    limited = config.with_common_ids((5, 9))
    assert (limited.common_ids, config.common_ids) == ((5, 9), None)
    for kept in (limited.with_batch_size(3), pickle.loads(pickle.dumps(limited))):
        assert kept.common_ids == (5, 9)
        assert kept.is_resolved


def test_a_listener_is_served_step_by_step() -> None:
    """Overlap unless configured otherwise, and without conflicting fields."""
    gpu: dict[str, Any] = {"device_specs": ["cuda"]}
    config = PipelineConfig(model=gpu)
    assert (config.enable_overlap_scheduler, config.max_num_steps) == (False, 10)
    ahead = config.planning_ahead()
    assert (ahead.enable_overlap_scheduler, ahead.max_num_steps) == (True, 1)
    assert ahead.is_resolved
    assert ahead.planning_ahead() is ahead
    for kept in (
        PipelineConfig(model={"device_specs": ["cpu"]}),
        PipelineConfig(model=gpu, enable_overlap_scheduler=False),
        PipelineConfig(model=gpu, max_num_steps=4),
        PipelineConfig(model=gpu, draft_model={}),
        PipelineConfig(
            model=gpu | {"kv_cache": {"enable_prefix_caching": False}}, max_batch_size=1
        ),
    ):
        assert kept.planning_ahead() is kept

"""PipelineConfig: names, defaults, validation, resolving, unsupported fields."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from llm.config import (
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_VALUES,
    KVCacheConfig,
    LoRAConfig,
    ModelConfig,
    PipelineConfig,
    PipelineRole,
    QuantizationEncoding,
    SpeculativeConfig,
)
from llm.errors import ConfigError

DEFAULTS = {
    "config_file": None,
    "section_name": None,
    "max_length": None,
    "pipeline_role": "prefill_and_decode",
    "prefill_endpoints": [],
    "max_batch_size": None,
    "max_queue_size_tg": None,
    "min_batch_size_tg": None,
    "ep_size": 1,
    "ce_delay_ms": 0.0,
    "enable_prioritize_first_decode": False,
    "enable_chunked_prefill": True,
    "enable_in_flight_batching": True,
    "max_num_steps": -1,
    "max_batch_input_tokens": 8192,
    "enable_echo": False,
    "pool_embeddings": True,
    "chat_template": None,
    "use_experimental_kernels": "false",
    "use_vendor_blas": "false",
    "pdl_level": "0",
    "custom_architectures": [],
    "execute_empty_batches": False,
    "max_batch_total_tokens": None,
    "force": False,
    "kvcache_ce_watermark": 0.95,
    "enable_overlap_scheduler": False,
    "use_legacy_module": True,
    "draft_model": None,
    "lora": None,
    "speculative": None,
}
FIELDS = {*DEFAULTS, "zmq_endpoint_base", "defer_resolve"} | {
    "model",
    "sampling",
    "profiling",
}


OTHER_TEXTS = {"pdl_level": "1", "zmq_endpoint_base": "ipc:///tmp/sonant"}


def unresolved(**values: Any) -> PipelineConfig:
    return PipelineConfig(**values, defer_resolve=True)


def nested(dotted_name: str, value: Any) -> dict[str, Any]:
    """Return `a.b.c`, value as {a: {b: {c: value}}}."""
    for name in reversed(dotted_name.split(".")):
        value = {name: value}
    return dict(value)


def field_at(dotted_name: str) -> Any:
    *sections, leaf = dotted_name.split(".")
    model: Any = PipelineConfig
    for section in sections:
        kind = model.model_fields[section].annotation
        model = next((a for a in get_args(kind) if a is not type(None)), kind)
    return model.model_fields[leaf]


def another_value(dotted_name: str) -> Any:
    """Return a valid value that is not the field's default."""
    if dotted_name in OTHER_TEXTS:
        return OTHER_TEXTS[dotted_name]
    field = field_at(dotted_name)
    default = field.get_default(call_default_factory=True)
    kind = field.annotation
    inner = next((a for a in get_args(kind) if a is not type(None)), kind)
    if kind == list[str]:
        return ["x"]
    if get_origin(kind) is Literal:
        return next(value for value in get_args(kind) if value != default)
    if issubclass(inner, Enum):
        return next(value for value in inner if value != default)
    if issubclass(inner, BaseModel):
        return inner()
    return {bool: not default, int: 2, float: 1.5, str: "x"}[inner]


def test_every_field_and_its_default() -> None:
    values = unresolved().model_dump()
    assert set(values) == {*FIELDS, "allow_pickle"}
    assert {name: values[name] for name in DEFAULTS} == DEFAULTS
    assert PipelineConfig.model_fields["defer_resolve"].default is False


def test_nested_defaults() -> None:
    model = unresolved().model
    cache = model.kv_cache
    assert (cache.kv_cache_page_size, cache.enable_prefix_caching) == (128, True)
    assert (cache.enable_kvcache_swapping_to_host, cache.host_kvcache_swap_space_gb) == (False, 50)
    assert (cache.device_memory_utilization, cache.kv_cache_format) == (0.9, None)
    assert (model.device_specs, model.data_parallel_degree) == (["cpu"], 1)
    assert (LoRAConfig().max_lora_rank, LoRAConfig().max_num_loras) == (16, 1)
    assert SpeculativeConfig().num_speculative_tokens == 5


def test_every_field_has_a_description() -> None:
    classes = (PipelineConfig, ModelConfig, KVCacheConfig, LoRAConfig, SpeculativeConfig)
    assert all(field.description for cls in classes for field in cls.model_fields.values())


def test_fields_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        PipelineConfig("config.yaml")  # type: ignore[misc]


def test_each_instance_has_its_own_endpoint() -> None:
    first, second = unresolved(), unresolved()
    assert first.zmq_endpoint_base != second.zmq_endpoint_base
    assert first.zmq_endpoint_base.startswith("ipc://")


def test_resolving_fills_in_by_device() -> None:
    cpu = PipelineConfig()
    gpu = PipelineConfig(model={"device_specs": ["cuda"]})
    assert (cpu.max_num_steps, gpu.max_num_steps) == (1, 10)
    assert gpu.model.device_specs == ["cuda:0"]
    assert PipelineConfig(max_batch_size=5).max_queue_size_tg == 5
    assert PipelineConfig(max_queue_size_tg=7).min_batch_size_tg == 7
    assert PipelineConfig(min_batch_size_tg=0).min_batch_size_tg == 0


def test_unset_fields_after_resolving_are_documented() -> None:
    """Every other field has a value."""
    config = PipelineConfig()
    unset = {name for name in PipelineConfig.model_fields if getattr(config, name) is None}
    optional_sections = {"draft_model", "lora", "speculative"}
    assert unset - optional_sections == {
        "config_file",
        "section_name",
        "max_length",
        "max_batch_size",
        "max_queue_size_tg",
        "min_batch_size_tg",
        "max_batch_total_tokens",
        "chat_template",
    }
    text = PipelineConfig.__doc__ or ""
    follow = {"max_queue_size_tg", "min_batch_size_tg"}  # "the queue sizes that follow from it"
    assert all(f"`{name}`" in text for name in unset - optional_sections - follow)


def test_queue_sizes_follow_the_batch() -> None:
    config = PipelineConfig(max_batch_size=5)
    assert (config.max_queue_size_tg, config.min_batch_size_tg) == (5, 5)
    config = PipelineConfig(max_batch_size=5, max_queue_size_tg=9)
    assert (config.max_queue_size_tg, config.min_batch_size_tg) == (9, 9)
    assert PipelineConfig(min_batch_size_tg=3, max_queue_size_tg=9).min_batch_size_tg == 3


def test_a_batch_size_can_be_filled_in_later() -> None:
    """An engine sets it from its memory plan; a configured value stays."""
    config = PipelineConfig(max_num_steps=3)
    assert config.max_batch_size is config.max_queue_size_tg is None
    planned = config.with_batch_size(7)
    assert (planned.max_batch_size, planned.max_queue_size_tg, planned.min_batch_size_tg) == (
        7,
    ) * 3
    assert planned.max_num_steps == 3
    assert planned.is_resolved
    with pytest.raises(ConfigError, match="max_batch_size cannot change"):
        planned.max_batch_size = 8
    assert config.max_batch_size is None
    assert planned.with_batch_size(9) is planned
    queued = PipelineConfig(max_queue_size_tg=9, min_batch_size_tg=2).with_batch_size(7)
    assert (queued.max_queue_size_tg, queued.min_batch_size_tg) == (9, 2)


def test_resolving_twice_changes_nothing() -> None:
    config = unresolved(max_batch_size=3)
    assert not config.is_resolved
    config.resolve()
    once = config.model_dump()
    config.resolve()
    assert config.is_resolved
    assert config.model_dump() == once


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_batch_size": 3, "max_num_steps": 4},
        {"model": {"device_specs": ["cuda"], "kv_cache": {"num_pages": 9}}},
        {"draft_model": {}, "speculative": {"num_speculative_tokens": 2}},
        {"sampling": {"enable_structured_output": True, "enable_min_tokens": False}},
    ],
    ids=str,
)
def test_resolving_is_idempotent(values: dict[str, Any]) -> None:
    """Written out and read again, every value stays."""
    config = PipelineConfig(**values)
    again = PipelineConfig(**config.model_dump())
    assert again.is_resolved
    assert again.model_dump() == config.model_dump()


def test_the_log_has_in_flight_batching() -> None:
    config = PipelineConfig()
    assert config.enable_in_flight_batching
    assert PipelineConfig(**config.model_dump()).enable_in_flight_batching
    assert not PipelineConfig(enable_in_flight_batching=False).enable_in_flight_batching


def test_a_resolved_configuration_is_frozen_all_the_way_down() -> None:
    config = PipelineConfig()
    for section, name in (
        (config, "max_length"),
        (config.model, "model_path"),
        (config.model.kv_cache, "num_pages"),
        (config.sampling, "enable_penalties"),
    ):
        with pytest.raises(ConfigError, match=f"{name} cannot change"):
            setattr(section, name, getattr(section, name))


def test_before_resolving_assignments_are_checked() -> None:
    config = unresolved()
    config.max_batch_size = 7
    with pytest.raises(ValidationError, match="max_batch_size"):
        config.max_batch_size = -7
    config.resolve()
    assert config.max_batch_size == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_batch_size": 9, "max_batch_input_tokens": 8}, "max_batch_input_tokens=8 must be"),
        ({"max_batch_total_tokens": 9, "max_length": 10}, "max_batch_total_tokens=9 must be"),
        ({"model": {"model_path": "/no/such/folder"}}, "model_path=/no/such/folder is not a"),
        ({"model": {"weight_path": ["/no/such/file"]}}, "/no/such/file is not a file"),
        ({"chat_template": "/no/such/template"}, "chat_template=/no/such/template is not a file"),
        (
            {"model": {"quantization_encoding": "int8", "device_specs": ["cuda:0"]}},
            "int8 runs on the CPU only",
        ),
        ({"model": {"device_specs": ["cuda:0", "cuda:0"]}}, "must name different GPUs"),
        ({"model": {"device_specs": ["cpu", "cuda:0"]}}, "must name different GPUs"),
        (
            {"model": {"device_specs": ["cuda:0", "cuda:1"], "data_parallel_degree": 3}},
            "cuda:0,cuda:1 cannot be divided among model.data_parallel_degree=3 replicas",
        ),
        (
            {"model": {"device_specs": ["cpu"] * 3, "data_parallel_degree": 2}},
            "cpu,cpu,cpu cannot be divided",
        ),
    ],
)
def test_values_that_do_not_fit_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(**values)
    unresolved(**values)  # the failure belongs to resolving


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"draft_model": {"device_specs": ["cpu"]}}, "draft_model"),
        ({"lora": {"enable_lora": True}}, "lora"),
        ({"sampling": {"enable_structured_output": True}}, "sampling.enable_structured_output"),
        ({"use_legacy_module": False}, "use_legacy_module=False"),
        (
            {"model": {"kv_cache": {"enable_kvcache_swapping_to_host": True}}},
            "model.kv_cache.enable_kvcache_swapping_to_host",
        ),
    ],
    ids=str,
)
def test_what_needs_one_device_is_refused_with_several(values: dict[str, Any], name: str) -> None:
    model = values.pop("model", {}) | {"device_specs": ["cpu", "cpu"]}
    with pytest.raises(ConfigError, match=f"^{name}: needs one device, and .*=cpu,cpu names"):
        PipelineConfig(model=model, **values)


def test_each_replica_has_its_devices() -> None:
    gpus = [f"cuda:{number}" for number in range(4)]
    model = {"device_specs": gpus, "data_parallel_degree": 2}
    config = PipelineConfig(model=model, zmq_endpoint_base="ipc:///tmp/x")
    for number, devices in enumerate((gpus[:2], gpus[2:])):
        own = config.of_replica(number)
        assert own.is_resolved
        assert (own.model.device_specs, own.model.data_parallel_degree) == (devices, 1)
        assert own.model.kv_cache == config.model.kv_cache
    assert config.model.device_specs == gpus


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_replicas_share_a_device_and_its_memory(device: str) -> None:
    model = {"device_specs": [device], "data_parallel_degree": 3}
    draft = {"device_specs": [device]}
    config = PipelineConfig(model=model, draft_model=draft)
    own = config.of_replica(2)
    assert own.model.device_specs == [device]
    assert own.draft_model is not None
    assert own.draft_model.device_specs == [device]
    whole = config.model.kv_cache.device_memory_utilization
    assert own.model.kv_cache.device_memory_utilization == pytest.approx(whole / 3)


def test_adapters_go_with_replicas_of_one_device_each() -> None:
    """The devices of a replica count for what needs one device, not those of all replicas."""
    lora = {"enable_lora": True}
    model = {"device_specs": ["cpu", "cpu"], "data_parallel_degree": 2}
    assert PipelineConfig(model=model, lora=lora).is_resolved
    with pytest.raises(ConfigError, match=r"^lora: needs one device"):
        PipelineConfig(model={**model, "device_specs": ["cpu"] * 4}, lora=lora)


@pytest.mark.parametrize("name", UNSUPPORTED_FIELDS)
def test_unsupported_fields_are_refused(name: str) -> None:
    value = another_value(name)
    with pytest.raises(ConfigError) as caught:
        PipelineConfig(**nested(name, value))
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert f"is not available in this release: {UNSUPPORTED_FIELDS[name]}" in message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FIELDS))
def test_the_default_of_an_unsupported_field_can_be_set(name: str) -> None:
    default = field_at(name).get_default(call_default_factory=True)
    assert PipelineConfig(**nested(name, default)).is_resolved


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in UNSUPPORTED_VALUES.items() for value in values],
)
def test_unsupported_values_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} is not available"):
        PipelineConfig(**nested(name, value))


def test_max_length_is_one_value() -> None:
    config = unresolved(max_length=5)
    assert config.model.max_length == 5
    config.max_length = 6
    assert config.model.max_length == 6
    config.model = ModelConfig(served_model_name="other")
    assert (config.model.max_length, config.model.served_model_name) == (6, "other")
    with pytest.raises(AttributeError):
        config.model.max_length = 7  # type: ignore[misc]


def test_the_model_shows_what_the_pipeline_owns(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("hello")
    config = PipelineConfig(chat_template=template)
    model = config.model
    assert (model.enable_echo, model.pool_embeddings, model.chat_template) == (
        config.enable_echo,
        config.pool_embeddings,
        template,
    )


def test_a_template_that_looks_like_deep_json_is_a_template(tmp_path: Path) -> None:
    text = "[" * 100_000
    (tmp_path / "chat.jinja").write_text(text)
    config = PipelineConfig(chat_template=tmp_path / "chat.jinja")
    assert config.retrieve_chat_template() == text


def test_two_configurations_do_not_share_a_section() -> None:
    model = ModelConfig(served_model_name="one")
    first, second = PipelineConfig(model=model, max_length=1), unresolved(model=model, max_length=2)
    assert (first.model.max_length, second.model.max_length) == (1, 2)
    second.model.served_model_name = "two"
    assert first.model.served_model_name == "one"


def test_pickling_keeps_values_and_state() -> None:
    for config in (PipelineConfig(max_length=9), unresolved(max_length=9)):
        copy = pickle.loads(pickle.dumps(config))
        assert copy == config
        assert (copy.is_resolved, copy.model.max_length) == (config.is_resolved, 9)


@pytest.mark.parametrize("encoding", [None, *QuantizationEncoding])
def test_graph_quantization_encoding(encoding: QuantizationEncoding | None) -> None:
    quantised = {"int8", "gptq", "q4_k", "q4_0", "q6_k"}
    config = unresolved(model={"quantization_encoding": encoding})
    expected = encoding if encoding in quantised else None
    assert config.graph_quantization_encoding == expected


class RecordingSession:
    """Records what a kernel session would keep."""

    gpu_profiling = "unset"
    use_experimental_kernels = False
    use_vendor_blas = False
    pdl_level = -1


def test_configure_session() -> None:
    session = RecordingSession()
    config = unresolved(use_experimental_kernels="Yes", use_vendor_blas="1")
    config.configure_session(session)
    assert (session.gpu_profiling, session.use_experimental_kernels) == ("off", True)
    assert session.use_vendor_blas


@pytest.mark.parametrize(
    "values", [{"pdl_level": "3"}, {"use_vendor_blas": "maybe"}, {"use_experimental_kernels": ""}]
)
def test_configure_session_refuses_nonsense(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        unresolved(**values).configure_session(RecordingSession())


def test_the_names_of_roles() -> None:
    assert [role.value for role in PipelineRole] == [
        "prefill_and_decode",
        "prefill_only",
        "decode_only",
    ]

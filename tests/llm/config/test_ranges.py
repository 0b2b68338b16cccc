"""PipelineConfig refuses invalid values and unknown keys with the name of the field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from llm.config import PipelineConfig


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_length": -1}, "max_length"),
        ({"max_length": "many"}, "max_length"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_queue_size_tg": 0}, "max_queue_size_tg"),
        ({"min_batch_size_tg": -1}, "min_batch_size_tg"),
        ({"max_batch_input_tokens": 0}, "max_batch_input_tokens"),
        ({"max_num_steps": 0}, "max_num_steps"),
        ({"max_num_steps": -2}, "max_num_steps"),
        ({"kvcache_ce_watermark": 0.0}, "kvcache_ce_watermark"),
        ({"kvcache_ce_watermark": 1.01}, "kvcache_ce_watermark"),
        ({"kvcache_ce_watermark": float("nan")}, "kvcache_ce_watermark"),
        ({"ce_delay_ms": -0.5}, "ce_delay_ms"),
        ({"ep_size": 0}, "ep_size"),
        ({"pipeline_role": "everything"}, "pipeline_role"),
        ({"max_batch_total_tokens": 0}, "max_batch_total_tokens"),
        ({"enable_echo": "perhaps"}, "enable_echo"),
        ({"custom_architectures": "one"}, "custom_architectures"),
        ({"profiling": {"gpu_profiling": "loud"}}, "profiling.gpu_profiling"),
        ({"lora": {"max_lora_rank": 0}}, "lora.max_lora_rank"),
        ({"lora": {"max_num_loras": 0}}, "lora.max_num_loras"),
        ({"speculative": {"speculative_method": "guess"}}, "speculative.speculative_method"),
        ({"speculative": {"num_speculative_tokens": 0}}, "speculative.num_speculative_tokens"),
        ({"speculative": {"rejection_strategy": "all"}}, "speculative.rejection_strategy"),
        ({"sampling": {"in_dtype": "int8"}}, "sampling.in_dtype"),
        ({"model": {"data_parallel_degree": 0}}, "model.data_parallel_degree"),
        ({"model": {"kv_cache": {"kv_cache_format": "int4"}}}, "model.kv_cache.kv_cache_format"),
        ({"model": {"kv_cache": {"device_memory_utilization": 0}}}, "model.kv_cache.device_mem"),
        ({"model": {"kv_cache": {"device_memory_utilization": 1.1}}}, "model.kv_cache.device_mem"),
        ({"model": {"kv_cache": {"host_kvcache_swap_space_gb": -1}}}, "model.kv_cache.host_kv"),
        ({"draft_model": {"device_specs": ["tpu"]}}, "draft_model.device_specs"),
        ({"zmq_endpoint_base": "http://localhost"}, "zmq_endpoint_base"),
        ({"zmq_endpoint_base": "ipc:///tmp/" + "x" * 100}, "zmq_endpoint_base"),
        ({"model": {"device_specs": ["tpu"]}}, "model.device_specs"),
        ({"model": {"device_specs": []}}, "model.device_specs"),
        ({"model": {"quantization_encoding": "int3"}}, "model.quantization_encoding"),
        ({"model": {"kv_cache": {"kv_cache_page_size": 0}}}, "model.kv_cache.kv_cache_page_size"),
        ({"model": {"kv_cache": {"num_pages": 1}}}, "model.kv_cache.num_pages"),
    ],
)
def test_a_wrong_value_names_its_field(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PipelineConfig(**values)
    location = ".".join(str(part) for part in caught.value.errors()[0]["loc"])
    assert location.startswith(named)


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ({"max_lenght": 5}, "max_length"),
        ({"model": {"kv_cache": {"page_size": 5}}}, "kv_cache_page_size"),
        ({"model": {"model_pth": "."}}, "model_path"),
        ({"sampling": {"enable_penalty": True}}, "enable_penalties"),
    ],
)
def test_an_unknown_key_names_the_nearest(values: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ValidationError, match=f"did you mean '{nearest}'"):
        PipelineConfig(**values)


def test_an_unknown_key_like_no_other_is_named_alone() -> None:
    with pytest.raises(ValidationError, match="unknown key 'qqq'") as caught:
        PipelineConfig(qqq=1)
    assert "did you mean" not in str(caught.value)

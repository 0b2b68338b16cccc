"""Roles of engines: what they need, and models that have no pages to move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm.config import PipelineConfig
from llm.engine.engine import create_engine
from llm.errors import ConfigError
from tests.fakes import build_embedding_checkpoint
from tests.llm.lfm2_checkpoints import write_lfm2

CACHE = {"kv_cache_page_size": 16, "num_pages": 16}


@pytest.mark.parametrize("role", ["prefill_only", "decode_only"])
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": {"device_specs": ["cpu", "cpu"]}}, "several devices for one engine"),
        ({"model": {"kv_cache": {"enable_prefix_caching": False}}}, "enable_prefix_caching=False"),
        ({"draft_model": {}}, "draft_model: a draft needs pages of its own"),
    ],
)
def test_engines_that_cannot_move_pages_are_refused(
    role: str, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"pipeline_role={role} excludes .*{reason}"):
        PipelineConfig(pipeline_role=role, **values)


@pytest.mark.parametrize("role", ["prefill_and_decode", "prefill_only"])
def test_endpoints_of_prompts_need_an_engine_that_decodes_only(role: str) -> None:
    with pytest.raises(ConfigError, match="prefill_endpoints needs pipeline_role=decode_only"):
        PipelineConfig(pipeline_role=role, prefill_endpoints=["tcp://one.example:5555"])


def test_an_endpoint_of_prompts_is_an_address() -> None:
    with pytest.raises(ValueError, match="must start with ipc://"):
        PipelineConfig(pipeline_role="decode_only", prefill_endpoints=["one.example:5555"])


@pytest.mark.parametrize("kind", ["recurrent", "embedding"])
def test_models_that_keep_more_than_pages_are_refused(tmp_path: Path, kind: str) -> None:
    write = write_lfm2 if kind == "recurrent" else build_embedding_checkpoint
    write(tmp_path / kind)
    model = {"model_path": str(tmp_path / kind), "kv_cache": CACHE}
    config = PipelineConfig(model=model, pipeline_role="prefill_only", max_batch_size=2)
    with pytest.raises(ConfigError, match="pipeline_role=prefill_only needs a model that generate"):
        create_engine(config)

"""1,024 requests at once on a pool for a few."""

from __future__ import annotations

from pathlib import Path

from tests.llm.engine.flood import Flood, throw
from tests.llm.llama_checkpoints import pipeline_config, write_llama


def test_a_flood_on_a_small_pool(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    config = pipeline_config(folder, num_pages=80, page_size=4, max_length=24, max_batch_size=64)
    throw(config, Flood(1024, prompt=6, output=9))

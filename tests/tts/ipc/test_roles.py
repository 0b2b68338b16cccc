"""Prompts computed by one engine and decoded by another: same tokens, all pages given back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from llm import ConfigError, PipelineRole, Request, SamplingParams
from tests.fakes import build_text_checkpoint
from tests.tts.engine.jobs import run
from tests.tts.ipc import roles as parts
from tests.tts.ipc.remote_engine import new_base, new_tcp_base, wait_until
from tests.tts.ipc.roles import PAGE, prompt, requests, roles, tokens_of
from tts.errors import NotAvailableError
from tts.ipc import inbox
from tts.ipc.decode_client import DecodeClient

OVERLAP = {"enable_overlap_scheduler": True, "force": True}
CHUNKS = {"max_batch_input_tokens": 40, "max_batch_size": 8}


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("decode", [{}, OVERLAP], ids=["steps", "overlap"])
@pytest.mark.parametrize("prefill", [{}, CHUNKS, OVERLAP], ids=["whole", "chunks", "overlap"])
def test_tokens_are_those_of_one_engine(
    text_checkpoint: Path, prefill: dict[str, Any], decode: dict[str, Any], one_by_one: bool
) -> None:
    async def scenario() -> None:
        asked = requests()
        expected = await parts.oracle(text_checkpoint, asked)
        async with roles(text_checkpoint, prefill=prefill, **decode) as served:
            if one_by_one:
                found = [await tokens_of(served.client, request) for request in asked]
                # Nothing but the last page of a prompt is computed by the engine that decodes.
                assert [cached for _, cached in found] == [
                    (len(request.prompt_ids) - 1) // PAGE * PAGE for request in asked
                ]
                assert [tokens for tokens, _ in found] == expected
            else:
                assert await parts.all_tokens(served.client, asked) == expected
            assert served.sent == [served.received]
            assert served.received == sum((len(r.prompt_ids) - 1) // PAGE for r in asked)
            await served.check_released()

    run(scenario)

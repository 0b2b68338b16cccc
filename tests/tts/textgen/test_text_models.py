"""A language model alone: TextService equals transformers, SpeechService refuses calls."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm import CheckpointError, ConfigError
from tests.tts.serving import Serving, reason_of, run_with_server, stream_request
from tests.tts.text_models import WRITERS
from tts import serve
from tts.factory import Service, create_service
from tts.v1 import common_pb2, speech_pb2
from tts.v1 import text_pb2 as pb

PROMPT = "Once upon a time, déjà 東"
NEW_TOKENS = 24
USER, ASSISTANT = pb.CHAT_ROLE_USER, pb.CHAT_ROLE_ASSISTANT
CONVERSATION = [(USER, "What time is it?"), (ASSISTANT, "Late."), (USER, "<|im_end|></s>Why?")]


@dataclass(frozen=True)
class Model:
    """A served checkpoint and the same one in transformers."""

    kind: str
    folder: Path
    service: Service

    def expected(self, ids: list[int]) -> tuple[list[int], str]:
        """Greedy tokens, and their text, of transformers."""
        twin = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        with torch.no_grad():
            answer = twin.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        new = answer[0, len(ids) :].tolist()
        ends = self.service.text.stop_token_ids
        kept = new[:-1] if new[-1] in ends else new
        return kept, tokenizer.decode(kept, skip_special_tokens=True)


@pytest.fixture(scope="module", params=WRITERS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = WRITERS[request.param](tmp_path_factory.mktemp("text") / request.param)
    flags = ["--model", str(folder), "--model.kv-cache.num-pages", "32", "--offline"]
    flags += ["--model.quantization-encoding", "float32"]  # as the reference
    config = serve.read_config(serve.build_parser().parse_args(flags)).model
    service = create_service(config)
    yield Model(request.param, folder, service)
    asyncio.run(service.client.close())


def request(**source: Any) -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    config = pb.GenerationConfig(sampling=sampling)
    return pb.GenerateRequest(config=config, input=pb.GenerationInput(**source))


def chat(messages: list[tuple[int, str]]) -> pb.ChatMessages:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.ChatMessages(messages=turns)


def test_a_prompt_is_continued_as_transformers_does(model: Model) -> None:
    ids = AutoTokenizer.from_pretrained(model.folder)(PROMPT)["input_ids"]
    assert list(model.service.prompts.text_prompt(PROMPT)) == ids
    expected = model.expected(ids)

    async def ask(served: Serving) -> None:
        answer = await served.text.Generate(request(prompt=PROMPT))
        assert list(answer.token_ids) == expected[0]
        if model.kind != "mistral":  # the libraries differ in how many U+FFFD broken bytes are
            assert answer.text == expected[1]
        assert answer.usage.prompt_tokens == len(ids)

    run_with_server(model.service, ask)


def test_a_conversation_is_rendered_as_transformers_does(model: Model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    roles = {USER: "user", ASSISTANT: "assistant"}
    plain = [*CONVERSATION[:2], (USER, "Why?")]
    turns = [{"role": roles[role], "content": content} for role, content in plain]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]

    async def ask(served: Serving) -> tuple[pb.GenerateResponse, pb.GenerateResponse]:
        wanted = served.text.Generate(request(chat=chat(plain)))
        return await wanted, await served.text.Generate(request(chat=chat(CONVERSATION)))

    answer, guarded = run_with_server(model.service, ask)
    assert answer.usage.prompt_tokens == len(ids)
    assert list(answer.token_ids) == model.expected(ids)[0]
    # What a user writes is text, whatever it looks like.
    assert guarded.usage.prompt_tokens > answer.usage.prompt_tokens + 2


def test_the_vocabulary_may_be_padded(model: Model) -> None:
    """Rows of the table beyond the tokenizer's ids are never an error."""
    assert model.service.text.max_seq_len == 512

    async def ask(served: Serving) -> None:
        answer = await served.text.Generate(request(token_ids=pb.TokenIds(ids=[3, 4, 5])))
        assert len(answer.token_ids) <= NEW_TOKENS

    run_with_server(model.service, ask)


def test_a_text_model_refuses_synthesis(model: Model) -> None:
    assert (model.service.family, model.service.synthesizer) == ("", None)

    async def ask(served: Serving) -> None:
        calls = [
            served.speech.SynthesizeStream(stream_request()).read(),
            served.speech.ListVoices(speech_pb2.ListVoicesRequest()),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "writes text only" in (caught.value.details() or "")
            assert reason_of(caught.value)

    run_with_server(model.service, ask)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "half a tokenizer": (lambda f: truncate(f / "tokenizer.json"), r"tokenizer\.json cannot be"),
    "an empty tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        r"tokenizer\.json has no tokenizer model",
    ),
    "an odd tokenizer": (
        lambda f: change(f / "tokenizer.json", model={"type": "BPE", "vocab": [1], "merges": []}),
        "merges of its BPE model are broken",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), r"cannot read .*config\.json"),
    "sizes in words": (
        lambda f: change(f / "config.json", hidden_size="64"),
        "hidden_size='64' must be a positive whole number",
    ),
    "no heads": (
        lambda f: change(f / "config.json", num_attention_heads=0),
        "num_attention_heads=0 must be a positive",
    ),
    "another size": (
        lambda f: change(f / "config.json", hidden_size=128),
        "embed_tokens.weight' is",
    ),
    "half the weights": (lambda f: truncate(f / "model.safetensors"), r"cannot read 'model\."),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
    "a web page": (
        lambda f: (f / "model.safetensors").write_text("<html>not found</html>"),
        "is not a safetensors file",
    ),
    "a broken template": (
        lambda f: (f / "chat_template.jinja").write_text("{% for %}"),
        "the chat template fails",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS["qwen"](tmp_path_factory.mktemp("whole") / "qwen")


@pytest.mark.parametrize("what", BROKEN)
def test_a_damaged_folder_is_reported_before_serving(
    whole: Path, tmp_path: Path, what: str
) -> None:
    spoil, message = BROKEN[what]
    folder = Path(shutil.copytree(whole, tmp_path / "broken"))
    spoil(folder)
    flags = ["--model", str(folder), "--model.kv-cache.num-pages", "8"]
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read_and_load(flags)


def read_and_load(flags: list[str]) -> None:
    """Load the configuration and the service as `tts.serve` does."""
    config = serve.read_config(serve.build_parser().parse_args(flags)).model
    service = create_service(config)
    try:
        asyncio.run(service.warm_up())
    finally:
        asyncio.run(service.client.close())

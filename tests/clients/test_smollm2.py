"""SmolLM2-135M-Instruct, a published and trained model, on this server, compared with
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.divergence import (
    PROMPTS,
    Divergence,
    Prompts,
    measure,
)
from benchmarks.report import lines_of
from llm.config import QuantizationEncoding
from tests.clients.smollm2 import gguf_file
from tests.llm.llama_checkpoints import reference
from tests.llm.lora.adapters import merge, write_adapter
from tests.speech_server import serving
from tts.checkpoint.chat import ChatMessage, ChatRole
from tts.checkpoint.hub import HubOptions, find_checkpoint
from tts.checkpoint.tokenizer import IncrementalDetokenizer
from tts.families.prompt import PromptBuilder
from tts.v1 import common_pb2
from tts.v1 import text_pb2 as pb
from tts.v1.text_pb2_grpc import TextServiceStub

pytestmark = pytest.mark.timeout(900)  # minutes on a busy machine, for one minute of work

TEXTS = lines_of(PROMPTS)
NUM_TOKENS = 32
CALL_S = 600
LOGIT_ERROR = LOGPROB_ERROR = 1e-3
INT8, BFLOAT16 = QuantizationEncoding.INT8, QuantizationEncoding.BFLOAT16
END = 2  # <|im_end|>, which is never part of an answer's text
QUESTION = "What is the capital of France? Answer in one short sentence."
PLAIN_TEXTS = [
    "Hello, world!",
    "a  1  22\t\n\n 3.14 x=10**9",
    "Él dijo «¿qué?» — 東京は夜です 🙂",
    "def f(x):\n    return x[1:-1]  # don't, we'll, I'M",
    "<|im_start|>user\nhi<|im_end|>\n",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "color"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random adapter of rank 4, for every matrix of every layer."""
    return write_adapter(tmp_path_factory.mktemp("adapters") / "random", folder, gain=0.02)


@pytest.fixture(scope="module")
def transformers_model(folder: Path) -> PreTrainedModel:
    """Load the same checkpoint in transformers."""
    return reference(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    found = AutoTokenizer.from_pretrained(folder)
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


@pytest.fixture(scope="module")
def text(folder: Path, adapter: Path) -> Iterator[TextServiceStub]:
    """TextService of a server process with the model in float32."""
    lora = {"enable_lora": True, "lora_paths": [f"random={adapter}"], "max_lora_rank": 4}
    flags = ["--model.quantization-encoding", "float32", "--offline", "--enable-echo"]
    flags += ["--sampling.enable-structured-output", "--lora", json.dumps(lora)]
    with serving(str(folder), flags) as server, grpc.insecure_channel(server.address) as channel:
        yield TextServiceStub(channel)


def generation(source: dict[str, Any], sampling: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return fields of a request, greedy unless `sampling` says otherwise."""
    params = common_pb2.SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS} | sampling)
    config = pb.GenerationConfig(sampling=params, **values)
    return {"config": config, "input": pb.GenerationInput(**source)}


def answers(
    text: TextServiceStub, prompts: Sequence[str], **values: Any
) -> list[pb.GenerateResponse]:
    """Return the texts that follow each prompt, to the full length; all are requested at once."""
    sampling = {"ignore_eos": True}
    requests = [
        pb.GenerateRequest(**generation({"prompt": prompt}, sampling, **values))
        for prompt in prompts
    ]
    calls = [text.Generate.future(request, timeout=CALL_S) for request in requests]
    return [call.result() for call in calls]


def chat(question: str) -> dict[str, Any]:
    messages = [pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=question)]
    return {"chat": pb.ChatMessages(messages=messages)}


def greedy(model: PreTrainedModel, ids: Sequence[int], num_tokens: int, **values: Any) -> list[int]:
    """Return the tokens that transformers generates, past its end tokens unless `values` name
    some.
    """
    prompt = torch.tensor([list(ids)])
    options = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False} | values
    generate: Any = model.generate
    with torch.inference_mode():
        found = generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, **options
        )
    return found[0, len(ids) :].tolist()


def told(ids: Sequence[int]) -> list[int]:
    """Return the tokens that are part of an answer's text."""
    return [token for token in ids if token != END]


@pytest.fixture(scope="module")
def expected(
    transformers_model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> list[list[int]]:
    """Return transformers' greedy tokens behind each prompt."""
    return [
        greedy(transformers_model, tokenizer(prompt)["input_ids"], NUM_TOKENS) for prompt in TEXTS
    ]


def test_the_converted_tokenizer_is_the_packaged_one(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = GGUFReader(gguf_file()).fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert len(tokenizer) == len(tokens) == 49_152
    assert tokenizer("The capital of France is")["input_ids"] == [504, 3575, 282, 4649, 314]
    for plain in PLAIN_TEXTS:
        assert tokenizer.decode(tokenizer(plain)["input_ids"]) == plain
    one, two = (tokenizer(digits)["input_ids"] for digits in ("x 7", "x 77"))
    assert two == [*one, one[-1]], "each digit is a piece of its own"
    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    assert tokenizer.decode([1, 504, 2, 0], skip_special_tokens=True) == "The"


def test_our_tokenizer_gives_the_ids_of_transformers(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    builder = PromptBuilder.load(folder)
    for plain in [*TEXTS, *PLAIN_TEXTS[:-1]]:
        ids = tokenizer(plain)["input_ids"]
        assert list(builder.text_prompt(plain)) == ids
        written = IncrementalDetokenizer(builder.tokenizer)
        assert "".join([*(written.push([token]) for token in ids), written.finish()]) == plain


def test_greedy_text_is_that_of_transformers(
    text: TextServiceStub, tokenizer: PreTrainedTokenizerFast, expected: list[list[int]]
) -> None:
    assert len(TEXTS) == 20
    found = answers(text, TEXTS)
    assert [list(answer.token_ids) for answer in found] == [told(ids) for ids in expected]
    assert {answer.usage.output_tokens for answer in found} == {NUM_TOKENS}
    assert expected[0][:5] == [7042, 30, 198, 198, 504], "… Paris."
    for answer, ids in zip(found, expected, strict=True):
        assert answer.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_logits_are_those_of_transformers(
    folder: Path, transformers_model: PreTrainedModel, expected: list[list[int]]
) -> None:
    """Logits of each prompt, and of each token that follows it, with cached keys and values."""
    prompts = Prompts.read(folder, TEXTS, NUM_TOKENS)
    (ours,) = prompts.continued(QuantizationEncoding.FLOAT32, None)
    assert ours.ids.tolist() == expected
    for ids, new, logits in zip(prompts.ids, expected, ours.logits, strict=True):
        with torch.inference_mode():
            theirs = transformers_model(torch.tensor([[*ids, *new[:-1]]])).logits[0, len(ids) - 1 :]
        assert (logits - theirs).abs().max() <= LOGIT_ERROR


def test_a_chat_is_rendered_and_answered_as_by_transformers(
    text: TextServiceStub,
    folder: Path,
    transformers_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The model ends its answer with its end token, which is not part of the text."""
    turns = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    message = ChatMessage(ChatRole.USER, QUESTION)
    assert list(PromptBuilder.load(folder).chat_prompt([message])) == ids
    request = pb.GenerateRequest(**generation(chat(QUESTION), {"max_tokens": 200}))
    answer = text.Generate(request, timeout=CALL_S)
    assert answer.usage.prompt_tokens == len(ids)
    *new, end = greedy(transformers_model, ids, 200, eos_token_id=END)
    assert end == tokenizer.eos_token_id == END
    assert list(answer.token_ids) == new
    assert answer.finish_reason == common_pb2.FINISH_REASON_STOP
    assert answer.text == tokenizer.decode(new)
    assert "Paris" in answer.text


def test_a_conversation_is_rendered_as_by_transformers(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    turns = [("system", "Be brief."), ("user", "Hi  1 2"), ("assistant", "Hello."), ("user", "é?")]
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True
    )
    messages = [ChatMessage(ChatRole(role), content) for role, content in turns]
    assert list(PromptBuilder.load(folder).chat_prompt(messages)) == rendered["input_ids"]


def test_a_document_fits_its_schema(text: TextServiceStub) -> None:
    question = chat("Describe a person as JSON with a name, an age and a favorite color.")
    for seed in range(4):
        sampling = {"temperature": 0.8, "seed": seed, "max_tokens": 200}
        values = {"json_schema": json.dumps(SCHEMA)}
        request = pb.GenerateRequest(**generation(question, sampling, **values))
        answer = text.Generate(request, timeout=CALL_S)
        assert answer.finish_reason == common_pb2.FINISH_REASON_STOP
        found = json.loads(answer.text)
        assert found.keys() == {"name", "age", "color"}
        assert isinstance(found["name"], str)
        assert type(found["age"]) is int
        assert 0 <= found["age"] <= 150
        assert found["color"] in ("red", "green", "blue")


def test_an_adapter_gives_the_text_of_merged_weights(
    text: TextServiceStub,
    folder: Path,
    adapter: Path,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    expected: list[list[int]],
) -> None:
    merged = reference(merge(folder, adapter, tmp_path / "merged"))
    prompts = TEXTS[:4]
    found = [list(answer.token_ids) for answer in answers(text, prompts, lora="random")]
    assert all(ids != told(base) for ids, base in zip(found, expected, strict=False))
    theirs = [greedy(merged, tokenizer(p)["input_ids"], NUM_TOKENS) for p in prompts]
    assert found == [told(ids) for ids in theirs]


def test_log_probabilities_are_those_of_transformers(
    text: TextServiceStub,
    transformers_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    expected: list[list[int]],
) -> None:
    """Log-probabilities of the written tokens, of their alternatives, and of the prompt."""
    prompts = TEXTS[:4]
    found = answers(text, prompts, top_logprobs=5, echo=True)
    for prompt, new, answer in zip(prompts, expected, found, strict=False):
        ids = tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            logprobs = (
                transformers_model(torch.tensor([[*ids, *new[:-1]]])).logits[0].log_softmax(-1)
            )
        assert [entry.token_id for entry in answer.prompt_logprobs] == ids
        assert [entry.token_id for entry in answer.logprobs] == told(new)
        scored = [*answer.prompt_logprobs[1:], *answer.logprobs]
        rows = [row for row, token in zip(logprobs, [*ids[1:], *new], strict=True) if token != END]
        for entry, theirs in zip(scored, rows, strict=True):
            best = theirs.topk(5)
            assert entry.logprob == pytest.approx(theirs[entry.token_id].item(), abs=LOGPROB_ERROR)
            ours = [top.logprob for top in entry.top]
            assert ours == pytest.approx(best.values.tolist(), abs=LOGPROB_ERROR)


def test_streamed_text_is_that_of_one_answer(text: TextServiceStub) -> None:
    for source in (chat("Write two short sentences about the sea."), chat("Write π in digits.")):
        sampling = {"temperature": 0.8, "seed": 3, "max_tokens": 60}
        whole = text.Generate(pb.GenerateRequest(**generation(source, sampling)), timeout=CALL_S)
        request = pb.GenerateStreamRequest(**generation(source, sampling))
        deltas = [event.delta for event in text.GenerateStream(request, timeout=CALL_S)]
        assert "".join(delta.text for delta in deltas) == whole.text != ""
        assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)


def test_the_default_format_gives_a_prompt_the_same_text_alone_and_in_a_batch(
    folder: Path, expected: list[list[int]]
) -> None:
    """The format is float32: other formats give some of the prompts other texts."""
    flags = ["--offline", "--no-model.kv-cache.enable-prefix-caching"]
    with serving(str(folder), flags) as server, grpc.insecure_channel(server.address) as channel:
        text = TextServiceStub(channel)
        together = [list(answer.token_ids) for answer in answers(text, TEXTS)]
        alone = [list(answers(text, [prompt])[0].token_ids) for prompt in TEXTS]
    assert together == alone
    assert together == [told(ids) for ids in expected]


@pytest.fixture(scope="module")
def divergences(folder: Path) -> dict[QuantizationEncoding, Divergence]:
    """Compare int8 and bfloat16 with float32."""
    return dict(measure(Prompts.read(folder, TEXTS, NUM_TOKENS), [INT8, BFLOAT16]))


def test_narrower_formats_stay_near_float32(
    divergences: dict[QuantizationEncoding, Divergence],
) -> None:
    """docs/cpu.md has the figures; a broken matrix gives far lower ones."""
    for found in divergences.values():
        assert found.agreement >= 0.94, found
        assert found.logprob_error <= 0.1, found
        assert found.worst_logit > 0, found


def test_the_file_is_served_as_it_is(
    folder: Path,
    transformers_model: PreTrainedModel,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--model FILE.gguf`: the same prompts, greedy text and logits, without a conversion."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = find_checkpoint(str(gguf_file()), HubOptions(user_cache=tmp_path))
    prompts, converted = (Prompts.read(path, TEXTS, NUM_TOKENS) for path in (own, folder))
    assert prompts.ids == converted.ids
    question = [ChatMessage(ChatRole.USER, QUESTION)]
    (chat_ids, same) = (PromptBuilder.load(path).chat_prompt(question) for path in (own, folder))
    assert chat_ids == same
    (ours,) = prompts.continued(QuantizationEncoding.FLOAT32, None)
    assert ours.ids.tolist() == expected
    ids, new, logits = prompts.ids[0], expected[0], ours.logits[0]
    with torch.inference_mode():
        theirs = transformers_model(torch.tensor([[*ids, *new[:-1]]])).logits[0, len(ids) - 1 :]
    assert (logits - theirs).abs().max() <= LOGIT_ERROR
    flags = ["--model.quantization-encoding", "float32", "--offline"]
    model = str(gguf_file())
    with serving(model, flags) as server, grpc.insecure_channel(server.address) as channel:
        (answer,) = answers(TextServiceStub(channel), TEXTS[:1])
    assert list(answer.token_ids) == told(expected[0])

"""Prompts: the embedded family's turns, chat templates, and text that stays text."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from decoder.codecs.ramp import ramp_spec
from llm import CheckpointError, RequestError
from tests.tts.family_checkpoints import qwen_tokenizer
from tests.vocabulary import ANY_VOICE, END_OF_SPEECH, FIRST_CODE, FIRST_VOICE, START_OF_SPEECH
from tts.checkpoint.chat import GUARDS, ChatMessage, ChatRole, ChatTemplate, load_chat_template
from tts.checkpoint.tokenizer import IncrementalDetokenizer, TextTokenizer
from tts.errors import InvalidRequestError, PreconditionError
from tts.families.prompt import LONG_CHARACTERS, PromptBuilder, encoded
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice, VoicePrompt

SPEC = ramp_spec({"codebook_size": 64})


@pytest.fixture(scope="module")
def prompts(tiny_checkpoint: Path) -> PromptBuilder:
    return PromptBuilder.load(tiny_checkpoint, SPEC)


def user(text: str) -> ChatMessage:
    return ChatMessage(ChatRole.USER, text)


def with_template(folder: Path, template: str) -> PromptBuilder:
    return PromptBuilder.load(folder, SPEC, template)


# --- text


def test_long_texts_are_encoded_outside_the_event_loop() -> None:
    threads: list[int] = []

    def work(text: str) -> tuple[int, ...]:
        threads.append(threading.get_ident())
        return (len(text),)

    async def scenario() -> None:
        for length in (LONG_CHARACTERS, LONG_CHARACTERS + 1):
            assert await encoded(length, work, "x" * length) == (length,)

    asyncio.run(scenario())
    assert threads[0] == threading.get_ident() != threads[1]


def test_added_tokens_that_are_plain_text_may_be_written(tmp_path: Path) -> None:
    """Tokens like the line breaks of Gemma: in the text model, listed again, and not special."""
    data, _ = qwen_tokenizer({"<|im_end|>": 400})
    letters = data["model"]["vocab"]
    end = data["added_tokens"][0]
    line_break = {**end, "id": letters["Ċ"], "content": "\n", "special": False}
    steering = {**end, "id": letters["z"], "content": "z"}
    data["added_tokens"] += [line_break, steering]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    tokenizer = TextTokenizer(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("a\nb")
    assert ids == [letters["a"], letters["Ċ"], letters["b"]]
    assert tokenizer.decode(ids) == "a\nb"
    with pytest.raises(RequestError, match="a control token of this model"):
        tokenizer.encode("a\nz")


# --- speech


def test_a_built_in_voice_is_one_token(prompts: PromptBuilder, tiny_checkpoint: Path) -> None:
    voice = VoiceRegistry.load(tiny_checkpoint / "voices.json").get("owen")
    ids = prompts.speech_prompt("hi there", voice)
    assert ids == (FIRST_VOICE + 1, *b"hi there", START_OF_SPEECH)


def test_a_cloned_voice_is_a_first_turn(prompts: PromptBuilder) -> None:
    voice = Voice("me", prompt=VoicePrompt((5, 0, 63), "my words"))
    assert prompts.speech_prompt("hi", voice) == (
        ANY_VOICE,
        *b"my words",
        START_OF_SPEECH,
        *(FIRST_CODE + code for code in (5, 0, 63)),
        END_OF_SPEECH,
        *b"hi",
        START_OF_SPEECH,
    )


def test_control_tokens_in_text_and_transcript_are_encoded_as_characters(
    prompts: PromptBuilder,
) -> None:
    trick = "<|end_of_speech|><|s_12|>"
    ids = prompts.speech_prompt(trick, Voice("me", prompt=VoicePrompt((1,), trick)))
    assert sum(i == END_OF_SPEECH for i in ids) == 1
    assert sum(i >= FIRST_CODE for i in ids) == 1


def test_a_voice_with_an_unknown_token_is_a_checkpoint_error(prompts: PromptBuilder) -> None:
    with pytest.raises(CheckpointError, match=r"no token <\|voice_99\|>"):
        prompts.speech_prompt("hi", Voice("x", control_token="<|voice_99|>"))


def test_an_unknown_family_lists_the_known_ones(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "speech.json").write_text('{"family": "nosuch"}')
    with pytest.raises(CheckpointError, match=r"unknown family 'nosuch'; supported: embedded"):
        PromptBuilder.load(tmp_path, SPEC)


def test_a_text_model_refuses_speech_prompts(text_checkpoint: Path) -> None:
    prompts = PromptBuilder.load(text_checkpoint)
    assert prompts.vocabulary is None
    with pytest.raises(PreconditionError, match="text only"):
        prompts.speech_prompt("hi", Voice("x", control_token="<|voice_0|>"))


# --- text


def test_a_plain_prompt_is_its_text(prompts: PromptBuilder) -> None:
    assert prompts.text_prompt("<|pad|>text") == tuple(b"<|pad|>text")
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        prompts.text_prompt("")


def test_generated_ids_become_text(prompts: PromptBuilder) -> None:
    stream = IncrementalDetokenizer(prompts.tokenizer)
    assert stream.push(prompts.text_prompt("né")) + stream.finish() == "né"


# --- chat


def test_the_checkpoints_template_is_rendered(prompts: PromptBuilder) -> None:
    messages = [ChatMessage(ChatRole.SYSTEM, "be brief"), user("hi")]
    text = "system: be brief\nuser: hi\nassistant: "
    assert prompts.can_chat
    assert prompts.chat_prompt(messages) == tuple(text.encode())


MARKED = "{% for m in messages %}<|voice_1|>{{ m.content }}<|end_of_text|>{% endfor %}"


def test_control_tokens_of_the_template_are_encoded_as_tokens(tiny_checkpoint: Path) -> None:
    ids = with_template(tiny_checkpoint, MARKED).chat_prompt([user("a"), user("b")])
    assert ids == (FIRST_VOICE + 1, 97, 260, FIRST_VOICE + 1, 98, 260)


@pytest.mark.parametrize(
    "content",
    [
        "<|end_of_text|>",
        "x<|s_1|><|s_2|>y",
        "<<|pad|>",
        "<|<|pad|>|>",
        "ends with <|end_of",
        "ends with <",
        "<|s_",
        f"{GUARDS[0]}<|pad|>",
    ],
)
def test_control_tokens_of_a_message_are_encoded_as_characters(
    tiny_checkpoint: Path, content: str
) -> None:
    prompts = with_template(tiny_checkpoint, MARKED)
    first, *middle, last = prompts.chat_prompt([user(content)])
    assert bytes(middle).decode() == content
    assert (first, last) == (FIRST_VOICE + 1, 260)


def test_neighbouring_messages_cannot_form_a_control_token(tiny_checkpoint: Path) -> None:
    prompts = with_template(tiny_checkpoint, "{% for m in messages %}{{ m.content }}{% endfor %}")
    ids = prompts.chat_prompt([user("<|p"), user("ad|>")])
    assert bytes(ids) == b"<|pad|>"


def test_filters_of_the_template_see_the_plain_content(tiny_checkpoint: Path) -> None:
    prompts = with_template(tiny_checkpoint, "{{ messages[0].content | trim | tojson }}")
    assert bytes(prompts.chat_prompt([user('  "<|pad|>" ')])) == b'"\\"<|pad|>\\""'


def test_messages_full_of_noncharacters_are_refused(prompts: PromptBuilder) -> None:
    with pytest.raises(InvalidRequestError, match="noncharacters"):
        prompts.chat_prompt([user("".join(GUARDS))])


def test_a_conversation_that_the_template_refuses_is_an_invalid_argument(
    tiny_checkpoint: Path,
) -> None:
    prompts = with_template(tiny_checkpoint, "{{ raise_exception('user must begin') }}")
    with pytest.raises(InvalidRequestError, match="user must begin"):
        prompts.chat_prompt([user("hi")])


@pytest.mark.parametrize("messages", [[], [user("")]])
def test_an_empty_conversation_is_refused(
    tiny_checkpoint: Path, messages: list[ChatMessage]
) -> None:
    prompts = with_template(tiny_checkpoint, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequestError, match=r"input\.chat"):
        prompts.chat_prompt(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% for %}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        pytest.param("{{ " + "[" * 10_000, id="deep"),
    ],
)
def test_broken_and_escaping_templates_fail(tiny_checkpoint: Path, template: str) -> None:
    with pytest.raises(CheckpointError, match="chat template fails"):
        with_template(tiny_checkpoint, template).chat_prompt([user("hi")])


def test_without_a_template_a_chat_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_checkpoint / "tokenizer.json").read_bytes())
    prompts = PromptBuilder.load(tmp_path)
    assert not prompts.can_chat
    with pytest.raises(PreconditionError, match="no chat template"):
        prompts.chat_prompt([user("hi")])


def test_locations_of_templates(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("from a file: {{ bos_token }}")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert rendered(load_chat_template(tmp_path)) == "from a file: <s>"
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert rendered(load_chat_template(tmp_path)) == "named"
    assert rendered(load_chat_template(tmp_path, "{{ 'given' }}")) == "given"
    other = tmp_path / "other.jinja"
    other.write_text("other")
    assert rendered(load_chat_template(tmp_path, str(other))) == "other"
    with pytest.raises(CheckpointError, match="chat_template"):
        load_chat_template(tmp_path, str(tmp_path / "absent.jinja"))


def rendered(template: ChatTemplate | None) -> str:
    assert template is not None
    return template.render([user("hi")])


def test_templates_have_the_functions_that_published_ones_use() -> None:
    source = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ strftime_now('%Y') | length }}{% endfor %}"
    )
    assert ChatTemplate(source).render([user("a"), user("b")]) == "4"


def test_templates_may_use_generation_marks_and_tools() -> None:
    """Templates render as in transformers, with nothing marked and no tools."""
    source = (
        "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
        "{% if tools is not none %}tools{% endif %}{{ documents is none }}"
    )
    assert ChatTemplate(source).render([user("a"), user("b")]) == "[a][b]True"


@pytest.mark.parametrize("source", ["{{ 1 + 'a' }}", "{% generation %}", "{{ x.y.z }}"])
def test_a_broken_template_is_a_checkpoint_error(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(source).render([user("a")])

"""`--help` and `--help-all`: what they show can be set, and the defaults shown are those used."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from llm import KVCacheConfig, ModelConfig, StrictModel
from llm.speculative.draft import OWN_CACHE_FIELDS
from tts import say, serve
from tts.cli.options import Chunking, ModelChoice, read_options
from tts.config.flags import FIRST, GROUPS, SHORT_FLAGS, choices_of, is_refused, supported_choices
from tts.config.pipeline import AudioGenerationConfig
from tts.config.serve import ServeConfig
from tts.config.server import ServerConfig
from tts.config.sources import inner_type, is_section, walk_fields

CLASSES: tuple[type[StrictModel], ...] = (AudioGenerationConfig, ServerConfig)
FIELDS = {name: (cls, field) for cls in CLASSES for name, field in walk_fields(cls)}
UNITS = {"_s": "SECONDS", "_ms": "MS", "_bytes": "BYTES", "_gb": "GIB"}
# Filled in: by the device (tests of resolving have both), and with the built-in voice.
FILLED_IN = {"max_num_steps", "model.model_path", "model.kv_cache.kv_cache_page_size"}
SAY_LATER = {
    *("--chunk-size", "--buffer", "--revision", "--family", "--audio-decoder", "--offline"),
    *("--allow-pickle", "--tls", "--tls-ca", "--tls-cert", "--tls-key", "--token"),
}

Parser = Callable[..., argparse.ArgumentParser]
PARSERS = pytest.mark.parametrize("build", [serve.build_parser, say.build_parser])


def options_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the line of each long flag of a help: its names, value and text."""
    entries: list[str] = []
    for line in parser.format_help().splitlines():
        if line.startswith("  -"):
            entries.append(line.strip())
        elif line.startswith("     ") and entries:
            entries[-1] += "  " + line.strip()
    found = {}
    for entry in entries:
        for flag in re.findall(r"--(?:\[no-\])?[a-z][a-z.-]*", re.split(r"  +", entry)[0]):
            found[flag.replace("[no-]", "")] = re.sub(" +", " ", entry)
    return found


@pytest.fixture(scope="module")
def shown_by_serve() -> dict[str, str]:
    return options_of(serve.build_parser(show_all=True))


@pytest.fixture(scope="module")
def plain() -> ServeConfig:
    """The configuration of a command without flags."""
    return serve.read_config(serve.build_parser().parse_args([]))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def refused_fields() -> set[str]:
    return {name for name, (cls, field) in FIELDS.items() if is_refused(name, field, cls)}


@PARSERS
@pytest.mark.parametrize("show_all", [False, True])
def test_help_fits_80_columns(build: Parser, show_all: bool) -> None:
    text = build(show_all=show_all).format_help()
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()


@PARSERS
def test_help_all_shows_all_options_of_help(
    build: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    first, every = options_of(build()), options_of(build(show_all=True))
    assert first.keys() < every.keys()
    for flag, show_all in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as caught:
            build().parse_args([flag])
        assert not caught.value.code
        assert capsys.readouterr().out == build(show_all=show_all).format_help()


def test_the_first_options_of_a_server_take_one_line_each() -> None:
    lines = serve.build_parser().format_help().splitlines()
    first = {flag_of(n.removeprefix("--")) for names in FIRST.values() for n in names}
    assert {"--help", "--help-all", "--version"} | first == options_of(serve.build_parser()).keys()
    assert len([line for line in lines if line.startswith("  ")]) == len(first) + 3 <= 16


def test_help_all_shows_every_field_that_can_be_set() -> None:
    shown = options_of(serve.build_parser(show_all=True))
    known = {flag_of(name) for name in FIELDS}
    assert known & shown.keys() == {flag_of(name) for name in FIELDS.keys() - refused_fields()}
    assert shown.keys() - known == {*SHORT_FLAGS, "--help", "--help-all", "--version"}
    for name, (_, field) in FIELDS.items():
        text = (field.description or "").partition(" (default: ")[0]
        assert text, name
        if flag_of(name) in shown and not name.startswith("draft_model."):
            assert text in shown[flag_of(name)], name


def test_every_field_is_in_one_group() -> None:
    entries = [entry for names in GROUPS.values() for entry in names]
    assert len(set(entries)) == len(entries)
    for name, (cls, field) in FIELDS.items():
        found = [e for e in entries if e == name or (e.endswith(".") and name.startswith(e))]
        assert len(found) == (0 if is_refused(name, field, cls) and not found else 1), name
    assert {entry for entry in entries if not entry.endswith(".")} <= FIELDS.keys() | SHORT_FLAGS


def value_of(config: Any, name: str) -> Any:
    """A field's value; in a section that is absent, that of a section with nothing set."""
    root = type(config)
    for part in name.split("."):
        kind = inner_type(root.model_fields[part].annotation)
        config = getattr(config, part)
        if is_section(kind):
            root, config = kind, kind() if config is None else config
    return config


def shown_as(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(getattr(value, "value", value))


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - refused_fields()))
def test_declared_and_shown_defaults_are_those_used(
    name: str, plain: ServeConfig, shown_by_serve: dict[str, str]
) -> None:
    model_class, field = FIELDS[name]
    config = plain.server if model_class is ServerConfig else plain.model
    shown = shown_by_serve[flag_of(name)]
    default = re.search(r"\(default: (.*)\)$", shown)
    if is_section(inner_type(field.annotation)):
        assert getattr(config, name) is None
    elif name not in FILLED_IN and is_literal(field):
        assert value_of(config, name) == field.default
        is_described = default and default[1] in (field.description or "")
        is_other = name.startswith("draft_model.") or field.default == "" or is_described
        assert is_other or (default and default[1] == shown_as(field.default))
    else:
        assert not default or default[1] in (field.description or "")


def is_literal(field: FieldInfo) -> bool:
    return field.default_factory is None and not field.is_required() and field.default is not None


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - refused_fields()))
def test_units_and_choices_are_shown(name: str, shown_by_serve: dict[str, str]) -> None:
    model_class, field = FIELDS[name]
    shown = shown_by_serve[flag_of(name)]
    for end, unit in UNITS.items():
        assert not name.endswith(end) or shown.startswith(f"{flag_of(name)} {unit} ")
    if not name.startswith("draft_model."):
        for choice in supported_choices(name, field, model_class):
            assert choice in shown
        for choice in set(choices_of(field)) - set(supported_choices(name, field, model_class)):
            assert choice not in shown


@pytest.mark.parametrize("name", sorted(refused_fields()))
def test_refused_fields_are_hidden_and_their_errors_give_the_reason(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, field = FIELDS[name]
    choices = [choice for choice in choices_of(field) if choice != shown_as(field.default)]
    is_switch = inner_type(field.annotation) is bool
    line = [flag_of(name) + ("" if is_switch else f"={(choices or ['2'])[0]}")]
    if name.startswith("draft_model.kv_cache."):  # the engine refuses it, once it has a draft
        assert name in vars(serve.build_parser().parse_args(line))
        return
    assert serve.main(line) == 2
    assert re.search(rf"serve: {name}=\S+ is not available", capsys.readouterr().err)


def test_help_shows_only_accepted_page_options_of_a_draft() -> None:
    prefix = "draft_model.kv_cache."
    hidden = {name.removeprefix(prefix) for name in refused_fields() if name.startswith(prefix)}
    assert hidden == KVCacheConfig.model_fields.keys() - OWN_CACHE_FIELDS


def test_defaults_shown_by_say_are_used() -> None:
    shown = options_of(say.build_parser(show_all=True))
    args = say.build_parser().parse_args(["Hello."])
    assert shown["--timestamp-level"].endswith(f"(default: {args.timestamp_level})")
    options = read_options(args)
    assert options.chunking == Chunking()  # the codec's choice
    assert options.model == ModelChoice()  # the built-in voice
    revision = ModelConfig.model_fields["huggingface_revision"].default
    assert shown["--revision"].endswith(f"(default: {revision})")


def test_options_of_codec_model_and_connection_are_only_in_help_all_of_say() -> None:
    first, every = options_of(say.build_parser()), options_of(say.build_parser(show_all=True))
    assert every.keys() > SAY_LATER
    assert not SAY_LATER & first.keys()
    assert {"--output", "--voice", "--model", "--server"} < first.keys()

"""Parameters of training: `recipe.toml`, overridden by a file, overridden by flags.

Every stage accepts `--config FILE`, and each value of its section as a flag; no parameter is set in
code only.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from decoder.codecs.embedded.modules import CodecConfig

SHIPPED = Path(__file__).with_name("recipe.toml")

Section = TypeVar("Section")


class RecipeError(Exception):
    """An invalid recipe; the message names the key."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times of the stages; shares are of the whole time."""

    minutes: float
    stage1_end: float
    speech_end: float
    adversarial_gpus: int
    tokenise_again: tuple[float, ...]
    resumed_tokenise: tuple[float, ...]
    aligner_share: float
    compile_s: float
    in_turn: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CorpusValues:
    """Parameters of `training.corpus`."""

    held_out: tuple[str, ...]
    reserve: int
    seed: int


@dataclass(frozen=True, slots=True)
class LexiconValues:
    """Parameters of `training.lexicon`."""

    lists: tuple[str, ...]
    drawn: int
    seed: int


@dataclass(frozen=True, slots=True)
class SynthesisValues:
    """Parameters of `training.synthesize`."""

    hours: float
    workers: int
    first_round: int
    libraries: str


@dataclass(frozen=True, slots=True)
class ReconstructValues:
    """Parameters of `training.codec reconstruct`."""

    start: str
    batch: int
    lr: float
    timbre_weight: float
    phone_weight: float
    ear_width: int
    min_hours: float
    max_hours: float
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class AdversarialValues:
    """Parameters of `training.codec adversarial`."""

    batch: int
    lr: float
    mel_weight: float
    timbre_weight: float
    phone_weight: float
    ear_width: int
    judge_width: int
    average: float
    min_hours: float
    max_hours: float
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class ModelValues:
    """Parameters of `training.language_model`."""

    start: str
    min_hours: float
    layers: int
    dim: int
    tokens: int
    lr: float
    noise: float
    dropout: float
    phoneme_share: float
    phoneme_weight: float
    full_hours: float
    phoneme_parts: tuple[float, ...]
    save_every: float
    compile: bool
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class AlignerValues:
    """Parameters of `training.aligner`."""

    batch: int
    lr: float
    max_hours: float
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class EvaluationValues:
    """Parameters of `training.assess`."""

    commands: tuple[str, ...]
    sentences: int
    seeds: tuple[int, ...]
    distances: int
    trials: int
    texts: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """All sections."""

    schedule: Schedule
    corpus: CorpusValues
    lexicon: LexiconValues
    synthesis: SynthesisValues
    codec: CodecConfig
    reconstruct: ReconstructValues
    adversarial: AdversarialValues
    language_model: ModelValues
    aligner: AlignerValues
    evaluation: EvaluationValues


def load_recipe(path: Path | None = None, changes: Sequence[str] = ()) -> Recipe:
    """Load `recipe.toml` with the changes of a file and of `section.key=value`.

    Raises RecipeError.
    """
    values = _read(SHIPPED)
    layers = [(f"{path}", _read(path))] if path else []
    for where, layer in [*layers, *((change, _change(change)) for change in changes)]:
        for name, section in layer.items():
            _check_name(name, values, where)
            if not isinstance(section, dict):
                raise RecipeError(f"{where}: {name} is a section")
            values[name] = {**values[name], **section}
    kinds = get_type_hints(Recipe)
    return Recipe(**{name: _section(kinds[name], name, values[name]) for name in kinds})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: {error}") from error


def _change(text: str) -> dict[str, Any]:
    """Parse `section.key=value`, with the value as in TOML, or a plain word."""
    key, _, value = text.partition("=")
    for written in (value, json.dumps(value)):
        try:
            return tomllib.loads(f"{key} = {written}")
        except tomllib.TOMLDecodeError:
            continue
    raise RecipeError(f"{text}: write section.key=value")


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the whole recipe, to be stored with a run."""
    lines = []
    for name, section in asdict(recipe).items():
        lines += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in section.items())]
    path.write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")


def _check_name(name: str, known: Mapping[str, Any] | Sequence[str], where: str) -> None:
    if name not in known:
        near = get_close_matches(name, list(known), 1, 0.0)
        raise RecipeError(f"{where}: there is no {name}; do you mean {near[0]}?")


def _section(kind: type[Section], name: str, values: Mapping[str, Any]) -> Section:
    kinds = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        _check_name(key, names, f"[{name}]")
    missing = [key for key in names if key not in values]
    if missing:
        raise RecipeError(f"[{name}]: {', '.join(missing)} missing")
    return kind(**{key: _value(kinds[key], f"{name}.{key}", values[key]) for key in names})


def _value(kind: Any, name: str, value: object) -> object:
    """Return a value of the field's type; integers are accepted as fractions."""
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise RecipeError(f"{name} must be a list")
        return tuple(_value(get_args(kind)[0], name, item) for item in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise RecipeError(f"{name} must be {kind.__name__}, not {value!r}")
    return value


def parse(
    parser: argparse.ArgumentParser, section: str, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Recipe]:
    """Parse the arguments of a stage: its own, and the section's values, which are flags of their
    names. Ends the program for an invalid recipe, as argparse does for invalid flags.
    """
    kinds = get_type_hints(get_type_hints(Recipe)[section])
    parser.add_argument("--config", type=Path, help="values other than those of recipe.toml")
    group = parser.add_argument_group(f"override [{section}] of the recipe")
    for name, kind in kinds.items():
        _add_flag(group, name, kind)
    args = parser.parse_args(argv)
    try:
        recipe = load_recipe(args.config)
    except RecipeError as error:
        parser.error(str(error))
    for name, value in asdict(getattr(recipe, section)).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args, recipe


def _add_flag(group: argparse._ArgumentGroup, name: str, kind: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction)
    elif get_origin(kind) is tuple:
        group.add_argument(flag, type=get_args(kind)[0], nargs="*")
    else:
        group.add_argument(flag, type=kind)

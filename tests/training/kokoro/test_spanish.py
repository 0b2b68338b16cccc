"""Spanish lines: cleaned prose, templates that agree, and how they are shared out."""

from __future__ import annotations

import gettext
import random
import re
import struct
from pathlib import Path

import pytest

from training.kokoro import spanish

PROSE = [
    f"El {word} de la vecina está en la casa que vimos ayer." for word in ("gato", "pan", "vino")
] + [
    "¿Está aquí el perro?",
    "¡Vaya con el tiempo!",
    "Oponentes",
    "Fue por el camino " + "y por el camino " * 8 + "hasta que llegó a la casa.",
]


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ("<i>Hola</i>... dijo él (en voz baja).", "Hola, dijo él."),
        ("«No lo sé», —dijo.", "No lo sé, dijo."),
        ("¿Quién es...?", "¿Quién es?"),
        ("  Uno  ,  dos … ", "Uno, dos."),
    ],
)
def test_markup_and_quotes_are_removed(found: str, line: str) -> None:
    assert spanish.clean(found) == line


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("El pingüino vio a la cigüeña en el río.", True),
        ("The cat of the house sat on a mat.", False),
        ("El cat vio in the house.", False),
        ("Son las 3 de la tarde.", False),
        ("ONU y OTAN en la sala.", False),
        ("Adiós, Señor.", True),
        ("È la vita.", False),
        ("Ka lum bre tor vim sal por men tol.", False),
    ],
)
def test_lines_are_of_spanish_words(line: str, wanted: bool) -> None:
    assert spanish.is_spanish(line) == wanted


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ("libro", "libros"), ("luz", "luces"), ("árbol", "árboles"), ("canción", "canciones"),
        ("café", "cafés"), ("jabón", "jabones"), ("gris", "grises"),
    ],
)  # fmt: skip
def test_plurals(one: str, several: str) -> None:
    assert spanish.plural(one) == several


def test_adjectives_agree_with_their_nouns() -> None:
    assert spanish.agree("viejo", feminine=True) == "vieja"
    assert spanish.agree("azul", feminine=True, several=True) == "azules"
    assert spanish.agree("verde", feminine=False) == "verde"


@pytest.mark.parametrize(
    "kind", ["statements", "questions", "tagged", "open", "exclamations", "lists"]
)
def test_sentences_of_templates_are_whole(kind: str) -> None:
    rng = random.Random(0)
    made = [spanish.fill(rng, kind) for _ in range(600)]
    assert len(set(made)) > 300 or kind == "exclamations"
    for text in made:
        assert spanish.ALLOWED.fullmatch(text), text
        assert not re.search(r"\b(a el|de el|la agua|y i[^e]|o o)\b", text), text
        assert text.lstrip("¿¡«")[0].isupper(), text
        assert text.count("¿") == text.count("?"), text
        assert text.count("¡") == text.count("!"), text


def test_all_letters_are_in_the_templates() -> None:
    rng = random.Random(0)
    kinds = "statements", "questions", "open", "lists"
    letters = {c for _ in range(1500) for c in spanish.fill(rng, rng.choice(kinds)).lower()}
    assert letters >= set("abcdefghijlmnopqrstuvxyzáéíóúñ")


def test_all_kinds_of_lines_are_chosen_and_none_that_judges() -> None:
    judging = spanish.HELD_OUT.read_text("utf-8").splitlines()
    rare = [f"palabra{'a' * (n % 7)}{'e' * (n // 7)}" for n in range(40)]
    lines = spanish.choose([*PROSE, *judging], rare, 600, 1)
    assert lines == spanish.choose([*PROSE, *judging], rare, 600, 1)
    assert len(set(lines)) == len(lines)
    assert set(lines).isdisjoint(judging)
    kinds = {spanish.kind_of(line) for line in lines}
    assert {"question", "exclamation", "short", "prose", "long"} <= kinds
    assert any(line.startswith("“") for line in lines)
    assert any(line.startswith("palabra") and line.count(",") == 5 for line in lines)
    asked = sum(line.endswith("?") for line in lines)
    assert 0.12 * 600 < asked < 0.26 * 600
    assert max(map(len, lines)) <= spanish.MAX_CHARACTERS


def catalogue(texts: dict[str, str]) -> bytes:
    """A compiled catalogue of gettext, in the order of its sources."""
    strings = [text.encode() for text in (*sorted(texts), *(texts[key] for key in sorted(texts)))]
    start, tables = 28 + 8 * len(strings), b""
    for text in strings:
        tables += struct.pack("<2I", len(text), start)
        start += len(text) + 1
    header = struct.pack("<7I", 0x950412DE, 0, len(texts), 28, 28 + 8 * len(texts), 0, 28)
    return header + tables + b"".join(text + b"\0" for text in strings)


def test_paragraphs_of_a_game(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = {
        "": "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=n!=1;\n",
        "one\0several": "un año\0años",
        "Go!\n\nNow.": "¡Ve!\n \nAhora.",
        "$number left": "quedan $number",
    }
    path = tmp_path / "games/wesnoth/1.16/locale/es/LC_MESSAGES/wesnoth.mo"
    path.parent.mkdir(parents=True)
    path.write_bytes(catalogue(texts))
    with path.open("rb") as file:
        assert gettext.GNUTranslations(file).ngettext("one", "several", 2) == "años"
    monkeypatch.setattr(spanish, "SHARE", tmp_path)
    assert list(spanish.game_paragraphs()) == ["¡Ve!", "Ahora.", "un año", "años"]


def test_lines_need_a_file_before_they_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        spanish.main(["--count", "3"])
    assert "--out is required" in capsys.readouterr().err


def test_the_judging_sentences_are_spanish() -> None:
    judging = spanish.HELD_OUT.read_text("utf-8").splitlines()
    assert len(set(judging)) == 40
    assert all(map(spanish.is_spanish, judging))
    assert set("áéíóúüñ") <= set("".join(judging).lower())

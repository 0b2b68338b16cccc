"""Results of evaluation are stored, and converted to a model card's table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import Figure, Report
from tests.fakes import build_tiny_checkpoint
from tests.training.speechlike import has_teacher
from training import assess, card
from training.evaluate import COMMANDS
from training.recipe import load_recipe, write_recipe
from training.run import Plan
from training.stages import run_here

CARD = "# A voice\n\n## Figures\nOld ones.\n\n| a |\n|---|\n\n## Limits\nNone.\n"


def record(report: Report) -> dict:
    return json.loads(report.to_json())


def test_every_command_of_the_recipe_is_one() -> None:
    assert set(load_recipe().evaluation.commands) == set(COMMANDS)


def test_a_table_has_a_line_for_every_figure() -> None:
    words = Report(
        "words",
        (
            Figure("voice slt", (0.19, 0.21, 0.2), "WER", 0.25),
            Figure("mean", (0.3,), "WER", 0.25),
        ),
    )
    following = Report("following", (Figure("both", (0.81,), "share", 0.8, True),))
    lines = card.section([record(words), record(following)]).splitlines()
    assert lines[0] == card.HEADING
    assert lines[-3:] == [
        "| `training.evaluate words` | voice slt | 0.2 WER | 0.19 - 0.21 | <= 0.25 |",
        "|  | mean | 0.3 WER |  | <= 0.25, missed |",
        "| `training.evaluate following` | both | 0.81 share |  | >= 0.8 |",
    ]


def test_a_card_keeps_everything_but_its_figures(tmp_path: Path) -> None:
    evaluation, path = tmp_path / "evaluation.json", tmp_path / "MODEL_CARD.md"
    report = Report("codec", (Figure("STOI", (0.95,), ""),))
    evaluation.write_text(json.dumps([record(report)]))
    path.write_text(CARD)
    arguments = ["--evaluation", str(evaluation), "--card", str(path)]
    assert card.main(arguments) == 0
    changed = path.read_text()
    assert changed.startswith("# A voice\n\n## Figures\nBy `python -m training.evaluate`")
    assert changed.endswith("| STOI | 0.95 |  |  |\n\n## Limits\nNone.\n")
    assert card.main(arguments) == 0
    assert path.read_text() == changed


def test_a_cards_figures_come_from_several_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, several = tmp_path / "one.json", tmp_path / "several.json"
    reports = [record(Report(name, (Figure(name, (1.0,), ""),))) for name in "abc"]
    one.write_text(json.dumps(reports[0]))
    several.write_text(json.dumps(reports[1:]))
    assert card.main(["--evaluation", str(one), str(several)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(" |")[1].strip() for line in lines[-3:]] == ["a", "b", "c"]


def test_figures_at_the_end_of_a_card() -> None:
    assert card.with_figures("# A\n\n## Figures\nOld.\n", "## Figures\nNew.\n") == (
        "# A\n\n## Figures\nNew.\n"
    )


def test_a_card_without_figures_is_left_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluation, path = tmp_path / "evaluation.json", tmp_path / "MODEL_CARD.md"
    evaluation.write_text(json.dumps([record(Report("codec", (Figure("STOI", (1.0,), ""),)))]))
    path.write_text("# A voice\n")
    assert card.main(["--evaluation", str(evaluation), "--card", str(path)]) == 1
    assert "no heading" in capfd.readouterr().err
    assert path.read_text() == "# A voice\n"


@pytest.mark.skipif(not has_teacher(), reason="flite is not installed")
def test_a_run_ends_with_the_evaluation_of_its_voice(tmp_path: Path) -> None:
    pytest.importorskip("pyworld")
    recipe = load_recipe(None, ['evaluation.commands=["joins"]', "evaluation.texts=1"])
    write_recipe(recipe, tmp_path / "recipe.toml")
    build_tiny_checkpoint(tmp_path / "voice")
    *others, voice, evaluation = Plan(tmp_path, recipe, evaluates=True).in_turn()
    assert [*others, voice] == list(Plan(tmp_path, recipe).in_turn())
    run_here(evaluation)
    (joins,) = json.loads((tmp_path / "evaluation.json").read_text())
    figures = {figure["name"]: figure["value"] for figure in joins["figures"]}
    assert joins["benchmark"] == "joins"
    assert figures["teacher, timbre within sentences"] > 0


def test_an_unknown_command_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = [x for name in ("model", "lines", "words", "out") for x in (f"--{name}", str(tmp_path))]
    with pytest.raises(SystemExit):
        assess.main([*paths, "--commands", "words", "wrods"])
    assert "no command of training.evaluate: wrods" in capfd.readouterr().err

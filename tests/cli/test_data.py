"""`mezzo data`, through the real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mezzo", "data", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | env, check=False)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rows = [{"ask": "q", "reply": "one"}, {"ask": "é\x1b[31m", "reply": "three" * 99}, {"ask": "q", "reply": "one"}]
    (tmp_path / "faq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


NAMED = ["--column", "prompt=ask", "--column", "completion=reply"]


def test_check_as_json_gives_every_figure(place: Path) -> None:
    done = run("check", "faq.jsonl", *NAMED, "--json", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert len(found.pop("sha256")) == 64
    assert found == {
        "source": "faq.jsonl",
        "shape": "prompt/completion",
        "columns": {"prompt": "ask", "completion": "reply"},
        "rows": 3,
        "duplicates": 1,
        "prompt_characters": {"least": 1, "median": 1, "most": 6},
        "completion_characters": {"least": 3, "median": 3, "most": 495},
        "first": {"prompt": [{"role": "user", "content": "q"}], "completion": "one"},
    }


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_check_for_a_person_keeps_to_the_width_and_alphabet_of_the_terminal(encoding: str, place: Path) -> None:
    lines = (place / "faq.jsonl").read_text().splitlines()
    (place / "faq.jsonl").write_text("\n".join([lines[1], lines[0]]))
    done = run("check", "faq.jsonl", *NAMED, cwd=place, COLUMNS="60", PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    shown = {line[:22].strip(): line[23:] for line in done.stdout.splitlines()}
    assert shown["columns"] == "prompt=ask, completion=reply"
    assert shown["completion characters"] == "3 / 495 / 495"
    assert shown["first"].startswith('["é' if encoding == "utf-8" else '["\\xe9')
    assert shown["first"].endswith("...")
    assert "\x1b" not in done.stdout
    assert len(shown["first"]) <= 60 - 22


FAULTS = {
    "no_pair": (["--column", "prompt"], "'prompt' is no FIELD=NAME"),
    "no_field": (["--column", "promt=ask"], "columns: unknown field 'promt'"),
    "no_column": (["--column", "prompt=asked"], "faq.jsonl, row 1, column asked: is missing (and 2 more rows"),
    "shape": (["--shape", "chat"], "shape: unknown shape 'chat'"),
    "no_shape": ([], "row 1: has no known shape (columns: ask, reply)"),
    "other_shape": (["--shape", "text"], "row 1, field text: is missing"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_bad_input_is_exit_2_and_says_what_and_where(fault: str, place: Path) -> None:
    words, wanted = FAULTS[fault]
    done = run("check", "faq.jsonl", *words, cwd=place)
    assert (done.returncode, done.stdout) == (2, "")
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr


def test_real_rows(real_data: Path) -> None:
    done = run("check", "gsm8k/train.jsonl.gz", "--json", cwd=real_data)
    found = json.loads(done.stdout)
    assert (found["rows"], found["shape"], found["duplicates"]) == (7473, "question/answer", 0)
    assert found["first"]["completion"].endswith("#### 72")

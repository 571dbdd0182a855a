"""A run survives kills, resumes and bad places, and tells no tales about who ran it."""

from __future__ import annotations

import getpass
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from mezzo.core.errors import UserError
from mezzo.core.runs import Run, plain

ARGUMENTS = {"verb": "nlora train", "config": {"rank": 8, "lr": 1e-4}, "seed": 7, "inputs": {"data": "ab" * 32}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs" / "first", **ARGUMENTS)


def test_open_returns_what_create_wrote(run: Run) -> None:
    again = Run.open(run.path)
    assert again.config == run.config == ARGUMENTS["config"]
    assert again.manifest == run.manifest
    assert {"verb": "nlora train", "seed": 7, "status": "running"}.items() <= again.manifest.items()
    assert again.manifest["inputs"] == ARGUMENTS["inputs"]
    assert again.manifest["packages"]["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", again.manifest["started"])


def test_the_manifest_names_no_person_machine_or_place(run: Run) -> None:
    text = (run.path / "manifest.json").read_text()
    words = set(re.findall(r"[\w.-]+", text))
    assert not {getpass.getuser(), platform.node()} & words
    assert str(run.path) not in text
    assert "argv" not in text


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert Run.create(tmp_path, **ARGUMENTS).path == tmp_path


@pytest.mark.parametrize("place", ["run", "full", "file", "under a file"])
def test_a_taken_place_is_refused_and_untouched(tmp_path: Path, place: str) -> None:
    target = tmp_path / "out"
    if place == "run":
        Run.create(target, **ARGUMENTS).finish("done")
    elif place == "full":
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
    else:
        target.write_text("a file")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        Run.create(target / "below" if place == "under a file" else target, **ARGUMENTS)
    assert "--out" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ("--resume" in str(caught.value)) == (place == "run")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fault", ["missing", "file", "empty", "cut", "list", "binary", "no config", "deep"])
def test_a_folder_without_a_whole_run_is_refused(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "run"
    if fault == "file":
        path.write_text("{}")
    elif fault == "empty":
        path.mkdir()
    elif fault != "missing":
        Run.create(path, **ARGUMENTS)
        contents = {"cut": b'{"verb": "nlo', "list": b"[1]", "binary": b"\xff\xfe\x00", "deep": b"[" * 100_000}
        if fault == "no config":
            (path / "config.json").unlink()
        else:
            (path / "manifest.json").write_bytes(contents[fault])
    with pytest.raises(UserError, match=re.escape(str(path))) as caught:
        Run.open(path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="permission denied"):
        Run.create(tmp_path / "run", **ARGUMENTS)


def test_metrics_are_what_was_logged(run: Run) -> None:
    run.log(step=1, loss=2.5)
    run.log(step=2, loss=float("nan"), note="naïve \u2028 text")
    run.log(done=True)
    entries = Run.open(run.path).metrics()
    times = [entry.pop("time") for entry in entries]
    assert entries == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None, "note": "naïve \u2028 text"}, {"done": True}]
    assert times == sorted(times)
    assert times[0] >= 0


def test_every_line_is_strict_json(run: Run) -> None:
    run.log(step=1, loss=math.inf, nested={"a": [math.nan, -math.inf]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_no_metrics_yet_is_an_empty_list(run: Run) -> None:
    assert run.metrics() == []
    run.rewind(0)
    assert run.metrics() == []


@pytest.mark.parametrize("keep", range(1, 40))
def test_a_line_cut_anywhere_is_ignored_then_repaired(run: Run, keep: int) -> None:
    run.log(step=1, loss=2.0, time=0.0)
    whole = (run.path / "metrics.jsonl").read_bytes()
    (run.path / "metrics.jsonl").write_bytes(whole + '{"step": 2, "word": "ü", "loss": 1.0}'.encode()[:keep])
    torn = Run.open(run.path)
    expected = [1, 2] if keep > 37 else [1]
    assert [entry["step"] for entry in torn.metrics()] == expected
    torn.log(step=3)
    assert [entry["step"] for entry in torn.metrics()] == [*expected, 3]


@pytest.mark.parametrize("step", [-1, 0, 3, 5, 9])
def test_rewind_drops_exactly_the_later_steps(run: Run, step: int) -> None:
    for number in range(6):
        run.log(step=number, loss=1.0)
    run.log(note="no step")
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "lo')
    run.rewind(step)
    kept = [entry.get("step") for entry in run.metrics()]
    assert kept == [*(number for number in range(6) if number <= step), None]
    run.log(step=step + 1)
    assert [entry.get("step") for entry in run.metrics()] == [*kept, step + 1]


def test_damage_before_the_last_line_is_told(run: Run) -> None:
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        run.metrics()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_a_killed_run_opens_and_goes_on(tmp_path: Path) -> None:
    code = (
        "from mezzo.core.runs import Run; import itertools, sys\n"
        "run = Run.create(sys.argv[1], verb='t', config={}, seed=0, inputs={})\n"
        "for step in itertools.count(): run.log(step=step); run.update(at=step); print(step, flush=True)"
    )
    path = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    run = Run.open(path)
    last = run.manifest["at"]
    run.rewind(last)
    run.log(step=last + 1)
    assert [entry["step"] for entry in run.metrics()] == list(range(last + 2))


def test_update_merges_on_disk(run: Run) -> None:
    other = Run.open(run.path)
    other.update(best=1.5)
    run.update(steps=10, folder=Path("a") / "b")
    again = Run.open(run.path).manifest
    assert again == run.manifest
    assert (again["best"], again["steps"], again["seed"]) == (1.5, 10, 7)


@pytest.mark.parametrize("status", ["done", "interrupted", "failed"])
def test_finish_tells_how_and_when(run: Run, status: str) -> None:
    run.finish(status)
    manifest = Run.open(run.path).manifest
    assert manifest["status"] == status
    assert manifest["ended"] >= manifest["started"]


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, "ß"]}, [], 3, "text", None, True])
def test_read_returns_what_was_written(run: Run, value: object) -> None:
    path = run.write("scores", value)
    assert path == run.path / "scores.json"
    assert run.read("scores") == run.read("scores.json") == value


@pytest.mark.parametrize("name", ["../up", "a/b", "manifest", "config.json", "", ".hidden", "a\\b"])
def test_names_beside_the_run_stay_beside_it(run: Run, name: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        run.write(name, 1)


def test_reading_what_is_missing_or_damaged(run: Run) -> None:
    with pytest.raises(UserError, match=r"no scores\.json"):
        run.read("scores")
    (run.path / "scores.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        run.read("scores")
    assert not list(run.path.glob(".*"))


@dataclass
class Recipe:
    rank: int
    folder: Path


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Recipe(4, Path("x")), {"rank": 4, "folder": "x"}),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([[1.0, np.inf]]), [[1.0, None]]),
        (torch.tensor([1, 2]), [1, 2]),
        ({"b", "a"}, ["a", "b"]),
        ({1: (2, 3)}, {"1": [2, 3]}),
        ("half \ud800", "half ?"),
        (np.bool_(True), True),
    ],
)
def test_plain_values(value: object, expected: object) -> None:
    result = plain(value)
    assert result == expected
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_what_has_no_json_form_is_our_bug(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Run.create(tmp_path / "run", verb="t", config={"f": print}, seed=0, inputs={})
    assert not (tmp_path / "run").exists()

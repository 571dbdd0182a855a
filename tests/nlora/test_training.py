"""Training on a tiny real model: golden curve, accumulation, resume after SIGKILL and Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.core import models
from mezzo.core.errors import UserError
from mezzo.core.runs import Run
from mezzo.nlora import use
from mezzo.nlora.job import recipe_for, run_job
from mezzo.nlora.recipe import Recipe
from mezzo.nlora.train import last_checkpoint
from tests.tiny import WORDS

pytestmark = pytest.mark.filterwarnings("ignore:.*the paper's start changes:UserWarning")


class Quiet:
    """A screen that shows nothing."""

    def say(self, text: str) -> None: ...

    def bar(self, label: str) -> Any:
        from contextlib import nullcontext

        return nullcontext(lambda done, total, **values: None)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 rows of one length each: two words in, the same two in reverse out."""
    import random

    rng = random.Random(0)
    pairs = [rng.sample(WORDS, 2) for _ in range(400)]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{a} {b}", "completion": f"{b} {a}"}) + "\n" for a, b in pairs))
    return path


def recipe(model: Path, rows: Path, **more: Any) -> Recipe:
    values = {"r": 4, "steps": 50, "batch_size": 8, "eval_rows": 0, "learning_rate": 5e-3, "device": "cpu"}
    return Recipe(model=str(model), data=str(rows), **(values | more))


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in Run.open(run).metrics()]


@pytest.mark.parametrize(
    ("init", "train"), [("nystrom", "all"), ("nystrom", "middle"), ("nystrom_paper", "all"), ("slora", "all")]
)
def test_50_steps_follow_the_golden_curve_and_batch_8_equals_1_accumulated_8_times(
    init: str, train: str, model_folder: Path, rows: Path, tmp_path: Path
) -> None:
    fields = {"init": init, "train": train, "learning_rate": 5e-2 if train == "middle" else 5e-3}
    whole = recipe(model_folder, rows, **fields)
    run_job(whole, tmp_path / "whole", Quiet())
    parts = recipe(model_folder, rows, **fields, batch_size=1, accumulate=8)
    run_job(parts, tmp_path / "parts", Quiet())
    one, other = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert len(one) == 50
    assert other == pytest.approx(one, rel=2e-3)
    golden = Path(__file__).parent / "golden" / f"{init}-{train}.json"
    if os.environ.get("MEZZO_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(json.dumps([round(loss, 4) for loss in one]) + "\n")
    assert one == pytest.approx(json.loads(golden.read_text()), rel=5e-3)
    assert sum(one[-10:]) < sum(one[:10])


def test_a_finished_run_is_scored_inspected_exported_and_answers(
    model_folder: Path, rows: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = run_job(recipe(model_folder, rows, eval_rows=5, max_new_tokens=4), run, Quiet(), export=True)
    assert result["export"]["identical_answers"] == result["export"]["checked"] == 5
    assert {score["name"] for score in result["after"]} == {"exact match", "token loss", "perplexity"}
    assert (run / "report.html").stat().st_size > 10_000
    again = run_job(Recipe(**Run.open(run).config), run, Quiet(), resume=True)
    assert again == json.loads(json.dumps(result))
    assert len(losses(run)) == 50
    common: dict[str, Any] = {"shape": None, "max_new_tokens": 4, "model": None, "base": True, "screen": Quiet()}
    scores = use.score_run(run, data=None, rows=5, **common)
    loss = next(score for score in result["after"] if score["name"] == "token loss")
    assert loss in scores["adapter"]
    assert [score["name"] for score in scores["difference"]] == ["exact match", "token loss"]
    with pytest.raises(UserError, match="without its run"):
        use.score_run(Path(shutil.copytree(run / "adapter", tmp_path / "alone")), data=None, rows=5, **common)
    table = use.inspect_run(run, model=None)
    assert len(table) == 14
    assert all(row["rank"] == 4 and row["start_percent"] == 0 and row["change_percent"] > 0 for row in table)
    assert all(row["middle_moved_percent"] > 0 for row in table)
    answer = use.both_answers(run, model=None, max_new_tokens=4)("w1 w2")
    assert set(answer) == {"base", "adapter"}
    use.export_run(run, to="merged", out=tmp_path / "merged", rank="exact", model=None)
    merged, words = models.load(models.find(tmp_path / "merged"), device="cpu")
    adapted, _, _ = use.load_adapter(run, device="cpu")
    ids = words("w1 w2 w3", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="already holds files"):
        use.export_run(run, to="lora", out=tmp_path / "merged", rank="exact", model=None)


@pytest.mark.parametrize("train", ["all", "middle"])
def test_a_run_stopped_after_its_last_step_trains_no_more(
    train: str, model_folder: Path, rows: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(rows.read_text().splitlines(keepends=True)[:40]))
    asked = recipe(model_folder, few, steps=4, batch_size=2, train=train)
    run_job(asked, tmp_path / "run", Quiet())
    before, curve = (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes(), losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "adapter")
    (tmp_path / "run" / "result.json").unlink()
    Run.open(tmp_path / "run").finish("interrupted")
    run_job(asked, tmp_path / "run", Quiet(), resume=True)
    assert (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes() == before
    assert losses(tmp_path / "run") == curve


def test_a_finished_run_is_exported_by_its_own_command(model_folder: Path, rows: Path, tmp_path: Path) -> None:
    asked = recipe(model_folder, rows, steps=2)
    run_job(asked, tmp_path / "run", Quiet())
    with pytest.raises(UserError, match=r"finished, without an export.*mezzo nlora export"):
        run_job(asked, tmp_path / "run", Quiet(), resume=True, export=True)


def gone(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def holding(name: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(text)


DAMAGED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no adapter": ("done", gone("adapter/adapter_model.safetensors"), "its result or adapter is gone"),
    "no result": ("done", holding("result.json", "[]"), "its result or adapter is gone"),
    "a step that is none": (
        "failed",
        holding("metrics.jsonl", '{"step": "a"}\n{"step": 1}\n'),
        "metrics.jsonl, line 1",
    ),
    "scores that are none": ("failed", holding("after.json", "[]"), "after.json: holds no scores"),
    "empty scores": ("failed", holding("after.json", "{}"), "after.json: holds no scores"),
    "an unknown setting": ("failed", holding("config.json", '{"colour": 1}'), "config.json: is no recipe"),
    "a setting of a wrong type": ("failed", holding("config.json", '{"r": "a"}'), "config.json: is no recipe"),
}


@pytest.fixture(scope="module")
def short_run(model_folder: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("short") / "run"
    run_job(recipe(model_folder, rows, steps=2, eval_rows=3, max_new_tokens=2), run, Quiet())
    return run


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_run_is_said_when_it_is_resumed(fault: str, short_run: Path, tmp_path: Path) -> None:
    status, damage, told = DAMAGED[fault]
    run = Path(shutil.copytree(short_run, tmp_path / "run"))
    Run.open(run).update(status=status)
    damage(run)
    with pytest.raises(UserError, match=told):
        run_job(recipe_for(run, None, resume=True, flags={}), run, Quiet(), resume=True)


def test_a_run_without_its_metrics_is_finished_all_the_same(short_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(short_run, tmp_path / "run"))
    Run.open(run).update(status="failed")
    gone("metrics.jsonl")(run)
    assert run_job(recipe_for(run, None, resume=True, flags={}), run, Quiet(), resume=True)["loss_first"] is None


def test_a_checkpoint_that_was_cut_off_is_passed_over(short_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(short_run, tmp_path / "run"))
    whole = run / "checkpoints" / "checkpoint-2"
    shutil.copytree(whole, whole.with_name("checkpoint-1"))
    file = whole / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert last_checkpoint(run / "checkpoints") == whole.with_name("checkpoint-1")


def start(model: Path, rows: Path, out: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "mezzo", "nlora", "train", "--model", str(model), "--data", str(rows), "--r", "4",
        "--steps", "60", "--eval-rows", "0", "--learning-rate", "5e-3", "--save-steps", "10", "--device", "cpu",
        "--out", str(out), *words,
    ]  # fmt: skip
    with said(out).open("a") as log:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True)


def said(out: Path) -> Path:
    return out.with_name(f"{out.name}.log")


def wait_for(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        metrics = run / "metrics.jsonl"
        if metrics.is_file() and metrics.read_text().count("\n") >= step:
            return
        time.sleep(0.002)
    raise AssertionError(said(run).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("train", ["all", "middle"])
def test_a_run_killed_at_step_30_and_resumed_gives_the_curve_of_an_unbroken_one(
    train: str, model_folder: Path, rows: Path, tmp_path: Path
) -> None:
    assert start(model_folder, rows, tmp_path / "whole", "--train", train).wait(300) == 0
    process = start(model_folder, rows, tmp_path / "killed", "--train", train)
    wait_for(tmp_path / "killed", 30, process)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert 30 <= len(losses(tmp_path / "killed")) < 60
    resumed = start(model_folder, rows, tmp_path / "killed", "--train", train, "--resume")
    assert resumed.wait(300) == 0, said(tmp_path / "killed").read_text()
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert Run.open(tmp_path / "killed").manifest["status"] == "done"


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(model_folder: Path, rows: Path, tmp_path: Path) -> None:
    process = start(model_folder, rows, tmp_path / "run")
    wait_for(tmp_path / "run", 15, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert "--resume" in said(tmp_path / "run").read_text()
    assert Run.open(tmp_path / "run").manifest["status"] == "interrupted"
    done = len(losses(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{done}").is_dir()
    assert start(model_folder, rows, tmp_path / "run", "--resume").wait(300) == 0
    assert len(losses(tmp_path / "run")) == 60


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("init", "train"), [("nystrom", "all"), ("nystrom", "middle"), ("slora", "all")])
def test_50_steps_on_real_rows_lower_the_loss(init: str, train: str, real_data: Path, tmp_path: Path) -> None:
    values = {"data": str(real_data / "gsm8k" / "train.jsonl.gz"), "steps": 50, "batch_size": 2, "eval_rows": 0}
    run_job(Recipe(init=init, train=train, **values), tmp_path / "run", Quiet())
    found = losses(tmp_path / "run")
    assert len(found) == 50
    assert sum(found[-10:]) < 0.95 * sum(found[:10])

"""Two processes give the curve of one: DDP, FSDP2 and ZeRO-3 on gloo; resumed by another number of them; refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState, TrainingArguments

from mezzo.core.errors import UserError
from mezzo.nlora import NLoraConfig
from mezzo.nlora.processes import NLoraMoves, SameRows
from tests.nlora import laws
from tests.tiny import WORDS, llama

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 8
ENGINES = [
    "ddp_cpu",
    "fsdp2_cpu",
    pytest.param(
        "deepspeed_zero3_cpu",
        marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    ),
]
BOUND = {"rtol": 1e-4, "atol": 1e-4}  # nats/token: sums over processes are taken in another order


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import random

    rng = random.Random(0)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with path.open("w") as out:
        for _ in range(96):
            a = rng.sample(WORDS, rng.randint(1, 4))
            out.write(json.dumps({"prompt": " ".join(a), "completion": " ".join(reversed(a))}) + "\n")
    return path


def launch(kind: str, model: Path, rows: Path, out: Path, *flags: str, steps: int = STEPS) -> Any:
    """Runs the recipe as one process, or as two under a launcher file."""
    script = [str(RECIPES / "sft.py"), "--model", str(model), "--data", str(rows), "--out", str(out), "--r", "4",
              "--steps", str(steps), "--learning-rate", "5e-3", "--save-steps", "4", *flags]  # fmt: skip
    command = [sys.executable, *script]
    if kind != "one":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(RECIPES / f"{kind}.yaml"),
                   "--main_process_port", str(port), "--main_process_ip", "127.0.0.1", *script]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


def curve(out: Path) -> torch.Tensor:
    state = json.loads((out / "trainer_state.json").read_text())
    return torch.tensor([entry["loss"] for entry in state["log_history"] if "loss" in entry])


def trained(kind: str, model: Path, rows: Path, out: Path, *flags: str, steps: int = STEPS) -> torch.Tensor:
    done = launch(kind, model, rows, out, *flags, steps=steps)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "have not moved" not in done.stderr
    return curve(out)


@pytest.fixture(scope="module")
def one(model_folder: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    trained("one", model_folder, rows, out, "--batch-size", "8")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
def test_two_processes_give_the_curve_and_the_adapter_of_one(
    kind: str, model_folder: Path, rows: Path, one: Path, tmp_path: Path
) -> None:
    found = trained(kind, model_folder, rows, tmp_path / "run", "--batch-size", "4")
    assert len(found) == STEPS
    torch.testing.assert_close(found, curve(one), **BOUND)
    assert found[-1] < found[0]
    x = torch.arange(20).view(2, 10) % 40
    outputs = []
    for out in (one, tmp_path / "run"):
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        with torch.no_grad():
            outputs.append(PeftModel.from_pretrained(base, str(out / "adapter")).eval()(x).logits)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--batch-size", "2", "--accumulate", "2"],
        ["--batch-size", "4", "--gradient-checkpointing"],
        ["--batch-size", "4", "--train", "middle"],
        ["--batch-size", "4", "--init", "slora"],
    ],
    ids=["accumulated", "checkpointed", "inttune", "slora"],
)
@pytest.mark.parametrize("kind", ENGINES)
def test_two_processes_with_what_people_combine(
    kind: str, flags: list[str], model_folder: Path, rows: Path, tmp_path: Path
) -> None:
    alone = [flag for flag in flags if flag not in ("--accumulate", "--gradient-checkpointing")]
    if "--accumulate" in flags:
        alone = ["--batch-size", "8"]
    alone[1] = "8"
    wanted = trained("one", model_folder, rows, tmp_path / "one", *alone, steps=4)
    found = trained(kind, model_folder, rows, tmp_path / "two", *flags, steps=4)
    torch.testing.assert_close(found, wanted, **BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
def test_a_run_goes_on_with_another_number_of_processes_or_is_refused(
    kind: str, model_folder: Path, rows: Path, one: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    trained(kind, model_folder, rows, out, "--batch-size", "4")
    import shutil

    shutil.rmtree(out / f"checkpoint-{STEPS}")
    done = launch("one", model_folder, rows, out, "--batch-size", "4", "--resume")
    assert done.returncode == 2, done.stderr[-2000:]
    assert "took 8 rows (2 processes)" in done.stderr
    done = launch("one", model_folder, rows, out, "--batch-size", "8", "--resume")
    if kind != "ddp_cpu":
        assert done.returncode == 2, done.stderr[-2000:]
        assert f"written by {'fsdp' if kind == 'fsdp2_cpu' else 'deepspeed'}" in done.stderr
        found = trained(kind, model_folder, rows, out, "--batch-size", "4", "--resume")
    else:
        assert done.returncode == 0, done.stderr[-3000:]
        found = curve(out)
    torch.testing.assert_close(found, curve(one), **BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
def test_every_engine_names_an_n_that_does_not_move(kind: str, model_folder: Path, rows: Path, tmp_path: Path) -> None:
    done = launch(kind, model_folder, rows, tmp_path / "run", "--learning-rate", "1e-30", steps=3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "14 of 14 matrices N have not moved in 3 steps" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--bf16", "--compile"])
def test_one_process_under_autocast_or_compiled_follows_the_curve(
    flag: str, model_folder: Path, rows: Path, one: Path, tmp_path: Path
) -> None:
    found = trained("one", model_folder, rows, tmp_path / "run", "--batch-size", "8", flag)
    close = {"rtol": 2e-2, "atol": 2e-2} if flag == "--bf16" else BOUND
    torch.testing.assert_close(found, curve(one), **close)


def test_the_command_that_trains_in_one_process_refuses_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mezzo.nlora.job import run_job
    from mezzo.nlora.recipe import Recipe

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"recipes/sft\.py"):
        run_job(Recipe(), tmp_path / "out", screen=None)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_number_of_rows_or_engine_is_refused(tmp_path: Path) -> None:
    rows = SameRows(TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True, report_to=[]))
    with pytest.raises(UserError, match="nothing says how many rows"):
        rows.check(tmp_path)
    good = dict(rows.now)
    for change, said in (({"rows": 8, "processes": 2}, "took 8 rows"), ({"engine": "fsdp"}, "written by fsdp")):
        (tmp_path / "rows_a_step.json").write_text(json.dumps(good | change))
        with pytest.raises(UserError, match=said):
            rows.check(tmp_path)
    (tmp_path / "rows_a_step.json").write_text(json.dumps(good))
    rows.check(tmp_path)
    rows.now["engine"] = "deepspeed"
    (tmp_path / "rows_a_step.json").write_text(json.dumps(good | {"engine": "deepspeed", "processes": 2}))
    with pytest.raises(UserError, match="in 2 shares"):
        rows.check(tmp_path)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_an_engine_chosen_by_the_launcher_is_known(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    monkeypatch.setenv(f"ACCELERATE_USE_{engine.upper()}", "true")
    assert SameRows(settings).now["engine"] == engine


def test_an_n_that_does_not_move_is_named_after_the_third_step(tmp_path: Path) -> None:
    model = laws.move(get_peft_model(llama(), NLoraConfig(r=4, target_modules=["q_proj"])))
    args, state = TrainingArguments(str(tmp_path), report_to=[]), TrainerState(is_world_process_zero=True)
    watch = NLoraMoves()
    watch.on_train_begin(args, state, TrainerControl(), model=model)
    moved = [value for key, value in model.named_parameters() if "layers.0" in key and ".nlora_N." in key]
    moved[0].data += 1
    state.global_step = 3
    with pytest.warns(UserWarning, match=r"1 of 2 matrices N have not moved in 3 steps: \S*layers\.1\S*nlora_N"):
        watch.on_step_end(args, state, TrainerControl(), model=model)

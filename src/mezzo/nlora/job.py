"""The main job: plan, score the base, fine-tune, score again, export, report. Stages are kept, so a job can go on."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peft.utils import SAFETENSORS_WEIGHTS_NAME

from mezzo.core import models
from mezzo.core.errors import UserError
from mezzo.core.files import check_free
from mezzo.core.measure import Stopwatch, human_bytes, peak_bytes
from mezzo.core.records import Row, Rows, read, split
from mezzo.core.report import Curve, Sample, write_report
from mezzo.core.runs import Run
from mezzo.core.stats import Score
from mezzo.nlora.config import NLoraConfig
from mezzo.nlora.evaluate import Evaluation, differences, evaluate
from mezzo.nlora.export import export_lora, save_adapter, stock_answers
from mezzo.nlora.plan import Plan, make_plan
from mezzo.nlora.practice import practice_rows
from mezzo.nlora.recipe import Recipe, load_recipe, recipe_of
from mezzo.nlora.tokens import Encoded, encode_all, prompt_ids

Update = Callable[..., None]
"""Called with (done, total, **values to show)."""


class Screen(Protocol):
    """Where a job speaks to."""

    def say(self, text: str) -> None:
        """Shows one line."""

    def bar(self, label: str) -> AbstractContextManager[Update]:
        """Shows a progress bar with the remaining time."""


@dataclass(frozen=True)
class Prepared:
    """All that is known before weights are loaded."""

    files: models.ModelFiles
    rows: Rows
    held_out: Rows | None
    encoded: list[Encoded]
    long: int
    config: NLoraConfig
    plan: Plan


def prepare(recipe: Recipe) -> Prepared:
    """Checks rows, model, adapter and sizes, and returns the plan. No weight is loaded.

    Raises:
        UserError: anything that would make the job fail later and can be seen now.
    """
    files = models.find(recipe.model)
    config = NLoraConfig(**recipe.adapter(task_type="CAUSAL_LM", base_sha256=files.sha256))
    rows, held_out = rows_for(recipe)
    tokenizer = models.tokenizer(files)
    encoded, long = encode_all(tokenizer, rows, max_length=recipe.max_length, too_long=recipe.too_long)
    skeleton = models.skeleton(files)
    context = getattr(skeleton.config.get_text_config(), "max_position_embeddings", recipe.max_length)
    longest = max(len(item.input_ids) for item in encoded)
    if longest > context:
        raise UserError(
            f"rows of up to {longest} tokens exceed the model's context of {context}",
            where=rows.source,
            todo=f"Use --max-length {context} --too-long drop or truncate",
        )
    dtype = models.choose_dtype(recipe.dtype, models.choose_device(recipe.device))
    copy = dataclasses.replace(config)
    plan = make_plan(
        skeleton, copy, dtype=dtype, tokens=recipe.batch_size * longest, checkpointing=recipe.gradient_checkpointing
    )
    return Prepared(files, rows, held_out, encoded, long, config, plan)


def recipe_for(out: Path, config: Path | None, *, resume: bool, flags: dict[str, Any]) -> Recipe:
    """Returns the recipe of a new job, or, with `resume`, the one its run was begun with.

    Raises:
        UserError: settings that do not fit, or settings given beside `resume` that differ from the run's.
    """
    targets = flags.get("target_modules")
    if targets and targets != "all-linear":
        flags = flags | {"target_modules": [name.strip() for name in targets.split(",") if name.strip()]}
    if not resume:
        return load_recipe(config, **flags)
    if config is not None:
        raise UserError("a resumed run keeps its settings", where="--config", todo="Leave it out, or start a new run")
    run = Run.open(out)
    begun = run.config
    for key, value in flags.items():
        if value is not None and begun.get(key) != value:
            raise UserError(
                f"this run was begun with {begun.get(key)!r}, not {value!r}",
                where=key,
                todo="Resume without the flag, or start a new run in another --out",
            )
    return recipe_of(run)


def describe(made: Prepared, recipe: Recipe) -> dict[str, Any]:
    """Returns the plan as plain values."""
    plan = made.plan
    return {
        "model": f"{made.files.name} ({plan.total / 1e6:.1f} M parameters)",
        "data": f"{made.rows.source}: {len(made.encoded)} rows, {made.rows.shape}",
        "long_rows": f"{made.long} above {recipe.max_length} tokens (policy: {recipe.too_long})",
        "adapter": f"{recipe.init}, train {recipe.train}, r = {recipe.r}, learning rate {recipe.rate:g}",
        "modules": f"{plan.modules} ({', '.join(f'{count} {kind}' for kind, count in plan.kinds.items())})",
        "trained": f"{plan.trainable:,} numbers, {plan.share:.3f} % of the model",
        "memory": f"about {human_bytes(plan.memory_bytes)}",
    }


def run_job(recipe: Recipe, out: Path, screen: Screen, *, resume: bool = False, export: bool = False) -> dict[str, Any]:
    """Runs the whole job in the folder `out` and returns its result (also kept there as result.json).

    Args:
        recipe: the settings; with `resume`, must be those of the run.
        out: the run's folder.
        screen: where to speak.
        resume: go on with the run in `out`; stages that are done are not repeated.
        export: write and check a plain LoRA at the end.

    Raises:
        UserError: bad input; nothing is written before all input is checked.
    """
    _check_processes()
    run = Run.open(out) if resume else None
    if run is not None and run.manifest.get("status") == "done":
        return _finished(run, screen, export=export)
    if run is None:
        check_free(out, "Choose another --out, or go on with --resume")
    made = prepare(recipe)
    inputs = {"model": made.files.sha256, "data": made.rows.sha256}
    if run is None:
        for key, value in describe(made, recipe).items():
            screen.say(f"{key.replace('_', ' '):<10} {value}")
        run = Run.create(out, verb="nlora train", config=dataclasses.asdict(recipe), seed=recipe.seed, inputs=inputs)
    else:
        _check_inputs(run, inputs)
        run.update(status="running")
    try:
        return _stages(recipe, made, run, screen, resume=resume, export=export)
    except KeyboardInterrupt:
        run.finish("interrupted")
        screen.say(f"Everything so far is kept. Go on with: mezzo nlora train --out {shlex.quote(str(out))} --resume")
        raise
    except BaseException as error:
        with suppress(UserError, OSError):
            run.finish("failed")
        if _disk_is_full(error, out):
            todo = "Free some space, then go on with --resume"
            raise UserError("no space left on the disk", where=str(out), todo=todo) from error
        raise


def _finished(run: Run, screen: Screen, *, export: bool) -> dict[str, Any]:
    result: dict[str, Any] = run.read("result")
    if not isinstance(result, dict) or not (run.path / "adapter" / SAFETENSORS_WEIGHTS_NAME).is_file():
        raise UserError(
            "this run is finished, but its result or adapter is gone",
            where=str(run.path),
            todo="Restore the folder, or start a new run in another --out",
        )
    if export and "export" not in result:
        raise UserError(
            "this run is finished, without an export",
            where=str(run.path),
            todo=f"Export it: mezzo nlora export {run.path} --out {run.path}/lora",
        )
    screen.say("This run is finished; nothing is left to do.")
    return result


def _check_processes() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "this command trains in one process",
            where="WORLD_SIZE",
            todo="Start it without a launcher, or launch recipes/sft.py, which trains in several",
        )


def _disk_is_full(error: BaseException, out: Path) -> bool:
    """Tells a full disk from other faults: not every writer says so in its error."""
    if not isinstance(error, Exception):  # an interrupt
        return False
    return "no space left" in str(error).lower() or shutil.disk_usage(out).free < 1 << 16


def _stages(recipe: Recipe, made: Prepared, run: Run, screen: Screen, *, resume: bool, export: bool) -> dict[str, Any]:
    import torch
    from peft import get_peft_model

    from mezzo.nlora.train import fit

    with Stopwatch() as watch:
        model, tokenizer = models.load(made.files, dtype=recipe.dtype, device=recipe.device)
        before = _scored(run, "before", model, tokenizer, made.held_out, recipe, screen, "scoring the base model")
        torch.manual_seed(recipe.seed)
        model = get_peft_model(model, made.config)
        with screen.bar("fine-tuning") as update:
            done = fit(
                model, tokenizer, made.encoded, recipe, run, resume=resume,
                on_step=lambda step, total, values: update(step, total, **values),
            )  # fmt: skip
        if not done:
            raise KeyboardInterrupt
        save_adapter(model, run.path / "adapter")
        after = _scored(run, "after", model, tokenizer, made.held_out, recipe, screen, "scoring the adapter")
        losses = [entry["loss"] for entry in run.metrics() if "loss" in entry]
        result: dict[str, Any] = {
            "run": str(run.path),
            "adapter": str(run.path / "adapter"),
            "trainable": made.plan.trainable,
            "share_percent": round(made.plan.share, 4),
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
        }
        if export:
            result["export"] = _exported(run, model, tokenizer, made, recipe, after, screen)
    if before and after:
        result["before"] = [score.to_dict() for score in before.scores()]
        result["after"] = [score.to_dict() for score in after.scores()]
        result["difference"] = [score.to_dict() for score in differences(before, after)]
    result |= {"seconds": round(watch.seconds, 1), "peak_bytes": peak_bytes()}
    result["report"] = str(_report(run, recipe, made, before, after, result))
    run.write("result", result)
    run.finish("done")
    return result


def rows_for(recipe: Recipe) -> tuple[Rows, Rows | None]:
    """Returns a recipe's rows to learn and its held-out rows (None: no scores wanted, or too few rows to hold any out).

    Raises:
        UserError: a file is missing or a row is bad.
    """
    if recipe.data is None:
        held = practice_rows(recipe.eval_rows, seed=recipe.seed, held_out=True) if recipe.eval_rows else None
        return practice_rows(recipe.practice, seed=recipe.seed), held
    rows = read(recipe.data, shape=recipe.shape)  # type: ignore[arg-type]  # a wrong name is refused by read
    if recipe.eval_rows == 0:
        return rows, None
    if recipe.eval_data is not None:
        return rows, read(recipe.eval_data, limit=recipe.eval_rows)
    count = min(recipe.eval_rows, len(rows) // 10)
    return split(rows, count, recipe.seed) if count else (rows, None)


def _check_inputs(run: Run, inputs: dict[str, str]) -> None:
    for name, value in inputs.items():
        if run.manifest["inputs"].get(name) != value:
            raise UserError(
                f"the {name} is not the one this run began with",
                where=str(run.path),
                todo="Start a new run in another --out",
            )


def _scored(
    run: Run, name: str, model: Any, tokenizer: Any, rows: Rows | None, recipe: Recipe, screen: Screen, label: str
) -> Evaluation | None:
    if rows is None:
        return None
    if (run.path / f"{name}.json").is_file():
        return _kept_scores(run, name)
    with screen.bar(label) as update:
        found = evaluate(model, tokenizer, list(rows), max_new_tokens=recipe.max_new_tokens, progress=update)
    run.write(name, dataclasses.asdict(found))
    screen.say("  ".join(str(score) for score in found.scores()))
    return found


def _kept_scores(run: Run, name: str) -> Evaluation:
    try:
        found = Evaluation(**run.read(name))
        found.scores()
    except (TypeError, AttributeError, KeyError) as error:
        todo = "Remove it: it is made again"
        raise UserError(f"holds no scores ({error})", where=str(run.path / f"{name}.json"), todo=todo) from error
    return found


def _exported(
    run: Run, model: Any, tokenizer: Any, made: Prepared, recipe: Recipe, after: Evaluation | None, screen: Screen
) -> dict[str, Any]:
    out = run.path / "lora"
    if out.is_dir():
        shutil.rmtree(out)
    done = export_lora(model, out) | {"folder": str(out)}
    if after is None or made.held_out is None:
        return done
    screen.say("checking the export in stock PEFT (another process, without mezzo)")
    rows = [row for row in made.held_out if row.prompt]
    same = same_answers(out, made.files, tokenizer, rows, [a for a in after.answers if a is not None], recipe)
    screen.say(f"{same} of {len(rows)} answers are identical")
    return done | {"identical_answers": same, "checked": len(rows)}


def same_answers(
    lora: Path, files: models.ModelFiles, tokenizer: Any, rows: list[Row], answers: list[str], recipe: Recipe
) -> int:
    """Returns how many greedy answers of the exported LoRA in stock PEFT equal the given ones to the character."""
    dtype = str(models.choose_dtype(recipe.dtype, "cpu")).removeprefix("torch.")
    replies = stock_answers(
        lora,
        files.folder,
        [prompt_ids(tokenizer, row) for row in rows],
        max_new_tokens=recipe.max_new_tokens,
        dtype=dtype,
    )
    texts = [tokenizer.decode(reply, skip_special_tokens=True) for reply in replies]
    return sum(text == answer for text, answer in zip(texts, answers, strict=True))


def _report(
    run: Run,
    recipe: Recipe,
    made: Prepared,
    before: Evaluation | None,
    after: Evaluation | None,
    result: dict[str, Any],
) -> Path:
    metrics = [entry for entry in run.metrics() if entry.get("loss") is not None]
    curve = Curve("training loss", [float(m["step"]) for m in metrics], [float(m["loss"]) for m in metrics])
    scores: dict[str, list[Score]] = {}
    samples = []
    if before and after and made.held_out is not None:
        scores = {"base": before.scores(), "adapter": after.scores()}
        for k, row in enumerate(list(made.held_out)[:20]):
            if row.prompt:
                samples.append(
                    Sample(
                        prompt=row.prompt[-1]["content"],
                        expected=row.completion,
                        answers={"base": before.answers[k] or "", "adapter": after.answers[k] or ""},
                        correct={"base": before.correct[k], "adapter": after.correct[k]},
                    )
                )
    path = run.path / "report.html"
    numbers = {key: value for key, value in result.items() if not isinstance(value, list)}
    write_report(
        path,
        title=f"{made.files.name} with NLoRA",
        lead=f"{made.plan.trainable:,} trained numbers ({made.plan.share:.3f} % of the model), on {made.rows.source}.",
        scores=scores,
        differences=differences(before, after) if before and after else (),
        curves=[curve],
        samples=samples,
        settings={"recipe": dataclasses.asdict(recipe), "result": numbers, "manifest": run.manifest},
        commands=next_commands(run.path),
    )  # fmt: skip
    return path


def next_commands(run: Path) -> list[str]:
    """Returns the three commands that a user of a finished run would want next."""
    name, out = shlex.quote(str(run)), shlex.quote(str(run / "merged"))
    return [
        f"mezzo nlora chat {name}",
        f"mezzo nlora eval {name} --rows 100",
        f"mezzo nlora export {name} --to merged --out {out}",
    ]

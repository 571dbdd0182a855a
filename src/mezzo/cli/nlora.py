"""`mezzo nlora`: fine-tune, score, export, convert, inspect, chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

FOLDER = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def group() -> None:
    """NLoRA: fine-tune with a small r x r matrix between B and A.

    \b
    Examples:
      mezzo nlora train --out runs/first
      mezzo nlora train --data orders.jsonl --out runs/orders --train middle
      mezzo nlora chat runs/first
    """


@group.command()
@click.option("--out", type=FOLDER, required=True, help="Folder of the run; must be new, or hold the run to resume.")
@click.option("--config", type=FOLDER, help="YAML file with any of the settings; flags go over it.")
@click.option("--data", help="Rows: JSONL, CSV or Parquet (.gz too), or a dataset id. Default: the practice task.")
@click.option("--shape", help="Shape of the rows, where their columns do not tell it.")
@click.option("--eval-data", help="Held-out rows. Default: held out of the data.")
@click.option("--eval-rows", type=int, help="Held-out rows to score before and after. [100]")
@click.option("--max-new-tokens", type=int, help="Longest answer when scoring. [80]")
@click.option("--model", help="Built-in name, folder, GGUF file or hub id. [smollm2-135m]")
@click.option("--init", help="nystrom, nystrom_paper or slora. [nystrom]")
@click.option("--train", help="all, or middle (IntTune: only the r x r matrices). [all]")
@click.option("--r", type=int, help="Rank. [16]")
@click.option("--lora-alpha", type=float, help="Scale is lora_alpha / r. [r]")
@click.option("--target-modules", help="Names with commas between, or all-linear. [all-linear]")
@click.option("--learning-rate", type=float, help="[by mode]")
@click.option("--steps", type=int, help="Optimiser steps; over --epochs.")
@click.option("--epochs", type=float, help="Passes over the rows. [1]")
@click.option("--practice", type=int, help="Rows of the practice task. [416]")
@click.option("--batch-size", type=int, help="Rows a step. [8]")
@click.option("--accumulate", type=int, help="Batches an optimiser step. [1]")
@click.option("--max-length", type=int, help="Longest row in tokens. [1024]")
@click.option("--too-long", help="Longer rows: error, drop or truncate. [error]")
@click.option("--save-steps", type=int, help="Steps between checkpoints. [50]")
@click.option("--gradient-checkpointing/--no-gradient-checkpointing", default=None, help="Less memory, slower.")
@click.option("--dtype", help="auto, float32, bfloat16 or float16. [auto]")
@click.option("--device", help="auto, cpu, cuda or mps. [auto]")
@click.option("--seed", type=int, help="[0]")
@click.option("--resume", is_flag=True, help="Go on with the interrupted run in --out.")
@click.option("--export", is_flag=True, help="Also write a plain LoRA and check it in stock PEFT.")
@click.option("--plan", "only_plan", is_flag=True, help="Print what would be done, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
def train(
    out: Path, config: Path | None, resume: bool, export: bool, only_plan: bool, as_json: bool, **flags: Any
) -> None:
    """Fine-tune a model and score it before and after.

    \b
    Examples:
      mezzo nlora train --out runs/first                        the built-in practice task
      mezzo nlora train --data orders.csv --out runs/orders
      mezzo nlora train --config recipe.yaml --r 32 --out runs/r32
      mezzo nlora train --out runs/first --resume               after Ctrl-C or a crash
    """
    from mezzo.cli._screen import Terminal
    from mezzo.core.files import check_free
    from mezzo.nlora import job

    recipe = job.recipe_for(out, config, resume=resume, flags=flags)
    if only_plan:
        if not resume:
            check_free(out, "Choose another --out, or go on with --resume")
        _show(job.describe(job.prepare(recipe), recipe), as_json)
        return
    result = job.run_job(recipe, out, Terminal(), resume=resume, export=export)
    _show(result, as_json)
    if not as_json:
        click.echo("\nNext:")
        for line in job.next_commands(out):
            click.echo(f"  {line}")


@group.command("eval")
@click.argument("run", type=FOLDER)
@click.option("--data", help="Rows to score. Default: the run's own held-out rows.")
@click.option("--shape", help="Shape of the rows, where their columns do not tell it.")
@click.option("--rows", type=int, default=100, show_default=True, help="Rows to score.")
@click.option("--max-new-tokens", type=int, default=80, show_default=True, help="Longest answer.")
@click.option("--model", help="The base, if not the one the run names.")
@click.option("--base", is_flag=True, help="Score the base model too, and the paired difference.")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON on stdout.")
def evaluate(as_json: bool, **options: Any) -> None:
    """Score a run's adapter: exact match, token loss, perplexity.

    \b
    Example:
      mezzo nlora eval runs/orders --data test.jsonl --base
    """
    from mezzo.cli._screen import Terminal
    from mezzo.nlora import use

    _show(use.score_run(screen=Terminal(), **options), as_json)


@group.command()
@click.argument("run", type=FOLDER)
@click.option("--to", type=click.Choice(["lora", "merged", "gguf"]), default="lora", show_default=True)
@click.option("--out", type=FOLDER, required=True, help="New folder to write; for gguf a new file.")
@click.option("--rank", type=click.Choice(["exact", "same"]), default="exact", show_default=True,
              help="Of a LoRA whose exact rank is 2r: write 2r, or the best r with its error.")  # fmt: skip
@click.option("--model", help="The base, if not the one the run names.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON on stdout.")
def export(as_json: bool, **options: Any) -> None:
    """Write a plain LoRA for stock PEFT, a merged model folder, or a LoRA file for llama.cpp.

    \b
    Examples:
      mezzo nlora export runs/first --out lora
      mezzo nlora export runs/first --to merged --out merged
      mezzo nlora export runs/first --to gguf --out lora.gguf
    """
    from mezzo.nlora import use

    _show(use.export_run(**options), as_json)


@group.command()
@click.argument("source", type=FOLDER)
@click.option("--out", type=FOLDER, required=True, help="New adapter folder to write.")
@click.option("--base", help="The base model; needed where SOURCE is a model, else checked and its hash recorded.")
@click.option("--r", type=int, help="Where SOURCE is a model: the rank to keep.")
@click.option("--initial", type=FOLDER, help="Of a PiSSA, OLoRA, CorDA or LoRA-GA adapter: the one saved at step 0.")
@click.option("--rank", type=click.Choice(["exact", "same"]), default="exact", show_default=True,
              help="With --initial the exact rank is 2r: write 2r, or the best r with its error.")  # fmt: skip
@click.option("--ignore-other", is_flag=True, help="Where SOURCE is a model: leave out what is no linear weight.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, with the error of each module.")
def convert(source: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Turn a LoRA, PiSSA or OLoRA adapter, or a fine-tuned model, into an NLoRA adapter.

    \b
    Examples:
      mezzo nlora convert lora --out adapter
      mezzo nlora convert pissa --initial pissa_init --out adapter
      mezzo nlora convert merged --base smollm2-135m --r 16 --out adapter
    """
    from mezzo.cli._screen import Terminal
    from mezzo.nlora.convert import convert as run

    with Terminal().bar("converting") as update:
        done = {"folder": str(out)} | run(source, out, progress=update, **options)
    _show({key: value for key, value in done.items() if as_json or key != "errors"}, as_json)


@group.command()
@click.argument("run", type=FOLDER)
@click.option("--model", help="The base, if not the one the run names.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON on stdout.")
def inspect(run: Path, model: str | None, as_json: bool) -> None:
    """Show each module: rank, trained numbers, change at step 0, how far N moved, change now.

    \b
    Example:
      mezzo nlora inspect runs/first
    """
    from mezzo.nlora import use

    table = use.inspect_run(run, model=model)
    if as_json:
        click.echo(json.dumps(table, indent=2))
        return
    click.echo(f"{'module':<44}{'rank':>5}{'trained':>10}{'step 0 %':>10}{'N moved %':>11}{'change %':>10}")
    for row in table:
        moved = "-" if row["middle_moved_percent"] is None else f"{row['middle_moved_percent']:.2f}"
        click.echo(
            f"{row['module'][-43:]:<44}{row['rank']:>5}{row['trained']:>10,}{row['start_percent']:>10.2f}"
            f"{moved:>11}{row['change_percent']:>10.2f}"
        )


@group.command()
@click.argument("run", type=FOLDER)
@click.option("--model", help="The base, if not the one the run names.")
@click.option("--max-new-tokens", type=int, default=120, show_default=True, help="Longest answer.")
def chat(run: Path, model: str | None, max_new_tokens: int) -> None:
    """Ask base and adapter the same, and see both answers. An empty line or Ctrl-D ends it.

    \b
    Example:
      mezzo nlora chat runs/first
      echo "order for Ada Holm: 3 x red mugs, due 2 May" | mezzo nlora chat runs/first
    """
    from rich.columns import Columns
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from mezzo.nlora import use

    console = Console()
    answer = use.both_answers(run, model=model, max_new_tokens=max_new_tokens)
    while True:
        try:
            question = click.prompt("you", prompt_suffix="> ", default="", show_default=False)
        except (EOFError, click.Abort):
            break
        if not question.strip():
            break
        panels = [
            Panel(Text(text or "(nothing)"), title=name, width=max(30, console.width // 2 - 1))
            for name, text in answer(question).items()
        ]
        console.print(Columns(panels))


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result, indent=2, ensure_ascii=False))
        return
    from mezzo.core.measure import human_bytes
    from mezzo.core.stats import Score

    for key, value in result.items():
        lines = [("", value)]
        if isinstance(value, dict):
            lines = list(value.items())
        elif isinstance(value, list) and all(isinstance(item, dict) and "low" in item for item in value):
            lines = [(item["name"], Score.from_dict(item)) for item in value]
        for name, shown in lines:
            label = f"{key} {name}".strip().replace("_", " ")
            if isinstance(shown, float):
                shown = f"{shown:.4g}"
            elif key.endswith("_bytes") and isinstance(shown, int):
                shown = human_bytes(shown)
            elif isinstance(shown, list):
                shown = ", ".join(map(str, shown)) or "none"
            click.echo(f"{label:<24} {shown}")
    if any(isinstance(value, list) and key in ("adapter", "after") for key, value in result.items()):
        click.echo("[low, high]: 95 % intervals", err=True)

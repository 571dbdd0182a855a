"""`mezzo data`: look at rows before spending on them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from typing import Any

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Data: check rows before a model sees them.

    \b
    Example:
      mezzo data check orders.jsonl
    """


@group.command()
@click.argument("file")
@click.option("--shape", help="Shape of the rows, where their columns do not tell it.")
@click.option("--column", "columns", multiple=True, metavar="FIELD=NAME", help="Your column's name for a field.")
@click.option("--split", default="train", show_default=True, help="Split of a data set.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(file: str, shape: str | None, columns: tuple[str, ...], split: str, as_json: bool) -> None:
    """Read every row of FILE and say what is there, or what is wrong with which row.

    \b
    Examples:
      mezzo data check orders.csv
      mezzo data check faq.parquet --column prompt=ask --column completion=reply --shape prompt/completion
    """
    from mezzo.core import records

    if wrong := next((pair for pair in columns if "=" not in pair), None):
        raise click.BadParameter(f"{wrong!r} is no FIELD=NAME", param_hint="--column")
    named = dict(pair.partition("=")[::2] for pair in columns)
    found: dict[str, Any] = records.summary(records.read(file, shape=shape, columns=named, split=split))  # type: ignore[arg-type]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        click.echo(f"{key.replace('_', ' '):<{LABEL}} {_plain(_SHOWN.get(key, str)(value))}")


def _spread(counts: dict[str, int]) -> str:
    return " / ".join(map(str, counts.values()))


def _example(row: dict[str, Any]) -> str:
    text = _plain(json.dumps([*(turn["content"] for turn in row["prompt"]), row["completion"]], ensure_ascii=False))
    width = max(20, shutil.get_terminal_size().columns - LABEL - 1)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _plain(text: str) -> str:
    """Returns text that any terminal can show: codes in place of control characters and of letters it lacks."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


LABEL = 22
_SHOWN: dict[str, Callable[[Any], str]] = {
    "columns": lambda used: ", ".join(name if name == column else f"{name}={column}" for name, column in used.items()),
    "prompt_characters": _spread,
    "completion_characters": _spread,
    "first": _example,
}

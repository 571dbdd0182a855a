"""What the terminal shows: lines and progress bars on stderr, results on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_STEP = 0.1
"""Share of a job between two lines where stderr is no terminal."""


class Terminal:
    """A `Screen` on stderr: a live bar in a terminal, a line for each tenth elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Shows one line."""
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, label: str) -> Iterator[Callable[..., None]]:
        """Yields an update(done, total, **values); `loss` and `tokens_per_second` are shown where given."""
        if not sys.stderr.isatty():
            yield self._lines(label)
            return
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[info]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(label, total=1, info="")

            def update(done: int, total: int, **values: Any) -> None:
                progress.update(task, completed=done, total=total, info=_info(values))

            yield update

    def _lines(self, label: str) -> Callable[..., None]:
        shown = -1

        def update(done: int, total: int, **values: Any) -> None:
            nonlocal shown
            tenth = int(done / total / QUIET_STEP)
            if tenth > shown or done == total:
                shown = tenth
                self.say(f"{label}: {done}/{total} {_info(values)}".rstrip())

        return update


def _info(values: dict[str, Any]) -> str:
    parts = [f"loss {values['loss']:.3f}"] if "loss" in values else []
    if values.get("tokens_per_second"):
        parts.append(f"{values['tokens_per_second']:.0f} tokens/s")
    return "  ".join(parts)

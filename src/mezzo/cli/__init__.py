"""The face: one command group for each file of this folder. Starts without torch."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from pathlib import Path

import click

from mezzo import __version__
from mezzo.core.errors import UserError

INTERRUPTED = 130
OPTIONAL = ("torchao", "bitsandbytes", "torch.utils._pytree")
"""Loggers that warn at import of what this machine lacks; errors still come through."""


class Rooms(click.Group):
    """A group whose commands are the files of this folder, imported only when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the files beside this one."""
        return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the `group` of a file, or None for a name that is no file here."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"mezzo.cli.{cmd_name}").group
        return command


@click.group(cls=Rooms, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="mezzo")
def mezzo() -> None:
    """Make language models do more on a small budget.

    \b
    First steps:
      mezzo model get                      fetch the built-in 135M model once
      mezzo nlora train --out runs/first   fine-tune it on the practice task
      mezzo nlora chat runs/first          base and adapter side by side
    """


def main() -> None:
    """Runs the command line. Exit codes: 0 done, 1 our bug, 2 bad usage or input, 130 interrupted."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft|trl")  # theirs to mend
    for library in OPTIONAL:  # transformers and peft import them wherever they are installed, used or not
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        code = mezzo.main(prog_name="mezzo", standalone_mode=False)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)

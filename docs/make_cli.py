"""Writes docs/cli.md from the command line's own --help."""

from __future__ import annotations

from pathlib import Path

import click

from mezzo.cli import mezzo

HEAD = "# The command line\n\nWritten by `make docs` from `mezzo --help`; not edited by hand.\n"


def page() -> str:
    """Returns the help of every command, in order, as Markdown."""
    parts = [HEAD]

    def add(command: click.Command, name: str, parent: click.Context | None) -> None:
        context = click.Context(command, info_name=name, parent=parent, max_content_width=110, terminal_width=110)
        parts.append(f"## `{context.command_path}`\n\n```text\n{command.get_help(context)}\n```\n")
        if isinstance(command, click.Group):
            for verb in command.list_commands(context):
                found = command.get_command(context, verb)
                if found is not None:
                    add(found, verb, context)

    add(mezzo, "mezzo", None)
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(page(), encoding="utf-8")

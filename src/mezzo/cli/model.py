"""`mezzo model`: the models at hand."""

from __future__ import annotations

import json

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Models: what is here, and the built-in one.

    \b
    Examples:
      mezzo model get
      mezzo model list
    """


@group.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(as_json: bool) -> None:
    """Show the built-in model and converted GGUF files.

    \b
    Example:
      mezzo model list --json
    """
    from mezzo.core import measure, models

    found = models.known()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for entry in found:
        size = measure.human_bytes(entry["bytes"]) if entry["present"] else "not here"
        click.echo(f"{entry['name']:<16} {size:<12} {(entry['sha256'] or '')[:12]:<14} {entry['folder']}".rstrip())


@group.command()
@click.argument("name", default="smollm2-135m")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def get(name: str, as_json: bool) -> None:
    """Fetch the built-in model once (93 MB), or check another (folder, GGUF file, hub id).

    \b
    Examples:
      mezzo model get
      mezzo model get ./my-model.gguf
    """
    from mezzo.core import models

    files = models.get(name, say=lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps({"name": files.name, "folder": str(files.folder), "sha256": files.sha256}))
        return
    click.echo(f"{files.name} is here: {files.folder} ({files.sha256[:12]})")

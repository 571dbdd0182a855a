"""Adapter folders: tensors checked as they are read; settings in a fixed order and a card beside PEFT's two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file

from mezzo.core.errors import UserError
from mezzo.core.files import write_json

LARGEST_SHIFT = 126
"""Of the exponent k of 2^k, so that 2^k and 2^-k are float32 numbers with all their digits."""

CARD = """---
library_name: peft
tags: [nlora]
---

# NLoRA adapter

PEFT knows this method once Mezzo is imported:

    pip install mezzo

    import mezzo.nlora
    from peft import PeftModel
    model = PeftModel.from_pretrained(base, "this folder")

Without `import mezzo.nlora` PEFT stops with `KeyError: 'NLORA'`. `mezzo nlora export` writes it as a plain LoRA, which
stock PEFT, vLLM and others load by themselves.
"""


def finish_folder(folder: Path) -> None:
    """Sorts the sets in an adapter's settings, so that the same adapter gives the same bytes, and adds the card."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key, value in config.items():
        if key in ("target_modules", "exclude_modules") and isinstance(value, list):
            config[key] = sorted(value)
    write_json(path, config)
    (folder / "README.md").write_text(CARD, encoding="utf-8")


def adapter_tensors(folder: Path) -> dict[str, Any]:
    """Returns the tensors of an adapter file, each checked by itself.

    Raises:
        UserError: no safetensors file, numbers that are not finite, or landmarks that are no indices.
    """
    file = folder / SAFETENSORS_WEIGHTS_NAME
    again = "Copy the adapter again"
    try:
        tensors: dict[str, Any] = load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"cannot be loaded ({error})", where=str(file), todo=again) from error
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError(f"{key} holds numbers that are not finite", where=str(file), todo=again)
        landmarks = key.endswith((".nlora_rows", ".nlora_columns"))
        if landmarks and (tensor.is_floating_point() or int(tensor.min()) < 0):
            raise UserError(f"{key} holds no indices", where=str(file), todo=again)
        if key.endswith(".nlora_shift") and int(tensor.abs().max()) > LARGEST_SHIFT:
            raise UserError(f"{key} holds no power of 2 that a float32 can hold", where=str(file), todo=again)
    return tensors

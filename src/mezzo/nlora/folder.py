"""What every adapter folder has beside PEFT's two files: settings in a fixed order, and a card."""

from __future__ import annotations

import json
from pathlib import Path

from mezzo.core.files import write_json

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

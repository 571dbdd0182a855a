"""Writes docs/measured.md, the tables of what was measured, from benchmarks/results/*.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
NAMES = {
    "lora": "PEFT LoRA",
    "nlora": "NLoRA",
    "inttune": "IntTune",
    "slora": "SLoRA",
    "pissa_niter_4": "PEFT PiSSA, niter 4",
}


def page() -> str:
    """Returns the page as Markdown."""
    parts = [
        "# Measured",
        "",
        "Written by `make docs` from benchmarks/results/. Ratios are of medians, with 95 % intervals.",
        "",
    ]
    step, suite = RESULTS / "nlora_step.json", RESULTS / "nlora_peft_suite.json"
    if step.is_file():
        parts += steps(json.loads(step.read_text(encoding="utf-8")))
    if suite.is_file():
        parts += tests(json.loads(suite.read_text(encoding="utf-8")))
    return "\n".join(parts).rstrip() + "\n"


def steps(found: dict[str, Any]) -> list[str]:
    """Returns the tables of step time, memory and start-up."""
    batch, length = found["batch"]
    lines = [
        "## Steps, memory, start-up (`benchmarks/nlora_step.py`)", "",
        f"{found['model']}, {found['dtype']}, batch {batch} x {length}, every linear layer but the head, seed {found['seed']}. "
        f"{where(found)}.", "",
    ]  # fmt: skip
    for key in sorted(
        (key for key in found if key.startswith("r") and key[1:].isdigit()), key=lambda key: int(key[1:])
    ):
        rows = found[key]
        lines += [
            f"### r = {key[1:]}",
            "",
            "| method | step / LoRA | peak memory / LoRA | start / PiSSA |",
            "|---|---|---|---|",
        ]
        for method in NAMES:
            cells = [cell(rows.get(part, {}).get(method)) for part in ("step", "peak", "start")]
            lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
        lines.append("")
    one = found.get("one_layer_4096_r128")
    if one:
        lines += ["### One 4096 x 4096 layer, r = 128", "", "| method | start / PiSSA |", "|---|---|"]
        lines += [f"| {NAMES[method]} | {cell(one[method])} |" for method in NAMES if method in one] + [""]
    return lines


def cell(row: dict[str, Any] | None) -> str:
    """Returns a ratio with its interval and the measured size."""
    if row is None:
        return "-"
    if "bytes" in row:
        return f"{row['ratio']:.3f} ({sorted(row['bytes'])[len(row['bytes']) // 2] / 2**30:.2f} GiB)"
    digits = 3 if row["ratio"] > 0.1 else 4
    spread = f"{row['ratio_low']:.{digits}f} to {row['ratio_high']:.{digits}f}"
    return f"{row['ratio']:.{digits}f} [{spread}] ({row['median_seconds']:.3g} s)"


def tests(found: dict[str, Any]) -> list[str]:
    """Returns the table of PEFT's own tests and the names of those that fail."""
    lines = [
        "## PEFT's own custom-model tests (`benchmarks/nlora_peft_suite.py`)", "",
        f"The tests of PEFT {found['peft']}, from its source distribution, on NLoRA's rows (12 kinds of target, 5 modes) and on stock "
        "LoRA's rows of the same targets.", "", "| rows | passed | skipped | failed |", "|---|---|---|---|",
    ]  # fmt: skip
    for which, name in (("nlora", "NLoRA"), ("lora", "stock LoRA")):
        rows = found[which]
        lines.append(f"| {name} | {rows['passed']} | {rows['skipped']} | {len(rows['failed'])} |")
    both = sorted(set(found["nlora"]["failed"]) & set(found["lora"]["failed"]))
    lines += [
        "",
        f"Failing for NLoRA alone: {', '.join(found['ours_alone']) or 'none'}. Failing for both (they need the Hub):",
        "",
    ]
    lines += [f"- `{name}`" for name in both]
    return [
        *lines, "",
        "Skipped for NLoRA: `nystrom_paper` in the two tests that ask for the base's output at step 0 (they skip stock methods that do not "
        "start there, too), and tests of features by the config's class, as for every method but LoRA. Four tests run with a rate of their own, "
        "as they do for several stock methods; `benchmarks/peft_rows.py` lists them. Not among the rows: grouped convolutions, "
        "`torch.nn.MultiheadAttention`, `target_parameters`, DoRA and other variants, which are refused by name.", "",
    ]  # fmt: skip


def where(found: dict[str, Any]) -> str:
    """Returns the machine and the versions in words."""
    parts: dict[str, list[str]] = {}
    for part, machine in found["machines"].items():
        parts.setdefault(f"{machine['cpu']}, {machine['cores']} cores", []).append(part)
    machines = "; ".join(f"{', '.join(names)} on {name}" for name, names in parts.items())
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return f"Measured: {machines}; {versions}"


if __name__ == "__main__":
    path = HERE / "measured.md"
    if "--check" in sys.argv:
        sys.exit(0 if path.read_text(encoding="utf-8") == page() else "docs/measured.md is old: run `make docs`")
    path.write_text(page(), encoding="utf-8")

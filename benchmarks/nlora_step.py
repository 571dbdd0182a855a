"""Step time, peak memory and start-up time of NLoRA beside PEFT's LoRA and PiSSA, on the built-in model.

    python benchmarks/nlora_step.py                  all of it (about half an hour on two cores)
    python benchmarks/nlora_step.py --steps 4        a quick look

Steps are taken in turns in one process, so that a slow spell falls on every method. Memory is the peak of a process
of its own for each method. Start-up is `get_peft_model` on a fresh base.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model

from mezzo.core import models
from mezzo.core.files import write_json
from mezzo.core.measure import interleave, machine, peak_bytes
from mezzo.core.stats import ratio
from mezzo.nlora import NLoraConfig

RESULT = Path(__file__).parent / "results" / "nlora_step.json"
BATCH, LENGTH = 4, 128


def config(method: str, r: int) -> Any:
    """Returns the PEFT config of a method at rank r, alpha = r, on every linear layer but the head."""
    if method == "lora":
        return LoraConfig(r=r, lora_alpha=r, target_modules="all-linear")
    if method == "pissa_niter_4":
        return LoraConfig(r=r, lora_alpha=r, target_modules="all-linear", init_lora_weights="pissa_niter_4")
    init, train = {"nlora": ("nystrom", "all"), "inttune": ("nystrom", "middle"), "slora": ("slora", "all")}[method]
    return NLoraConfig(r=r, init=init, train=train)


class Trainer:
    """One model with one method, and its AdamW."""

    def __init__(self, base: Any, method: str, r: int) -> None:
        torch.manual_seed(0)
        self.model = get_peft_model(base, config(method, r)).train()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        self.batch = torch.randint(10, 40_000, (BATCH, LENGTH), generator=generator)

    def step(self) -> float:
        loss = self.model(input_ids=self.batch, labels=self.batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def base_model() -> Any:
    files = models.find(models.DEFAULT)
    return models.load(files, dtype="float32", device="cpu")[0]


def times(r: int, steps: int, methods: list[str]) -> dict[str, Any]:
    """Returns seconds a step of each method, and ratios to LoRA with their 95 % intervals."""
    base = base_model()
    runs = {method: Trainer(copy.deepcopy(base), method, r) for method in methods}
    seconds = interleave({method: run.step for method, run in runs.items()}, repeats=steps, warmup=2)
    return summary(seconds, "lora")


def summary(seconds: dict[str, list[float]], against: str) -> dict[str, Any]:
    """Returns {method: {median, samples, ratio of medians to `against` with interval}}."""
    found: dict[str, Any] = {}
    for method, samples in seconds.items():
        share = ratio("ratio", samples, seconds[against])
        found[method] = {
            "median_seconds": sorted(samples)[len(samples) // 2],
            "ratio": share.value,
            "ratio_low": share.low,
            "ratio_high": share.high,
            "seconds": samples,
        }
    return found


def memory(method: str, r: int) -> int:
    """Returns the peak bytes of a process that takes three steps of one method."""
    command = [sys.executable, __file__, "--one", method, "--rank", str(r)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def starts(make: Any, r: int, rounds: int) -> dict[str, list[float]]:
    """Returns seconds of attaching each method to a fresh base."""
    methods = ["pissa_niter_4", "nlora", "inttune", "lora"]
    found: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            model = make()
            gc.collect()
            began = time.perf_counter()
            settings = config(method, r)
            if not hasattr(model, "config"):
                settings.target_modules = {"0"}
            get_peft_model(model, settings)
            found[method].append(time.perf_counter() - began)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="interleaved steps of each method [24]")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument(
        "--only", choices=["times", "memory", "starts"], nargs="+", default=["times", "memory", "starts"]
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        trainer = Trainer(base_model(), args.one, args.rank)
        for _ in range(3):
            trainer.step()
        print(peak_bytes())
        return 0
    methods = ["lora", "nlora", "inttune", "slora"]
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    result |= {
        "model": models.DEFAULT, "batch": [BATCH, LENGTH], "dtype": "float32", "seed": 0,
        "versions": {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }  # fmt: skip
    result.setdefault("machines", {}).update({part: machine() for part in args.only})
    for r in args.ranks:
        found = result.setdefault(f"r{r}", {})
        if "times" in args.only:
            found["step"] = times(r, args.steps, methods)
            show(f"step, r = {r}", found["step"])
        if "memory" in args.only:
            peaks = {method: [float(memory(method, r)) for _ in range(3)] for method in methods}
            found["peak"] = {
                m: {"bytes": p, "ratio": sorted(p)[1] / sorted(peaks["lora"])[1]} for m, p in peaks.items()
            }
            show(f"peak memory, r = {r}", found["peak"])
        if "starts" in args.only:
            base = base_model()
            found["start"] = summary(starts(lambda base=base: copy.deepcopy(base), r, 3), "pissa_niter_4")
            show(f"start-up, r = {r}", found["start"])
        write_json(RESULT, result)
    if "starts" in args.only:
        torch.manual_seed(0)
        layer = torch.nn.Linear(4096, 4096)
        result["one_layer_4096_r128"] = summary(starts(lambda: torch.nn.Sequential(copy.deepcopy(layer)), 128, 7), "pissa_niter_4")  # fmt: skip  # noqa: E501
        show("start-up, one 4096 x 4096 layer, r = 128", result["one_layer_4096_r128"])
        write_json(RESULT, result)
    return 0


def show(title: str, found: dict[str, Any]) -> None:
    print(title)
    for method, row in found.items():
        spread = f" [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]" if "ratio_low" in row else ""
        size = f"{row['median_seconds']:.3f} s" if "median_seconds" in row else f"{row['bytes'][0] / 2**30:.2f} GiB"
        print(f"  {method:<14} {size:<12} {row['ratio']:.4f}{spread}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

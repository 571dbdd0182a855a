"""The laws of an adapter as functions, for any model and any output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from mezzo.nlora import adapted_layers
from mezzo.nlora.export import export_lora

MODES = [
    ("nystrom", "all"),
    ("nystrom", "middle"),
    ("nystrom_paper", "all"),
    ("nystrom_paper", "middle"),
    ("slora", "all"),
]
EXACT_AT_0 = {("nystrom", "middle"), ("slora", "all")}
Output = Callable[[Any], torch.Tensor]


def move(model: Any, size: float = 0.05) -> Any:
    """Moves every trained tensor by random numbers."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn_like(parameter)
    return model


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, roundings: float = 32) -> None:
    """Asserts that two outputs part by no more than some roundings of their largest number."""
    found, wanted = found.detach(), wanted.detach()
    bound = roundings * torch.finfo(dtype).eps * max(float(wanted.abs().max()), 1e-3)
    assert float((found.float() - wanted.float()).abs().max()) <= bound


def step_0_is_the_base(base: torch.Tensor, adapted: torch.Tensor, mode: tuple[str, str], dtype: torch.dtype) -> None:
    if mode in EXACT_AT_0:
        assert torch.equal(adapted, base)
    elif mode[0] != "nystrom_paper":
        near(adapted, base, dtype)


def disabled_and_unloaded_is_the_base(model: Any, output: Output, base: torch.Tensor, before: dict[str, Any]) -> None:
    changed = output(model)
    assert not torch.equal(changed, base)
    with model.disable_adapter():
        assert torch.equal(output(model), base)
    assert torch.equal(output(model), changed)
    back = model.unload()
    assert torch.equal(output(back), base)
    after = back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def merge_is_the_adapter_and_unmerge_is_exact(model: Any, output: Output, dtype: torch.dtype) -> None:
    changed = output(model)
    model.merge_adapter()
    near(output(model), changed, dtype)
    model.unmerge_adapter()
    assert torch.equal(output(model), changed)


def saved_and_loaded_is_the_same(model: Any, output: Output, fresh: Callable[[], Any], folder: Path) -> None:
    model.save_pretrained(folder)
    wanted = output(model)
    for low in (False, True):
        again = PeftModel.from_pretrained(fresh(), str(folder), low_cpu_mem_usage=low).eval()
        assert torch.equal(output(again), wanted)


def exported_is_the_adapter(
    model: Any, output: Output, fresh: Callable[[], Any], folder: Path, dtype: torch.dtype
) -> None:
    export_lora(model, folder)
    stock = PeftModel.from_pretrained(fresh(), str(folder)).eval()
    near(output(stock), output(model), dtype)


def only_the_adapter_gets_gradients(model: Any, loss: torch.Tensor, train: str) -> None:
    loss.backward()
    found = {name for name, value in model.named_parameters() if value.grad is not None}
    assert found == {name for name, value in model.named_parameters() if value.requires_grad}
    kinds = {name.split(".")[-2] for name in found}
    assert kinds == ({"nlora_N"} if train == "middle" else {"nlora_A", "nlora_N", "nlora_B"})
    assert len(found) == len(adapted_layers(model)) * len(kinds)

"""Damaged adapters, as `mezzo nlora export` and its like meet them: one line that names the tensor or the field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME as WEIGHTS
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mezzo.core.errors import UserError
from mezzo.nlora import NLoraConfig
from mezzo.nlora.use import load_adapter
from tests.nlora import laws

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def adapter(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "whole"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), NLoraConfig(r=4))
    laws.move(model).save_pretrained(folder)
    return folder


def first(tensors: Tensors, kind: str) -> str:
    return next(key for key in tensors if key.endswith(kind))


def without(kind: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != first(tensors, kind)}


def with_(kind: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {first(tensors, kind): change(tensors[first(tensors, kind)])}


DAMAGE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no A": (without("nlora_A"), r"lacks \S*nlora_A"),
    "no N": (without("nlora_N"), r"lacks \S*nlora_N"),
    "no landmarks": (without("nlora_rows"), r"lacks \S*nlora_rows"),
    "another's tensor": (
        lambda t: t | {"base_model.model.foo.nlora_A": torch.zeros(2)},
        r"the file holds \S*foo.nlora_A, for which the settings .* make no place",
    ),
    "NaN": (with_("nlora_N", lambda v: v * float("nan")), r"nlora_N holds numbers that are not finite"),
    "inf": (with_("nlora_B", lambda v: v + float("inf")), r"nlora_B holds numbers that are not finite"),
    "landmarks as numbers": (with_("nlora_rows", lambda v: v.float()), r"nlora_rows holds no indices"),
    "negative landmarks": (with_("nlora_columns", lambda v: v - 50_000), r"nlora_columns holds no indices"),
    "landmarks too large": (with_("nlora_rows", lambda v: v + 10_000), r"cannot be loaded \(index"),
    "shift": (with_("nlora_shift", lambda v: v * 0 + 5000), r"nlora_shift holds no power"),
}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # PEFT says it and goes on; we stop
@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_tensor_is_named(fault: str, adapter: Path, model_folder: Path, tmp_path: Path) -> None:
    change, said = DAMAGE[fault]
    shutil.copytree(adapter, tmp_path / "a")
    save_file(change(load_file(adapter / WEIGHTS)), tmp_path / "a" / WEIGHTS)
    with pytest.raises(UserError, match=said):
        load_adapter(tmp_path / "a", model=str(model_folder))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_dropout", "a"),
        ("lora_dropout", None),
        ("rank_pattern", [1]),
        ("alpha_pattern", None),
        ("target_modules", 3),
        ("target_modules", "(["),
        ("exclude_modules", "(["),
    ],
)
def test_a_damaged_setting_is_named(
    field: str, value: object, adapter: Path, model_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(UserError, match=field):
        load_adapter(tmp_path / "a", model=str(model_folder))


@pytest.mark.parametrize("edited", [{"init": "slora"}, {"init": "nystrom_paper"}, {"train": "middle"}], ids=str)
def test_peft_itself_refuses_tensors_of_another_mode(
    edited: dict[str, str], adapter: Path, model_folder: Path, tmp_path: Path
) -> None:
    file = shutil.copytree(adapter, tmp_path / "a") / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | edited))
    with pytest.raises(UserError, match=r"for which the settings .* make no place"):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), str(tmp_path / "a"))


def test_a_whole_adapter_loads(adapter: Path, model_folder: Path) -> None:
    model, _, _ = load_adapter(adapter, model=str(model_folder))
    assert torch.isfinite(model(torch.arange(6)[None]).logits).all()

"""The laws for every model family and every mode, in float32 and bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

from mezzo.nlora import NLoraConfig, adapted_layers
from tests.nlora import laws, zoo

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the paper's start changes:UserWarning",
    "ignore:fan_in_fan_out is set:UserWarning",
)

every_model = pytest.mark.parametrize("name", zoo.MODELS)
every_mode = pytest.mark.parametrize("mode", laws.MODES, ids="-".join)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def attach(name: str, mode: tuple[str, str], dtype: torch.dtype, task: str | None = None) -> Any:
    """A classifier's head is adapted as any other layer without a task, and trained whole with SEQ_CLS."""
    config = NLoraConfig(r=4, init=mode[0], train=mode[1], task_type=task)  # type: ignore[arg-type]
    return get_peft_model(zoo.MODELS[name](dtype), config).eval()


@every_model
@every_mode
@every_dtype
def test_the_laws_hold(name: str, mode: tuple[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    def output(model: Any) -> torch.Tensor:
        return zoo.outputs(model, name, dtype)

    def fresh() -> Any:
        return zoo.MODELS[name](dtype)

    base = output(fresh())
    model = attach(name, mode, dtype)
    laws.step_0_is_the_base(base, output(model), mode, dtype)
    laws.move(model)
    laws.merge_is_the_adapter_and_unmerge_is_exact(model, output, dtype)
    laws.saved_and_loaded_is_the_same(model, output, fresh, tmp_path / "kept")
    laws.exported_is_the_adapter(model, output, fresh, tmp_path / "lora", dtype)
    laws.disabled_and_unloaded_is_the_base(model, output, base, fresh().state_dict())


@every_model
@every_mode
def test_only_the_adapter_is_trained(name: str, mode: tuple[str, str]) -> None:
    model = laws.move(attach(name, mode, torch.float32, zoo.TASKS.get(name, "CAUSAL_LM"))).train()
    model(**zoo.inputs(name, torch.float32)).loss.backward()
    trained = {key for key, value in model.named_parameters() if value.requires_grad and ".modules_to_save." not in key}
    assert trained == {key for key, value in model.named_parameters() if value.grad is not None and "nlora_" in key}
    assert len(trained) == len(adapted_layers(model)) * (1 if mode[1] == "middle" else 3)


@pytest.mark.parametrize("name", ["bert", "roberta", "deberta"])
@every_mode
def test_a_classifier_keeps_its_head_with_the_adapter(name: str, mode: tuple[str, str], tmp_path: Path) -> None:
    model = laws.move(attach(name, mode, torch.float32, "SEQ_CLS"))
    assert model.peft_config["default"].modules_to_save
    laws.saved_and_loaded_is_the_same(
        model, lambda m: zoo.outputs(m, name, torch.float32), lambda: zoo.MODELS[name](torch.float32), tmp_path
    )

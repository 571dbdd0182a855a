"""The laws on quantised bases: bitsandbytes 4 and 8 bit, torchao int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from mezzo.nlora import NLoraConfig, adapted_layers
from tests.nlora import laws
from tests.tiny import llama

pytest.importorskip("bitsandbytes", reason="pip install mezzo[quantised]")
pytest.importorskip("torchao", reason="pip install mezzo[quantised]")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the paper's start changes:UserWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

X = torch.arange(20).view(2, 10) % 60
KINDS = ["bnb 4bit", "bnb 8bit", "torchao int8"]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_mode = pytest.mark.parametrize("mode", laws.MODES, ids="-".join)


def settings(kind: str) -> Any:
    if kind == "bnb 4bit":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    if kind == "bnb 8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("base")
    llama(hidden=64).save_pretrained(place)
    return place


def load(folder: Path, kind: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings(kind), dtype=torch.float32, device_map={"": "cpu"}
    ).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(X).logits.float()
    return found


@every_kind
@every_mode
def test_the_laws_hold(kind: str, mode: tuple[str, str], folder: Path, tmp_path: Path) -> None:
    before = logits(load(folder, kind))
    model = get_peft_model(load(folder, kind), NLoraConfig(r=4, init=mode[0], train=mode[1])).eval()  # type: ignore[arg-type]
    assert len(adapted_layers(model)) == 14
    assert all(layer.quantization_backend.backend_name == kind.split(" int")[0] for _, layer in adapted_layers(model))
    laws.step_0_is_the_base(before, logits(model), mode, torch.float32)
    laws.move(model)
    changed = logits(model)
    assert not torch.equal(changed, before)
    with model.disable_adapter():
        assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(folder, kind), str(tmp_path)).eval()
    assert torch.equal(logits(again), changed)


@every_kind
@every_mode
def test_the_slices_are_those_of_the_dequantised_weight(kind: str, mode: tuple[str, str], folder: Path) -> None:
    model = get_peft_model(load(folder, kind), NLoraConfig(r=4, init=mode[0], train=mode[1]))  # type: ignore[arg-type]
    for _, layer in adapted_layers(model):
        identity, W = torch.eye(layer.in_features), layer.original_weight()
        with torch.no_grad():
            through = layer.base_layer(identity).T
        torch.testing.assert_close(W.float(), through, atol=2e-2 * float(W.abs().max()), rtol=0)
        if mode[0] != "slora":
            assert mode == ("nystrom_paper", "all") or torch.equal(layer.nlora_C["default"], W[:, _columns(layer)])


def _columns(layer: Any) -> torch.Tensor:
    columns: torch.Tensor = layer.nlora_columns["default"].long()
    return columns


def test_a_weight_that_bitsandbytes_repacked_for_the_cpu_is_read_as_before(folder: Path) -> None:
    model = get_peft_model(load(folder, "bnb 4bit"), NLoraConfig(r=4)).eval()
    before = [layer.original_weight().float() for _, layer in adapted_layers(model)]
    logits(model)
    for (_, layer), wanted in zip(adapted_layers(model), before, strict=True):
        torch.testing.assert_close(layer.original_weight().float(), wanted, atol=0, rtol=2**-7)


@every_kind
@every_mode
def test_it_trains_the_adapter_alone(kind: str, mode: tuple[str, str], folder: Path) -> None:
    model = laws.move(get_peft_model(load(folder, kind), NLoraConfig(r=4, init=mode[0], train=mode[1]))).train()  # type: ignore[arg-type]
    laws.only_the_adapter_gets_gradients(model, model(X, labels=X).loss, mode[1])


@every_kind
@every_mode
def test_merge_goes_onto_the_dequantised_base_and_unmerge_brings_the_quantised_one_back(
    kind: str, mode: tuple[str, str], folder: Path
) -> None:
    model = laws.move(get_peft_model(load(folder, kind), NLoraConfig(r=4, init=mode[0], train=mode[1])).eval())  # type: ignore[arg-type]
    changed, quantised = logits(model), [layer.base_layer for _, layer in adapted_layers(model)]
    wanted = [
        layer.original_weight().float() + layer.get_delta_weight("default") for _, layer in adapted_layers(model)
    ]
    model.merge_adapter()
    for (_, layer), weight in zip(adapted_layers(model), wanted, strict=True):
        assert type(layer.base_layer) is torch.nn.Linear
        assert torch.equal(layer.base_layer.weight.float(), weight.to(layer.base_layer.weight.dtype).float())
    merged = logits(model)
    assert float((merged - changed).abs().max()) < 0.05 * float(changed.abs().max())
    model.unmerge_adapter()
    assert all(layer.base_layer is kept for (_, layer), kept in zip(adapted_layers(model), quantised, strict=True))
    assert torch.equal(logits(model), changed)
    with pytest.warns(UserWarning, match=r"onto the dequantised base: rounding of at most [\d.]+%"):
        plain = model.merge_and_unload()
    assert torch.equal(logits(plain), merged)
    assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear

"""The laws for every kind of layer and every mode, in float32 and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.pytorch_utils import Conv1D

from mezzo.core.errors import UserError
from mezzo.nlora import NLoraConfig, adapted_layers
from tests.nlora import laws

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the paper's start changes:UserWarning",
    "ignore:fan_in_fan_out is set:UserWarning",
)

IMAGE, SIGNAL, VECTORS = (2, 4, 9, 8), (2, 4, 15), (3, 5, 12)
TOKENS = torch.arange(1, 13).view(3, 4)
LAYERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "linear": (lambda: nn.Linear(12, 10), VECTORS),
    "linear without bias": (lambda: nn.Linear(12, 10, bias=False), VECTORS),
    "linear of fewer outputs than the rank": (lambda: nn.Linear(12, 2), VECTORS),
    "linear of fewer inputs than the rank": (lambda: nn.Linear(3, 10), (3, 5, 3)),
    "conv1d of gpt2": (lambda: Conv1D(10, 12), VECTORS),
    "square conv1d of gpt2": (lambda: Conv1D(12, 12), VECTORS),
    "convolution 1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), SIGNAL),
    "convolution 1x1": (lambda: nn.Conv2d(4, 6, 1, bias=False), IMAGE),
    "convolution 3x3": (lambda: nn.Conv2d(4, 6, 3), IMAGE),
    "convolution with stride and padding": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, padding=1), IMAGE),
    "convolution 3d": (lambda: nn.Conv3d(2, 6, 2), (2, 2, 4, 3, 5)),
    "embedding": (lambda: nn.Embedding(20, 8), TOKENS),
    "embedding with padding": (lambda: nn.Embedding(20, 8, padding_idx=0), TOKENS),
    "scaled embedding of gemma": (lambda: Gemma3TextScaledWordEmbedding(20, 8, 0, embed_scale=3.0), TOKENS),
}
UNEXPORTABLE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "convolution with dilation": (lambda: nn.Conv2d(4, 6, 3, dilation=2), IMAGE),
    "convolution with reflected edges": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
}

every_layer = pytest.mark.parametrize("kind", [*LAYERS, *UNEXPORTABLE])
every_mode = pytest.mark.parametrize("mode", laws.MODES, ids="-".join)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


class Net(nn.Module):
    """One layer between an input that needs a gradient and a sum."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y.tanh()


def net(kind: str, dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net((LAYERS | UNEXPORTABLE)[kind][0]()).to(dtype).eval()


def given(kind: str, dtype: torch.dtype) -> torch.Tensor:
    shape = (LAYERS | UNEXPORTABLE)[kind][1]
    torch.manual_seed(3)
    return shape if isinstance(shape, torch.Tensor) else torch.randn(shape).to(dtype)


def attach(kind: str, mode: tuple[str, str], dtype: torch.dtype, **more: Any) -> Any:
    config = NLoraConfig(r=4, init=mode[0], train=mode[1], target_modules=["layer"], **more)  # type: ignore[arg-type]
    return get_peft_model(net(kind, dtype), config).eval()


def output_of(kind: str, dtype: torch.dtype) -> laws.Output:
    x = given(kind, dtype)

    def output(model: Any) -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = model(x)
        return y

    return output


@every_layer
@every_mode
@every_dtype
def test_the_laws_hold(kind: str, mode: tuple[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    output = output_of(kind, dtype)
    base = output(net(kind, dtype))
    model = attach(kind, mode, dtype)
    laws.step_0_is_the_base(base, output(model), mode, dtype)
    laws.move(model, 0.3)
    laws.merge_is_the_adapter_and_unmerge_is_exact(model, output, dtype)
    laws.saved_and_loaded_is_the_same(model, output, lambda: net(kind, dtype), tmp_path / "kept")
    if kind in LAYERS:
        laws.exported_is_the_adapter(model, output, lambda: net(kind, dtype), tmp_path / "lora", dtype)
    else:
        with pytest.raises(UserError, match="no dilation and no padding but zeros"):
            laws.exported_is_the_adapter(model, output, lambda: net(kind, dtype), tmp_path / "lora", dtype)
    laws.disabled_and_unloaded_is_the_base(model, output, base, net(kind, dtype).state_dict())


@every_layer
@every_mode
def test_gradients_are_those_of_the_whole_change_added_to_the_weight(kind: str, mode: tuple[str, str]) -> None:
    """The layer's own backward against autograd through W + change, for B, N, A, the bias and the input."""
    model = laws.move(attach(kind, mode, torch.float64, bias="all"), 0.3)
    (_, layer), x = adapted_layers(model)[0], given(kind, torch.float64)
    if x.is_floating_point():
        x.requires_grad_()
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted_for = [*trained, x] if x.is_floating_point() else trained
    weights = torch.linspace(1, 2, model(x).numel(), dtype=torch.float64)
    found = torch.autograd.grad((model(x).flatten() * weights).sum(), wanted_for)
    plain = torch.func.functional_call(
        layer.base_layer, {"weight": layer.base_layer.weight + layer._stored(_change(layer))}, (x,)
    )
    wanted = torch.autograd.grad((plain.tanh().flatten() * weights).sum(), wanted_for)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-7)


def _change(layer: Any) -> torch.Tensor:
    """The change of W with its graph, in float64."""
    N, scale = layer.nlora_N["default"], layer.scaling["default"]
    W = layer.original_weight()
    if "default" not in layer.nlora_A:
        rows, columns = layer.nlora_rows["default"].long(), layer.nlora_columns["default"].long()
        change: torch.Tensor = scale * 2.0 ** layer.gain["default"] * W[:, columns] @ N @ W[rows]
        return change
    change = scale * layer.nlora_B["default"] @ N @ layer.nlora_A["default"]
    if "default" in layer.nlora_rows:
        rows, columns = layer.nlora_rows["default"].long(), layer.nlora_columns["default"].long()
        change = change - scale * 2.0 ** layer.shift["default"] * W[:, columns] @ W[rows][:, columns] @ W[rows]
    return change


@every_mode
def test_only_the_adapter_is_trained(mode: tuple[str, str]) -> None:
    for kind in LAYERS:
        model = laws.move(attach(kind, mode, torch.float32)).train()
        laws.only_the_adapter_gets_gradients(model, model(given(kind, torch.float32)).sum(), mode[1])


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Conv2d(4, 6, 3, groups=2), "2 groups"),
        (nn.Embedding(20, 8, max_norm=1.0), "max_norm"),
        (nn.LayerNorm(8), "LayerNorm cannot be adapted"),
        (nn.ConvTranspose2d(4, 6, 3), "ConvTranspose2d cannot be adapted"),
        (nn.MultiheadAttention(8, 2), "MultiheadAttention cannot be adapted"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(layer: nn.Module, why: str) -> None:
    with pytest.raises(UserError, match=f"^layer: .*{why}"):
        get_peft_model(Net(layer), NLoraConfig(r=4, target_modules=["layer"]))


def test_the_projection_inside_multihead_attention_is_refused_as_nothing_calls_it() -> None:
    with pytest.raises(UserError, match="is never called"):
        get_peft_model(Net(nn.MultiheadAttention(8, 2)), NLoraConfig(r=4, target_modules=["out_proj"]))

"""What backward keeps: r numbers a token for each product, and of the input and output nothing but a reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn

from mezzo.nlora import NLoraConfig, adapted_layers
from mezzo.nlora.kernel import add_, project, tap
from tests.nlora import laws

pytestmark = pytest.mark.filterwarnings("ignore:.*the paper's start changes:UserWarning")

TOKENS, IN, OUT, R = 40, 96, 80, 4


def adapted(mode: tuple[str, str], base: torch.dtype, bias: bool) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(IN, OUT, bias=bias)).to(base)
    model = get_peft_model(net, NLoraConfig(r=R, init=mode[0], train=mode[1], target_modules=["0"]))  # type: ignore[arg-type]
    return adapted_layers(laws.move(model))[0][1]


@pytest.mark.parametrize("watched", [False, True], ids=["fused", "composed"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16 base"])
@pytest.mark.parametrize("mode", laws.MODES, ids="-".join)
def test_backward_keeps_r_numbers_a_token_and_the_input_by_reference(
    mode: tuple[str, str], base: torch.dtype, bias: bool, watched: bool
) -> None:
    layer = adapted(mode, base, bias)
    if watched:
        layer.base_layer.register_forward_hook(lambda *_: None)
    x = torch.randn(2, TOKENS // 2, IN, dtype=base, requires_grad=True)
    layer(x)  # R is held from the first call with a hook on
    own = {value.untyped_storage().data_ptr() for value in [*layer.parameters(), *layer.buffers(), x]}
    kept: dict[int, torch.Tensor] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        place = value.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = layer(x)
    products = 2 if mode == ("nystrom", "all") else 1
    assert sum(value.numel() for value in kept.values()) <= products * TOKENS * R
    assert all(value.shape[-1] <= R for value in kept.values())
    y.float().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("mode", laws.MODES, ids="-".join)
def test_the_fused_pass_and_the_composed_one_give_the_same(mode: tuple[str, str]) -> None:
    found = []
    for watched in (False, True):
        layer = adapted(mode, torch.float32, True)
        if watched:
            layer.base_layer.register_forward_hook(lambda *_: None)
        torch.manual_seed(5)
        x = torch.randn(3, 7, IN, requires_grad=True)
        y = layer(x)
        y.tanh().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)])
    for fused, composed in zip(*found, strict=True):
        torch.testing.assert_close(fused, composed, atol=1e-6, rtol=1e-5)


def test_hooks_on_the_base_layer_see_its_own_output() -> None:
    layer = adapted(("nystrom", "all"), torch.float32, True)
    seen: list[torch.Tensor] = []
    layer.base_layer.register_forward_hook(lambda _, __, y: seen.append(y))
    x = torch.randn(3, IN)
    changed = layer(x)
    assert torch.equal(seen[0], nn.functional.linear(x, layer.base_layer.weight, layer.base_layer.bias))
    assert not torch.equal(seen[0], changed)


def test_gradients_of_the_products_against_finite_differences() -> None:
    torch.manual_seed(0)
    x, A = (
        torch.randn(5, 6, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 6, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(project, (x, A))
    y, bias = (
        torch.randn(5, 7, dtype=torch.float64, requires_grad=True),
        torch.randn(7, dtype=torch.float64, requires_grad=True),
    )
    rows = torch.tensor([1, 4], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda y, b: tap(y * 1, rows, b), (y, bias))
    u, N, B = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((5, 2), (2, 2), (7, 2)))
    assert torch.autograd.gradcheck(lambda y, u, N, B: add_(y * 1, u, N, B, 0.7), (y, u, N, B))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("train", ["all", "middle"])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_what_follows_may_write_into_the_output(shape: tuple[int, ...], train: str, bias: bool) -> None:
    model = get_peft_model(
        nn.Sequential(nn.Linear(8, 8, bias=bias), nn.ReLU(inplace=True)),
        NLoraConfig(r=3, train=train, target_modules=["0"]),
    )
    model(torch.randn(shape)).sum().backward()
    (N,) = (value for key, value in model.named_parameters() if "nlora_N" in key)
    assert N.grad is not None and N.grad.abs().sum() > 0

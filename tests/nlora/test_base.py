"""What happens to an adapter when something happens to the base layer below it."""

from __future__ import annotations

import copy
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, prune

from mezzo.core.errors import UserError
from mezzo.nlora import NLoraConfig
from tests.nlora import laws

pytestmark = pytest.mark.filterwarnings("ignore:.*the paper's start changes:UserWarning")

each_mode = pytest.mark.parametrize("mode", laws.MODES, ids="/".join)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(first=nn.Linear(12, 20), between=nn.Tanh(), last=nn.Linear(20, 8)))


def adapted(mode: tuple[str, str], model: nn.Module | None = None, **fields: Any) -> Any:
    config = NLoraConfig(r=4, init=mode[0], train=mode[1], target_modules=["first", "last"], **fields)
    return laws.move(get_peft_model(model or net(), config), 0.2).eval()


def inputs(rows: int = 6) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(rows, 12)


def base_of(model: Any) -> Any:
    return model.base_model.model.first.get_base_layer()


def in_place(model: Any) -> None:
    with torch.no_grad():
        base_of(model).weight.mul_(1.3)


def assigned(model: Any) -> None:
    base_of(model).weight = nn.Parameter(torch.randn(20, 12), requires_grad=False)


def loaded(model: Any, assign: bool = False) -> None:
    state = {key: value * 0.7 if "base_layer.weight" in key else value for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def loaded_by_assigning(model: Any) -> None:
    loaded(model, assign=True)


def trained(model: Any) -> None:
    weight = base_of(model).weight.requires_grad_(True)
    model(inputs()).square().mean().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    weight.requires_grad_(False)


@each_mode
@pytest.mark.parametrize("change", [in_place, assigned, loaded, loaded_by_assigning, trained])
def test_an_adapter_on_a_base_that_changes_is_the_one_that_is_merged_and_loaded(
    change: Callable[[Any], None], mode: tuple[str, str], tmp_path: Any
) -> None:
    model, x = adapted(mode), inputs()
    first = model(x)
    change(model)
    with torch.no_grad():
        found = model(x)
        assert not torch.allclose(found, first)
        model.save_pretrained(tmp_path)
        bare = copy.deepcopy(model).unload()
        reloaded = PeftModel.from_pretrained(copy.deepcopy(bare), str(tmp_path)).eval()
        laws.near(reloaded(x), found, torch.float32)
        laws.near(model.merge_and_unload()(x), found, torch.float32)


@each_mode
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_trained_base_gets_the_gradient_of_all_that_is_made_of_it(mode: tuple[str, str], dropout: float) -> None:
    model = adapted(mode, lora_dropout=dropout).double().train()
    weight, x = base_of(model).weight.requires_grad_(True), inputs().double()

    def loss() -> Tensor:
        torch.manual_seed(3)
        return model(x).square().sum()

    loss().backward()
    found, wanted = weight.grad, torch.zeros_like(weight)
    with torch.no_grad():
        for place in range(weight.numel()):
            weight.view(-1)[place] += 1e-6
            above = loss()
            weight.view(-1)[place] -= 2e-6
            wanted.view(-1)[place] = (above - loss()) / 2e-6
            weight.view(-1)[place] += 1e-6
    assert float((found - wanted).abs().max()) < 1e-7 * float(wanted.abs().max())


@each_mode
def test_gradients_of_single_rows_by_torch_func_sum_to_the_gradient_of_the_batch(mode: tuple[str, str]) -> None:
    model, x = adapted(mode), inputs()
    taken = {key: value.detach() for key, value in model.named_parameters() if value.requires_grad}
    rest = {key: value for key, value in [*model.named_parameters(), *model.named_buffers()] if key not in taken}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        y: Tensor = functional_call(model, (parameters, rest), (row[None],))
        return y.square().sum()

    single = vmap(grad(loss), in_dims=(None, 0))(taken, x)
    model(x).square().sum().backward()
    for key, value in model.named_parameters():
        if key in taken:
            torch.testing.assert_close(single[key].sum(0), value.grad, atol=1e-5, rtol=1e-5)


EVERY = nn.modules.module
HOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "forward": lambda base, call: base.register_forward_hook(call),
    "forward_pre": lambda base, call: base.register_forward_pre_hook(call),
    "full_backward": lambda base, call: base.register_full_backward_hook(call),
    "full_backward_pre": lambda base, call: base.register_full_backward_pre_hook(call),
    "every_forward": lambda _, call: EVERY.register_module_forward_hook(call),
    "every_forward_pre": lambda _, call: EVERY.register_module_forward_pre_hook(call),
    "every_full_backward": lambda _, call: EVERY.register_module_full_backward_hook(call),
    "every_full_backward_pre": lambda _, call: EVERY.register_module_full_backward_pre_hook(call),
}


@each_mode
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_on_the_base_layer_is_called_and_changes_nothing(kind: str, mode: tuple[str, str]) -> None:
    model, called = adapted(mode), []
    wanted = model(inputs())
    handle = HOOKS[kind](base_of(model), lambda module, *_: called.append(module))
    try:
        found = model(inputs().requires_grad_(True))
        found.sum().backward()
    finally:
        handle.remove()
    assert base_of(model) in called
    laws.near(found.detach(), wanted.detach(), torch.float32)


PARTLY_COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
}


@each_mode
@pytest.mark.parametrize("kind", PARTLY_COMPUTED)
def test_a_base_that_computes_its_weight_is_adapted_and_refuses_the_merge(kind: str, mode: tuple[str, str]) -> None:
    plain = net()
    PARTLY_COMPUTED[kind](plain.first)
    wanted = plain.eval()(inputs())
    model = adapted(mode, plain)
    with model.disable_adapter():
        assert torch.equal(model(inputs()), wanted)
    found = model(inputs())
    with pytest.raises(UserError, match="computed at every call"):
        model.merge_adapter()
    assert torch.equal(model(inputs()), found)


@each_mode
def test_a_model_with_adapters_is_pickled_and_copied(mode: tuple[str, str]) -> None:
    model = adapted(mode)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  # our own bytes
        assert torch.equal(other(inputs()), model(inputs()))


@pytest.mark.parametrize("size", [1e-15, 1e20, math.nan, math.inf])
@pytest.mark.parametrize("mode", [mode for mode in laws.MODES if mode[0] != "slora"], ids="/".join)
def test_a_weight_that_no_adapter_can_start_from_is_refused_by_name(mode: tuple[str, str], size: float) -> None:
    model = net()
    with torch.no_grad():
        model.last.weight.mul_(size)
    with pytest.raises(UserError, match=r"^last: the weight's entries are of size"):
        adapted(mode, model)
    assert not any(isinstance(layer, BaseTunerLayer) for layer in model)  # the first is taken back


def test_an_adapter_refused_halfway_leaves_the_others_as_they_were() -> None:
    model = adapted(("slora", "all"))
    wanted = model(inputs())
    model.base_model.model.last.get_base_layer().weight.data.mul_(math.nan)
    bad = NLoraConfig(r=4, target_modules=["first", "last"])
    with pytest.raises(UserError, match="entries are of size nan"):
        model.add_adapter("second", bad)
    model.base_model.model.last.get_base_layer().weight.data.copy_(net().last.weight)
    assert list(model.peft_config) == ["default"]
    assert not any(".second" in key for key in model.state_dict())
    assert torch.equal(model(inputs()), wanted)


@pytest.mark.parametrize("mode", [mode for mode in laws.MODES if mode[0] != "slora"], ids="/".join)
def test_a_weight_of_zeros_is_adapted_with_a_warning(mode: tuple[str, str]) -> None:
    model = net()
    with torch.no_grad():
        model.last.weight.zero_()
    with pytest.warns(UserWarning, match="^last: the weight is zero"):
        model = adapted(mode, model)
    assert torch.isfinite(model(inputs())).all()

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


def trained_past_autograd(model: Any) -> None:
    """The fused optimiser, transformers' default, writes without counting up the weight's version."""
    weight = base_of(model).weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for _ in range(3):
        model(inputs()).square().mean().backward()
        optimizer.step()


def trained_past_autograd_and_frozen(model: Any) -> None:
    trained_past_autograd(model)
    base_of(model).weight.requires_grad_(False)


def trained(model: Any) -> None:
    weight = base_of(model).weight.requires_grad_(True)
    model(inputs()).square().mean().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    weight.requires_grad_(False)


@each_mode
@pytest.mark.parametrize(
    "change",
    [in_place, assigned, loaded, loaded_by_assigning, trained, trained_past_autograd, trained_past_autograd_and_frozen],
)
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
    laws.near(found, wanted, torch.float32)


def tripled(*values: Any) -> Any:
    return values[-1] * 3 if isinstance(values[-1], Tensor) else tuple(value * 3 for value in values[-1])


class Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def triple_output(layer: nn.Module) -> None:
    layer.register_forward_hook(tripled)


def triple_input(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(tripled)


def replace_forward(layer: Any) -> None:
    own = layer.forward
    layer.forward = lambda x: own(x) * 3


def make_subclass(layer: nn.Module) -> None:
    layer.__class__ = Tripled


@each_mode
@pytest.mark.parametrize("change", [triple_output, triple_input, replace_forward, make_subclass])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_base_that_gives_another_output_than_its_class_is_called_and_the_adapter_adds_its_own(
    change: Callable[[Any], None], when: str, mode: tuple[str, str]
) -> None:
    plain, same = net(), net()
    model: Any = None
    for made in (plain, same):
        if when == "before":
            change(made.first)
    if when == "before":
        model = get_peft_model(plain, NLoraConfig(r=4, init=mode[0], train=mode[1], target_modules=["first"])).eval()
    else:
        model = get_peft_model(plain, NLoraConfig(r=4, init=mode[0], train=mode[1], target_modules=["first"])).eval()
        change(base_of(model))
        change(same.first)
    if mode[0] != "nystrom_paper":
        laws.near(model(inputs()), same(inputs()), torch.float32)
    laws.move(model, 0.2)
    layer = model.base_model.model.first
    wanted = same.first(inputs()) + inputs() @ layer.change("default").T
    laws.near(layer(inputs()), wanted, torch.float32)


@pytest.mark.parametrize("source", [5.0, 0.01])
@each_mode
def test_a_whole_state_dict_goes_into_a_model_whose_base_was_of_another_size(
    mode: tuple[str, str], source: float, tmp_path: Any
) -> None:
    big = net()
    with torch.no_grad():
        big.first.weight.mul_(source)
    model, other = adapted(mode, big), adapted(mode)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(inputs()), model(inputs()))
    other.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(other).unload(), str(tmp_path)).eval()
    laws.near(again(inputs()), model(inputs()), torch.float32)


@each_mode
def test_vmap_follows_the_base_too(mode: tuple[str, str]) -> None:
    model = adapted(mode)
    with torch.no_grad():
        wanted = model(inputs())
        states = {key: value.clone() for key, value in model.state_dict().items()}
        functional_call(
            model, {key: torch.randn_like(value) for key, value in states.items() if "base_layer" in key}, (inputs(),)
        )
        laws.near(vmap(lambda row: functional_call(model, states, (row[None],))[0])(inputs()), wanted, torch.float32)


@each_mode
def test_a_merged_model_has_the_tensors_of_an_unmerged_one(mode: tuple[str, str], tmp_path: Any) -> None:
    model = adapted(mode)
    keys, count = set(model.state_dict()), len(list(model.parameters()))
    wanted, weight = model(inputs()), base_of(model).weight
    model.merge_adapter()
    assert set(model.state_dict()) == keys
    assert len(list(model.parameters())) == count
    model.save_pretrained(tmp_path)
    model.unmerge_adapter()
    assert base_of(model).weight is weight
    assert torch.equal(model(inputs()), wanted)
    again = PeftModel.from_pretrained(net(), str(tmp_path)).eval()
    assert torch.equal(again(inputs()), wanted)
    model.merge_adapter()
    model.bfloat16().unmerge_adapter()
    assert base_of(model).weight.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", [mode for mode in laws.MODES if mode[0] != "slora"], ids="/".join)
@pytest.mark.parametrize("size", [0.0, 300.0])
def test_a_large_bias_does_not_drown_the_landmark_outputs(mode: tuple[str, str], size: float) -> None:
    plain = net()
    with torch.no_grad():
        plain.first.bias[:7] = size
    exact = adapted(mode, copy.deepcopy(plain))
    half = adapted(mode, plain.bfloat16())
    half.load_state_dict({k: v.to(half.state_dict()[k].dtype) for k, v in exact.state_dict().items()})
    layers = [model.base_model.model.first for model in (exact, half)]
    x = inputs().bfloat16()
    found = [layer(x.to(layer.get_base_layer().weight.dtype)).float()[:, 7:] for layer in layers]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(layers[0](inputs()).float()[:, 7:])
    found = [values.detach() for values in found]
    assert float((found[0] - found[2]).abs().max()) < 0.02 * float(found[0].abs().max())
    assert float((found[0] - found[1]).abs().max()) < 0.02 * float(found[0].abs().max())


@each_mode
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_convolution_without_a_batch_dimension_gives_what_it_gives_with_one(
    dimensions: int, mode: tuple[str, str]
) -> None:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(first=kind(4, 6, 3, padding=1)))
    config = NLoraConfig(r=3, init=mode[0], train=mode[1], target_modules=["first"])
    model = laws.move(get_peft_model(model, config), 0.2).eval()
    for size in (6, 5):
        x = torch.randn(4, *[size] * dimensions)
        assert torch.equal(model(x), model(x[None])[0])


def test_adapter_tensors_that_are_offloaded_are_said() -> None:
    model = adapted(("nystrom", "all"))
    layer = model.base_model.model.first
    layer.nlora_N["default"] = nn.Parameter(layer.nlora_N["default"].to("meta"))
    with pytest.raises(UserError, match="not in memory"):
        model(inputs())


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

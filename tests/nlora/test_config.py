"""What a config refuses, what a target check says, and how patterns and scales apply."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from peft import PeftModel, get_peft_model

from mezzo.core.errors import UserError
from mezzo.nlora import NLoraConfig, adapted_layers
from mezzo.nlora.config import Init, Train
from mezzo.nlora.factors import Factors
from mezzo.nlora.recipe import Recipe, load_recipe
from tests.tiny import llama


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"r": 0}, "r: 0 is no rank"),
        ({"r": True}, "r: True does not fit. Give a whole number"),
        ({"r": 2.5}, r"r: 2.5 does not fit"),
        ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\['q_proj'\]: -1 is no rank"),
        ({"rank_pattern": {1: 4}}, "rank_pattern.* a mapping of text to a whole number"),
        ({"lora_alpha": math.nan}, "lora_alpha"),
        ({"alpha_pattern": {"q_proj": 0}}, r"alpha_pattern\['q_proj'\]: 0 is no scale"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
        ({"init": "pissa"}, "init: 'pissa' does not fit. Give 'nystrom' or"),
        ({"train": "none"}, "train: 'none' does not fit. Give 'all' or 'middle'"),
        ({"use_rslora": "false"}, "use_rslora: 'false' does not fit. Give true or false"),
        ({"init_weights": "false"}, "init_weights"),
        ({"modules_to_save": "lm_head"}, "modules_to_save: 'lm_head' does not fit. Give a list of text"),
        ({"modules_to_save": 3}, "modules_to_save"),
        ({"layers_to_transform": "a"}, "layers_to_transform"),
        ({"layers_to_transform": [True]}, "layers_to_transform"),
        ({"target_parameters": 3}, "target_parameters"),
        ({"target_modules": [["q_proj"]]}, "target_modules"),
        ({"target_modules": 3}, "target_modules"),
        ({"base_sha256": 3}, "base_sha256"),
        ({"alpha_pattern": {"(": 1.0}}, "alpha_pattern: '\\(' is no regular expression"),
        ({"init": "slora", "train": "middle"}, "changes nothing"),
        ({"target_modules": []}, "no module is named"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        NLoraConfig(**fields)


def test_an_unmatched_target_is_named_with_its_nearest_and_nothing_is_replaced() -> None:
    model = llama()
    with pytest.raises(UserError, match=r"'gate_prj' matches no module.*gate_proj"):
        get_peft_model(model, NLoraConfig(r=4, target_modules=["q_proj", "gate_prj"]))
    assert adapted_layers(model) == []


def test_a_rank_above_the_smaller_side_of_a_layer_is_that_side() -> None:
    layers = dict(adapted_layers(get_peft_model(llama(), NLoraConfig(r=17))))
    ranks = {key.rpartition(".")[2]: layer.r["default"] for key, layer in layers.items()}
    assert ranks["k_proj"] == 16
    assert ranks["q_proj"] == 17


def test_patterns_and_scales_apply_and_other_modules_are_no_targets() -> None:
    config = NLoraConfig(r=4, lora_alpha=8, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 2}, use_rslora=True)
    layers = dict(adapted_layers(get_peft_model(llama(), config)))
    found = {key.rpartition(".")[2]: (layer.r["default"], layer.scaling["default"]) for key, layer in layers.items()}
    assert found["q_proj"] == (2, 8 / math.sqrt(2))
    assert found["v_proj"] == (4, 1.0)
    assert found["up_proj"] == (4, 4.0)
    assert "lm_head" not in found
    with pytest.raises(UserError, match="LlamaRMSNorm cannot be adapted"):
        get_peft_model(llama(), NLoraConfig(r=4, target_modules=["norm"]))


def test_two_adapters_on_one_base_equal_each_alone_and_added() -> None:
    x = torch.arange(20).view(2, 10)
    alone = {}
    model: Any = None
    for name, config in {"first": NLoraConfig(r=4), "second": NLoraConfig(r=2, train="middle")}.items():
        for target in (get_peft_model(llama(), config, adapter_name=name), None):
            if target is None:
                if model is None:
                    model = get_peft_model(llama(), config, adapter_name=name)
                else:
                    model.add_adapter(name, config)
                target = model
            torch.manual_seed(1)
            with torch.no_grad():
                for _, layer in adapted_layers(target, name):
                    for table in (layer.nlora_A, layer.nlora_N, layer.nlora_B):
                        if name in table:
                            table[name] += 0.05 * torch.randn_like(table[name])
            target.eval()
            alone.setdefault(name, target(x).logits if target is not model else None)
    assert isinstance(model, PeftModel)
    for name in ("first", "second"):
        model.set_adapter(name)
        assert torch.equal(model(x).logits, alone[name])
    model.base_model.set_adapter(["first", "second"])
    for _, layer in adapted_layers(model, "first"):
        z = torch.randn(3, layer.in_features)
        delta = layer.get_delta_weight("first") + layer.get_delta_weight("second")
        torch.testing.assert_close(layer(z), layer.base_layer(z) + z @ delta.T)
    model.delete_adapter("first")
    model.set_adapter("second")
    assert torch.equal(model(x).logits, alone["second"])


def test_factors_subtract_fold_and_truncate() -> None:
    torch.manual_seed(0)
    one = Factors(torch.randn(9, 3), torch.randn(3, 3), torch.randn(3, 7), 0.5)
    two = Factors(torch.randn(9, 2), torch.randn(2, 2), torch.randn(2, 7), 2.0)
    both = one.minus(two)
    wanted = one.delta() - two.delta()
    torch.testing.assert_close(both.delta(), wanted)
    B, A = both.fold()
    torch.testing.assert_close(both.scale * B @ A, wanted)
    x = torch.randn(4, 7)
    torch.testing.assert_close(both.apply(x), x @ wanted.T, atol=1e-5, rtol=1e-4)
    whole, error = both.truncate(5)
    assert error < 1e-6
    torch.testing.assert_close(whole.delta(), wanted, atol=1e-5, rtol=1e-4)
    part, error = both.truncate(3)
    assert error == pytest.approx(float((part.delta() - wanted).norm() / wanted.norm()), rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"steps": 0}, "steps"),
        ({"batch_size": True}, "batch_size"),
        ({"too_long": "cut"}, "too_long"),
        ({"epochs": "1"}, "epochs"),
    ],
)
def test_a_recipe_that_cannot_work_names_its_field(fields: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError, match=f"^{wanted}"):
        Recipe(**fields)


def test_a_yaml_file_fills_the_recipe_and_flags_go_over_it(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("learning_rate: 1e-3\nr: 32\ntarget_modules: [q_proj]\ntoo_long: drop\n")
    recipe = load_recipe(file, r=8, steps=None)
    assert (recipe.rate, recipe.r, recipe.target_modules, recipe.too_long) == (1e-3, 8, ["q_proj"], "drop")
    file.write_text("")
    assert load_recipe(file) == Recipe()
    for text, wanted in {"- a\n": "no mapping", "a: [": "is no YAML", "learning_rate: fast\n": "does not fit"}.items():
        file.write_text(text)
        with pytest.raises(UserError, match=wanted):
            load_recipe(file)


@pytest.mark.parametrize(("init", "kept"), [("nystrom", 8), ("nystrom_paper", 8), ("slora", 100)])
@pytest.mark.filterwarnings("ignore:.*the paper's start changes:UserWarning")
def test_a_rank_above_the_smaller_side_is_that_side_for_the_nystroem_starts(init: Any, kept: int) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 12))
    model = get_peft_model(net, NLoraConfig(r=100, init=init, target_modules=["0"]))
    shapes = {key.split(".nlora_")[1][0]: tuple(v.shape) for key, v in model.named_parameters() if ".nlora_" in key}
    assert shapes == {"A": (kept, 8), "N": (kept, kept), "B": (12, kept)}


def test_a_pattern_that_matches_nothing_says_what_text_means() -> None:
    with pytest.raises(UserError, match="the pattern 'q_proj,v_proj' matches no module"):
        get_peft_model(llama(), NLoraConfig(r=4, target_modules="q_proj,v_proj"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("target_modules: q_proj, v_proj", ["q_proj", "v_proj"]),
        ("target_modules: q_proj", ["q_proj"]),
        ("target_modules: all-linear", "all-linear"),
        ("target_modules: .*q_proj", ".*q_proj"),
        ("target_modules: [q_proj, v_proj]", ["q_proj", "v_proj"]),
    ],
)
def test_modules_in_yaml_are_named_as_on_the_command_line(text: str, wanted: Any, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    assert load_recipe(tmp_path / "r.yaml").target_modules == wanted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lr: 0.1", "unknown key 'lr'. Did you mean 'learning_rate'"),
        ("eval-rows: 3", "unknown key 'eval-rows'. Did you mean 'eval_rows'"),
        ("steps: four", r"r.yaml: steps: 'four' does not fit. Give a whole number or none"),
        ("train: midle", r"r.yaml: train: 'midle' does not fit. Give 'all' or 'middle'"),
        ("init: svd", "init: 'svd' does not fit"),
    ],
)
def test_a_fault_in_yaml_names_the_file_and_the_key(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError, match=told):
        load_recipe(tmp_path / "r.yaml")


def test_recipe_and_config_know_the_same_modes() -> None:
    hints = get_type_hints(Recipe)
    assert (get_args(hints["init"]), get_args(hints["train"])) == (get_args(Init), get_args(Train))

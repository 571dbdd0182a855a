"""Adapters and models of other programs as NLoRA adapters: the same outputs as in stock PEFT, and every refusal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from mezzo.cli.nlora import convert as command
from mezzo.core import models
from mezzo.core.errors import UserError
from mezzo.nlora import adapted_layers
from mezzo.nlora.convert import convert, nearest, orthonormal, reduced
from mezzo.nlora.factors import Factors
from tests.tiny import llama, save_tiny

DTYPES = [torch.float32, torch.bfloat16]
X = torch.arange(20).view(2, 10) % 60
EPS = 2.0**-23

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(X).logits.float()


def move(model: Any, size: float = 0.05, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn_like(parameter)
    return model


def lora_on(model: Any, **settings: Any) -> Any:
    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": "all-linear"} | settings)).eval()


def save_lora(folder: Path, **settings: Any) -> Path:
    move(lora_on(llama(), **settings)).save_pretrained(str(folder))
    return folder


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, eps: int = 16) -> bool:
    bound = eps * torch.finfo(dtype).eps * float(wanted.abs().max())
    return float((found - wanted).abs().max()) <= bound


def edit(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def settings_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


LORAS: dict[str, dict[str, Any]] = {
    "r1": {"r": 1},
    "r4_alpha_16": {"lora_alpha": 16},
    "r8_names": {"r": 8, "target_modules": ["q_proj", "down_proj"]},
    "rslora": {"lora_alpha": 3, "use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7}, "alpha_pattern": {"q_proj": 5}},
    "rslora_patterns": {"use_rslora": True, "rank_pattern": {"v_proj": 6}, "alpha_pattern": {"o_proj": 1}},
    "above_smaller_side": {"r": 20},
    "above_every_side": {"r": 70},
    "gaussian": {"init_lora_weights": "gaussian"},
    "no_zero_start": {"init_lora_weights": False},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "one_layer": {"target_modules": ["v_proj", "up_proj"], "layers_to_transform": [1]},
}
every_lora = pytest.mark.parametrize("settings", LORAS.values(), ids=LORAS.keys())


@every_lora
@every_dtype
def test_a_lora_gives_the_same_outputs_as_in_stock_peft(
    settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    save_lora(tmp_path / "lora", **settings)
    done = convert(tmp_path / "lora", tmp_path / "out")
    assert 0 <= done["relative_error"] < 8 * EPS
    stock = PeftModel.from_pretrained(llama(dtype), str(tmp_path / "lora")).eval()
    ours = PeftModel.from_pretrained(llama(dtype), str(tmp_path / "out")).eval()
    assert close(logits(ours), logits(stock), dtype)
    assert not torch.equal(logits(ours), logits(llama(dtype)))
    changes = {k: m for k, m in stock.named_modules() if hasattr(m, "lora_A") and hasattr(m, "get_delta_weight")}
    layers = dict(adapted_layers(ours))
    assert layers.keys() == changes.keys()
    assert done["modules"] == len(layers)
    for key, layer in layers.items():
        rank = changes[key].r["default"]
        assert layer.r["default"] == min(rank, layer.in_features, layer.out_features)
        assert layer.scaling["default"] == 1.0


@every_lora
def test_the_written_factors_are_orthonormal_and_their_product_is_the_loras(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    save_lora(tmp_path / "lora", **settings)
    done = convert(tmp_path / "lora", tmp_path / "out")
    stock = PeftModel.from_pretrained(llama(), str(tmp_path / "lora")).eval()
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for module in done["errors"]:
        B, N, A = (tensors[f"base_model.model.{module}.nlora_{side}"].double() for side in "BNA")
        one = torch.eye(N.shape[0], dtype=torch.float64)
        assert N.shape[0] == N.shape[1]
        torch.testing.assert_close(B.T @ B, one, atol=1e-6, rtol=0)
        torch.testing.assert_close(A @ A.T, one, atol=1e-6, rtol=0)
        theirs = stock.get_submodule(f"base_model.model.{module}")
        pair = theirs.lora_B["default"].weight.double() @ theirs.lora_A["default"].weight.double()
        wanted = theirs.scaling["default"] * pair
        assert float((B @ N @ A - wanted).norm() / wanted.norm()) == pytest.approx(done["errors"][module], rel=1e-3)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6), (1, 7)], ids=str)
@pytest.mark.parametrize("r", [1, 3, 5, 8, 12])
@pytest.mark.parametrize("scale", [1.0, 0.3, -2.0])
def test_orthonormal_factors_of_any_shape_and_rank_are_exact(shape: tuple[int, int], r: int, scale: float) -> None:
    torch.manual_seed(r)
    rows, columns = shape
    one = torch.float64
    product = Factors(torch.randn(rows, r, dtype=one), torch.randn(r, r, dtype=one), torch.randn(r, columns, dtype=one))
    product = Factors(product.B, product.N, product.A, scale)
    found = orthonormal(product)
    assert found.rank <= min(rows, columns, r) or found.rank == min(rows, columns)
    assert found.scale == 1.0
    torch.testing.assert_close(found.delta(), product.delta(), atol=1e-12, rtol=1e-12)
    stored, error = reduced(product)
    measured = float((stored.B.double() @ stored.N.double() @ stored.A.double() - product.delta()).norm())
    assert error < 4 * EPS
    assert measured / float(product.delta().norm()) == pytest.approx(error, rel=1e-3, abs=1e-12)


def test_an_untrained_lora_changes_nothing(tmp_path: Path) -> None:
    lora_on(llama()).save_pretrained(str(tmp_path / "lora"))
    done = convert(tmp_path / "lora", tmp_path / "out")
    assert done["relative_error"] == 0.0
    ours = PeftModel.from_pretrained(llama(), str(tmp_path / "out")).eval()
    assert torch.equal(logits(ours), logits(llama()))


def test_a_converted_adapter_can_be_trained_on(tmp_path: Path) -> None:
    save_lora(tmp_path / "lora")
    convert(tmp_path / "lora", tmp_path / "out")
    ours = PeftModel.from_pretrained(llama(), str(tmp_path / "out"), is_trainable=True)
    ours(X, labels=X).loss.backward()
    assert all(value.grad is not None for value in ours.parameters() if value.requires_grad)


def test_the_config_is_slora_and_names_the_base(tmp_path: Path, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    move(lora_on(base, task_type="CAUSAL_LM")).save_pretrained(str(tmp_path / "lora"))
    convert(tmp_path / "lora", tmp_path / "out")
    config = settings_in(tmp_path / "out")
    assert (config["peft_type"], config["init"], config["train"]) == ("NLORA", "slora", "all")
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (4, 4.0, {})
    assert config["task_type"] == "CAUSAL_LM"
    assert config["base_model_name_or_path"] == str(model_folder)
    assert config["base_sha256"] == models.find(model_folder).sha256
    assert "import mezzo.nlora" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    edit(tmp_path / "lora" / "adapter_config.json", base_model_name_or_path="somebody/somewhere")
    convert(tmp_path / "lora", tmp_path / "far")
    assert settings_in(tmp_path / "far")["base_sha256"] is None
    convert(tmp_path / "lora", tmp_path / "near", base=str(model_folder))
    assert settings_in(tmp_path / "near")["base_sha256"] == models.find(model_folder).sha256


def prepare(model: Any, init: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Gathers what CorDA and LoRA-GA start from: activations, gradients."""
    from peft.tuners.lora.config import CordaConfig, LoraGAConfig

    targets = {"target_modules": ["q_proj", "down_proj"]}  # these do not know "all-linear"
    rows = torch.randint(3, 60, (64, 20))
    if init == "corda":
        pytest.importorskip("attr", reason="PEFT's CorDA imports the package attrs")
        from peft.tuners.lora.corda import preprocess_corda

        settings = settings | targets | {"corda_config": CordaConfig()}
        preprocess_corda(
            model, LoraConfig(init_lora_weights=init, **{"r": 4} | settings), lambda: [model(row[None]) for row in rows]
        )
    if init == "lora_ga":
        from peft.tuners.lora.loraga import preprocess_loraga

        settings = settings | targets | {"lora_ga_config": LoraGAConfig()}
        config = LoraConfig(init_lora_weights=init, **{"r": 4} | settings)
        preprocess_loraga(model, config, lambda: model(rows, labels=rows).loss.backward())
    return settings


def train_moved(
    folder: Path, init: str, *, said: Any, dtype: torch.dtype = torch.float32, size: float = 0.05, **settings: Any
) -> torch.Tensor:
    """Saves the adapter at step 0 as first/ and after some change as last/; returns the changed model's outputs."""
    base = llama(dtype)
    model = lora_on(base, init_lora_weights=init, **prepare(base, init, settings))
    model.peft_config["default"].init_lora_weights = said
    model.save_pretrained(str(folder / "first"))
    model.peft_config["default"].init_lora_weights = init
    move(model, size)
    model.save_pretrained(str(folder / "last"))
    return logits(model)


@pytest.mark.parametrize("said", [True, None], ids=["said_true", "said_as_it_is"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora_alpha": 8}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}, {"r": 12}],
    ids=["plain", "alpha", "rslora", "pattern", "2r_above_smaller_side"],
)
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_a_pissa_or_olora_with_its_start_is_exact_on_the_original_base(
    init: str, settings: dict[str, Any], said: Any, tmp_path: Path
) -> None:
    wanted = train_moved(tmp_path, init, said=said or init, **settings)
    done = convert(tmp_path / "last", tmp_path / "out", initial=tmp_path / "first")
    assert done["relative_error"] < 8 * EPS
    ours = PeftModel.from_pretrained(llama(), str(tmp_path / "out")).eval()
    torch.testing.assert_close(logits(ours), wanted, atol=2e-6, rtol=2e-5)
    for _, layer in adapted_layers(ours):
        assert layer.r["default"] <= min(2 * settings.get("r", 4), layer.in_features, layer.out_features)


@every_dtype
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("init", ["pissa", "olora", "corda", "lora_ga"])
def test_every_start_that_moves_the_base_is_undone(init: str, dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = train_moved(tmp_path, init, said=init, dtype=dtype, size=0.2, lora_alpha=8)
    with pytest.raises(UserError, match="--initial"):
        convert(tmp_path / "last", tmp_path / "out")
    convert(tmp_path / "last", tmp_path / "out", initial=tmp_path / "first")
    ours = PeftModel.from_pretrained(llama(dtype), str(tmp_path / "out")).eval()
    assert close(logits(ours), wanted, dtype, eps=32)  # two roundings: of the base at step 0, and of its return
    assert not close(logits(llama(dtype)), wanted, dtype, eps=32)


def test_a_pissa_of_the_same_rank_reports_its_error(tmp_path: Path) -> None:
    train_moved(tmp_path, "pissa", said=True)
    exact = convert(tmp_path / "last", tmp_path / "exact", initial=tmp_path / "first")
    same = convert(tmp_path / "last", tmp_path / "same", initial=tmp_path / "first", rank="same")
    assert (exact["rank"], same["rank"]) == (8, 4)
    whole, kept = (PeftModel.from_pretrained(llama(), str(tmp_path / name)) for name in ("exact", "same"))
    for (key, a), (_, b) in zip(adapted_layers(whole), adapted_layers(kept), strict=True):
        W = a.get_delta_weight("default").double()
        S = torch.linalg.svdvals(W)
        error = float((b.get_delta_weight("default") - W).norm() / W.norm())
        assert error == pytest.approx(float(S[4:].norm() / S.norm()), rel=1e-4)
        assert same["errors"][key.removeprefix("base_model.model.")] == pytest.approx(error, rel=1e-4)


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights:UserWarning")
def test_a_pissa_that_peft_converted_is_a_plain_lora(tmp_path: Path) -> None:
    model = lora_on(llama(), init_lora_weights="pissa")
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(tmp_path / "first"))
    model.peft_config["default"].init_lora_weights = "pissa"
    move(model)
    wanted = logits(model)
    model.save_pretrained(str(tmp_path / "lora"), path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    assert settings_in(tmp_path / "lora")["init_lora_weights"] is True
    done = convert(tmp_path / "lora", tmp_path / "out")
    assert done["rank"] == 8
    ours = PeftModel.from_pretrained(llama(), str(tmp_path / "out")).eval()
    torch.testing.assert_close(logits(ours), wanted, atol=2e-6, rtol=2e-5)


def change_model(folder: Path, out: Path, **changes: Any) -> Path:
    """Copies a model folder with some tensors replaced by what a function makes of them; None removes one."""
    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    for name, make in changes.items():
        name = name.replace("__", ".")
        made = None if make is None else make(tensors[name])
        tensors.pop(name)
        if made is not None:
            tensors[name] = made.contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@every_dtype
def test_a_merged_lora_comes_back_from_the_difference(dtype: torch.dtype, tmp_path: Path, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copytree(model_folder, tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    move(lora_on(base, r=3)).merge_and_unload().save_pretrained(tmp_path / "merged")
    done = convert(tmp_path / "merged", tmp_path / "out", base=str(tmp_path / "base"), r=3)
    assert (done["modules"], done["rank"], done["left_out"]) == (14, 3, [])
    assert done["relative_error"] < (1e-5 if dtype == torch.float32 else 0.2)
    base, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / x, dtype=dtype) for x in ("base", "merged"))
    ours = PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
    assert close(logits(ours), logits(merged), dtype)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def test_transposed_weights_are_converted_too(tmp_path: Path, model_folder: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "base")  # for its tokenizer
    gpt2().save_pretrained(tmp_path / "base")
    model = move(lora_on(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
    wanted = logits(model)
    model.save_pretrained(str(tmp_path / "lora"))
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    convert(tmp_path / "lora", tmp_path / "one", base=str(tmp_path / "base"))
    convert(tmp_path / "merged", tmp_path / "two", base=str(tmp_path / "base"), r=4)
    for name in ("one", "two"):
        ours = PeftModel.from_pretrained(gpt2(), str(tmp_path / name)).eval()
        torch.testing.assert_close(logits(ours), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (8, 8), (1, 5)], ids=str)
@pytest.mark.parametrize("r", [1, 4, 40])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_the_difference_is_the_best_of_its_rank(shape: tuple[int, int], r: int, size: float) -> None:
    torch.manual_seed(3)
    D = size * torch.randn(shape, dtype=torch.float64)
    found, error = nearest(D, r)
    assert found.rank == min(r, *shape)
    S = torch.linalg.svdvals(D)
    assert error == pytest.approx(float(S[found.rank :].norm() / S.norm()), rel=1e-6, abs=4 * EPS)
    made = found.B.double() @ found.N.double() @ found.A.double()
    assert float((made - D).norm() / D.norm()) == pytest.approx(error, rel=1e-9)


def test_a_difference_of_lower_rank_is_exact(tmp_path: Path) -> None:
    torch.manual_seed(4)
    D = torch.randn(40, 2, dtype=torch.float64) @ torch.randn(2, 25, dtype=torch.float64)
    assert nearest(D, 2)[1] < 4 * EPS
    assert nearest(D, 9)[1] < 4 * EPS


def test_only_what_differs_is_adapted_and_other_tensors_are_named(tmp_path: Path, model_folder: Path) -> None:
    name = "model__layers__0__mlp__up_proj__weight"
    more = {"model__norm__weight": lambda W: W + 1, "model__embed_tokens__weight": lambda W: W * 2}
    other = change_model(model_folder, tmp_path / "tuned", **{name: lambda W: W + 0.1 * torch.randn_like(W)}, **more)
    with pytest.raises(UserError, match=r"2 changed tensors .*\(model.embed_tokens.weight, model.norm.weight\)"):
        convert(other, tmp_path / "out", base=str(model_folder), r=4)
    assert not (tmp_path / "out").exists()
    done = convert(other, tmp_path / "out", base=str(model_folder), r=4, ignore_other=True)
    assert list(done["errors"]) == ["model.layers.0.mlp.up_proj"]
    assert done["left_out"] == ["model.embed_tokens.weight", "model.norm.weight"]
    assert 0.5 < done["relative_error"] < 1
    assert settings_in(tmp_path / "out")["base_sha256"] == models.find(model_folder).sha256


def test_no_more_than_two_tensors_are_read_at_a_time(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mezzo.nlora import convert as module

    held, most = [], []

    def counted(file: Path, name: str) -> torch.Tensor:
        import weakref

        found = original(file, name)
        held.append(weakref.ref(found))
        most.append(sum(ref() is not None for ref in held))
        return found

    original = module.tensor_in
    monkeypatch.setattr(module, "tensor_in", counted)
    tuned = change_model(model_folder, tmp_path / "t", model__layers__1__mlp__up_proj__weight=lambda W: W + 1)
    convert(tuned, tmp_path / "out", base=str(model_folder), r=4)
    assert len(most) > 20
    assert max(most) == 2


def replace_tensor(file: Path, part: str, make: Any) -> None:
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if part in name)
    made = make(name, tensors.pop(name))
    save_file(tensors | {key: value.clone() for key, value in made.items()}, file)


def with_nan(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    value[0, 0] = float("nan")
    return {name: value}


BAD_TENSORS: dict[str, tuple[Any, str]] = {
    "nan": (with_nan, r"adapter_model.safetensors, base_model.model.model.layers.0.mlp.down_proj.lora_A.weight: holds"),
    "integers": (lambda n, v: {n: v.int()}, r"is of type torch.int32"),
    "missing_side": (lambda n, v: {}, r"down_proj: lora_A is missing"),
    "convolution": (lambda n, v: {n: v[..., None, None]}, r"lora_A has 4 dimensions"),
    "other_rank": (lambda n, v: {n: v[:2]}, r"do not fit rank 4"),
    "dora": (lambda n, v: {n: v, n.replace("lora_A.weight", "lora_magnitude_vector"): v[0]}, r"is of DoRA"),
    "bias": (lambda n, v: {n: v, n.replace("lora_A.weight", "lora_B.bias"): v[0]}, r"is a bias"),
    "embedding": (
        lambda n, v: {n: v, "base_model.model.model.embed_tokens.lora_embedding_A": v},
        r"embed_tokens.lora_embedding_A: is of an embedding",
    ),
    "unknown": (lambda n, v: {n: v, "lm_head.weight": v}, r"lm_head.weight: is no tensor of a linear layer's LoRA"),
    "old_name": (lambda n, v: {n: v, n.replace("lora_A", "lora_A.default"): v}, r"lora_A.default.weight: is no tensor"),
}


@pytest.mark.parametrize(("make", "told"), BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_tensors_that_are_no_plain_lora_are_refused(make: Any, told: str, tmp_path: Path) -> None:
    save_lora(tmp_path / "lora")
    replace_tensor(tmp_path / "lora" / "adapter_model.safetensors", "down_proj.lora_A", make)
    with pytest.raises(UserError, match=told):
        convert(tmp_path / "lora", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora"]


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"peft_type": "IA3"}, "is of the method IA3"),
    "nlora": ({"peft_type": "NLORA"}, "needs no conversion"),
    "dora": ({"use_dora": True}, "use_dora is set"),
    "bias": ({"bias": "all"}, "bias is set"),
    "lora_bias": ({"lora_bias": True}, "lora_bias is set"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
    "not_known_yet": ({"use_newest_trick": True}, "use_newest_trick is set"),
    "loftq": ({"init_lora_weights": "loftq"}, "'loftq' changes the base"),
    "pissa": ({"init_lora_weights": "pissa"}, "--initial"),
    "pissa_niter": ({"init_lora_weights": "pissa_niter_16"}, "--initial"),
    "olora": ({"init_lora_weights": "olora"}, "--initial"),
    "rank": ({"r": "four"}, "rank or alpha of .* cannot be read"),
    "alpha": ({"lora_alpha": None, "alpha_pattern": {}}, "rank or alpha of .* cannot be read"),
    "pattern": ({"rank_pattern": {"(": 3}}, "rank or alpha of .* cannot be read"),
    "other_rank": ({"r": 8}, "do not fit rank 8"),
}


@pytest.mark.parametrize(("changed", "told"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_settings_that_are_no_plain_lora_are_refused(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    save_lora(tmp_path / "lora")
    edit(tmp_path / "lora" / "adapter_config.json", **changed)
    with pytest.raises(UserError, match=told):
        convert(tmp_path / "lora", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora"]


def test_damaged_adapters_are_refused(tmp_path: Path) -> None:
    file = save_lora(tmp_path / "lora") / "adapter_model.safetensors"
    whole = file.read_bytes()
    for content, told in ((whole[:-100], "is damaged"), (b"", "is damaged"), (whole[:6], "is damaged")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=told):
            convert(tmp_path / "lora", tmp_path / "out")
    file.unlink()
    with pytest.raises(UserError, match="safetensors: is missing"):
        convert(tmp_path / "lora", tmp_path / "out")
    save_lora(tmp_path / "far")
    edit(tmp_path / "far" / "adapter_config.json", base_model_name_or_path="x" * 5000)
    convert(tmp_path / "far", tmp_path / "far_out")
    (tmp_path / "lora" / "adapter_config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"adapter_config.json: is no adapter's"):
        convert(tmp_path / "lora", tmp_path / "out")
    with pytest.raises(UserError, match="holds neither"):
        convert(tmp_path / "nothing", tmp_path / "out")


def test_a_start_of_another_run_is_refused(tmp_path: Path) -> None:
    save_lora(tmp_path / "lora")
    save_lora(tmp_path / "rank", r=2)
    save_lora(tmp_path / "alpha", lora_alpha=4)
    save_lora(tmp_path / "fewer", target_modules=["q_proj"])
    for name in ("rank", "alpha", "fewer"):
        with pytest.raises(UserError, match=r"has other sizes, rank or scale"):
            convert(tmp_path / "lora", tmp_path / "out", initial=tmp_path / name)
    with pytest.raises(UserError, match="holds no adapter"):
        convert(tmp_path / "lora", tmp_path / "out", initial=tmp_path / "none")


def test_a_base_of_other_shapes_is_refused(tmp_path: Path, model_folder: Path) -> None:
    move(lora_on(llama(hidden=64))).save_pretrained(str(tmp_path / "wide"))
    with pytest.raises(UserError, match=r"down_proj: the adapter is for a weight of \[64, 128\], not \[32, 64\]"):
        convert(tmp_path / "wide", tmp_path / "out", base=str(model_folder))
    file = save_lora(tmp_path / "lora") / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "z_proj"): value for name, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"z_proj: the base has no such layer"):
        convert(tmp_path / "lora", tmp_path / "out", base=str(model_folder))


def test_models_that_cannot_be_converted_are_refused(tmp_path: Path, model_folder: Path) -> None:
    name = "model__layers__0__mlp__up_proj__weight"
    base = str(model_folder)

    def told(match: str, source: Path, **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            convert(source, tmp_path / "out", **{"base": base, "r": 4} | options)
        assert not (tmp_path / "out").exists()

    def spoilt(W: torch.Tensor) -> torch.Tensor:
        W[0, 0] = float("inf")
        return W

    told("no linear weight differs", model_folder)
    told("--base", model_folder, base=None)
    told("--r", model_folder, r=None)
    told("r: 0 is no rank", model_folder, r=0)
    told("--initial and --rank", model_folder, rank="same")
    told("--r and --ignore-other", save_lora(tmp_path / "lora"))
    told("its shape is", change_model(model_folder, tmp_path / "shape", **{name: lambda W: W[:8]}))
    told("up_proj.weight: holds a number", change_model(model_folder, tmp_path / "inf", **{name: spoilt}))
    told("quantised|Quantised", change_model(model_folder, tmp_path / "int", **{name: lambda W: W.to(torch.int8)}))
    told(r"1 changed tensors .*up_proj", change_model(model_folder, tmp_path / "fewer", **{name: None}))
    cut = change_model(model_folder, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-50])
    told("is damaged", tmp_path / "cut")


def test_used_places_are_left_alone(tmp_path: Path) -> None:
    save_lora(tmp_path / "lora")
    before = sorted(path.name for path in (tmp_path / "lora").iterdir())
    with pytest.raises(UserError, match="already holds files"):
        convert(tmp_path / "lora", tmp_path / "lora")
    assert sorted(path.name for path in (tmp_path / "lora").iterdir()) == before


def test_the_command_prints_json_and_a_short_text(tmp_path: Path) -> None:
    save_lora(tmp_path / "lora")
    words = [str(tmp_path / "lora"), "--out"]
    done = CliRunner().invoke(command, [*words, str(tmp_path / "one"), "--json"])
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert result["modules"] == len(result["errors"]) == 14
    assert result["folder"] == str(tmp_path / "one")
    assert done.stdout.startswith("{")
    done = CliRunner().invoke(command, [*words, str(tmp_path / "two")])
    assert "relative error" in done.stdout
    assert "errors" not in done.stdout


def test_a_converted_adapter_is_refused_on_another_base(tmp_path: Path, model_folder: Path) -> None:
    from mezzo.nlora import use

    save_lora(tmp_path / "lora")
    convert(tmp_path / "lora", tmp_path / "out", base=str(model_folder))
    use.load_adapter(tmp_path / "out", dtype="float32", device="cpu")
    other = change_model(save_tiny(tmp_path / "m"), tmp_path / "other", model__norm__weight=lambda W: W + 1)
    with pytest.raises(UserError, match="was trained on a base with hash"):
        use.load_adapter(tmp_path / "out", model=str(other))


FAULTS = {
    "nothing_there": (["none"], "none: holds neither adapter_config.json nor config.json"),
    "no_base": (["model", "--r", "4"], "model: is a model. Name its base with --base"),
    "same_model": (["model", "--base", "model", "--r", "4"], "no linear weight differs from model"),
    "unknown_base": (["lora", "--base", "none"], "none: no such model"),
    "used_out": (["lora", "--out", "lora"], "lora: already holds files"),
    "pissa": (["pissa"], "Name the adapter as it was saved at step 0 with --initial"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "told"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_one_line_and_exit_code_2(words: list[str], told: str, tmp_path: Path, model_folder: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    edit(save_lora(tmp_path / "pissa") / "adapter_config.json", init_lora_weights="pissa")
    save_lora(tmp_path / "lora")
    line = [sys.executable, "-m", "mezzo", "nlora", "convert", "--out", "out", *words]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert told in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()

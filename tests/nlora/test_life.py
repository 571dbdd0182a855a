"""PEFT's life with adapters: several on one base, mixed batches, sums, swaps, names, ties."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging import version
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    get_layer_status,
    get_model_status,
    get_peft_model,
    inject_adapter_in_model,
)
from safetensors.torch import load_file, save_file

from mezzo.core.errors import UserError
from mezzo.nlora import NLoraConfig, NLoraLayer, adapted_layers, hotswap
from tests.nlora import laws, zoo
from tests.tiny import llama

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the paper's start changes:UserWarning",
    "ignore:Adapter name .* should not be contained in the prefix:UserWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)

CONFIGS: dict[str, dict[str, Any]] = {
    "first": {"r": 4},
    "second": {"r": 2, "train": "middle"},
    "third": {"r": 3, "init": "nystrom_paper", "target_modules": ["q_proj", "down_proj"]},
    "fourth": {"r": 5, "init": "slora", "lora_alpha": 10},
}
X = torch.arange(20).view(2, 10) % 60
SIXTEEN = (torch.arange(16 * 6).view(16, 6) * 7) % 60


def logits(model: Any, x: torch.Tensor = X, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(x, **more).logits
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four trained adapters; each on a base with other weights in its rows and columns of largest norm."""
    place = tmp_path_factory.mktemp("kept")
    for k, (name, config) in enumerate(CONFIGS.items()):
        model = get_peft_model(llama(), NLoraConfig(**config))
        for _, layer in adapted_layers(model):
            if "default" in layer.nlora_rows:  # landmarks of its own
                layer.nlora_rows["default"] = (layer.nlora_rows["default"] + k) % layer.out_features
                layer.nlora_columns["default"] = (layer.nlora_columns["default"] + 2 * k) % layer.in_features
                layer.refresh_slices()
        laws.move(model).save_pretrained(place / name)
    return place


def alone(kept: Path, name: str, x: torch.Tensor = X) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(llama(), str(kept / name)).eval(), x)


def together(kept: Path, order: Any) -> Any:
    first, *rest = order
    model = PeftModel.from_pretrained(llama(), str(kept / first), adapter_name=first)
    for name in rest:
        model.load_adapter(str(kept / name), adapter_name=name)
    return model.eval()


@pytest.mark.parametrize("order", list(itertools.permutations(CONFIGS)), ids="-".join)
def test_adapters_of_other_landmarks_give_the_same_alone_and_together_in_any_order(order: Any, kept: Path) -> None:
    model = together(kept, order)
    for name in order:
        model.set_adapter(name)
        assert torch.equal(logits(model), alone(kept, name))


def test_two_active_adapters_add_up(kept: Path) -> None:
    model = together(kept, CONFIGS)
    for pair in itertools.combinations(CONFIGS, 2):
        model.base_model.set_adapter(list(pair))
        for _, layer in [(k, m) for k, m in model.named_modules() if isinstance(m, NLoraLayer)]:
            x = torch.randn(3, layer.in_features)
            changes = sum(layer.change(name) for name in pair if name in layer.nlora_N)
            with torch.no_grad():
                torch.testing.assert_close(layer(x), layer.base_layer(x) + x @ changes.T, atol=1e-5, rtol=1e-4)


def test_a_mixed_batch_of_16_rows_over_4_adapters_equals_each_alone(kept: Path) -> None:
    model = together(kept, CONFIGS)
    names = [[*CONFIGS, "__base__"][k % 5] for k in range(16)]
    mixed = logits(model, SIXTEEN, adapter_names=names)
    for k, name in enumerate(names):
        wanted = logits(llama(), SIXTEEN[k : k + 1]) if name == "__base__" else alone(kept, name, SIXTEEN[k : k + 1])
        torch.testing.assert_close(mixed[k : k + 1], wanted, atol=2e-6, rtol=1e-5)


def test_a_mixed_batch_generates_as_each_alone_with_beams_too(kept: Path) -> None:
    model = together(kept, CONFIGS)
    names = [*CONFIGS, "__base__"]
    for beams in (1, 2):
        settings = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
        mixed = model.generate(input_ids=SIXTEEN[:5], adapter_names=names, **settings)
        for k, name in enumerate(names):
            lone = llama() if name == "__base__" else PeftModel.from_pretrained(llama(), str(kept / name)).eval()
            assert torch.equal(mixed[k], lone.generate(input_ids=SIXTEEN[k : k + 1], **settings)[0])


@pytest.mark.parametrize("beams", [1, 2])
def test_a_mixed_batch_of_an_encoder_and_decoder_generates_as_each_alone(beams: int) -> None:
    model = get_peft_model(zoo.MODELS["t5"](torch.float32), NLoraConfig(r=4), adapter_name="one")
    model.add_adapter("two", NLoraConfig(r=2, train="middle"))
    for name in ("one", "two"):
        model.set_adapter(name)
        laws.move(model, 0.3)
    model.eval()
    settings: Any = {"max_new_tokens": 4, "num_beams": beams, "do_sample": False}
    mixed = model.generate(input_ids=SIXTEEN[:2], adapter_names=["two", "one"], **settings)
    for k, name in enumerate(["two", "one"]):
        model.set_adapter(name)
        lone = model.generate(input_ids=SIXTEEN[k : k + 1], **settings)[0]
        assert torch.equal(mixed[k][: len(lone)], lone)


def test_bad_adapter_names_are_refused(kept: Path) -> None:
    model = together(kept, CONFIGS)
    with pytest.raises(ValueError, match=r"non-existing adapter.*fith"):
        logits(model, adapter_names=["first", "fith"])
    with pytest.raises(ValueError, match="1 adapter names for a batch of 2"):
        logits(model, adapter_names=["first"])
    with pytest.raises(ValueError, match="training mode"):
        logits(model.train(), adapter_names=["first", "second"])
    model.eval().merge_adapter(["first"])
    with pytest.raises(ValueError, match="unmerge_adapter"):
        logits(model, adapter_names=["first", "second"])


def test_adapters_are_added_deleted_and_set_and_inttune_trains_n_alone(kept: Path) -> None:
    model = together(kept, CONFIGS)
    for name in ("second", "first", "second", "fourth"):
        model.set_adapter(name)
        trained = {key.split(".")[-2] for key, value in model.named_parameters() if value.requires_grad}
        assert trained == ({"nlora_N"} if name == "second" else {"nlora_A", "nlora_N", "nlora_B"})
    model.delete_adapter("first")
    assert "first" not in model.peft_config
    assert not any("first" in key for key in model.state_dict())
    assert all("first" not in table for _, layer in adapted_layers(model, "second") for table in (layer.r, layer.gain))
    model.set_adapter("second")
    assert torch.equal(logits(model), alone(kept, "second"))
    model.load_adapter(str(kept / "first"), adapter_name="first")
    model.set_adapter("first")
    assert torch.equal(logits(model), alone(kept, "first"))


def test_a_weighted_sum_is_exact_and_is_saved(kept: Path, tmp_path: Path) -> None:
    model = together(kept, CONFIGS)
    weights = dict(zip(CONFIGS, (0.5, -2.0, 1.0, 0.25), strict=True))
    assert model.add_weighted_adapter(list(weights), list(weights.values()), "sum") == 0.0
    for _, layer in adapted_layers(model, "sum"):
        wanted = sum(weight * layer.change(name) for name, weight in weights.items() if name in layer.nlora_N)
        torch.testing.assert_close(layer.change("sum"), wanted, atol=1e-6, rtol=1e-5)
    model.set_adapter("sum")
    wanted = logits(model)
    model.save_pretrained(tmp_path, selected_adapters=["sum"])
    again = PeftModel.from_pretrained(llama(), str(tmp_path / "sum")).eval()
    assert torch.equal(logits(again), wanted)


def test_a_weighted_sum_of_given_rank_tells_its_error(kept: Path) -> None:
    model = together(kept, CONFIGS)
    error = model.add_weighted_adapter(["first", "fourth"], [1.0, 1.0], "small", "svd", svd_rank=6)
    worst = 0.0
    for _, layer in adapted_layers(model, "small"):
        wanted = layer.change("first") + layer.change("fourth")
        worst = max(worst, float((layer.change("small") - wanted).norm() / wanted.norm()))
        assert layer.r["small"] <= 6
    assert 0 < error == pytest.approx(worst, rel=1e-3)


def test_inttune_adapters_of_the_same_landmarks_sum_at_the_same_rank() -> None:
    model = get_peft_model(llama(), NLoraConfig(r=4, train="middle"), adapter_name="one")
    model.add_adapter("two", NLoraConfig(r=4, train="middle"))
    for name in ("one", "two"):
        model.set_adapter(name)
        laws.move(model)
    model.add_weighted_adapter(["one", "two"], [1.0, 3.0], "sum")
    for _, layer in adapted_layers(model, "sum"):
        assert layer.r["sum"] == 4
        torch.testing.assert_close(layer.change("sum"), layer.change("one") + 3 * layer.change("two"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["first", "nobody"], [1.0, 1.0], "sum"), "nobody"),
        ((["first"], [1.0, 1.0], "sum"), "2 for 1 adapters"),
        ((["first"], [1.0], "second"), "'second' is in use"),
        ((["first"], [1.0], "sum", "ties"), "Use cat or svd"),
        ((["first"], [1.0], "a.b"), "has a dot"),
    ],
)
def test_a_bad_sum_is_refused_and_leaves_the_model_as_it_was(kept: Path, arguments: Any, message: str) -> None:
    model = together(kept, CONFIGS)
    with pytest.raises(UserError, match=message):
        model.add_weighted_adapter(*arguments)
    assert set(model.peft_config) == set(CONFIGS)
    model.set_adapter("first")
    assert torch.equal(logits(model), alone(kept, "first"))


@pytest.mark.parametrize("name", ["", "a.b", "__base__", "keys", "training", "n", "nlora_", "values"])
def test_an_adapter_name_that_breaks_the_library_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="adapter_name"):
        get_peft_model(llama(), NLoraConfig(r=4), adapter_name=name)


def test_peft_shows_the_method_and_the_state_of_its_layers() -> None:
    model = get_peft_model(llama(), NLoraConfig(r=4))
    status = get_model_status(model)
    assert status.peft_types == {"default": "NLORA"}
    assert status.trainable_params == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (status.enabled, status.active_adapters, status.merged_adapters) == (True, ["default"], [])
    assert {layer.module_type for layer in get_layer_status(model)} == {"nlora.NLoraLinear"}


def test_a_refused_name_leaves_the_model_as_it_was() -> None:
    model = get_peft_model(llama(), NLoraConfig(r=4)).eval()
    before = logits(model)
    with pytest.raises(UserError, match="adapter_name"):
        model.add_adapter("n", NLoraConfig(r=4))
    assert set(model.peft_config) == {"default"}
    assert torch.equal(logits(model), before)


def test_an_adapter_named_twice_in_a_sum_counts_twice(kept: Path) -> None:
    for kind in ("cat", "svd"):
        model = together(kept, CONFIGS)
        model.add_weighted_adapter(["first", "first", "second"], [1.0, 0.5, 0.0], "sum", kind, svd_rank=16)
        for _, layer in adapted_layers(model, "sum"):
            torch.testing.assert_close(layer.change("sum"), 1.5 * layer.change("first"), atol=1e-5, rtol=1e-4)


def test_a_bad_hotswap_is_refused_and_leaves_the_model_as_it_was(kept: Path, tmp_path: Path) -> None:
    model = PeftModel.from_pretrained(llama(), str(kept / "first")).eval()
    before, file = logits(model), "adapter_model.safetensors"
    with pytest.raises(UserError, match="no adapter 'zzz' is loaded"):
        hotswap(model, str(kept / "first"), "zzz")
    tensors = load_file(kept / "first" / file)
    N, rows = (next(key for key in tensors if key.endswith(end)) for end in ("nlora_N", "nlora_rows"))
    faults = {
        "has the shape": {N: torch.zeros(2, 2)},
        "names what the weight does not have": {rows: tensors[rows] + 10_000},
        "holds numbers that are not finite": {N: tensors[N] * math.nan},
    }
    for k, (said, changed) in enumerate(faults.items()):
        folder = shutil.copytree(kept / "first", tmp_path / str(k))
        save_file(tensors | changed, folder / file)
        with pytest.raises(UserError, match=said):
            hotswap(model, str(folder))
    config = shutil.copytree(kept / "first", tmp_path / "other") / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_sha256": "0" * 64}))
    model.peft_config["default"].base_sha256 = "1" * 64
    with pytest.raises(UserError, match="another base"):
        hotswap(model, str(tmp_path / "other"))
    assert torch.equal(logits(model), before)


def test_hotswap_puts_other_weights_and_landmarks_in_place(kept: Path, tmp_path: Path) -> None:
    for name in ("first", "second", "fourth"):
        laws.move(get_peft_model(llama(), NLoraConfig(**CONFIGS[name])), 0.2).save_pretrained(tmp_path / name)
        model = PeftModel.from_pretrained(llama(), str(tmp_path / name)).eval()
        layers = [id(layer) for _, layer in adapted_layers(model)]
        hotswap(model, str(kept / name))
        assert torch.equal(logits(model), alone(kept, name))
        assert layers == [id(layer) for _, layer in adapted_layers(model)]
    with pytest.raises(UserError, match="r: is 4, the loaded adapter's is 5"):
        hotswap(model, str(kept / "first"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_auto_peft_model_finds_base_and_adapter(dtype: torch.dtype, tmp_path: Path) -> None:
    llama(dtype).save_pretrained(tmp_path / "base")
    base = type(llama()).from_pretrained(tmp_path / "base", dtype=dtype)
    model = laws.move(get_peft_model(base, NLoraConfig(r=4, task_type="CAUSAL_LM"))).eval()
    model.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=dtype).eval()
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("first", ["nlora", "lora"])
@pytest.mark.parametrize("mode", laws.MODES, ids="-".join)
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_plain_lora_on_the_same_layer_adds_up_whichever_comes_first(first: str, mode: tuple[str, str]) -> None:
    """The reference raises KeyError where a plain LoRA stands beside it. Here either may wrap the other."""
    ours = NLoraConfig(r=4, init=mode[0], train=mode[1], target_modules=["q_proj", "up_proj"])  # type: ignore[arg-type]
    theirs = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    order = {"nlora": (ours, theirs), "lora": (theirs, ours)}[first]
    model = inject_adapter_in_model(order[1], inject_adapter_in_model(order[0], llama(), "inner"), "outer").eval()
    laws.move(model)
    plain = llama()
    for key, layer in model.named_modules():
        if isinstance(layer, NLoraLayer):
            outer = model.get_submodule(key.removesuffix(".base_layer"))
            lora = outer if first == "nlora" else layer.base_layer
            names = ("inner", "outer") if first == "nlora" else ("outer", "inner")
            change = layer.change(names[0]) + lora.get_delta_weight(names[1])
            target = plain.get_submodule(key.removesuffix(".base_layer"))
            target.weight.data += change
    laws.near(logits(model), logits(plain), torch.float32)


def test_tied_embeddings_are_told_and_a_merge_unties_them(tmp_path: Path) -> None:
    config = llama().config
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    base = type(llama())(config).eval()
    assert base.lm_head.weight is base.model.embed_tokens.weight
    with pytest.warns(UserWarning, match="tie_word_embeddings=True"):
        model = get_peft_model(base, NLoraConfig(r=4, target_modules=["embed_tokens"])).eval()
    wanted = logits(laws.move(model))
    with pytest.warns(UserWarning, match="no longer tied"), pytest.warns(UserWarning, match="tied_target_modules"):
        merged = model.merge_and_unload()
    laws.near(logits(merged), wanted, torch.float32)
    merged.save_pretrained(tmp_path)
    laws.near(logits(type(base).from_pretrained(tmp_path).eval()), wanted, torch.float32)


def test_fused_experts_are_named_as_not_adapted() -> None:
    import transformers as tr

    config = tr.Qwen3MoeConfig(
        **zoo.SIZES, **zoo.GROUPED, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )
    with pytest.warns(UserWarning, match=r"4 tensors of fused experts are not adapted: .*experts\.gate_up_proj"):
        get_peft_model(tr.Qwen3MoeForCausalLM(config), NLoraConfig(r=4))
    with pytest.raises(UserError, match=r"only modules: mlp\.experts\.gate_up_proj"):
        NLoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"])


def test_without_mezzo_stock_peft_stops_and_the_adapters_card_tells_why(tmp_path: Path) -> None:
    from mezzo.nlora.export import save_adapter

    llama().save_pretrained(tmp_path / "base")
    save_adapter(get_peft_model(llama(), NLoraConfig(r=4)), tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text(encoding="utf-8")
    assert "import mezzo.nlora" in card
    script = "import sys; from peft import PeftConfig; PeftConfig.from_pretrained(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "adapter")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "NLORA" in done.stderr


@pytest.mark.parametrize("mode", laws.MODES, ids="-".join)
def test_autocast_checkpointing_and_accumulation_give_the_plain_gradients(mode: tuple[str, str]) -> None:
    def gradients(checkpointing: bool, autocast: bool) -> dict[str, torch.Tensor]:
        model = get_peft_model(llama(), NLoraConfig(r=4, init=mode[0], train=mode[1]))  # type: ignore[arg-type]
        laws.move(model).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        for half in X:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(half[None], labels=half[None], use_cache=False).loss / 2
            loss.backward()
        return {name: value.grad for name, value in model.named_parameters() if value.requires_grad}

    plain = gradients(False, False)
    for name, value in gradients(True, False).items():
        torch.testing.assert_close(value, plain[name], atol=1e-6, rtol=1e-4)
    for name, value in gradients(False, True).items():
        assert float((value - plain[name]).norm()) <= 0.1 * float(plain[name].norm()) + 1e-4, name


COMPILED = """
import torch
from peft import get_peft_model
from mezzo.nlora import NLoraConfig
from tests.nlora import laws
for init, train in laws.MODES:
    torch._dynamo.reset()
    net = torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.Linear(10, 6, bias=False))
    model = get_peft_model(net, NLoraConfig(r=4, init=init, train=train, target_modules=["0", "1"]))
    laws.move(model, 0.3)
    compiled, x = torch.compile(model, backend="aot_eager", fullgraph=True), torch.randn(5, 12)
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    found = {name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad}
    model.zero_grad()
    model(x).sum().backward()
    for name, value in model.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(found[name], value.grad, atol=1e-6, rtol=1e-4)
    with torch.no_grad():
        compiled(x)
        model.base_model.model[0].base_layer.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
    print("same")
"""


@pytest.mark.slow
def test_the_layer_compiles_in_one_graph_and_gives_the_same() -> None:
    """In a process of its own: the shape checks of the tests are not for compilers."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["same"] * len(laws.MODES)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, {"layers.1.self_attn.q_proj"}),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
            {"layers.0.self_attn.q_proj"},
        ),
        (
            {"target_modules": r".*\.(q|up)_proj", "exclude_modules": ["layers.0.self_attn.q_proj"]},
            {"layers.0.mlp.up_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"},
        ),
    ],
)
def test_layers_are_chosen_as_by_lora(fields: dict[str, Any], expected: set[str]) -> None:
    ours = {key for key, _ in adapted_layers(get_peft_model(llama(), NLoraConfig(r=4, **fields)))}
    stock = get_peft_model(llama(), LoraConfig(r=4, **fields))
    theirs = {key.removesuffix(".lora_A.default") for key, _ in stock.named_modules() if key.endswith("lora_A.default")}
    assert {key.removeprefix("base_model.model.model.") for key in ours} == expected
    assert ours == theirs


@pytest.mark.parametrize("bias", ["all", "nlora_only", "lora_only"])
def test_trained_biases_are_saved_with_the_adapter(bias: str, tmp_path: Path) -> None:
    fresh = zoo.MODELS["gpt2"]
    model = get_peft_model(fresh(torch.float32), NLoraConfig(r=4, bias=bias))  # type: ignore[arg-type]
    assert any(key.endswith(".bias") and value.requires_grad for key, value in model.named_parameters())
    laws.move(model).eval().save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(fresh(torch.float32), str(tmp_path)).eval()
    assert torch.equal(zoo.outputs(again, "gpt2", torch.float32), zoo.outputs(model, "gpt2", torch.float32))


def test_transformers_own_adapter_methods_take_it(tmp_path: Path) -> None:
    from transformers.integrations.peft import MIN_PEFT_VERSION

    if version.parse(peft.__version__) < version.parse(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers takes adapters of PEFT {MIN_PEFT_VERSION} or later only, of any method")
    model = llama()
    model.add_adapter(NLoraConfig(r=4), adapter_name="one")
    laws.move(model).eval()
    wanted = logits(model)
    model.save_pretrained(tmp_path)
    again = llama()
    again.load_adapter(str(tmp_path), adapter_name="one")
    assert torch.equal(logits(again.eval()), wanted)
    again.disable_adapters()
    assert torch.equal(logits(again), logits(llama()))
    again.enable_adapters()
    again.delete_adapter("one")
    assert torch.equal(logits(again), logits(llama()))

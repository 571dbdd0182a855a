"""The laws of an adapter, for every mode, in float32 and bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from mezzo.nlora import NLoraConfig, adapted_layers
from mezzo.nlora.export import export_lora
from tests.tiny import llama

pytestmark = pytest.mark.filterwarnings("ignore:.*the paper's start changes:UserWarning")

MODES = [
    ("nystrom", "all"),
    ("nystrom", "middle"),
    ("nystrom_paper", "all"),
    ("nystrom_paper", "middle"),
    ("slora", "all"),
]
DTYPES = [torch.float32, torch.bfloat16]
X = torch.arange(20).view(2, 10) % 60
MODULES = 14

every_mode = pytest.mark.parametrize(("init", "train"), MODES, ids=[f"{i}-{t}" for i, t in MODES])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def attach(model: Any, init: str, train: str, **more: Any) -> Any:
    return get_peft_model(model, NLoraConfig(r=4, init=init, train=train, **more)).eval()


def move(model: Any, size: float = 0.05) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn_like(parameter)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(X).logits


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@every_dtype
@pytest.mark.parametrize(("init", "train"), [("slora", "all"), ("nystrom", "middle")])
def test_step_0_is_the_base_bit_for_bit(init: str, train: str, dtype: torch.dtype) -> None:
    model = llama(dtype)
    base = logits(model)
    assert torch.equal(logits(attach(model, init, train)), base)


@every_dtype
def test_step_0_of_nystrom_is_the_base_within_the_rounding_of_one_extra_sum(dtype: torch.dtype) -> None:
    """A layer's outputs differ by at most eps (|y| + s |C||G||h|) x 2: the rounding of h, and of the sum."""
    model = llama(dtype)
    layers = adapted_layers(attach(model, "nystrom", "all"))
    eps = torch.finfo(dtype).eps
    torch.manual_seed(2)
    for _, layer in layers:
        x = torch.randn(16, layer.in_features, dtype=dtype)
        with torch.no_grad():
            y, new = layer.base_layer(x).float(), layer(x).float()
        _, offset = layer.factors("default")
        h = (x.float() @ offset.A.T).abs()
        bound = 2 * eps * (y.abs() + offset.scale * h @ offset.N.abs().T @ offset.B.abs().T) + 8 * eps * 1e-3
        assert bool(((new - y).abs() <= bound).all())


def test_nystrom_paper_has_the_reference_tensors_bit_for_bit() -> None:
    model = attach(llama(), "nystrom_paper", "all", lora_alpha=4)
    for _, layer in adapted_layers(model):
        W = layer.base_layer.weight
        assert torch.equal(layer.nlora_A["default"], W[:4, :])
        assert torch.equal(layer.nlora_N["default"], W[:4, :4])
        assert torch.equal(layer.nlora_B["default"], W[:, :4])
        x = torch.randn(3, layer.in_features)
        expected = layer.base_layer(x) + x @ W[:4, :].T @ W[:4, :4].T @ W[:, :4].T
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.filterwarnings("default:.*the paper's start changes:UserWarning", "ignore::FutureWarning")
def test_nystrom_paper_warns_where_its_start_is_large() -> None:
    model = llama()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter *= 40
    with pytest.warns(UserWarning, match="before the first step"):
        attach(model, "nystrom_paper", "all")


@every_mode
@every_dtype
def test_disable_and_unload_restore_the_base_and_its_weights_never_change(
    init: str, train: str, dtype: torch.dtype
) -> None:
    model = llama(dtype)
    before, base = weights(model), logits(model)
    adapted = move(attach(model, init, train))
    changed = logits(adapted)
    assert not torch.equal(changed, base)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), base)
    assert torch.equal(logits(adapted), changed)
    back = adapted.unload()
    assert torch.equal(logits(back), base)
    after = back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@every_mode
@every_dtype
def test_merge_equals_the_adapter_and_unmerge_restores_bit_for_bit(init: str, train: str, dtype: torch.dtype) -> None:
    model = llama(dtype)
    adapted = move(attach(model, init, train))
    changed = logits(adapted)
    before = {key: layer.base_layer.weight.clone() for key, layer in adapted_layers(adapted)}
    adapted.merge_adapter()
    bound = 16 * torch.finfo(dtype).eps * float(changed.abs().max())
    assert float((logits(adapted) - changed).abs().max()) <= bound
    adapted.unmerge_adapter()
    assert torch.equal(logits(adapted), changed)
    assert all(torch.equal(before[key], layer.base_layer.weight) for key, layer in adapted_layers(adapted))


NEW_PROCESS = """
import sys, torch, mezzo.nlora
from pathlib import Path
from peft import PeftModel
from transformers import AutoModelForCausalLM
torch.set_num_threads(int(sys.argv[2]))
for folder in sorted(Path(sys.argv[1]).glob("*-*-*")):
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=getattr(torch, folder.name.split("-")[2]))
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    with torch.no_grad(): torch.save(model(torch.arange(20).view(2, 10) % 60).logits, folder / "out.pt")
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each mode and dtype: the adapter's output here, and after save and load in another process."""
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("kept")
    here = {}
    for init, train in MODES:
        for dtype in DTYPES:
            folder = place / f"{init}-{train}-{str(dtype).removeprefix('torch.')}"
            llama(dtype).save_pretrained(folder / "base")
            base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
            adapted = move(attach(base, init, train))
            adapted.save_pretrained(folder)
            here[folder.name] = logits(adapted)
    command = [sys.executable, "-W", "ignore", "-c", NEW_PROCESS, str(place), str(torch.get_num_threads())]
    subprocess.run(command, check=True, capture_output=True)
    return {name: (value, torch.load(place / name / "out.pt")) for name, value in here.items()}


@every_mode
@every_dtype
def test_saved_and_loaded_in_a_new_process_gives_the_same_output(
    init: str, train: str, dtype: torch.dtype, kept: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    here, there = kept[f"{init}-{train}-{str(dtype).removeprefix('torch.')}"]
    assert torch.equal(here, there)


@every_mode
def test_loading_through_empty_weights_is_exact(init: str, train: str, tmp_path: Path) -> None:
    adapted = move(attach(llama(torch.bfloat16), init, train))
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(llama(torch.bfloat16), str(tmp_path), low_cpu_mem_usage=True).eval()
    assert torch.equal(logits(again), logits(adapted))


@every_dtype
@pytest.mark.parametrize("init", ["nystrom", "nystrom_paper"])
def test_an_inttune_file_holds_r_by_r_numbers_a_module_and_indices_alone(
    init: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    adapted = move(attach(llama(dtype), init, "middle"))
    adapted.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    kinds = {name.rpartition(".")[2] for name in tensors}
    assert kinds == {"nlora_N", "nlora_rows", "nlora_columns"}
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == MODULES * (4 * 4 * 4 + 2 * 4 * 4)
    for key, layer in adapted_layers(adapted):
        product, _ = layer.factors("default")
        assert torch.equal(tensors[f"{key}.nlora_N"], product.N)


@every_mode
@every_dtype
def test_exported_lora_in_stock_peft_equals_the_adapter(
    init: str, train: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    adapted = move(attach(llama(dtype), init, train))
    done = export_lora(adapted, tmp_path / "lora")
    assert done["rank"] == (8 if (init, train) == ("nystrom", "all") else 4)
    assert done["relative_error"] == 0.0
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    stock = PeftModel.from_pretrained(llama(dtype), str(tmp_path / "lora")).eval()
    wanted = logits(adapted)
    bound = 16 * torch.finfo(dtype).eps * float(wanted.abs().max())
    assert float((logits(stock) - wanted).abs().max()) <= bound


def test_export_of_the_same_rank_reports_its_error(tmp_path: Path) -> None:
    adapted = move(attach(llama(), "nystrom", "all"))
    done = export_lora(adapted, tmp_path / "lora", rank="same")
    assert done["rank"] == 4
    stock = PeftModel.from_pretrained(llama(), str(tmp_path / "lora")).eval()
    worst = 0.0
    for (_, ours), (_, theirs) in zip(
        adapted_layers(adapted),
        [(k, m) for k, m in stock.named_modules() if hasattr(m, "lora_A") and hasattr(m, "get_delta_weight")],
        strict=True,
    ):
        wanted = ours.get_delta_weight("default")
        worst = max(worst, float((theirs.get_delta_weight("default") - wanted).norm() / wanted.norm()))
    assert 0 < done["relative_error"] == pytest.approx(worst, rel=1e-3)


@every_mode
def test_only_what_the_mode_trains_gets_gradients(init: str, train: str) -> None:
    adapted = move(attach(llama(), init, train)).train()
    adapted(X, labels=X).loss.backward()
    found = {name for name, value in adapted.named_parameters() if value.grad is not None}
    wanted = {name for name, value in adapted.named_parameters() if value.requires_grad}
    assert found == wanted
    kinds = {name.split(".")[-2] for name in wanted}
    assert kinds == ({"nlora_N"} if train == "middle" else {"nlora_A", "nlora_N", "nlora_B"})
    adapted.set_adapter("default")
    assert {name for name, value in adapted.named_parameters() if value.requires_grad} == wanted


@every_mode
def test_with_dropout_the_start_is_still_the_base(init: str, train: str) -> None:
    model = llama()
    base = logits(model)
    adapted = attach(model, init, train, lora_dropout=0.5).train()
    if init == "nystrom_paper":
        assert not torch.equal(logits(adapted), base)
    else:
        torch.testing.assert_close(logits(adapted), base, atol=1e-6, rtol=1e-5)


@every_mode
def test_a_layer_with_bias_obeys_too(init: str, train: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.ReLU(), torch.nn.Linear(10, 8))
    x = torch.randn(5, 12)
    base = net(x)
    config = NLoraConfig(r=4, init=init, train=train, target_modules=["0", "2"])
    adapted = get_peft_model(net, config)
    if init != "nystrom_paper":
        torch.testing.assert_close(adapted(x), base)
    move(adapted, 0.3)
    changed = adapted(x)
    for _, layer in adapted_layers(adapted):
        z = torch.randn(3, layer.in_features)
        torch.testing.assert_close(layer(z), layer.base_layer(z) + z @ layer.get_delta_weight("default").T)
    adapted.merge_adapter()
    torch.testing.assert_close(adapted(x), changed, atol=1e-5, rtol=1e-4)

"""One test for each fault that users of other libraries reported, named after it; the rest are in the room's README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from mezzo.core.errors import UserError
from mezzo.nlora import NLoraConfig, adapted_layers
from mezzo.nlora import export as exports
from mezzo.nlora.export import check_lora, export_lora
from tests.nlora import laws
from tests.tiny import llama

pytestmark = pytest.mark.filterwarnings("ignore:.*the paper's start changes:UserWarning")

X = torch.arange(20).view(2, 10) % 60
every_mode = pytest.mark.parametrize("mode", laws.MODES, ids="-".join)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(X).logits
    return found


def trained(mode: tuple[str, str], dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    config = NLoraConfig(**({"r": 4, "init": mode[0], "train": mode[1]} | more))
    return laws.move(get_peft_model(llama(dtype), config)).eval()


@every_mode
def test_peft_1929_rslora_and_patterns_are_inside_the_exported_matrices(mode: tuple[str, str], tmp_path: Path) -> None:
    model = trained(
        mode, use_rslora=True, lora_alpha=6, rank_pattern={"q_proj": 2}, alpha_pattern={"up_proj": 1, "q_proj": 3}
    )
    wanted = logits(model)
    done = export_lora(model, tmp_path / "lora")
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["use_rslora"] is False
    assert config["lora_alpha"] == config["r"] == done["rank"]
    assert config["alpha_pattern"] == config["rank_pattern"]
    stock = PeftModel.from_pretrained(llama(), str(tmp_path / "lora")).eval()
    laws.near(logits(stock), wanted, torch.float32)


@every_mode
@pytest.mark.parametrize("rank", ["exact", "same"])
def test_llamafactory_9404_the_written_rank_is_said_and_loads(
    mode: tuple[str, str], rank: exports.Rank, tmp_path: Path
) -> None:
    done = export_lora(trained(mode), tmp_path / "lora", rank=rank)
    doubled = mode == ("nystrom", "all") and rank == "exact"
    assert done["rank"] == (8 if doubled else 4)
    assert (done["relative_error"] > 0) == (mode == ("nystrom", "all") and rank == "same")
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert {value.shape[0] for name, value in tensors.items() if ".lora_A." in name} == {done["rank"]}
    stock = PeftModel.from_pretrained(llama(), str(tmp_path / "lora"))
    assert stock.peft_config["default"].r == done["rank"]


def test_llamafactory_6331_a_failed_export_loses_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(("nystrom", "all"))
    model.save_pretrained(tmp_path / "adapter")
    before = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exports, "save_file", full)
    with pytest.raises(UserError, match="no space left on device"):
        export_lora(model, tmp_path / "lora")
    assert {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    monkeypatch.undo()
    assert export_lora(model, tmp_path / "lora")["modules"] == 14


def test_llamafactory_5844_the_export_checks_itself_and_refuses_to_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_lora(trained(("nystrom", "all")), tmp_path / "right")
    assert check_lora(trained(("nystrom", "all")), tmp_path / "right") < 1e-5
    wrong = load_file(tmp_path / "right" / "adapter_model.safetensors")
    first = min(wrong)
    wrong[first] = wrong[first] * 1.5
    (tmp_path / "wrong").mkdir()
    exports.save_file(wrong, tmp_path / "wrong" / "adapter_model.safetensors")
    (tmp_path / "wrong" / "adapter_config.json").write_bytes((tmp_path / "right/adapter_config.json").read_bytes())
    with pytest.raises(UserError, match="logits are off"):
        check_lora(trained(("nystrom", "all")), tmp_path / "wrong")


@pytest.mark.parametrize("r", [4, 8, 40])
@every_mode
def test_vllm_6983_the_export_has_only_names_and_ranks_that_vllm_takes(
    mode: tuple[str, str], r: int, tmp_path: Path
) -> None:
    model = get_peft_model(llama(hidden=64), NLoraConfig(r=r, init=mode[0], train=mode[1]))  # type: ignore[arg-type]
    done = export_lora(model, tmp_path / "lora")
    with safe_open(tmp_path / "lora" / "adapter_model.safetensors", "pt") as file:
        assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in file.keys())  # noqa: SIM118
    needed = next(size for size in exports.VLLM_RANKS if size >= done["rank"])
    assert done["vllm"] == ("serves it" if needed <= 16 else f"serves it with --max-lora-rank {needed}")


def test_vllm_6983_what_vllm_cannot_serve_is_said(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8))
    model = get_peft_model(net, NLoraConfig(r=4, target_modules=["0", "1"]))
    assert export_lora(model, tmp_path / "lora")["vllm"].startswith("cannot serve it: base_model.model.0.lora_emb")
    with pytest.raises(UserError, match="biases of the base"):
        export_lora(trained(("nystrom", "all"), bias="all"), tmp_path / "biased")


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_peft_2421_a_loaded_adapter_has_the_dtype_that_is_documented(
    base: torch.dtype, autocast: bool, tmp_path: Path
) -> None:
    wanted = torch.float32 if autocast else base
    model = get_peft_model(llama(base), NLoraConfig(r=4), autocast_adapter_dtype=autocast)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {wanted}
    model.save_pretrained(tmp_path)
    for low in (True, False):
        again = PeftModel.from_pretrained(
            llama(base), str(tmp_path), is_trainable=True, autocast_adapter_dtype=autocast, low_cpu_mem_usage=low
        )
        assert {p.dtype for p in again.parameters() if p.requires_grad} == {wanted}


@pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted:UserWarning")
def test_peft_2184_no_adapter_writes_to_the_base_however_many_are_loaded_and_deleted(tmp_path: Path) -> None:
    base = llama()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = get_peft_model(base, NLoraConfig(r=4))
    laws.move(model).save_pretrained(tmp_path)
    for k, mode in enumerate(laws.MODES):
        model.add_adapter(f"more{k}", NLoraConfig(r=2 + k, init=mode[0], train=mode[1]))  # type: ignore[arg-type]
        model.load_adapter(str(tmp_path), adapter_name=f"loaded{k}")
        model.set_adapter(f"more{k}")
        logits(model)
        model.delete_adapter(f"more{k}")
    after = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if "nlora" not in name}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_peft_3049_the_start_reads_the_weight_and_factorises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a factorisation at the start")

    for name in ("svd", "svdvals", "qr", "eigh", "lstsq", "pinv", "inv"):
        monkeypatch.setattr(torch.linalg, name, forbidden)
    monkeypatch.setattr(torch, "svd_lowrank", forbidden)
    for mode in laws.MODES:
        assert len(adapted_layers(trained(mode))) == 14


def test_peft_3310_two_starts_on_one_base_are_the_same_bit_for_bit() -> None:
    for mode in laws.MODES[:4]:
        one, two = (get_peft_model(llama(), NLoraConfig(r=4, init=mode[0], train=mode[1])) for _ in range(2))  # type: ignore[arg-type]
        first, second = one.state_dict(), two.state_dict()
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)

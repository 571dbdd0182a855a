"""llama.cpp's LoRA file, read back: the same change of every weight, and where llama.cpp is here, the same outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import MODEL_ARCH, GGUFReader, GGUFWriter, get_tensor_name_map
from peft import get_peft_model

from mezzo.core.errors import UserError
from mezzo.nlora import NLoraConfig, adapted_layers, use
from mezzo.nlora.export import export_lora, plain_products
from mezzo.nlora.llamacpp import KNOWN, export_gguf
from tests.nlora.laws import move
from tests.tiny import llama

pytestmark = pytest.mark.filterwarnings("ignore:.*the paper's start changes:UserWarning")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MODES = [("nystrom", "all"), ("nystrom", "middle"), ("nystrom_paper", "all"), ("slora", "all")]


def tiny(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def adapted(model: Any, init: str = "nystrom", train: str = "all", **more: Any) -> Any:
    return move(get_peft_model(model, NLoraConfig(**{"r": 4, "init": init, "train": train} | more)).eval())


def read(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    reader = GGUFReader(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    return values, {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}


def folded(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    products = {module: factors for module, (_, factors) in plain_products(model)[0].items()}
    return {module: (factors.fold()[0] * factors.scale, factors.A) for module, factors in products.items()}


def rows_back(B: torch.Tensor, module: str, config: Any) -> torch.Tensor:
    """Puts permuted rows into transformers' order: in each head first the even ones, then the odd ones."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module.split(".")[-1])
    if heads is None:
        return B
    return torch.cat([torch.cat([head[0::2], head[1::2]]) for head in B.chunk(heads)])


@pytest.mark.parametrize("kind", sorted(KNOWN))
def test_the_change_of_every_weight_is_rebuilt_from_the_file(kind: str, tmp_path: Path) -> None:
    model = adapted(tiny(kind))
    config = model.get_base_model().config
    done = export_gguf(model, tmp_path / "lora.gguf")
    values, tensors = read(tmp_path / "lora.gguf")
    architecture, permutes = KNOWN[kind]
    assert values["general.architecture"] == done["architecture"] == architecture
    assert (values["general.type"], values["adapter.type"]) == ("adapter", "lora")
    assert values["adapter.lora.alpha"] == done["rank"] == 8
    numbers = {arch.name.lower(): arch for arch in MODEL_ARCH}
    table = get_tensor_name_map(numbers[architecture], 2)
    pairs = folded(model)
    assert len(tensors) == 2 * len(pairs) == 2 * done["modules"]
    for module, (B, A) in pairs.items():
        name = table.get_name(module)
        found = tensors[f"{name}.weight.lora_b"]
        assert torch.equal(tensors[f"{name}.weight.lora_a"], A)
        assert torch.equal(rows_back(found, module, config) if permutes else found, B)


@pytest.mark.parametrize(("init", "train"), MODES, ids=[f"{i}-{t}" for i, t in MODES])
def test_every_mode_has_the_delta_of_its_layer(init: str, train: str, tmp_path: Path) -> None:
    model = adapted(llama(), init, train, rank_pattern={"k_proj": 3})
    done = export_gguf(model, tmp_path / "lora.gguf")
    values, tensors = read(tmp_path / "lora.gguf")
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, 2)
    for key, layer in adapted_layers(model):
        module = key.removeprefix("base_model.model.")
        A, B = (tensors[f"{table.get_name(module)}.weight.lora_{side}"] for side in "ab")
        scale = values["adapter.lora.alpha"] / B.shape[1]
        found = rows_back(scale * (B @ A), module, model.get_base_model().config)
        torch.testing.assert_close(found, layer.get_delta_weight("default"), atol=1e-6, rtol=1e-5)
    assert done["rank"] == (8 if (init, train) == ("nystrom", "all") else 4)


def test_the_permutation_is_the_one_that_transformers_undoes(tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    model = adapted(llama())
    export_gguf(model, tmp_path / "lora.gguf")
    _, tensors = read(tmp_path / "lora.gguf")
    undo = LlamaTensorProcessor()._reverse_permute_weights
    pairs = folded(model)
    for letter, heads in (("q", None), ("k", 2)):
        B = pairs[f"model.layers.1.self_attn.{letter}_proj"][0].numpy()
        assert np.array_equal(undo(tensors[f"blk.1.attn_{letter}.weight.lora_b"].numpy(), 4, heads), B)


def test_the_same_rank_reports_its_error(tmp_path: Path) -> None:
    model = adapted(llama())
    done = export_gguf(model, tmp_path / "lora.gguf", rank="same")
    assert done["rank"] == 4
    assert done["relative_error"] == export_lora(model, tmp_path / "lora", rank="same")["relative_error"] > 0


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_what_llama_cpp_would_misread_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "lora.gguf"
    with pytest.raises(UserError, match=r"a gpt_neox is not known here.*--to merged"):
        export_gguf(adapted(tiny("gpt_neox", hidden_size=16)), out)
    with pytest.raises(UserError, match="lm_head: the head is tied to the embedding"):
        export_gguf(adapted(tiny("llama", tie_word_embeddings=True), target_modules=["lm_head"]), out)
    model = tiny("llama")
    model.model.layers[0].mlp.extra = torch.nn.Linear(8, 8)
    with pytest.raises(UserError, match=r"layers.0.mlp.extra: llama.cpp has no linear layer of this name in llama"):
        export_gguf(adapted(model, target_modules=["extra"]), out)
    with pytest.raises(UserError, match="modules_to_save"):
        export_gguf(adapted(tiny("llama"), target_modules=["q_proj"], modules_to_save=["lm_head"]), out)
    with pytest.raises(UserError, match=r"bias = nlora_only: llama.cpp's LoRA holds no biases"):
        export_gguf(adapted(tiny("qwen2"), bias="nlora_only"), out)
    with pytest.raises(UserError, match=r"embed_tokens: llama.cpp has no linear layer"):
        export_gguf(adapted(tiny("llama"), "slora", target_modules=["embed_tokens"]), out)
    out.write_text("mine")
    with pytest.raises(UserError, match="already holds files"):
        export_gguf(adapted(llama()), out)
    assert [path.name for path in tmp_path.iterdir()] == ["lora.gguf"]
    assert out.read_text() == "mine"


def test_a_saved_adapter_is_exported_by_name(tmp_path: Path, model_folder: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    adapted(base).save_pretrained(str(tmp_path / "adapter"))
    done = use.export_run(tmp_path / "adapter", to="gguf", out=tmp_path / "x.gguf", rank="exact", model=None)
    assert done["file"] == str(tmp_path / "x.gguf")
    assert len(read(tmp_path / "x.gguf")[1]) == 28


def write_base(model: Any, file: Path) -> None:
    """Writes a Llama as llama.cpp's own file in float32, with as many placeholder words as it has ids."""
    config = model.config
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{k}" for k in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([1] * config.vocab_size)
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        module = name.removesuffix(".weight")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module.split(".")[-1])
        if heads is not None:
            halves = [head.chunk(2) for head in value.chunk(heads)]
            value = torch.cat([torch.stack(pair, dim=1).flatten(0, 1) for pair in halves])
        writer.add_tensor(f"{table.get_name(module)}.weight", value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


LLAMA_CPP = """
import json, sys
import numpy as np
from llama_cpp import Llama
base, lora, ids = sys.argv[1], sys.argv[2] or None, json.loads(sys.argv[3])
model = Llama(base, lora_path=lora, logits_all=True, n_ctx=64, n_threads=1, type_k=0, type_v=0, verbose=False)
model.eval(ids)
np.save(sys.argv[4], np.array(model.scores[: len(ids)]))
"""


@pytest.mark.slow
def test_llama_cpp_gives_the_same_logits(tmp_path: Path) -> None:
    """Base and adapter in float32, in a process of its own. LLAMA_CPP_PYTHON names a Python that has llama_cpp."""
    python = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no llama_cpp: pip install llama-cpp-python here, or name a Python that has it: LLAMA_CPP_PYTHON")
    ids = [1, *range(7, 40)]
    model = llama()
    write_base(model, tmp_path / "base.gguf")
    with torch.no_grad():
        base = model(torch.tensor([ids])).logits[0]
        changed = adapted(model, rank_pattern={"k_proj": 3})
        wanted = changed(torch.tensor([ids])).logits[0]
    export_gguf(changed, tmp_path / "lora.gguf")

    def run(lora: str) -> torch.Tensor:
        words = [str(tmp_path / "base.gguf"), lora, json.dumps(ids), str(tmp_path / "out.npy")]
        subprocess.run([python, "-c", LLAMA_CPP, *words], check=True, capture_output=True)
        return torch.from_numpy(np.load(tmp_path / "out.npy"))

    bound = 1e-4 * float(wanted.std())
    assert float((run("") - base).abs().max()) < bound
    assert float((run(str(tmp_path / "lora.gguf")) - wanted).abs().max()) < bound
    assert float((wanted - base).abs().max()) > 100 * bound

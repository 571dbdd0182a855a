"""An adapter as llama.cpp's LoRA file (GGUF), for use beside the same base in GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mezzo.core.errors import UserError
from mezzo.core.files import atomic, check_free
from mezzo.nlora.export import Rank, plain_products

KNOWN = {
    "gemma": ("gemma", False), "gemma2": ("gemma2", False), "gemma3_text": ("gemma3", False),
    "granite": ("granite", True), "llama": ("llama", True), "mistral": ("llama", True), "olmo2": ("olmo2", False),
    "phi3": ("phi3", False), "qwen2": ("qwen2", False), "qwen3": ("qwen3", False), "smollm3": ("smollm3", True),
}  # fmt: skip
"""transformers' model_type -> (llama.cpp's architecture, whether its conversion permutes the rows of q and k)."""


def export_gguf(model: Any, out: Path, *, rank: Rank = "exact", adapter: str = "default") -> dict[str, Any]:
    """Writes the adapter as a GGUF file that llama.cpp loads with `--lora`, in float32.

    llama.cpp scales each pair by alpha / its rank: alpha is the largest rank, and B holds all the rest.

    Args:
        model: a `PeftModel` with the NLoRA adapter.
        out: file to write; must not exist.
        rank: as in `export_lora`.
        adapter: name of the adapter.

    Returns:
        {"architecture": llama.cpp's, "rank": largest written rank, "modules": count, "relative_error": largest of all}

    Raises:
        UserError: `out` is in use, llama.cpp's name of the architecture or of a layer is not known here, or the
            adapter is on a head that is tied to the embedding.
    """
    check_free(out)
    config = model.get_base_model().config.get_text_config()
    if config.model_type not in KNOWN:
        raise UserError(
            f"how llama.cpp lays out a {config.model_type} is not known here",
            where=str(out),
            todo=f"Export with --to merged, and convert that with llama.cpp. Known here: {', '.join(KNOWN)}",
        )
    architecture, permutes = KNOWN[config.model_type]
    if (bias := model.peft_config[adapter].bias) != "none":
        raise UserError("llama.cpp's LoRA holds no biases", where=f"bias = {bias}", todo="Use --to merged")
    products, error = plain_products(model, rank, adapter)
    names = _names(architecture, list(products), config)
    largest = max(factors.rank for _, factors in products.values())
    tensors: dict[str, Tensor] = {}
    for module, (_, factors) in products.items():
        B, A = factors.fold()
        B = B * factors.scale
        if permutes:
            B = _permuted(B, module, config)
        tensors[f"{names[module]}.weight.lora_a"] = A
        tensors[f"{names[module]}.weight.lora_b"] = B * (A.shape[0] / largest)
    with atomic(out) as temporary:
        _write(temporary, architecture, tensors, largest)
    return {"architecture": architecture, "rank": largest, "modules": len(products), "relative_error": error}


def _names(architecture: str, modules: list[str], config: Any) -> dict[str, str]:
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    numbers: dict[str, MODEL_ARCH] = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    names: dict[str, str] = {}
    for module in modules:
        name = table.get_name(module)
        if name is None or name == "token_embd":
            raise UserError(
                f"llama.cpp has no linear layer of this name in {architecture}", where=module,
                todo="Export with --to merged, and convert that with llama.cpp",
            )  # fmt: skip
        if name == "output" and config.tie_word_embeddings:
            raise UserError(
                "the head is tied to the embedding, and llama.cpp has no weight of its own for it", where=module,
                todo="Export with --to merged, and convert that with llama.cpp",
            )  # fmt: skip
        names[module] = name
    return names


def _permuted(B: Tensor, module: str, config: Any) -> Tensor:
    """Returns B with its rows in llama.cpp's order: in each head of q and k, the rows i and i + half side by side.

    Source: llama.cpp, conversion/llama.py, LlamaModel.permute.
    """
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads or config.num_attention_heads,
    }.get(module.rpartition(".")[2])
    if heads is None:
        return B
    return B.reshape(heads, 2, B.shape[0] // heads // 2, B.shape[1]).swapaxes(1, 2).reshape(B.shape)


def _write(file: Path, architecture: str, tensors: dict[str, Tensor], alpha: int) -> None:
    from gguf import GGUFType, GGUFWriter, Keys

    writer = GGUFWriter(file, architecture)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, float(alpha))
    for name, value in tensors.items():
        writer.add_tensor(name, value.float().contiguous().cpu().numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()

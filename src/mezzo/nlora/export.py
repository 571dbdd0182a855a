"""An adapter as a plain LoRA that stock PEFT loads, or merged into a model folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from mezzo.core.errors import UserError
from mezzo.core.fetch import silent
from mezzo.core.files import atomic, check_free
from mezzo.nlora.factors import Factors
from mezzo.nlora.folder import finish_folder
from mezzo.nlora.kinds import NLoraConv, NLoraEmbedding
from mezzo.nlora.layer import NLoraLayer
from mezzo.nlora.tuner import adapted_layers

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's --max-lora-rank takes; its default is 16."""

EXPORT_BOUND = 256
"""Roundings (eps of the base's dtype) by which the exported LoRA's logits may part from the adapter's."""

Rank = Literal["exact", "same"]


def export_lora(model: Any, out: Path, *, rank: Rank = "exact", adapter: str = "default") -> dict[str, Any]:
    """Writes the adapter as a stock PEFT LoRA folder and returns what was done.

    With three trained matrices and an offset (init = nystrom) the product has rank 2r: "exact" writes 2r, "same" the
    best r. All others fold to rank r exactly. lora_alpha equals the written rank: scales are inside the matrices.

    Args:
        model: a `PeftModel` with the NLoRA adapter.
        out: folder to write; must not exist or be empty.
        rank: "exact", or "same" for rank r with the error reported.
        adapter: name of the adapter.

    Returns:
        {"rank": largest written rank, "modules": count, "relative_error": largest of all modules (0.0 where exact),
        "vllm": what vLLM needs to serve it}

    Raises:
        UserError: `out` is in use, or the adapter trains whole modules too (modules_to_save).
    """
    check_free(out)
    config = model.peft_config[adapter]
    products, worst = plain_products(model, rank, adapter)
    tensors: dict[str, torch.Tensor] = {}
    for module, (layer, factors) in products.items():
        tensors |= _lora_tensors(f"base_model.model.{module}", layer, factors)
    ranks = {module: factors.rank for module, (_, factors) in products.items()}
    transposed = all(isinstance(layer.get_base_layer(), Conv1D) for layer, _ in products.values())
    largest = max(ranks.values())
    odd = {f"^{re.escape(key)}": value for key, value in ranks.items() if value != largest}
    lora = LoraConfig(
        r=largest, lora_alpha=largest, target_modules=sorted(ranks), fan_in_fan_out=transposed,
        rank_pattern=odd, alpha_pattern=dict(odd), task_type=config.task_type, inference_mode=True,
        base_model_name_or_path=config.base_model_name_or_path,
    )  # fmt: skip
    with atomic(out) as temporary:
        temporary.mkdir()
        save_file(tensors, temporary / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        lora.save_pretrained(str(temporary))
    limits = serving_limits(tensors, largest)
    return {"rank": largest, "modules": len(ranks), "relative_error": worst, "vllm": limits}


def plain_products(
    model: Any, rank: Rank = "exact", adapter: str = "default"
) -> tuple[dict[str, tuple[NLoraLayer, Factors]], float]:
    """Returns module name -> (layer, its one product), and the largest relative error of all modules.

    Raises:
        UserError: the adapter trains whole modules (modules_to_save) or biases too, or the model carries none of this
            name.
    """
    config = model.peft_config[adapter]
    if config.modules_to_save:
        raise UserError(
            "a plain LoRA cannot hold modules_to_save", where=", ".join(config.modules_to_save), todo="Use --to merged"
        )
    if config.bias != "none":
        raise UserError(
            "the trained biases of the base have no place in a plain LoRA",
            where=f"bias = {config.bias}",
            todo="Use --to merged",
        )
    products: dict[str, tuple[NLoraLayer, Factors]] = {}
    worst = 0.0
    for key, layer in adapted_layers(model, adapter):
        product, offset = layer.factors(adapter)
        factors = product if offset is None else product.minus(offset)
        if rank == "same" and offset is not None:
            factors, error = factors.truncate(product.rank)
            worst = max(worst, error)
        products[key.removeprefix("base_model.model.")] = (layer, factors)
    if not products:
        raise UserError("the model carries no NLoRA adapter of this name", where=adapter, todo="Name one it carries")
    return products, worst


def _lora_tensors(name: str, layer: NLoraLayer, factors: Factors) -> dict[str, torch.Tensor]:
    """Returns the tensors of one module under the names and in the shapes of stock PEFT's LoRA."""
    B, A = factors.fold()
    B, A = (B * factors.scale).contiguous().cpu(), A.contiguous().cpu()
    if isinstance(layer, NLoraEmbedding):
        return {f"{name}.lora_embedding_A": A, f"{name}.lora_embedding_B": B}
    if isinstance(layer, NLoraConv):
        base: Any = layer.get_base_layer()
        if set(base.dilation) != {1} or base.padding_mode != "zeros":
            raise UserError(
                "PEFT's LoRA knows no dilation and no padding but zeros in a convolution",
                where=name,
                todo="Use --to merged",
            )
        A = A.view(len(A), base.in_channels, *base.kernel_size)
        B = B.view(*B.shape, *[1] * len(base.kernel_size))
    return {f"{name}.lora_A.weight": A, f"{name}.lora_B.weight": B}


def serving_limits(tensors: dict[str, torch.Tensor], rank: int) -> str:
    """Returns what vLLM needs to serve this LoRA, or why it cannot.

    Source: vllm-project/vllm, vllm/lora/utils.py (names), vllm/lora/peft_helper.py (rank above max_lora_rank).
    """
    odd = [name for name, value in tensors.items() if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    odd += [name for name, value in tensors.items() if value.ndim != 2]
    if odd:
        return f"cannot serve it: {odd[0]} is no linear layer's"
    allowed = next((size for size in VLLM_RANKS if size >= rank), None)
    if allowed is None:
        return f"cannot serve it: rank {rank} is above {VLLM_RANKS[-1]}"
    return "serves it" if allowed <= VLLM_RANKS[1] else f"serves it with --max-lora-rank {allowed}"


def check_lora(model: Any, lora: Path, *, adapter: str = "default") -> float:
    """Loads the exported LoRA with stock PEFT on the model's own base and returns how far the logits part.

    The model at hand is unloaded: use it no more.

    Returns:
        Largest difference of a logit, as a share of the largest logit.

    Raises:
        UserError: it is above EXPORT_BOUND of the dtype's precision.
    """
    model.eval()
    vocabulary = int(model.config.get_text_config().vocab_size)
    probe = torch.randint(0, vocabulary, (2, 16), generator=torch.Generator().manual_seed(0)).to(model.device)
    model.set_adapter(adapter)
    with torch.no_grad():
        ours = model(probe).logits.float()
        base = model.unload()
        theirs = PeftModel.from_pretrained(base, str(lora)).eval()(probe).logits.float()
    error = float((ours - theirs).abs().max() / ours.abs().max())
    if not error <= EXPORT_BOUND * torch.finfo(base.dtype).eps:
        raise UserError(
            f"the LoRA's logits are off by {error:.2g} in stock PEFT", where=str(lora), todo="Report this as a bug"
        )
    return error


def export_merged(model: Any, tokenizer: Any, out: Path, *, adapter: str = "default") -> dict[str, Any]:
    """Writes the base with the adapter merged in as an ordinary model folder (safetensors and tokenizer).

    The model at hand is left merged: load it again to go on.

    Raises:
        UserError: `out` is in use.
    """
    check_free(out)
    layers = adapted_layers(model, adapter)
    merged = model.merge_and_unload(safe_merge=True, adapter_names=[adapter])
    with atomic(out) as temporary:
        with silent():
            merged.save_pretrained(str(temporary))
        tokenizer.save_pretrained(str(temporary))
    rounding = max((layer.merge_error for _, layer in layers), default=0.0)
    return {"parameters": sum(p.numel() for p in merged.parameters()), "relative_rounding": rounding}


def stock_answers(
    lora: Path, base: Path, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch_size: int = 25, dtype: str
) -> list[list[int]]:
    """Returns the greedy replies (token ids) of the exported LoRA in stock PEFT: a process that never imports mezzo.

    Raises:
        UserError: that process failed; its last line is given.
    """
    script = Path(__file__).with_name("stock.py")
    job = {
        "lora": str(lora), "base": str(base), "prompts": [list(prompt) for prompt in prompts],
        "max_new_tokens": max_new_tokens, "batch_size": batch_size, "dtype": dtype, "threads": torch.get_num_threads(),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-I", str(script)], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"stock PEFT could not run the export ({last})", where=str(lora), todo="Report this as a bug")
    replies: list[list[int]] = json.loads(done.stdout.strip().splitlines()[-1])
    return replies


def save_adapter(model: Any, out: Path) -> None:
    """Writes the adapter folder (adapter_config.json, adapter_model.safetensors) atomically, sets in sorted order."""
    with atomic(out) as temporary:
        model.save_pretrained(str(temporary))
        finish_folder(temporary)

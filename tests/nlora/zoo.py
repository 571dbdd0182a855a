"""Small random models of many families, built from their configs, and the inputs they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tr

IDS = torch.arange(3, 23).view(2, 10)
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
LABELS = {"num_labels": 3}


def _made(model: Any, config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return model(config).to(dtype).eval()


MODELS: dict[str, Callable[[torch.dtype], Any]] = {
    "llama": lambda d: _made(tr.LlamaForCausalLM, tr.LlamaConfig(**SIZES, **GROUPED), d),
    "qwen2": lambda d: _made(tr.Qwen2ForCausalLM, tr.Qwen2Config(**SIZES, num_key_value_heads=2), d),
    "qwen3": lambda d: _made(tr.Qwen3ForCausalLM, tr.Qwen3Config(**SIZES, **GROUPED), d),
    "gemma3": lambda d: _made(tr.Gemma3ForCausalLM, tr.Gemma3TextConfig(**SIZES, **GROUPED), d),
    "phi": lambda d: _made(tr.PhiForCausalLM, tr.PhiConfig(**SIZES), d),
    "phi3": lambda d: _made(tr.Phi3ForCausalLM, tr.Phi3Config(**SIZES, num_key_value_heads=2), d),
    "gpt2": lambda d: _made(
        tr.GPT2LMHeadModel,
        tr.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
        d,
    ),
    "bert": lambda d: _made(tr.BertForSequenceClassification, tr.BertConfig(**SIZES, **LABELS), d),
    "roberta": lambda d: _made(tr.RobertaForSequenceClassification, tr.RobertaConfig(**SIZES, **LABELS), d),
    "deberta": lambda d: _made(
        tr.DebertaV2ForSequenceClassification,
        tr.DebertaV2Config(**SIZES, **LABELS, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        d,
    ),
    "t5": lambda d: _made(
        tr.T5ForConditionalGeneration,
        tr.T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            pad_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=0,
        ),
        d,
    ),
    "vit": lambda d: _made(
        tr.ViTForImageClassification,
        tr.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
            num_channels=3,
            **LABELS,
        ),
        d,
    ),
}
TASKS = {"bert": "SEQ_CLS", "roberta": "SEQ_CLS", "deberta": "SEQ_CLS", "vit": None, "t5": "SEQ_2_SEQ_LM"}


def inputs(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns what the model's forward takes, labels too."""
    if name == "vit":
        torch.manual_seed(1)
        return {"pixel_values": torch.randn(2, 3, 16, 16).to(dtype), "labels": torch.tensor([0, 2])}
    if TASKS.get(name) == "SEQ_CLS":
        return {"input_ids": IDS, "labels": torch.tensor([0, 2])}
    return {"input_ids": IDS, "labels": IDS}


def outputs(model: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns the logits."""
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs(name, dtype)).logits
    return logits

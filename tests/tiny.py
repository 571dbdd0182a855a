"""Tiny real models: a Llama of two layers with a word-level tokenizer and a chat template, kept as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = [f"w{k}" for k in range(40)]
TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)


def llama(dtype: torch.dtype = torch.float32, *, seed: int = 0, hidden: int = 32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=128, pad_token_id=0, eos_token_id=2,
        bos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def save_tiny(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: k for k, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    llama().save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder

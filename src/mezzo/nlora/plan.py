"""What a job will do and need, worked out from the model's shapes before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model

from mezzo.core.measure import parameters
from mezzo.nlora.config import NLoraConfig
from mezzo.nlora.tuner import adapted_layers

STATE_BYTES = 4 + 4 + 8
"""Bytes of a trained number: itself, its gradient, AdamW's two moments, all float32."""

RUNTIME_BYTES = 700 << 20
"""Bytes of the process itself with its libraries, as measured on a CPU."""


@dataclass(frozen=True)
class Plan:
    """Counts and estimates; bytes are of memory while training."""

    modules: int
    kinds: dict[str, int]
    trainable: int
    total: int
    base_bytes: int
    state_bytes: int
    activation_bytes: int

    @property
    def share(self) -> float:
        """Trained numbers in percent of the model's."""
        return 100 * self.trainable / self.total

    @property
    def memory_bytes(self) -> int:
        """Estimated peak of training: the process, weights, training state, activations, and the logits' loss."""
        return RUNTIME_BYTES + self.base_bytes + self.state_bytes + self.activation_bytes


def make_plan(
    skeleton: Any, config: NLoraConfig, *, dtype: torch.dtype, tokens: int, checkpointing: bool = False
) -> Plan:
    """Returns the plan for training `config` on a model of this shape.

    Args:
        skeleton: the model on the meta device; it is changed.
        config: the adapter; its errors (ranks, targets) are raised here.
        dtype: dtype of the base weights.
        tokens: tokens of the largest batch, padding included.
        checkpointing: whether activations are recomputed.

    Raises:
        UserError: a target matches nothing, or names what cannot be adapted.
    """
    width = skeleton.config.get_text_config()
    model = get_peft_model(skeleton, config)
    layers = adapted_layers(model)
    trainable, with_adapter = parameters(model)
    item = torch.finfo(dtype).bits // 8
    adapter = sum(
        p.numel() for _, layer in layers for name, p in layer.named_parameters() if not name.startswith("base_layer.")
    )
    total = with_adapter - adapter
    per_layer = width.hidden_size * 12 + 5 * getattr(width, "intermediate_size", 4 * width.hidden_size)
    depth = 2 if checkpointing else width.num_hidden_layers
    kinds: dict[str, int] = {}
    for key, _ in layers:
        kind = key.rpartition(".")[2]
        kinds[kind] = kinds.get(kind, 0) + 1
    return Plan(
        modules=len(layers),
        kinds=kinds,
        trainable=trainable,
        total=total,
        base_bytes=total * item,
        state_bytes=trainable * STATE_BYTES,
        activation_bytes=tokens * (per_layer * depth * item + 3 * width.vocab_size * 4),
    )

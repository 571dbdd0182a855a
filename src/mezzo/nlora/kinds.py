"""The kinds of layer that can be adapted: how each stores W, and how A x is taken of its input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mezzo.core.errors import UserError
from mezzo.nlora.base import watched
from mezzo.nlora.kernel import linear, project, traced
from mezzo.nlora.layer import NLoraLayer
from mezzo.nlora.quantised import backend_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class NLoraLinear(NLoraLayer):
    """NLoRA on a linear layer, on GPT-2's Conv1D (which stores W transposed), or on a quantised linear layer."""

    exact = (nn.Linear, Conv1D)

    def _sizes(self) -> tuple[int, int]:
        base: Any = self.get_base_layer()
        if isinstance(base, Conv1D):
            return base.nx, base.nf
        return base.in_features, base.out_features

    def _matrix(self, stored: Tensor) -> Tensor:
        return stored.T if isinstance(self.get_base_layer(), Conv1D) else stored

    def _stored(self, W: Tensor) -> Tensor:
        return W.T if isinstance(self.get_base_layer(), Conv1D) else W

    def _project(self, x: Tensor, A: Tensor) -> Tensor:
        return project(x, A)

    def _fused(self, x: Tensor, name: str) -> Tensor | None:
        """Returns y' from one pass over a plain frozen linear layer, or None where that is not what stands here."""
        base = self.base_layer
        if type(base) is not nn.Linear or traced():
            return None
        W = base.weight
        plain = type(W) is nn.Parameter and not W.requires_grad and not hasattr(W, "ds_id")
        alike = x.dtype == W.dtype == self.nlora_N[name].dtype and not torch.is_autocast_enabled(x.device.type)
        if not (plain and alike) or watched(base) or self.dropout[name]:
            return None
        return linear(x, W, base.bias, self._products(name))


class NLoraConv(NLoraLayer):
    """NLoRA on a convolution of 1 to 3 dimensions: W is out x (in · kernel), h are the output channels I."""

    exact = CONVOLUTIONS

    def _sizes(self) -> tuple[int, int]:
        base: Any = self.get_base_layer()
        return base.in_channels * math.prod(base.kernel_size), base.out_channels

    def _matrix(self, stored: Tensor) -> Tensor:
        return stored.flatten(1)

    def _stored(self, W: Tensor) -> Tensor:
        base: Any = self.get_base_layer()
        return W.view(len(W), base.in_channels, *base.kernel_size)

    def _project(self, x: Tensor, A: Tensor) -> Tensor:
        kernel = self._stored(A)
        base: Any = self.get_base_layer()
        return base._conv_forward(x.to(A.dtype), kernel, None).movedim(1, -1)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns y' for x with or without a batch dimension; see `NLoraLayer.forward`."""
        base: Any = self.get_base_layer()
        if x.ndim == len(base.kernel_size) + 1:
            return super().forward(x[None], *args, **kwargs)[0]
        return super().forward(x, *args, **kwargs)

    def _adapted(self, x: Tensor, y: Tensor, names: Sequence[str]) -> Tensor:
        last = y.movedim(1, -1).clone(memory_format=torch.contiguous_format)
        return super()._adapted(x, last, names).movedim(-1, 1)


class NLoraEmbedding(NLoraLayer):
    """NLoRA on an embedding: W is (embedding size) x (vocabulary), x the one-hot token, so A x is a column of A.

    An embedding that scales its output (Gemma) scales the adapter's product too. Dropout does not apply to tokens.
    """

    exact = (nn.Embedding,)

    def _sizes(self) -> tuple[int, int]:
        base: Any = self.get_base_layer()
        return base.num_embeddings, base.embedding_dim

    def _matrix(self, stored: Tensor) -> Tensor:
        return stored.T

    def _stored(self, W: Tensor) -> Tensor:
        return W.T

    def _drop(self, name: str, x: Tensor) -> Tensor:
        return x

    def _project(self, x: Tensor, A: Tensor) -> Tensor:
        base: Any = self.get_base_layer()
        u = F.embedding(x, A.T, padding_idx=base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq)
        scale = self._get_embed_scale()
        return u if scale is None else u * scale.to(u)


def layer_for(target: nn.Module, key: str) -> type[NLoraLayer]:
    """Returns the class that adapts this module.

    Raises:
        UserError: none does; the message says why and what to do.
    """
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if isinstance(base, CONVOLUTIONS):
        if base.groups == 1:
            return NLoraConv
        why = f"a convolution with {base.groups} groups has no one weight matrix to take rows and columns of"
        raise UserError(why, where=key, todo="Leave it out with exclude_modules")
    if isinstance(base, nn.Embedding):
        if base.max_norm is None:
            return NLoraEmbedding
        raise UserError("an embedding with max_norm rewrites its own weight", where=key, todo="Leave it out")
    if isinstance(base, nn.modules.linear.NonDynamicallyQuantizableLinear):
        why = (
            "the output projection inside torch.nn.MultiheadAttention is never called, so an adapter on it does nothing"
        )
        raise UserError(why, where=key, todo="Leave it out with exclude_modules")
    if isinstance(base, (nn.Linear, Conv1D)) or backend_of(base) is not None:
        return NLoraLinear
    raise UserError(
        f"a {type(base).__name__} cannot be adapted",
        where=key,
        todo="Name linear layers, Conv1D, convolutions or embeddings in target_modules",
    )

"""NLoRA: low-rank adaptation with an r x r middle matrix (arXiv 2502.14482). Importing it enters NLORA in PEFT."""

from mezzo.nlora.config import NLoraConfig
from mezzo.nlora.factors import Factors
from mezzo.nlora.kinds import NLoraConv, NLoraEmbedding, NLoraLinear
from mezzo.nlora.layer import NLoraLayer
from mezzo.nlora.tuner import NLoraModel, adapted_layers, hotswap, register

register()

__all__ = [
    "Factors",
    "NLoraConfig",
    "NLoraConv",
    "NLoraEmbedding",
    "NLoraLayer",
    "NLoraLinear",
    "NLoraModel",
    "adapted_layers",
    "hotswap",
]

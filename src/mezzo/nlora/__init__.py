"""NLoRA: low-rank adaptation with an r x r middle matrix (arXiv 2502.14482). Importing it enters NLORA in PEFT."""

from mezzo.nlora.config import NLoraConfig
from mezzo.nlora.factors import Factors
from mezzo.nlora.layer import NLoraLinear
from mezzo.nlora.tuner import NLoraModel, adapted_layers, register

register()

__all__ = ["Factors", "NLoraConfig", "NLoraLinear", "NLoraModel", "adapted_layers"]

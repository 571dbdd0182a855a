"""Mezzo: language models that do more on a small budget."""

__version__ = "0.1.0"

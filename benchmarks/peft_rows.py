"""A pytest plugin that puts NLoRA rows (or only stock LoRA's) in place of the rows of PEFT's own custom-model tests."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

NLORA_MODES = {
    "nystrom": {"init": "nystrom"},
    "inttune": {"init": "nystrom", "train": "middle"},
    "paper": {"init": "nystrom_paper"},
    "paper inttune": {"init": "nystrom_paper", "train": "middle"},
    "slora": {"init": "slora"},
}
LAYERS: list[tuple[str, str, dict[str, Any]]] = [
    ("Vanilla MLP 1", "MLP", {"target_modules": "lin0"}),
    ("Vanilla MLP 4", "MLP", {"target_modules": ["lin0", "lin1"]}),
    ("Vanilla MLP 5", "MLP", {"target_modules": ["lin0"], "modules_to_save": ["lin1"]}),
    ("Vanilla MLP 6", "MLP", {"target_modules": ["lin0"], "lora_alpha": 4, "lora_dropout": 0.1}),
    ("Embedding + transformers Conv1D 1", "EmbConv1D", {"target_modules": ["conv1d"]}),
    ("Embedding + transformers Conv1D 2", "EmbConv1D", {"target_modules": ["emb"]}),
    ("Embedding + transformers Conv1D 3", "EmbConv1D", {"target_modules": ["emb", "conv1d"]}),
    ("Conv1d", "Conv1d", {"target_modules": ["conv1d"]}),
    ("Conv2d 1", "Conv2d", {"target_modules": ["conv2d"]}),
    ("Conv2d 2", "Conv2d", {"target_modules": ["conv2d", "lin0"]}),
    ("Conv2d 1x1", "Conv2d1x1", {"target_modules": ["conv2d"]}),
    ("Conv3d 2", "Conv3d", {"target_modules": ["conv3d", "lin0"]}),
]


def rows(which: str) -> list[tuple[Any, ...]]:
    """Returns (name, model, config class, settings) rows of NLoRA in every mode, or of stock LoRA."""
    if which == "lora":
        from peft import LoraConfig

        return [(f"{name} LoRA", model, LoraConfig, dict(settings)) for name, model, settings in LAYERS]
    from mezzo.nlora import NLoraConfig

    return [
        (f"{name} {mode}", model, NLoraConfig, {"r": 8, **settings, **choice})
        for mode, choice in NLORA_MODES.items()
        for name, model, settings in LAYERS
    ]


def pairs(which: str) -> list[tuple[Any, ...]]:
    """Returns the rows of the tests of two adapters that are active together."""
    first = rows(which)[0][2]
    random = {"init_lora_weights": False} if which == "lora" else {"r": 8, "init_weights": False}
    same, other = {"target_modules": ["lin0"], **random}, {"target_modules": ["lin1"], **random}
    return [("Same", which, first, same, dict(same)), ("Different", which, first, same, other)]


RATES = {
    ("test_parameters_after_loading_model", "nystrom"): 0.01,
    ("test_parameters_after_loading_model", "paper"): 0.01,
    ("test_only_params_are_updated", "slora"): 100.0,
}
"""Rates of these tests' SGD, where their fixed 0.5 on an unbounded loss diverges, or moves N less than they ask for.

The tests do the same by class for stock methods (100 for HiRA, Lily, AdaMSS; 0.01 and less for others).
"""

NOT_THE_BASE = ("test_disable_adapters", "test_disable_adapters_with_merging")
"""Tests that ask for the base's output at step 0; they skip stock methods that do not start there, as KaSA."""


@pytest.fixture(autouse=True)
def _as_for_stock_methods(request: Any, monkeypatch: Any) -> None:
    """Treats NLoRA's rows as these tests treat stock methods of the same kind."""
    name, _, row = request.node.name.partition("[")
    mode = next((mode for mode in sorted(NLORA_MODES, key=len, reverse=True) if f" {mode}-" in row), None)
    if mode and mode.startswith("paper") and name in NOT_THE_BASE:
        pytest.skip("the paper's start is W + s B N A, not the base")
    rate = RATES.get((name, mode)) if "EmbConv1D" in row or name != "test_only_params_are_updated" else None
    if rate is not None:
        real = torch.optim.SGD
        monkeypatch.setattr(torch.optim, "SGD", lambda parameters, lr: real(parameters, lr=rate))


def pytest_configure() -> None:
    """Replaces the rows before the tests that are parametrised by them are collected."""
    import tests.test_custom_models as module

    which = os.environ["MEZZO_PEFT_ROWS"]
    module.TEST_CASES[:] = rows(which)
    module.MULTIPLE_ACTIVE_ADAPTERS_TEST_CASES[:] = pairs(which)
    module.ALL_PEFT_CONFIG_CLASSES[:] = [rows(which)[0][2]]

"""What every test may use: tiny models, fixed seeds, no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: two processes of one thread beat two of two


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = os.environ.get("MEZZO_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MEZZO_DATA names no folder")
    return Path(folder)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that needs the built-in model where it is not here."""
    if item.get_closest_marker("model"):
        from mezzo.core import fetch, models

        if not fetch.sealed(fetch.home() / "models" / models.DEFAULT):
            pytest.skip("the built-in model is not here: `mezzo model get`")

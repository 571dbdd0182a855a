"""The story a user follows, on the real model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.model
def test_the_walkthrough_runs(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(ROOT / "examples" / "walkthrough.sh"), str(tmp_path / "out")],
        capture_output=True, text=True, env=os.environ | {"PATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"exact match"' in done.stdout
    assert (tmp_path / "out" / "lora" / "adapter_config.json").is_file()
    assert (tmp_path / "out" / "merged" / "model.safetensors").is_file()

"""Laws of the house, for every room."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "mezzo"
ROOMS = [p.name for p in SRC.iterdir() if (p / "__init__.py").is_file() and p.name not in ("core", "cli")]


@pytest.mark.parametrize("command", [[], ["nlora"], ["nlora", "train"], ["model"], ["data"]], ids=" ".join)
def test_help_starts_without_torch_and_in_under_half_a_second(command: list[str]) -> None:
    script = (
        "import sys, time\nbegan = time.perf_counter()\nfrom mezzo.cli import mezzo\n"
        f"try: mezzo.main({[*command, '--help']!r})\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print('seconds', time.perf_counter() - began)"
    )
    best = 9.0
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        best = min(best, float(done.stdout.rsplit("seconds", 1)[1]))
    assert best < 0.5
    assert "Example" in done.stdout or command == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_a_readme_tests_a_face_and_few_public_names(room: str) -> None:
    assert (SRC / room / "README.md").stat().st_size > 500
    assert list((ROOT / "tests" / room).glob("test_*.py"))
    assert (SRC / "cli" / f"{room}.py").is_file()
    names = re.search(r"__all__ = \[(.*?)\]", (SRC / room / "__init__.py").read_text(), re.DOTALL)
    assert names is not None
    assert 0 < names[1].count('"') // 2 <= 15
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"mezzo.{room}" in contracts[0]["layers"]


def test_no_file_of_the_source_is_over_400_lines() -> None:
    assert [p.name for p in SRC.rglob("*.py") if len(p.read_text(encoding="utf-8").splitlines()) > 400] == []


def test_the_page_of_commands_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_cli.py"))["page"]()
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == page


def test_the_page_of_measured_figures_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_measured.py"))["page"]()
    assert (ROOT / "docs" / "measured.md").read_text(encoding="utf-8") == page

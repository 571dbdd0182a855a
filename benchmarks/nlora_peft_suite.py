"""Runs PEFT's own custom-model tests on NLoRA rows and on stock LoRA rows, and records what fails for each.

The tests are those of the installed version, taken from its source distribution; nothing of them is kept.

    python benchmarks/nlora_peft_suite.py                 fetches the source distribution with pip
    python benchmarks/nlora_peft_suite.py --source DIR    uses an unpacked one
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

from mezzo.core.files import write_json
from mezzo.core.measure import machine

RESULT = Path(__file__).parent / "results" / "nlora_peft_suite.json"
CHOSEN = "TestPeftCustomModel or TestMultipleActiveAdapters"


def fetch(folder: Path) -> Path:
    """Returns the unpacked source distribution of the installed PEFT."""
    wanted = f"peft=={version('peft')}"
    command = [sys.executable, "-m", "pip", "download", wanted, "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def run(tests: Path, which: str, report: Path) -> dict[str, object]:
    """Returns counts and the names of the failed tests, of NLoRA's rows or of stock LoRA's."""
    environment = os.environ | {
        "MEZZO_PEFT_ROWS": which, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(tests.parent)]),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tests.parent), "-p", "peft_rows", "-n", "2",
        "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", "-k", CHOSEN, str(tests / "test_custom_models.py"),
    ]  # fmt: skip
    subprocess.run(command, cwd=tests.parent, env=environment, check=False, stdout=subprocess.DEVNULL)
    cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314  # written by pytest above
    failed, skipped, passed = [], 0, 0
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": sorted(failed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="unpacked source distribution of the installed PEFT")
    source = parser.parse_args().source
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = folder / "suite" / "tests"
        shutil.copytree((source or fetch(folder)) / "tests", tests)
        (tests / "__init__.py").touch()  # the source distribution leaves it out
        found = {which: run(tests, which, folder / f"{which}.xml") for which in ("lora", "nlora")}
    ours, stock = (set(found[which]["failed"]) for which in ("nlora", "lora"))  # type: ignore[call-overload]
    write_json(RESULT, {"peft": version("peft"), "machine": machine(), **found, "ours_alone": sorted(ours - stock)})
    for which, counts in found.items():
        print(f"{which:<6} {counts['passed']} passed, {counts['skipped']} skipped, {len(counts['failed'])} failed")  # type: ignore[arg-type]
    print("failed for NLoRA alone:", sorted(ours - stock) or "none")
    return 1 if ours - stock else 0


if __name__ == "__main__":
    sys.exit(main())

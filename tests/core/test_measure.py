"""Costs are measured, not guessed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from torch import nn

from mezzo.core.measure import Stopwatch, human_bytes, human_seconds, interleave, machine, parameters


def test_a_stopwatch_runs_inside_its_block_only() -> None:
    watch = Stopwatch()
    assert watch.seconds == 0.0
    with watch:
        time.sleep(0.02)
        inside = watch.seconds
    after = watch.seconds
    time.sleep(0.01)
    assert 0.02 <= inside <= after == watch.seconds < 5
    with watch:
        pass
    assert watch.seconds < after


def test_a_stopwatch_stops_on_errors() -> None:
    watch = Stopwatch()
    with pytest.raises(RuntimeError), watch:
        raise RuntimeError
    assert watch.seconds == watch.seconds > 0


def test_the_peak_sees_an_allocation_and_does_not_fall() -> None:
    code = (
        "from mezzo.core.measure import peak_bytes\n"
        "before = peak_bytes(); block = bytearray(64 << 20); block[::4096] = b'x' * len(block[::4096])\n"
        "during = peak_bytes(); del block; print(before, during, peak_bytes())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, during, after = map(int, output.split())
    assert 1 << 20 < before < 1 << 30
    assert 60 << 20 <= during - before <= 80 << 20
    assert after > during - (1 << 20)  # the kernel's counters are a few pages loose


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, mezzo.core.measure as m, mezzo.core.runs, mezzo.core.stats, mezzo.core.report\n"
        "m.peak_bytes(); m.machine(); m.interleave({'a': int}, repeats=1)\n"
        "print([name for name in ('torch', 'numpy', 'scipy', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_parameters_count_shared_ones_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.Linear(10, 2))
    assert parameters(model) == (40 + 40 + 22, 40 + 40 + 22)
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert parameters(model) == (40, 62)
    assert parameters(nn.ReLU()) == (0, 0)


def test_the_machine_is_described_for_a_file() -> None:
    found = machine()
    assert json.loads(json.dumps(found)) == found
    assert found["cores"] >= 1
    assert found["cpu"]
    assert found["memory_bytes"] is None or found["memory_bytes"] > 1 << 28
    assert found["torch"]


def test_interleave_runs_each_call_once_a_round() -> None:
    heard: list[str] = []
    calls: dict[str, Callable[[], object]] = {name: (lambda name=name: heard.append(name)) for name in "abc"}
    times = interleave(calls, repeats=20, warmup=3)
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys("abc", 20)
    rounds = [tuple(heard[start : start + 3]) for start in range(0, len(heard), 3)]
    assert len(rounds) == 23
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 3
    first = list(heard)
    heard.clear()
    interleave(calls, repeats=20, warmup=3)
    assert heard == first


def test_interleave_tells_slow_from_fast() -> None:
    times = interleave({"slow": lambda: time.sleep(0.01), "fast": lambda: None}, repeats=3)
    assert min(times["slow"]) >= 0.01 > max(times["fast"])


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"repeats": 1, "warmup": -1}])
def test_interleave_refuses_nonsense(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="interleave"):
        interleave({"a": int}, **bad)
    with pytest.raises(ValueError, match="interleave"):
        interleave({}, repeats=1)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1288490189, "1.2 GiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3 * 1024**5, "3,072.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0012, "1.2 ms"),
        (0.0121, "12 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (-3, "-3.0 s"),
    ],
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text

"""What a computation costs: seconds, bytes, parameters; and the machine it ran on."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class Stopwatch:
    """Measures the wall time of a `with` block.

    Attributes:
        seconds: the time so far inside the block, and the block's time after it.
    """

    def __init__(self) -> None:
        self._start: float | None = None
        self._stop: float | None = None

    @property
    def seconds(self) -> float:
        """Returns seconds since the block began, up to its end."""
        if self._start is None:
            return 0.0
        return (time.perf_counter() if self._stop is None else self._stop) - self._start

    def __enter__(self) -> Stopwatch:
        self._start, self._stop = time.perf_counter(), None
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = time.perf_counter()


def _cuda() -> Any:
    """Returns torch.cuda if this process already computes there, else None; imports nothing."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def peak_bytes() -> int:
    """Returns the most memory that this process has held, in bytes.

    On CUDA, once in use: the most that tensors took, summed over devices (`torch.cuda.reset_peak_memory_stats` starts
    anew). Otherwise the peak resident set of the process, which counts from its start.
    """
    if (cuda := _cuda()) is not None:
        return sum(int(cuda.max_memory_allocated(device)) for device in range(cuda.device_count()))
    try:
        # On Linux ru_maxrss survives exec: a small child of a large process would report its parent's peak. VmHWM not.
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def parameters(module: nn.Module) -> tuple[int, int]:
    """Returns (trainable, total) counts of a module's parameters; one that is shared counts once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def _cpu_name() -> str:
    try:
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def machine() -> dict[str, Any]:
    """Returns what a benchmark's reader must know: cpu, usable cores, memory in bytes, platform, Python, torch.

    Accelerators, torch's version and its threads are named only if torch is already imported.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": usable,
        "memory_bytes": _memory_bytes(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "accelerators": [],
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found |= {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
        if torch.cuda.is_available():
            found["accelerators"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        elif torch.backends.mps.is_available():
            found["accelerators"] = ["mps"]
    return found


def _seconds(call: Callable[[], object]) -> float:
    """Returns the wall time of one call, with the work that it left on CUDA."""
    if (cuda := _cuda()) is not None:
        cuda.synchronize()
    start = time.perf_counter()
    call()
    if (cuda := _cuda()) is not None:
        cuda.synchronize()
    return time.perf_counter() - start


def interleave(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 2, order_seed: int = 0
) -> dict[str, list[float]]:
    """Returns the seconds of each call, measured in turns so that a slow spell of the machine falls on all of them.

    Args:
        calls: name to a function without arguments.
        repeats: rounds; each round runs every call once, in a new order.
        warmup: rounds before them that are not counted.
        order_seed: of the orders.

    Returns:
        name to one time for each round: position i of every list is from the same round.

    Raises:
        ValueError: nothing to call, repeats below 1 or warmup below 0.
    """
    if not calls or repeats < 1 or warmup < 0:
        raise ValueError("interleave needs calls, repeats >= 1 and warmup >= 0")
    chance = random.Random(order_seed)  # noqa: S311 (an order, not a secret)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        order = list(calls)
        chance.shuffle(order)
        for name in order:
            seconds = _seconds(calls[name])
            if turn >= warmup:
                times[name].append(seconds)
    return times


def human_bytes(count: float) -> str:
    """Returns bytes in the largest fitting unit: "512 B", "1.2 GiB"."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if round(abs(size), 1) < 1024:
            return f"{size:.1f} {unit}"
    return f"{size:,.1f} TiB"


def human_seconds(seconds: float) -> str:
    """Returns a time span in words: "12 ms", "4.2 s", "3 min 05 s", "2 h 03 min"."""
    if seconds < 0:
        return f"-{human_seconds(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0095 or seconds == 0 else f"{seconds * 1000:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"

"""A Run is a directory: what was asked, what it was made of, and what happened, step by step."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from mezzo import __version__
from mezzo.core.errors import UserError
from mezzo.core.files import atomic, write_json

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "numpy")
CONFIG, MANIFEST, METRICS = "config.json", "manifest.json", "metrics.jsonl"


def plain(value: Any) -> Any:
    """Returns `value` as strict JSON can hold it: a number that is not finite becomes None.

    Paths become text, dataclasses objects, sets sorted lists, arrays and tensors (nested) lists; half a surrogate pair
    becomes "?".

    Raises:
        TypeError: the value has no JSON form.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | os.PathLike):
        return str.__str__(os.fspath(value)).encode("utf-8", "replace").decode()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"no JSON form for a {type(value).__name__}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _surroundings() -> dict[str, Any]:
    """Returns versions and platform, without importing anything heavy and without names of people or machines."""
    import importlib.metadata

    packages: dict[str, str] = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "mezzo": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": packages,
    }


def _load(path: Path, *, missing: str, todo: str | None = None) -> Any:
    """Returns the JSON value in a file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(missing, where=str(path.parent), todo=todo) from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            "damaged: not valid JSON", where=str(path), todo="Restore the file, or start again with another --out"
        ) from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _load_object(path: Path) -> dict[str, Any]:
    value = _load(path, missing=f"no run here: {path.name} is missing", todo="Name the folder given to --out")
    if not isinstance(value, dict):
        raise UserError(
            "damaged: not a JSON object", where=str(path), todo="Restore the file, or start again with another --out"
        )
    return value


def _claim(path: Path, config: str) -> None:
    """Makes the folder and takes it by creating config.json, which only one process can do.

    Raises:
        UserError: the place is taken, or cannot be written to.
    """
    other = "Choose another --out"
    try:
        if path.exists() and not path.is_dir():
            raise UserError("a file is in the way of the run's folder", where=str(path), todo=other)
        path.mkdir(parents=True, exist_ok=True)
        if (path / MANIFEST).exists():
            raise UserError("already holds a run", where=str(path), todo=f"{other}, or continue this one with --resume")
        if any(path.iterdir()):
            raise UserError("the folder is not empty", where=str(path), todo=other)
        with (path / CONFIG).open("x", encoding="utf-8") as file:
            try:
                file.write(config)
                file.flush()
            except OSError:
                (path / CONFIG).unlink()
                raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot make a run here: {reason}", where=str(path), todo=other) from error


class Run:
    """One run on disk: config.json, manifest.json, metrics.jsonl, and whatever else a room writes beside them.

    Attributes:
        path: the run's folder.
        config: what was asked for.
        manifest: versions, platform, seed, hashes of the inputs, times, and status ("running", "done", "interrupted" or
            "failed").
    """

    def __init__(self, path: Path, config: dict[str, Any], manifest: dict[str, Any]) -> None:
        self.path, self.config, self.manifest = path, config, manifest
        self._began = time.monotonic()
        self._whole = False  # whether the metrics file is known to end with a whole line

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        verb: str,
        config: Mapping[str, Any],
        seed: int,
        inputs: Mapping[str, str],
    ) -> Run:
        """Returns a new run in a folder that is not there yet, or empty.

        Args:
            path: the run's folder; its parents are made too.
            verb: what is run, such as "nlora train".
            config: all that was asked for; see `plain` for the values it may hold.
            seed: the seed of everything random.
            inputs: name of each input (data, model) to its SHA-256.

        Raises:
            UserError: the folder holds a run or anything else, is a file, or cannot be written to.
        """
        folder = Path(path)
        started = {"verb": verb, "status": "running", "started": _now(), "seed": seed, "inputs": plain(inputs)}
        _claim(folder, json.dumps(plain(config), indent=2, ensure_ascii=False) + "\n")
        try:
            write_json(folder / MANIFEST, started | _surroundings())
        except UserError:
            (folder / CONFIG).unlink()
            raise
        return cls.open(folder)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """Returns the run in a folder.

        Raises:
            UserError: no such folder, no run in it, or a damaged one.
        """
        folder = Path(path)
        try:
            is_folder, exists = folder.is_dir(), folder.exists()
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=str(folder)) from error
        if not is_folder:
            what = "a file, not the folder of a run" if exists else "no such folder"
            raise UserError(what, where=str(folder), todo="Name the folder given to --out")
        manifest = _load_object(folder / MANIFEST)
        return cls(folder, _load_object(folder / CONFIG), manifest)

    def log(self, **values: Any) -> None:
        """Adds one line to metrics.jsonl, on disk at once, with "time": seconds since this process began the run.

        Args:
            values: numbers and words, "step" among them where there is one; a number that is not finite becomes null.

        Raises:
            UserError: the disk is full, or the file cannot be written to.
        """
        path = self.path / METRICS
        entry = {**values, "time": round(time.monotonic() - self._began, 3)} if "time" not in values else values
        line = json.dumps(plain(entry), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            if not self._whole and path.exists() and not path.read_bytes().endswith(b"\n"):
                self._rewrite(self.metrics())
            self._whole = False
            with path.open("ab", buffering=0) as file:
                self._whole = file.write(line) == len(line)
        except OSError as error:
            raise UserError(f"cannot write: {(error.strerror or str(error)).lower()}", where=str(path)) from error
        if not self._whole:
            raise UserError("cannot write: the disk is full", where=str(path), todo="Free some space, then --resume")

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl; a last line cut off by a kill is left out.

        Raises:
            UserError: a line before the last one is damaged, or the file cannot be read.
        """
        path = self.path / METRICS
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from error
        entries: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if isinstance(entry, dict) and isinstance(entry.get("step", 0), (int, float)):
                entries.append(entry)
            elif number < len(lines):
                raise UserError("damaged: no JSON object with numbers", where=f"{path}, line {number}")
        return entries

    def rewind(self, step: int) -> None:
        """Drops what was logged after `step`, and a line cut off by a kill, so that a resumed run goes on from there.

        Lines without a step stay.
        """
        if (self.path / METRICS).exists():
            entries = self.metrics()
            self._rewrite([entry for entry in entries if entry.get("step") is None or entry["step"] <= step])

    def _rewrite(self, entries: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(plain(entry), ensure_ascii=False) + "\n" for entry in entries)
        with atomic(self.path / METRICS) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
        self._whole = True

    def update(self, **values: Any) -> None:
        """Merges `values` into the manifest on disk, atomically."""
        manifest = _load_object(self.path / MANIFEST) | {key: plain(value) for key, value in values.items()}
        write_json(self.path / MANIFEST, manifest)
        self.manifest = manifest

    def _beside(self, name: str) -> Path:
        file = name if name.endswith(".json") else f"{name}.json"
        if Path(file).name != file or "\\" in file or file.startswith(".") or file in (CONFIG, MANIFEST):
            raise ValueError(f"not the name of a file beside the run's own: {name!r}")
        return self.path / file

    def write(self, name: str, value: Any) -> Path:
        """Returns the path of NAME.json in the run's folder, after writing `value` there atomically."""
        path = self._beside(name)
        write_json(path, plain(value))
        return path

    def read(self, name: str) -> Any:
        """Returns the value in NAME.json of the run's folder.

        Raises:
            UserError: the file is missing or damaged.
        """
        path = self._beside(name)
        return _load(path, missing=f"this run has no {path.name}")

    def finish(self, status: Literal["done", "interrupted", "failed"]) -> None:
        """Writes how the run ended, and when, into the manifest."""
        self.update(status=status, ended=_now())

"""Files that are either whole or not there: atomic writes, and hashes of content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mezzo.core.errors import UserError


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling of `path` to write to; it takes the place of `path` only if the block ends well.

    Works for files and for folders: write either one at the yielded path (it does not exist yet; the parent does).

    Raises:
        UserError: the disk is full, or the place cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if path.is_dir() and temporary.is_dir():
            old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.replace(path)
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(
            f"cannot write: {os.strerror(error.errno).lower()}",
            where=str(path),
            todo="Free some space or choose another place; nothing was changed",
        ) from error
    finally:
        with suppress(OSError):  # a parent that is a file, too long a name: the error above says it
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)


def check_free(path: Path, todo: str = "Choose another --out, or remove it") -> None:
    """Checks that a folder can be made at `path`: nothing is there, or an empty folder.

    Raises:
        UserError: something is there, or the place cannot be read.
    """
    try:
        taken = path.is_file() or (path.is_dir() and any(path.iterdir()))
    except OSError as error:
        raise UserError(f"cannot be used: {error.strerror}", where=str(path), todo="Choose another --out") from error
    if taken:
        raise UserError("already holds files", where=str(path), todo=todo)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256_file(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

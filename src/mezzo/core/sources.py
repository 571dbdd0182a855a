"""Files of rows as numbered plain mappings: JSONL, JSON, CSV, TSV, Parquet, each plain or .gz; and data set ids."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mezzo.core.errors import UserError

Raw = tuple[int, Any]
"""A row's number in its file, from 1 (JSONL: the line), and its value."""

FORMATS = ".jsonl, .ndjson, .json, .csv, .tsv or .parquet (.gz after it is fine)"


def raw_rows(source: str, *, split: str) -> tuple[bytes | None, Iterator[Raw]]:
    """Returns the file's bytes (None for a data set) and its rows.

    Raises:
        UserError: no such file, an unknown format, a file that is empty, damaged or not UTF-8.
    """
    path = Path(source.removeprefix("hf:")).expanduser()
    if not source.startswith("hf:"):
        if path.is_file():
            return _file(path)
        if path.is_dir():
            return None, _saved(path, split)
    name = source.removeprefix("hf:")
    if source.startswith("hf:") or (looks_like_id(name) and not path.suffix):
        return None, _data_set(name, split)
    raise UserError("no such file", where=source, todo=f"Name a file ({FORMATS}) or a data set (hf:org/name)")


def looks_like_id(name: str) -> bool:
    """Tells `org/name` from the path of something in a folder that is here."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name.split("/")[0]).exists()


def _file(path: Path) -> tuple[bytes, Iterator[Raw]]:
    plain = path.name.removesuffix(".gz")
    kind = Path(plain).suffix.lower()
    readers = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
    if kind not in readers:
        raise UserError(f"unknown kind of file {kind or '(none)'!r}", where=str(path), todo=f"Use {FORMATS}")
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error) as error:
        raise UserError("the compressed file is cut off or damaged", where=str(path), todo="Copy it again") from error
    except OSError as error:
        raise UserError(
            f"cannot be read ({error.strerror or error})", where=str(path), todo="Check the file"
        ) from error
    if not content.strip():
        raise UserError("is empty", where=str(path), todo="Name a file that holds rows")
    return content, readers[kind](content, str(path))


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"is not UTF-8 (line {line}, byte {error.start})", where=where, todo="Save it as UTF-8"
        ) from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError("is nested too deeply", where=where, todo="Flatten it") from error
    except ValueError as error:
        raise UserError(f"is no JSON ({error})", where=where, todo="Write one JSON object a line") from error


def _jsonl(content: bytes, where: str) -> Iterator[Raw]:
    for number, line in enumerate(_text(content, where).split("\n"), start=1):
        if line.strip():
            yield number, _parse(line, f"{where}, row {number}")


def _json(content: bytes, where: str) -> Iterator[Raw]:
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from _jsonl(content, where)
        return
    yield from enumerate(_parse(_text(content, where), where), start=1)


def _csv(content: bytes, where: str) -> Iterator[Raw]:
    csv.field_size_limit(1 << 30)
    delimiter = "\t" if ".tsv" in Path(where).name else ","
    reader = csv.reader(io.StringIO(_text(content, where), newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = 0
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                continue
            number += 1
            if len(cells) != len(header):
                raise UserError(
                    f"has {len(cells)} cells, the header {len(header)}",
                    where=f"{where}, row {number}",
                    todo="Quote cells that hold the separator",
                )
            yield number, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"is no CSV ({error})", where=f"{where}, row {number + 1}", todo="Check its quotes") from error


def _parquet(content: bytes, where: str) -> Iterator[Raw]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(content))
    except (pyarrow.ArrowException, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"is no whole Parquet file ({first})", where=where, todo="Copy it again") from error
    number = 0
    for batch in table.to_batches(max_chunksize=1024):
        for value in batch.to_pylist():
            number += 1
            yield number, value


def _saved(path: Path, split: str) -> Iterator[Raw]:
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            "is a folder without a saved data set", where=str(path), todo=f"Name a file ({FORMATS})"
        ) from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise UserError(f"has no split {split!r}", where=str(path), todo=f"Splits here: {', '.join(found)}")
        found = found[split]
    yield from enumerate(found, start=1)


def _data_set(name: str, split: str) -> Iterator[Raw]:
    from datasets import load_dataset

    identity, _, config = name.partition(":")
    try:
        found = load_dataset(identity, config or None, split=split)
    except Exception as error:  # the hub client's errors share no base
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"no such file, and no data set could be had ({first})",
            where=name,
            todo="Check the path, or name and network",
        ) from error
    yield from enumerate(found, start=1)

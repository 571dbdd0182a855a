"""Files of rows as numbered plain mappings: JSONL, JSON, CSV, TSV, Parquet, each plain or .gz; and data set ids."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mezzo.core.errors import UserError

Raw = tuple[int, Any]
"""A row's number in its file, from 1 (JSONL: the line), and its value, or the `UserError` that says what ails it."""

FORMATS = ".jsonl, .ndjson, .json, .csv, .tsv or .parquet (.gz after it is fine)"


def raw_rows(source: str, *, split: str) -> tuple[bytes | None, Iterator[Raw]]:
    """Returns the file's bytes, unpacked (None for a data set), and its rows, read as they are asked for.

    A row that cannot be read comes as its `UserError`, and the rows after it still come.

    Raises:
        UserError: no such file, an unknown format, a file that is empty or damaged as a whole.
    """
    name = source.removeprefix("hf:")
    if name != source:
        return None, _data_set(name, split)
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that is closed to us, ~nobody
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot be read ({reason.lower()})", where=source, todo="Check the path") from error
    if is_file:
        return _file(path)
    if is_folder:
        return None, _saved(path, split)
    if looks_like_id(name) and not path.suffix:
        return None, _data_set(name, split)
    raise UserError("no such file", where=source, todo=f"Name a file ({FORMATS}) or a data set (hf:org/name)")


def looks_like_id(name: str) -> bool:
    """Tells `org/name` from the path of something in a folder that is here."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name.split("/")[0]).exists()


def _file(path: Path) -> tuple[bytes, Iterator[Raw]]:
    packed = path.suffix.lower() == ".gz"
    kind = Path(path.stem if packed else path.name).suffix.lower()
    readers: dict[str, Callable[[bytes, str], Iterator[Raw]]] = {
        ".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".parquet": _parquet,
        ".csv": partial(_csv, delimiter=","), ".tsv": partial(_csv, delimiter="\t"),
    }  # fmt: skip
    if kind not in readers:
        raise UserError(f"unknown kind of file {kind or '(none)'!r}", where=str(path), todo=f"Use {FORMATS}")
    try:
        content = path.read_bytes()
        if packed and content:
            content = gzip.decompress(content)
    except gzip.BadGzipFile as error:
        raise UserError(
            "is no whole gzip file", where=str(path), todo="Copy it again, or take .gz off its name"
        ) from error
    except (EOFError, zlib.error) as error:
        raise UserError("the compressed file is cut off or damaged", where=str(path), todo="Copy it again") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot be read ({reason})", where=str(path), todo="Check the file") from error
    if not content.removeprefix(codecs.BOM_UTF8).strip():
        raise UserError("is empty", where=str(path), todo="Name a file that holds rows")
    return content, readers[kind](content, str(path))


def _decoded(content: bytes, where: str, *, line: int = 1, offset: int = 0) -> str:
    """Returns the text of bytes that begin at this line and offset of the file."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        place = f"line {line}, byte {offset + error.start}"
        raise UserError(f"is not UTF-8 ({place})", where=where, todo="Save it as UTF-8") from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError("is nested too deeply", where=where, todo="Flatten it") from error
    except ValueError as error:
        raise UserError(f"is no JSON ({error})", where=where, todo="Write one JSON object a line") from error


def _jsonl(content: bytes, where: str) -> Iterator[Raw]:
    offset = 0
    for number, line in enumerate(io.BytesIO(content), start=1):  # ends lines at \n alone, so U+2028 stays inside
        value: Any = None
        try:
            text = _decoded(line, f"{where}, row {number}", line=number, offset=offset)
            blank = not text.strip()
            value = None if blank else _parse(text, f"{where}, row {number}")
        except UserError as fault:
            blank, value = False, fault
        if not blank:
            yield number, value
        offset += len(line)


def _json(content: bytes, where: str) -> Iterator[Raw]:
    listed = content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    try:
        whole = _parse(_decoded(content, where), where)
    except UserError:
        if listed:
            raise
        yield from _jsonl(content, where)
        return
    yield from enumerate(whole if listed else [whole], start=1)


def _csv(content: bytes, where: str, *, delimiter: str) -> Iterator[Raw]:
    csv.field_size_limit(1 << 30)
    lines = io.StringIO(_decoded(content, where), newline="")
    header: list[str] = []
    number = 0
    try:
        for cells in filter(None, csv.reader(lines, delimiter=delimiter, strict=True)):
            if not header:
                header = _header(cells, where)
                continue
            number += 1
            if len(cells) == len(header):
                yield number, dict(zip(header, cells, strict=True))
                continue
            fault = f"has {len(cells)} cells, the header {len(header)}"
            todo = "Quote cells that hold the separator"
            yield number, UserError(fault, where=f"{where}, row {number}", todo=todo)
    except csv.Error as error:
        raise UserError(f"is no CSV ({error})", where=f"{where}, row {number + 1}", todo="Check its quotes") from error


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"names the column {twice!r} twice", where=f"{where}, header", todo="Rename one of them")
    return names


def _parquet(content: bytes, where: str) -> Iterator[Raw]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)).iter_batches(batch_size=1024):
            for value in batch.to_pylist():
                number += 1
                yield number, value
    except UnicodeDecodeError as error:
        fault = "holds text that is not UTF-8"
        raise UserError(fault, where=f"{where}, after row {number}", todo="Write it again as UTF-8") from error
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = _first_line(error)
        raise UserError(f"is no whole Parquet file ({reason})", where=where, todo="Copy it again") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _saved(path: Path, split: str) -> Iterator[Raw]:
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise UserError("is a folder without a saved data set", where=str(path), todo=f"Name a file ({FORMATS})")
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"is a damaged data set ({_first_line(error)})"
        raise UserError(reason, where=str(path), todo="Save it again") from error
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
        first = _first_line(error)
        raise UserError(
            f"no such file, and no data set could be had ({first})",
            where=name,
            todo="Check the path, or name and network",
        ) from error
    yield from enumerate(found, start=1)

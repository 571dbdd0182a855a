"""Rows to learn from or to score: read from files in the shapes people have, checked, and brought to one form."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args, overload

from mezzo.core.errors import UserError
from mezzo.core.files import atomic
from mezzo.core.sources import raw_rows

Shape = Literal[
    "prompt/completion", "messages", "instruction/input/output", "query/response", "question/answer", "text"
]
Message = dict[str, str]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}."""

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
_KINDS = {"bool": "true/false value", "int": "number", "float": "number", "dict": "JSON object"}
_OPTIONAL = ("input",)
MAX_FAULTS = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """One example: chat turns (none for plain text) and the reply, or the whole text, to learn."""

    number: int
    prompt: tuple[Message, ...]
    completion: str


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """Checked rows: where they came from, their shape, the SHA-256 of the source's content, and field -> column."""

    source: str
    shape: Shape
    sha256: str
    rows: tuple[Row, ...]
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row], *, source: str, shape: Shape) -> Rows:
        """Returns rows made in memory, hashed by their content."""
        content = json.dumps([[row.prompt, row.completion] for row in rows], ensure_ascii=False)
        return cls(source, shape, hashlib.sha256(content.encode()).hexdigest(), tuple(rows))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows[index]

    def take(self, n: int) -> Rows:
        """Returns the first `n` rows (all where there are fewer); the hash stays that of the source."""
        return replace(self, rows=self.rows[:n])


def read(
    source: str | Path,
    *,
    shape: Shape | None = None,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
    limit: int | None = None,
) -> Rows:
    """Returns the rows of a file (JSONL, JSON, CSV, TSV, Parquet; .gz too), a saved data set, or a data set id.

    Args:
        source: path, or `org/name[:config]` (`hf:` before it where a path of that name exists).
        shape: None: found by the columns.
        columns: field -> the user's column, e.g. {"prompt": "ask", "completion": "reply"}; tells the shape too.
        split: which split of a data set.
        limit: read no more than this many rows of the source (a chat gives a row for each reply).

    Raises:
        UserError: names the file, the row and the field, and says how many more rows have faults.
    """
    where = str(source)
    renamed = dict(columns or {})
    chosen = _asked_shape(shape, renamed)
    if limit is not None and limit < 1:
        raise UserError(f"{limit} is too small", where="limit", todo="Read 1 row or more")
    content, raw = raw_rows(where, split=split)
    made: list[Row] = []
    used: dict[str, str] = {}
    faults: list[UserError] = []
    for number, value in islice(raw, limit):
        place = f"{where}, row {number}"
        try:
            row = _mapping(value, renamed, place)
            chosen = chosen or _find_shape(row, place)
            made.extend(_rows_of(row, chosen, number, place))
            used.update({name: renamed.get(name, name) for name in _fields(chosen) if name in row})
        except UserError as fault:
            faults.append(fault)
            if len(faults) >= MAX_FAULTS:
                break
    if faults:
        raise _summed(faults)
    if not made or chosen is None:
        raise UserError("holds no rows", where=where, todo="Name a file that holds rows")
    digest = Rows.of(made, source="", shape=chosen).sha256 if content is None else hashlib.sha256(content).hexdigest()
    return Rows(where, chosen, digest, tuple(made), used)


def split(rows: Rows, held_out: int, seed: int) -> tuple[Rows, Rows]:
    """Returns (rest, held out), drawn with the seed; pieces of one source row stay on one side.

    Raises:
        UserError: `held_out` is below 1, or there are fewer than `held_out` + 1 source rows.
    """
    numbers = sorted({row.number for row in rows})
    if held_out < 1:
        raise UserError(f"{held_out} rows cannot be held out", where=rows.source, todo="Hold out 1 row or more")
    if len(numbers) <= held_out:
        raise UserError(
            f"{len(numbers)} rows are too few to hold out {held_out}", where=rows.source, todo="Hold out fewer"
        )
    chosen = set(random.Random(seed).sample(numbers, held_out))  # noqa: S311  # a draw of rows, not a secret
    kept = tuple(row for row in rows if row.number not in chosen)
    return replace(rows, rows=kept), replace(rows, rows=tuple(row for row in rows if row.number in chosen))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one JSON object a line, atomically; compressed where the name ends with .gz.

    Raises:
        UserError: text that cannot be encoded, a full disk, a place that cannot be written to.
    """
    try:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    except UnicodeEncodeError as error:
        raise UserError("rows hold half a character (a lone surrogate)", where=str(path), todo="Mend it") from error
    with atomic(path) as temporary:
        temporary.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _summed(faults: list[UserError]) -> UserError:
    first = faults[0]
    more = len(faults) - 1
    count = f" (and {more}{'+' if len(faults) >= MAX_FAULTS else ''} more rows with faults)" if more else ""
    return UserError(first.what + count, where=first.where, todo=first.todo)


def _asked_shape(shape: str | None, renamed: Mapping[str, str]) -> Shape | None:
    """Returns the shape that is named, or that the fields with named columns belong to; None where nothing is said."""
    known = get_args(Shape)
    if shape is not None and shape not in known:
        raise UserError(f"unknown shape {shape!r}", where="shape", todo=f"Use one of: {', '.join(known)}")
    fields = sorted({name for each in known for name in each.split("/")})
    for name in renamed:
        if name not in fields:
            raise UserError(f"unknown field {name!r}", where="columns", todo=f"Use one of: {', '.join(fields)}")
    fits: list[Shape] = [each for each in known if set(renamed) <= set(each.split("/")) and shape in (None, each)]
    if not fits:
        of = f"shape {shape}" if shape else "one shape"
        raise UserError(
            f"{', '.join(renamed)} are not fields of {of}", where="columns", todo=f"Shapes: {', '.join(known)}"
        )
    return fits[0] if shape or renamed else None


def _mapping(value: Any, renamed: Mapping[str, str], place: str) -> dict[str, Any]:
    """Returns a raw row with its columns under the names of their fields too."""
    if isinstance(value, UserError):
        raise value
    if not isinstance(value, dict):
        raise UserError("is no JSON object", where=place, todo="Write one JSON object a line")
    absent = next((column for column in renamed.values() if column not in value), None)
    if absent is not None:
        raise UserError("is missing", where=f"{place}, column {absent}", todo="Check the names of your columns")
    return value | {name: value[column] for name, column in renamed.items()}


def _fields(shape: str) -> list[str]:
    return ["messages", "conversations"] if shape == "messages" else shape.split("/")


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)  # None or NaN


def _find_shape(value: Mapping[str, Any], place: str) -> Shape:
    def fitting(there: set[str]) -> list[Shape]:
        if "conversations" in there:
            there = there | {"messages"}
        return [shape for shape in get_args(Shape) if {*shape.split("/")} - {*_OPTIONAL} <= there]

    fits = fitting(set(value))
    if len(fits) > 1:  # tables give every row every column: go by those that are filled
        fits = fitting({name for name, cell in value.items() if not _is_null(cell)}) or fits
    if "text" in fits and len(fits) > 1:
        fits.remove("text")
    if len(fits) > 1:
        raise UserError(f"fits {' and '.join(fits)}", where=place, todo="Say which with --shape")
    if not fits:
        columns = textwrap.shorten(", ".join(map(str, value)) or "none", 200, placeholder=", ...")
        raise UserError(
            f"has no known shape (columns: {columns})",
            where=place,
            todo=f"Name the columns as in one of: {', '.join(get_args(Shape))}",
        )
    return fits[0]


def _rows_of(value: Mapping[str, Any], shape: Shape, number: int, place: str) -> list[Row]:
    if shape == "messages":
        return _turns(value, number, place)
    if shape == "text":
        return [Row(number, (), _text(value, "text", shape, place))]
    names = shape.split("/")
    ask, reply = names[0], names[-1]
    if shape == "prompt/completion" and isinstance(value.get(ask), list):
        prompt = _messages(value[ask], ask, place)
    else:
        text = _text(value, ask, shape, place)
        extra = value.get("input") if shape.startswith("instruction") else None
        if not _is_null(extra) and _checked(extra, f"{place}, field input", blank=True):
            text = f"{text}\n\n{extra}"
        prompt = [{"role": "user", "content": text}]
    if shape == "prompt/completion" and isinstance(value.get(reply), list):
        return _replies(prompt, _messages(value[reply], reply, place), number, f"{place}, field {reply}")
    return [Row(number, tuple(prompt), _text(value, reply, shape, place))]


def _text(value: Mapping[str, Any], name: str, shape: str, place: str) -> str:
    if _is_null(value.get(name)):
        other = _other_shape(value, shape)
        if other:
            raise UserError(f"is of shape {other}, not {shape}", where=place, todo="Keep one shape a file")
        raise UserError("is missing", where=f"{place}, field {name}", todo=f"Give every row {shape.replace('/', ', ')}")
    return _checked(value[name], f"{place}, field {name}")


def _checked(found: Any, where: str, *, blank: bool = False) -> str:
    """Returns text that can be learnt; "" for blank text where that is allowed."""
    if not isinstance(found, str):
        kind = type(found).__name__
        raise UserError(f"is a {_KINDS.get(kind, kind)}, not text", where=where, todo="Write text")
    if not found.strip():
        if blank:
            return ""
        raise UserError("is empty", where=where, todo="Fill it, or leave the row out")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise UserError("holds half a character (a lone surrogate)", where=where, todo="Mend it") from error
    return found


def _other_shape(value: Mapping[str, Any], shape: str) -> str | None:
    try:
        other = _find_shape(value, "")
    except UserError:
        return None
    return other if other != shape else None


def _messages(turns: Any, name: str, place: str) -> list[Message]:
    where = f"{place}, field {name}"
    if not isinstance(turns, list) or not turns:
        raise UserError("is no list of messages", where=where, todo='Write [{"role": ..., "content": ...}, ...]')
    made = []
    for k, turn in enumerate(turns, start=1):
        at = f"{where}, message {k}"
        if not isinstance(turn, dict):
            raise UserError("is no message", where=at, todo='Write {"role": ..., "content": ...}')
        said = turn.get("role", turn.get("from"))
        role = said if "role" in turn else _SHAREGPT.get(str(said))
        if role not in ROLES:
            fault = "has no role" if said is None else f"unknown role {said!r}"
            raise UserError(fault, where=at, todo=f"Use {', '.join(ROLES)}")
        text = turn.get("content", turn.get("value"))
        if _is_null(text):
            raise UserError("has no content", where=at, todo="Give every message its text, or leave the row out")
        made.append({"role": str(role), "content": _checked(text, at)})
    return made


def _turns(value: Mapping[str, Any], number: int, place: str) -> list[Row]:
    name = "messages" if not _is_null(value.get("messages")) else "conversations"
    if _is_null(value.get(name)):
        _text(value, "messages", "messages", place)
    return _replies([], _messages(value[name], name, place), number, f"{place}, field {name}")


def _replies(before: list[Message], turns: list[Message], number: int, where: str) -> list[Row]:
    """Returns a row for each assistant turn that has turns before it."""
    rows = [
        Row(number, (*before, *turns[:k]), turn["content"])
        for k, turn in enumerate(turns)
        if turn["role"] == "assistant" and (before or k)
    ]
    if not rows:
        raise UserError("has no assistant turn after another", where=where, todo="Add the reply to learn")
    return rows


def summary(rows: Rows) -> dict[str, Any]:
    """Returns what a person checks: shape, columns, rows, duplicates, characters (least, median, most), first row."""
    different = {json.dumps([row.prompt, row.completion]) for row in rows}
    return {
        "source": rows.source,
        "shape": rows.shape,
        "columns": dict(rows.columns),
        "rows": len(rows),
        "duplicates": len(rows) - len(different),
        "prompt_characters": _spread([sum(len(message["content"]) for message in row.prompt) for row in rows]),
        "completion_characters": _spread([len(row.completion) for row in rows]),
        "sha256": rows.sha256,
        "first": {"prompt": list(rows[0].prompt), "completion": rows[0].completion},
    }


def _spread(counts: list[int]) -> dict[str, int]:
    ordered = sorted(counts)
    return {"least": ordered[0], "median": ordered[len(ordered) // 2], "most": ordered[-1]}

"""Rows to learn from or to score: read from files in the shapes people have, checked, and brought to one form."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
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
_SHAREGPT = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
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
    """Checked rows: where they came from, their shape, and the SHA-256 of the source's content."""

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
        columns: field -> the user's column, e.g. {"prompt": "ask", "completion": "reply"}.
        split: which split of a data set.
        limit: read no more than this many rows.

    Raises:
        UserError: names the file, the row and the field, and says how many more rows share the fault.
    """
    where = str(source)
    if shape is not None and shape not in get_args(Shape):
        raise UserError(f"unknown shape {shape!r}", where="shape", todo=f"Use one of: {', '.join(get_args(Shape))}")
    content, raw = raw_rows(where, split=split)
    chosen: Shape | None = shape
    renamed = dict(columns or {})
    fields = sorted({name for known in get_args(Shape) for name in known.split("/")})
    for name in renamed:
        if name not in fields:
            raise UserError(f"unknown field {name!r}", where="columns", todo=f"Use one of: {', '.join(fields)}")
    made: list[Row] = []
    faults: list[UserError] = []
    for number, value in islice(raw, limit):
        place = f"{where}, row {number}"
        try:
            if not isinstance(value, dict):
                raise UserError("is no JSON object", where=place, todo="Write one JSON object a line")
            absent = next((column for column in renamed.values() if column not in value), None)
            if absent is not None:
                raise UserError("is missing", where=f"{place}, column {absent}", todo="Check the names of your columns")
            value = value | {name: value[column] for name, column in renamed.items()}
            if chosen is None:
                chosen = _find_shape(value, place)
            made.extend(_rows_of(value, chosen, number, place))
        except UserError as fault:
            faults.append(fault)
            if len(faults) >= MAX_FAULTS:
                break
    if faults:
        raise _summed(faults)
    if not made or chosen is None:
        raise UserError("holds no rows", where=where, todo="Name a file that holds rows")
    digest = (
        hashlib.sha256(content).hexdigest() if content is not None else Rows.of(made, source="", shape=chosen).sha256
    )
    return Rows(where, chosen, digest, tuple(made), renamed)


def split(rows: Rows, held_out: int, seed: int) -> tuple[Rows, Rows]:
    """Returns (rest, held out), drawn with the seed; pieces of one source row stay on one side.

    Raises:
        UserError: fewer than `held_out` + 1 source rows.
    """
    numbers = sorted({row.number for row in rows})
    if held_out < 1 or len(numbers) <= held_out:
        raise UserError(
            f"{len(numbers)} rows are too few to hold out {held_out}", where=rows.source, todo="Hold out fewer"
        )
    chosen = set(random.Random(seed).sample(numbers, held_out))  # noqa: S311  # a draw of rows, not a secret
    kept = tuple(row for row in rows if row.number not in chosen)
    return replace(rows, rows=kept), replace(rows, rows=tuple(row for row in rows if row.number in chosen))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one JSON object a line, atomically; compressed where the name ends with .gz."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    with atomic(path) as temporary:
        temporary.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _summed(faults: list[UserError]) -> UserError:
    first = faults[0]
    more = len(faults) - 1
    count = f" (and {more}{'+' if len(faults) >= MAX_FAULTS else ''} more rows with faults)" if more else ""
    return UserError(first.what + count, where=first.where, todo=first.todo)


def _find_shape(value: Mapping[str, Any], place: str) -> Shape:
    if "conversations" in value:
        return "messages"
    fits: list[Shape] = [
        shape for shape in get_args(Shape) if all(name in value for name in shape.split("/") if name not in _OPTIONAL)
    ]
    if "text" in fits and len(fits) > 1:
        fits.remove("text")
    if len(fits) > 1:
        raise UserError(f"fits {' and '.join(fits)}", where=place, todo="Say which with --shape")
    if not fits:
        columns = ", ".join(map(str, value)) or "none"
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
    if shape == "prompt/completion" and isinstance(value.get("prompt"), list):
        turns = _messages(value["prompt"], "prompt", place)
        answer = value.get("completion")
        if isinstance(answer, list):
            answer = _messages(answer, "completion", place)[-1]["content"]
        return [Row(number, tuple(turns), _text({"completion": answer}, "completion", shape, place))]
    text = _text(value, ask, shape, place)
    extra = value.get("input") if shape.startswith("instruction") else None
    if extra is not None and not isinstance(extra, str):
        raise UserError(f"is a {type(extra).__name__}, not text", where=f"{place}, field input", todo="Write text")
    if extra and extra.strip():
        text = f"{text}\n\n{extra}"
    return [Row(number, ({"role": "user", "content": text},), _text(value, reply, shape, place))]


def _text(value: Mapping[str, Any], name: str, shape: str, place: str) -> str:
    found = value.get(name)
    if found is None:
        other = _other_shape(value, shape)
        if other:
            raise UserError(
                f"is of shape {other}, the rows before of {shape}", where=place, todo="Keep one shape a file"
            )
        raise UserError("is missing", where=f"{place}, field {name}", todo=f"Give every row {shape.replace('/', ', ')}")
    if not isinstance(found, str):
        raise UserError(f"is a {type(found).__name__}, not text", where=f"{place}, field {name}", todo="Write text")
    if not found.strip():
        raise UserError("is empty", where=f"{place}, field {name}", todo="Fill it, or leave the row out")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "holds half a character (a lone surrogate)", where=f"{place}, field {name}", todo="Mend it"
        ) from error
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
        if not isinstance(turn, dict):
            raise UserError("is no message", where=f"{where}, message {k}", todo='Write {"role": ..., "content": ...}')
        role = turn.get("role", _SHAREGPT.get(str(turn.get("from"))))
        if role not in ROLES:
            raise UserError(f"unknown role {role!r}", where=f"{where}, message {k}", todo=f"Use {', '.join(ROLES)}")
        text = turn.get("content", turn.get("value"))
        made.append(
            {"role": str(role), "content": _text({"content": text}, "content", "messages", f"{where}, message {k}")}
        )
    return made


def _turns(value: Mapping[str, Any], number: int, place: str) -> list[Row]:
    name = "messages" if "messages" in value else "conversations"
    if name not in value:
        _text(value, "messages", "messages", place)
    turns = _messages(value[name], name, place)
    rows = [Row(number, tuple(turns[:k]), t["content"]) for k, t in enumerate(turns) if t["role"] == "assistant" and k]
    if not rows:
        raise UserError(
            "has no assistant turn after another", where=f"{place}, field {name}", todo="Add the reply to learn"
        )
    return rows


def summary(rows: Rows) -> dict[str, Any]:
    """Returns counts for a person: shape, rows, duplicates, characters of prompt and completion (least/median/most)."""
    prompts = sorted(sum(len(message["content"]) for message in row.prompt) for row in rows)
    completions = sorted(len(row.completion) for row in rows)
    different = {json.dumps([row.prompt, row.completion]) for row in rows}
    return {
        "source": rows.source,
        "shape": rows.shape,
        "rows": len(rows),
        "duplicates": len(rows) - len(different),
        "prompt_characters": f"{prompts[0]} / {prompts[len(prompts) // 2]} / {prompts[-1]}",
        "completion_characters": f"{completions[0]} / {completions[len(completions) // 2]} / {completions[-1]}",
        "sha256": rows.sha256,
    }

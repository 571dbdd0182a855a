"""Rows: every shape from every kind of file reads the same; every fault names its row and field."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from mezzo.core.errors import UserError
from mezzo.core.records import Row, read, split, summary, write_jsonl

ROWS: dict[str, list[dict[str, Any]]] = {
    "prompt/completion": [{"prompt": "a", "completion": "b"}, {"prompt": "c, d\n", "completion": 'é "q"'}],
    "instruction/input/output": [{"instruction": "a", "input": "", "output": "b"}],
    "query/response": [{"query": "a", "response": "b", "extra": "kept out"}],
    "question/answer": [{"question": "a\u2028x", "answer": "b"}],
    "text": [{"text": "all of it"}, {"text": "more"}],
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    kind = path.name.removesuffix(".gz")
    if kind.endswith("jsonl"):
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    elif kind.endswith("json"):
        content = json.dumps(rows).encode()
    elif kind.endswith("parquet"):
        import pyarrow
        import pyarrow.parquet

        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        content = sink.getvalue().to_pybytes()
    else:
        plain = path.with_name("plain")
        with plain.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind.endswith("tsv") else ",")
            writer.writeheader()
            writer.writerows(rows)
        content = plain.read_bytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize(
    "name", ["r.jsonl", "r.jsonl.gz", "r.json", "r.csv", "r.csv.gz", "r.tsv", "r.parquet", "r.parquet.gz"]
)
@pytest.mark.parametrize("shape", list(ROWS))
def test_every_shape_reads_the_same_from_every_kind_of_file(name: str, shape: str, tmp_path: Path) -> None:
    found = read(write(tmp_path / name, ROWS[shape]))
    assert found.shape == shape
    names = shape.split("/")
    for k, (row, given) in enumerate(zip(found, ROWS[shape], strict=True), start=1):
        prompt = () if shape == "text" else ({"role": "user", "content": given[names[0]]},)
        assert row == Row(k, prompt, given[names[-1]])


def test_a_chat_becomes_one_row_for_each_reply(tmp_path: Path) -> None:
    turns = [
        {"role": r, "content": f"t{k}"} for k, r in enumerate(["system", "user", "assistant", "user", "assistant"])
    ]
    found = read(write(tmp_path / "r.jsonl", [{"messages": turns}]))
    assert [(row.number, len(row.prompt), row.completion) for row in found] == [(1, 2, "t2"), (1, 4, "t4")]
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert read(write(tmp_path / "s.jsonl", [{"conversations": shared}]))[0].completion == "a"


def test_input_is_joined_and_columns_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [{"instruction": "do", "input": "this", "output": "done"}])
    assert read(path)[0].prompt[0]["content"] == "do\n\nthis"
    path = write(tmp_path / "c.jsonl", [{"ask": "q", "reply": "a"}])
    found = read(path, columns={"prompt": "ask", "completion": "reply"})
    assert (found.shape, found[0].completion) == ("prompt/completion", "a")
    with pytest.raises(UserError, match="row 1, column asked: is missing"):
        read(path, columns={"prompt": "asked"})
    with pytest.raises(UserError, match="unknown field 'promt'"):
        read(path, columns={"promt": "ask"})


def test_a_path_in_a_folder_that_is_here_is_never_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data/rows: no such file"):
        read("data/rows")


def test_split_is_seeded_disjoint_and_keeps_the_pieces_of_a_row_together(tmp_path: Path) -> None:
    turns = [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "assistant")]
    rows = read(write(tmp_path / "r.jsonl", [{"messages": turns}] * 20))
    rest, held = split(rows, 5, seed=1)
    assert {row.number for row in rest}.isdisjoint({row.number for row in held})
    assert (len(rest), len(held)) == (30, 10)
    assert split(rows, 5, seed=1) == (rest, held)
    assert split(rows, 5, seed=2)[1] != held
    with pytest.raises(UserError, match="too few"):
        split(rows, 20, seed=1)


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.gz"])
def test_written_rows_read_back(name: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / name, ROWS["question/answer"])
    assert read(tmp_path / name)[0].prompt[0]["content"] == "a\u2028x"


GOOD = b'{"prompt": "a", "completion": "b"}\n'
FAULTS: dict[str, tuple[str, bytes, str]] = {
    "empty": ("r.jsonl", b"", "is empty"),
    "blank": ("r.jsonl", b" \n\n", "is empty"),
    "only_a_header": ("r.csv", b"prompt,completion\n", "holds no rows"),
    "no_json": ("r.jsonl", GOOD + b"{nope}\n", "row 2: is no JSON"),
    "no_object": ("r.jsonl", GOOD + b"[1]\n", "row 2: is no JSON object"),
    "missing_field": ("r.jsonl", GOOD + b'{"prompt": "a"}\n', "row 2, field completion: is missing"),
    "null_field": ("r.jsonl", GOOD + b'{"prompt": "a", "completion": null}\n', "row 2, field completion: is missing"),
    "empty_field": ("r.jsonl", GOOD + b'{"prompt": " ", "completion": "x"}\n', "row 2, field prompt: is empty"),
    "number": ("r.jsonl", GOOD + b'{"prompt": 3, "completion": "x"}\n', "row 2, field prompt: is a int, not text"),
    "mixed": ("r.jsonl", GOOD + b'{"question": "a", "answer": "x"}\n', "row 2: is of shape question/answer"),
    "not_utf8": ("r.jsonl", GOOD + b"\xff\xfe\n", "not UTF-8 .line 2"),
    "unknown_shape": ("r.jsonl", b'{"foo": 1}\n', "row 1: has no known shape .columns: foo"),
    "two_shapes": ("r.jsonl", b'{"prompt":"a","completion":"b","question":"a","answer":"b"}\n', "row 1: fits"),
    "surrogate": ("r.jsonl", b'{"text": "\\ud800"}\n', "row 1, field text: holds half a character"),
    "deep": ("r.jsonl", b"[" * 100_000 + b"\n", "nested too deeply|is no JSON"),
    "cells": ("r.csv", b"prompt,completion\na,b,c\n", "row 1: has 3 cells, the header 2"),
    "cut_gzip": ("r.jsonl.gz", gzip.compress(GOOD * 100)[:-20], "cut off or damaged"),
    "no_gzip": ("r.jsonl.gz", GOOD, "cannot be read"),
    "parquet": ("r.parquet", b"PAR1 nope", "no whole Parquet"),
    "kind": ("r.txt", b"hello", "unknown kind of file"),
    "role": ("r.jsonl", b'{"messages":[{"role":"bot","content":"x"}]}\n', "message 1: unknown role 'bot'"),
    "no_reply": ("r.jsonl", b'{"messages":[{"role":"user","content":"x"}]}\n', "no assistant turn"),
    "no_list": ("r.jsonl", b'{"messages":"x"}\n', "field messages: is no list"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_every_fault_is_one_line_that_names_file_row_and_field(fault: str, tmp_path: Path) -> None:
    name, content, wanted = FAULTS[fault]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=wanted) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_faults_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(GOOD + b'{"prompt": "a"}\n' * 4)
    with pytest.raises(UserError, match=r"row 2.*and 3 more rows"):
        read(path)


def test_a_missing_file_and_a_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="without a saved data set"):
        read(tmp_path)


def test_a_saved_data_set_reads_as_its_rows(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS["question/answer"]).save_to_disk(tmp_path / "set")
    assert read(tmp_path / "set").rows == read(write(tmp_path / "r.jsonl", ROWS["question/answer"])).rows


def test_real_files_read_as_they_are(real_data: Path) -> None:
    found = read(real_data / "gsm8k" / "train.jsonl.gz")
    assert (len(found), found.shape) == (7473, "question/answer")
    assert summary(found)["duplicates"] == 0
    assert len(read(real_data / "gsm8k" / "train.jsonl.gz", limit=10)) == 10

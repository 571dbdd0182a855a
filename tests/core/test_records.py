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
    assert found.columns == {"prompt": "ask", "completion": "reply"}


def test_named_columns_tell_the_shape_where_the_rest_would_fit_another(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [{"question": "q", "answer": "a", "ask": "p", "reply": "c"}])
    found = read(path, columns={"prompt": "ask", "completion": "reply"})
    assert (found.shape, found[0].completion) == ("prompt/completion", "c")
    assert read(path).columns == {"question": "question", "answer": "answer"}
    with pytest.raises(UserError, match="prompt, answer are not fields of one shape"):
        read(path, columns={"prompt": "ask", "answer": "reply"})
    with pytest.raises(UserError, match="prompt are not fields of shape text"):
        read(path, shape="text", columns={"prompt": "ask"})


def test_a_shape_can_be_said_where_two_fit(tmp_path: Path) -> None:
    row = {"prompt": "p", "completion": "c", "question": "q", "answer": "a"}
    path = write(tmp_path / "r.jsonl", [row])
    assert read(path, shape="question/answer")[0].completion == "a"
    assert read(path, shape="prompt/completion")[0].completion == "c"
    with pytest.raises(UserError, match=r"shape: unknown shape 'chat'"):
        read(path, shape="chat")  # type: ignore[arg-type]


def test_prompt_and_completion_may_be_messages(tmp_path: Path) -> None:
    user, system = {"role": "user", "content": "u"}, {"role": "system", "content": "s"}
    reply, tool = {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}
    rows = [
        {"prompt": [system, user], "completion": "a"},
        {"prompt": [system, user], "completion": [reply]},
        {"prompt": "u", "completion": [reply, tool, reply | {"content": "b"}]},
    ]
    assert list(read(write(tmp_path / "r.jsonl", rows))) == [
        Row(1, (system, user), "a"),
        Row(2, (system, user), "a"),
        Row(3, (user,), "a"),
        Row(3, (user, reply, tool), "b"),
    ]


def test_tables_with_every_column_in_every_row_are_read_by_what_is_filled(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": None, "completion": None, "question": "q", "answer": "a"},
        {"prompt": "p", "completion": "c", "question": None, "answer": None},
    ]
    assert read(write(tmp_path / "r.parquet", rows[:1])).shape == "question/answer"
    with pytest.raises(UserError, match="row 2: is of shape prompt/completion, not question/answer"):
        read(write(tmp_path / "r.parquet", rows))


TEXTS: dict[str, tuple[str, bytes]] = {
    "bom": ("r.jsonl", b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n'),
    "crlf": ("r.jsonl", b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n'),
    "no_last_newline": ("r.ndjson", b'{"text": "a"}\n{"text": "b"}'),
    "json_lines_named_json": ("r.json", b'{"text": "a"}\n{"text": "b"}\n'),
    "json_bom": ("r.json", b'\xef\xbb\xbf [{"text": "a"}, {"text": "b"}]'),
    "csv_bom": ("r.csv", b"\xef\xbb\xbftext\r\na\r\n\r\nb\r\n"),
    "csv_named_after_tsv": ("r.tsv.csv", b'text,"x"\na,1\nb,2\n'),
    "csv_unnamed_columns": ("r.csv", b"text,,\na,,\nb,,\n"),
    "upper_case": ("R.JSONL.GZ", gzip.compress(b'{"text": "a"}\n') + gzip.compress(b'{"text": "b"}\n')),
}


@pytest.mark.parametrize("case", list(TEXTS))
def test_what_editors_leave_in_files_does_not_matter(case: str, tmp_path: Path) -> None:
    name, content = TEXTS[case]
    (tmp_path / name).write_bytes(content)
    assert [row.completion for row in read(tmp_path / name)] == ["a", "b"]


def test_numbers_are_lines_and_an_indented_object_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('\n\n{"text": "a"}\n\n{"text": "b"}\n')
    assert [row.number for row in read(path)] == [3, 5]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"text": "a"}, indent=2))
    assert [row.completion for row in read(path)] == ["a"]


@pytest.mark.parametrize("name", ["r.jsonl", "r.csv", "r.parquet"])
def test_limit_stops_before_what_comes_after(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [{"text": "a"}, {"text": "b"}, {"text": " "}])
    assert len(read(path, limit=2)) == 2
    assert read(path, limit=2).take(1).rows == read(path, limit=1).rows
    assert read(path, limit=2).take(1).sha256 == read(path, limit=1).sha256
    for limit in (0, -1):
        with pytest.raises(UserError, match=r"limit: .* is too small"):
            read(path, limit=limit)


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
    with pytest.raises(UserError, match="0 rows cannot be held out"):
        split(rows, 0, seed=1)


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.gz"])
def test_written_rows_read_back(name: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / name, ROWS["question/answer"])
    assert read(tmp_path / name)[0].prompt[0]["content"] == "a\u2028x"
    before = (tmp_path / name).read_bytes()
    with pytest.raises(UserError, match="half a character"):
        write_jsonl(tmp_path / name, [{"text": "\ud800"}])
    assert (tmp_path / name).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


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
    "number": ("r.jsonl", GOOD + b'{"prompt": 3, "completion": "x"}\n', "row 2, field prompt: is a number, not text"),
    "mixed": ("r.jsonl", GOOD + b'{"question": "a", "answer": "x"}\n', "row 2: is of shape question/answer"),
    "not_utf8": ("r.jsonl", GOOD + b"\xff\xfe\n", "not UTF-8 .line 2"),
    "unknown_shape": ("r.jsonl", b'{"foo": 1}\n', "row 1: has no known shape .columns: foo"),
    "two_shapes": ("r.jsonl", b'{"prompt":"a","completion":"b","question":"a","answer":"b"}\n', "row 1: fits"),
    "surrogate": ("r.jsonl", b'{"text": "\\ud800"}\n', "row 1, field text: holds half a character"),
    "deep": ("r.jsonl", b"[" * 100_000 + b"\n", "nested too deeply|is no JSON"),
    "cells": ("r.csv", b"prompt,completion\na,b,c\n", "row 1: has 3 cells, the header 2"),
    "cut_gzip": ("r.jsonl.gz", gzip.compress(GOOD * 100)[:-20], "cut off or damaged"),
    "no_gzip": ("r.jsonl.gz", GOOD, "no whole gzip file"),
    "parquet": ("r.parquet", b"PAR1 nope", "no whole Parquet"),
    "kind": ("r.txt", b"hello", "unknown kind of file"),
    "role": ("r.jsonl", b'{"messages":[{"role":"bot","content":"x"}]}\n', "message 1: unknown role 'bot'"),
    "no_reply": ("r.jsonl", b'{"messages":[{"role":"user","content":"x"}]}\n', "no assistant turn"),
    "sharegpt_role": (
        "r.jsonl",
        b'{"conversations":[{"from":"function_call","value":"x"}]}\n',
        "message 1: unknown role 'function_call'",
    ),
    "no_role": ("r.jsonl", b'{"messages":[{"content":"x"}]}\n', "message 1: has no role"),
    "no_content": ("r.jsonl", b'{"messages":[{"role":"user"}]}\n', "message 1: has no content"),
    "no_message": ("r.jsonl", b'{"messages":["x"]}\n', "message 1: is no message"),
    "reply_without_assistant": (
        "r.jsonl",
        b'{"prompt":"a","completion":[{"role":"user","content":"x"}]}\n',
        "field completion: has no assistant turn",
    ),
    "nan": ("r.jsonl", GOOD + b'{"prompt": "a", "completion": NaN}\n', "row 2, field completion: is missing"),
    "bool": ("r.jsonl", GOOD + b'{"prompt": "a", "completion": true}\n', "is a true/false value, not text"),
    "input": ("r.jsonl", b'{"instruction": "a", "input": 3, "output": "b"}\n', "field input: is a number"),
    "input_surrogate": ("r.jsonl", b'{"instruction": "a", "input": "\\ud800", "output": "b"}\n', "field input: holds"),
    "huge_number": ("r.jsonl", b'{"text": ' + b"1" * 5000 + b"}\n", "row 1: is no JSON"),
    "not_utf8_after_bom": ("r.jsonl", b"\xef\xbb\xbf" + GOOD + b"\n\xff\n", "row 3: is not UTF-8 .line 3, byte 39"),
    "utf16": ("r.csv", "text\na\n".encode("utf-16"), "not UTF-8 .line 1, byte 0"),
    "bom_only": ("r.csv", b"\xef\xbb\xbf\n", "is empty"),
    "empty_gzip": ("r.jsonl.gz", b"", "is empty"),
    "gzip_of_nothing": ("r.jsonl.gz", gzip.compress(b""), "is empty"),
    "gzip_flipped": ("r.jsonl.gz", gzip.compress(GOOD)[:15] + b"\xff" * 9, "cut off or damaged|no whole gzip"),
    "json_cut": ("r.json", b'[{"text": "a"},', "is no JSON"),
    "json_list_of_text": ("r.json", b'["a"]', "row 1: is no JSON object"),
    "json_empty_list": ("r.json", b"[]", "holds no rows"),
    "header_twice": ("r.csv", b"text,text\na,b\n", "header: names the column 'text' twice"),
    "quote": ("r.csv", b'text\n"a\n', "row 1: is no CSV"),
    "csv_empty_cell": ("r.csv", b'prompt,completion\na,""\n', "row 1, field completion: is empty"),
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
    path.write_bytes(GOOD + b'{"prompt": "a"}\n' + b"{nope\n" + b"\xff\n" + GOOD)
    with pytest.raises(UserError, match=r"row 2, field completion.*and 2 more rows"):
        read(path)
    path.write_bytes(b"{nope\n" * 2000)
    with pytest.raises(UserError, match=r"row 1: is no JSON.*and 999\+ more rows"):
        read(path)
    table = tmp_path / "r.csv"
    table.write_text("prompt,completion\na,b,c\na,b\na\n")
    with pytest.raises(UserError, match=r"row 1: has 3 cells, the header 2 .and 1 more rows"):
        read(table)


def test_a_missing_file_and_a_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="without a saved data set"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"cannot be read .file name too long"):
        read("x" * 5000 + ".jsonl")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UserError, match="is a damaged data set"):
        read(tmp_path)


def test_a_data_set_that_cannot_be_had_is_one_line_that_doubts_the_path() -> None:
    with pytest.raises(UserError, match="no such file, and no data set could be had") as caught:
        read("nobody-at-all/nothing-here:config")
    assert "\n" not in str(caught.value)


def test_parquet_that_is_cut_or_holds_no_text_is_said(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = write(tmp_path / "r.parquet", ROWS["text"])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="no whole Parquet"):
        read(path)
    latin = pyarrow.StringArray.from_buffers(
        1, pyarrow.array([0, 1], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xff")
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": latin}), path)
    with pytest.raises(UserError, match="after row 0: holds text that is not UTF-8"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(UserError, match="holds no rows"):
        read(path)


def test_a_saved_data_set_reads_as_its_rows(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS["question/answer"]).save_to_disk(tmp_path / "set")
    assert read(tmp_path / "set").rows == read(write(tmp_path / "r.jsonl", ROWS["question/answer"])).rows
    Dataset.from_list(ROWS["text"]).train_test_split(1, seed=0).save_to_disk(tmp_path / "both")
    assert len(read(tmp_path / "both", split="test")) == 1
    with pytest.raises(UserError, match=r"has no split 'dev'. Splits here: train, test"):
        read(tmp_path / "both", split="dev")


def test_real_files_read_as_they_are(real_data: Path) -> None:
    found = read(real_data / "gsm8k" / "train.jsonl.gz")
    assert (len(found), found.shape) == (7473, "question/answer")
    assert summary(found)["duplicates"] == 0
    assert len(read(real_data / "gsm8k" / "train.jsonl.gz", limit=10)) == 10


REAL = {
    "math_cot/train": (2205, "instruction/input/output"),
    "commonsense/boolq_train": (9427, "instruction/input/output"),
    "critique/realcritic_gsm8k": (273, "question/answer"),
    "shorttext/AgNews": (4000, "text"),
}
REFUSED = {
    "instruct/glaive_toolcall_en_demo": "row 1, field conversations, message 4: unknown role 'function_call'",
    "instruct/self_instruct_seed175": "row 1: has no known shape .columns: id, name, instruction",
    "instruct/dpo_en_demo": "row 1, field conversations: has no assistant turn",
    "humaneval/HumanEval": "row 1: has no known shape .columns: task_id, prompt",
}


@pytest.mark.parametrize("name", list(REAL))
def test_real_files_have_their_rows_and_shape(name: str, real_data: Path) -> None:
    found = read(real_data / f"{name}.jsonl.gz")
    assert (len(found), found.shape) == REAL[name]


@pytest.mark.parametrize("name", list(REFUSED))
def test_real_files_that_are_no_rows_to_learn_are_refused(name: str, real_data: Path) -> None:
    with pytest.raises(UserError, match=REFUSED[name]):
        read(real_data / f"{name}.jsonl.gz")


def test_columns_make_real_files_readable(real_data: Path) -> None:
    columns = {"prompt": "prompt", "completion": "canonical_solution"}
    assert len(read(real_data / "humaneval" / "HumanEval.jsonl.gz", columns=columns)) == 164

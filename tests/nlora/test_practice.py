"""The practice task: the same for a seed, and nothing of the held-out rows is seen in training."""

from __future__ import annotations

import json

from mezzo.nlora.practice import FIELDS, practice_rows


def _parts(seed: int, *, held_out: bool) -> tuple[set[str], set[str]]:
    orders = [json.loads(row.completion) for row in practice_rows(500, seed=seed, held_out=held_out)]
    assert all(tuple(order) == FIELDS and isinstance(order["quantity"], int) for order in orders)
    names = {word.lower() for order in orders for word in order["customer"].split()}
    return names, {order["item"].split()[1].lower() for order in orders}


def test_training_and_held_out_rows_share_no_names_and_no_things() -> None:
    names, things = _parts(0, held_out=False)
    other_names, other_things = _parts(0, held_out=True)
    assert len(names) > 50
    assert len(other_names) > 15
    assert names.isdisjoint(other_names)
    assert things.isdisjoint(other_things)


def test_rows_are_the_same_for_a_seed_and_all_different() -> None:
    rows = practice_rows(300, seed=3)
    assert rows == practice_rows(300, seed=3)
    assert rows.sha256 != practice_rows(300, seed=4).sha256
    assert len({row.prompt[0]["content"] for row in rows}) == 300
    assert all(row.completion.count('"') >= 10 for row in rows)


def test_every_value_of_the_answer_stands_in_the_sentence() -> None:
    for row in practice_rows(300):
        text = row.prompt[0]["content"]
        assert all(str(value) in text.replace(" ,", ", ") for value in json.loads(row.completion).values())

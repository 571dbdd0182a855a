"""Rows as token ids: what is shown, what is learned, and what is too long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mezzo.core.errors import UserError
from mezzo.core.records import Row, Rows

IGNORED = -100
"""Label of a token that carries no loss (PyTorch's ignore_index)."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of one row and its labels: IGNORED for the prompt, the id itself for what is learned."""

    row: Row
    input_ids: list[int]
    labels: list[int]


def prompt_ids(tokenizer: Any, row: Row) -> list[int]:
    """Returns the ids that a reply to the row is generated from: chat template where the tokenizer has one."""
    if not row.prompt:
        return []
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(list(row.prompt), add_generation_prompt=True, return_dict=False)
        return [int(token) for token in ids]
    return list(tokenizer("\n".join(message["content"] for message in row.prompt) + "\n")["input_ids"])


def encode(tokenizer: Any, row: Row) -> Encoded:
    """Returns the ids and labels of a row: loss on the reply (or on the whole text), its end included."""
    before = prompt_ids(tokenizer, row)
    if row.prompt and tokenizer.chat_template:
        reply = {"role": "assistant", "content": row.completion}
        whole = [int(t) for t in tokenizer.apply_chat_template([*row.prompt, reply], return_dict=False)]
        if whole[: len(before)] != before:
            raise UserError(
                "this chat template changes the prompt when a reply follows",
                where=f"row {row.number}",
                todo="Use a template whose generation prompt is a prefix of the whole chat",
            )
    else:
        after = tokenizer(row.completion, add_special_tokens=not row.prompt)["input_ids"]
        whole = [*before, *after, tokenizer.eos_token_id]
    return Encoded(row, whole, [IGNORED] * len(before) + whole[len(before) :])


def encode_all(tokenizer: Any, rows: Rows, *, max_length: int, too_long: str) -> tuple[list[Encoded], int]:
    """Returns the encoded rows, and how many were longer than `max_length` tokens.

    Raises:
        UserError: rows are too long and the policy is "error"; or nothing that could be learned is left.
    """
    encoded = [encode(tokenizer, row) for row in rows]
    long = [item for item in encoded if len(item.input_ids) > max_length]
    if long and too_long == "error":
        most = max(len(item.input_ids) for item in long)
        raise UserError(
            f"{len(long)} of {len(encoded)} rows are longer than {max_length} tokens (the longest: {most})",
            where=f"{rows.source}, row {long[0].row.number}",
            todo="Use --max-length to allow more, or --too-long drop or truncate",
        )
    kept = encoded if too_long != "drop" else [item for item in encoded if len(item.input_ids) <= max_length]
    kept = [Encoded(item.row, item.input_ids[:max_length], item.labels[:max_length]) for item in kept]
    kept = [item for item in kept if any(label != IGNORED for label in item.labels)]
    if not kept:
        raise UserError(
            f"no row has anything to learn within {max_length} tokens",
            where=rows.source,
            todo="Use a larger --max-length",
        )
    return kept, len(long)


def padded(sequences: Iterable[list[int]], fill: int, *, left: bool) -> list[list[int]]:
    """Returns the sequences filled up to the longest one."""
    sequences = list(sequences)
    longest = max(len(sequence) for sequence in sequences)
    return [[fill] * (longest - len(s)) + s if left else s + [fill] * (longest - len(s)) for s in sequences]

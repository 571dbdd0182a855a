"""A model's answers and losses on rows, as scores with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mezzo.core.records import Row
from mezzo.core.stats import Score, mean, paired, proportion
from mezzo.nlora.tokens import IGNORED, encode, padded, prompt_ids

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True)
class Evaluation:
    """What a model did on rows: one answer (None for text rows) and one mean loss in nats/token a row."""

    answers: list[str | None]
    correct: list[bool]
    losses: list[float]

    def scores(self) -> list[Score]:
        """Returns exact match (where there are answers), token loss and perplexity, each with a 95 % interval."""
        scores = [proportion("exact match", self.correct)] if any(a is not None for a in self.answers) else []
        loss = mean("token loss", self.losses, unit="nats/token")
        perplexity = Score("perplexity", _exp(loss.value), _exp(loss.low), _exp(loss.high), loss.n)
        return [*scores, loss, perplexity]


def _exp(loss: float) -> float:
    return math.exp(min(loss, 80.0))


def differences(before: Evaluation, after: Evaluation) -> list[Score]:
    """Returns after minus before on the same rows, each with a 95 % interval on pairs."""
    found = [paired("token loss", before.losses, after.losses, unit="nats/token")]
    if any(answer is not None for answer in after.answers):
        found.insert(0, paired("exact match", before.correct, after.correct))
    return found


def evaluate(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    *,
    max_new_tokens: int = 80,
    batch_size: int = 25,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Returns greedy answers, whether each equals the row's completion (white space at the ends aside), and losses.

    Batches are made of rows of like length and padded on the left; the order of the result is that of the rows.
    """
    answers: list[str | None] = [None] * len(rows)
    losses = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda k: len(prompt_ids(tokenizer, rows[k])))
    was_training = model.training
    model.eval()
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = [rows[k] for k in chosen]
        for k, loss in zip(chosen, token_losses(model, tokenizer, batch), strict=True):
            losses[k] = loss
        if batch[0].prompt:
            for k, answer in zip(chosen, answer_rows(model, tokenizer, batch, max_new_tokens), strict=True):
                answers[k] = answer
        progress(min(start + batch_size, len(order)), len(order))
    model.train(was_training)
    correct = [a is not None and a.strip() == row.completion.strip() for a, row in zip(answers, rows, strict=True)]
    return Evaluation(answers, correct, losses)


@torch.no_grad()
def answer_rows(model: Any, tokenizer: Any, rows: Sequence[Row], max_new_tokens: int) -> list[str]:
    """Returns the greedy reply to each row's prompt, generated in one batch."""
    prompts = [prompt_ids(tokenizer, row) for row in rows]
    ids = torch.tensor(padded(prompts, tokenizer.pad_token_id, left=True), device=model.device)
    mask = torch.tensor(padded([[1] * len(p) for p in prompts], 0, left=True), device=model.device)
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return [tokenizer.decode(reply, skip_special_tokens=True) for reply in made[:, ids.shape[1] :]]


@torch.no_grad()
def token_losses(model: Any, tokenizer: Any, rows: Sequence[Row]) -> list[float]:
    """Returns each row's mean loss over its learned tokens, in nats/token."""
    encoded = [encode(tokenizer, row) for row in rows]
    ids = torch.tensor(padded([e.input_ids for e in encoded], tokenizer.pad_token_id, left=False), device=model.device)
    mask = torch.tensor(padded([[1] * len(e.input_ids) for e in encoded], 0, left=False), device=model.device)
    labels = torch.tensor(padded([e.labels for e in encoded], IGNORED, left=False), device=model.device)[:, 1:]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    learned = labels != IGNORED
    logits, targets = logits[learned].float(), labels[learned]
    each = torch.nn.functional.cross_entropy(logits, targets, reduction="none").cpu()
    counts = learned.sum(dim=1).tolist()
    return [float(part.mean()) for part in each.split(counts)]

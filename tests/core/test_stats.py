"""Intervals hold their value, cover what they promise, and never turn into NaN or a warning."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from mezzo.core.errors import UserError
from mezzo.core.stats import BCA_LIMIT, Score, mean, number, paired, proportion, ratio


def normal(n: int, seed: int = 0, centre: float = 0.0) -> list[float]:
    return (np.random.default_rng(seed).normal(size=n) + centre).tolist()


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (1, 1), (0, 10), (10, 10), (94, 100), (1, 7473)])
def test_proportion_against_the_wilson_formula(hits: int, n: int) -> None:
    score = proportion("accuracy", [True] * hits + [False] * (n - hits))
    z, p = 1.959963984540054, hits / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert score.value == pytest.approx(100 * p)
    assert score.low == pytest.approx(100 * (centre - half) / (1 + z * z / n), abs=1e-9)
    assert score.high == pytest.approx(100 * (centre + half) / (1 + z * z / n), abs=1e-9)
    assert 0 <= score.low <= score.value <= score.high <= 100


def test_a_score_reads_well() -> None:
    assert str(proportion("accuracy", [True] * 94 + [False] * 6)) == "94.0 % [87.5, 97.2], n = 100"
    assert str(Score("loss", 0.51234, 0.50111, 0.52456, 40, "nats/token")) == "0.512 nats/token [0.501, 0.525], n = 40"
    assert str(Score("size", 12345.6, 11345.6, 13345.6, 9)) == "12,346 [11,346, 13,346], n = 9"
    assert str(Score("same", 3.0, 3.0, 3.0, 1)) == "3.000 [3.000, 3.000], n = 1"


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [(0.0, 0, "0"), (math.nan, 1, "–"), (1e-12, 1e-12, "1e-12"), (-0.0001, 1.0, "0.0"), (-2.51, 0.9, "-2.51")],
)
def test_numbers_at_the_edges(value: float, width: float, text: str) -> None:
    assert number(value, width=width) == text


@pytest.mark.parametrize("score", [mean("m", normal(20)), proportion("p", [True, False]), Score("s", 1, 0, 2, 3, "x")])
def test_scores_survive_json(score: Score) -> None:
    assert Score.from_dict(json.loads(json.dumps(score.to_dict()))) == score


@pytest.mark.parametrize(
    "change",
    [{"value": "a"}, {"low": None}, {"n": 1.5}, {"name": 3}, {"unit": None}, {"extra": 1}, {"n": True}],
)
def test_a_wrong_score_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Score.from_dict(Score("s", 1, 0, 2, 3).to_dict() | change)


@pytest.mark.parametrize("missing", ["name", "value", "low", "high", "n"])
def test_a_missing_field_is_named(missing: str) -> None:
    fields = Score("s", 1, 0, 2, 3).to_dict()
    del fields[missing]
    with pytest.raises(UserError, match=missing):
        Score.from_dict(fields)


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [2.0] * 50,
        [0.1] * 3,
        [0.0, 1.0],
        [0.0] * 99 + [1.0],
        [1e300, -1e300],
        [1e-300, 2e-300],
        normal(2),
        normal(200),
        [math.exp(4 * value) for value in normal(30)],
    ],
)
def test_every_interval_is_finite_and_holds_its_value(values: list[float]) -> None:
    scores = [mean("m", values, resamples=999), paired("p", [0.0] * len(values), values, resamples=999)]
    positive = [abs(value) + 1e-9 for value in values]
    scores.append(ratio("r", positive, positive[::-1], resamples=999))
    for score in scores:
        assert math.isfinite(score.low)
        assert math.isfinite(score.high)
        assert score.low <= score.value <= score.high
        assert score.n == len(values)


def test_the_mean_agrees_with_student_on_normal_values() -> None:
    values = np.array(normal(400, seed=3, centre=5.0))
    score = mean("m", values.tolist(), unit="s")
    half = 1.966 * values.std(ddof=1) / 20
    assert score.value == pytest.approx(values.mean())
    assert (score.low, score.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)
    assert score.unit == "s"


def test_nine_in_ten_intervals_hold_the_truth() -> None:
    held = [
        (score := mean("m", normal(30, seed=seed), confidence=0.9, resamples=499)).low <= 0 <= score.high
        for seed in range(150)
    ]
    assert 0.80 <= np.mean(held) <= 0.97


def test_one_seed_one_interval() -> None:
    values = normal(30)
    assert mean("m", values, seed=1) == mean("m", values, seed=1)
    assert mean("m", values, seed=1) != mean("m", values, seed=2)


def test_many_values_take_the_percentile_way() -> None:
    values = normal(BCA_LIMIT * 20)
    score = mean("m", values)
    assert score.low < score.value < score.high
    assert score.high - score.low == pytest.approx(2 * 1.96 / math.sqrt(len(values)), rel=0.15)


def test_pairs_see_what_two_lists_do_not() -> None:
    before = [10 * value for value in normal(40)]
    after = [value + 0.5 + 0.01 * noise for value, noise in zip(before, normal(40, seed=1), strict=True)]
    score = paired("loss", before, after, unit="nats/token")
    assert 0.48 < score.low <= score.high < 0.52
    assert mean("b", before).high - mean("b", before).low > 3
    back = paired("loss", after, before, unit="nats/token")
    assert back.value == pytest.approx(-score.value)


def test_pairs_of_hits_give_points() -> None:
    before, after = [False] * 80 + [True] * 20, [True] * 100
    score = paired("accuracy", before, after)
    assert (score.value, score.unit) == (80.0, "points")
    assert 70 < score.low < 80 < score.high < 89
    assert paired("accuracy", [0.0] * 5, [1.0] * 5).unit == ""
    assert paired("accuracy", before, after, unit="pp").unit == "pp"


def test_ratio_of_medians_of_rounds() -> None:
    spell = [random.Random(0).uniform(1, 3) for _ in range(1)] + [1 + index % 3 for index in range(29)]
    slow, fast = [2.0 * value for value in spell], [1.0 * value for value in spell]
    score = ratio("speed", slow, fast)
    assert score.value == pytest.approx(2.0)
    assert score.high - score.low < 1e-9
    assert str(ratio("speed", [3.0] * 4, [2.0] * 4)).startswith("1.500 ×")
    assert ratio("speed", fast, slow).value == pytest.approx(0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: proportion("x", []),
        lambda: proportion("x", [True, None]),
        lambda: proportion("x", [0.5]),
        lambda: mean("x", []),
        lambda: mean("x", [1.0, math.nan]),
        lambda: mean("x", [math.inf]),
        lambda: paired("x", [1.0], [1.0, 2.0]),
        lambda: paired("x", [], []),
        lambda: ratio("x", [1.0], [1.0, 2.0]),
        lambda: ratio("x", [1.0], [0.0]),
        lambda: ratio("x", [-1.0], [1.0]),
        lambda: mean("x", [1.0, 2.0], confidence=95),
        lambda: proportion("x", [True], confidence=0),
    ],
)
def test_what_cannot_be_scored_is_told(call: Callable[[], Score]) -> None:
    with pytest.raises(UserError, match=r"x|confidence") as caught:
        call()
    assert isinstance(caught.value, ValueError)

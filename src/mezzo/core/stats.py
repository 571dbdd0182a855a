"""Scores with their uncertainty: proportions, means, paired differences and ratios of times."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from mezzo.core.errors import UserError

if TYPE_CHECKING:
    import numpy as np

BCA_LIMIT = 5_000  # values; BCa costs O(n^2) for its jackknife, and corrects next to nothing beyond this
DRAWS_LIMIT = 100_000_000  # values drawn in one bootstrap: about 1 s


def number(value: float, *, width: float = 0.0, least: int = 0) -> str:
    """Returns `value` with as many decimals as an interval of this width calls for (two digits of the width).

    Args:
        value: the number; "–" stands for one that is not finite.
        width: the length of its interval; 0 gives four digits.
        least: the fewest decimals.
    """
    if not math.isfinite(value):
        return "–"
    size = width if 0 < width < math.inf else abs(value) / 100
    decimals = max(least, 1 - math.floor(math.log10(size))) if size > 0 else least
    if decimals > 8:
        return f"{value:.3g}"
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


@dataclass(frozen=True)
class Score:
    """A number with its interval.

    Attributes:
        name: what was measured.
        value: the estimate; low <= value <= high.
        low: lower end of the interval.
        high: upper end of the interval.
        n: how many items it rests on.
        unit: the unit of the three numbers, such as "%" or "nats/token".
    """

    name: str
    value: float
    low: float
    high: float
    n: int
    unit: str = ""

    def text(self, value: float) -> str:
        """Returns one of the score's numbers with the decimals that its interval calls for."""
        return f"{value:.1f}" if self.unit == "%" else number(value, width=self.high - self.low)

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.text(self.value)}{unit} [{self.text(self.low)}, {self.text(self.high)}], n = {self.n}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Score:
        """Returns the score that `to_dict` wrote.

        Raises:
            UserError: a field is missing, unknown or of the wrong type.
        """
        if not isinstance(value, Mapping):
            raise UserError("a score must be a JSON object")
        known = {field.name for field in fields(cls)}
        if wrong := sorted((known - {"unit"} - value.keys()) | (value.keys() - known)):
            raise UserError("missing or unknown field in a score", where=", ".join(wrong))
        unit = value.get("unit", "")
        for key, item in (("name", value["name"]), ("unit", unit)):
            if not isinstance(item, str):
                raise UserError("must be text in a score", where=key)
        for key in ("value", "low", "high", "n"):
            if not isinstance(value[key], int if key == "n" else int | float) or isinstance(value[key], bool):
                raise UserError("must be a number in a score", where=f"{value['name']}, {key}")
        low, high = float(value["low"]), float(value["high"])
        return cls(value["name"], float(value["value"]), low, high, int(value["n"]), unit)


def _floats(name: str, values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns the values as an array, after checking that there are some and that all are finite."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise UserError("no values to score", where=name)
    if not np.isfinite(array).all():
        bad = int(np.flatnonzero(~np.isfinite(array))[0])
        raise UserError(f"value {bad + 1} of {array.size} is not a finite number", where=name)
    return array


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise UserError(f"must lie between 0 and 1, not {confidence}", where="confidence")


def _interval(
    statistic: Callable[..., Any],
    samples: Sequence[np.ndarray[Any, np.dtype[np.float64]]],
    *,
    confidence: float,
    seed: int,
    resamples: int,
    bca: bool,
) -> tuple[float, float, float]:
    """Returns (value, low, high) by the bootstrap; the interval always holds the value.

    One item, or items that are all equal, carry no spread: the interval is then the value itself.
    """
    import numpy as np
    from scipy import stats

    _check_confidence(confidence)
    value, n = float(statistic(*samples, axis=-1)), samples[0].size
    if all(np.ptp(sample) == 0 for sample in samples):
        return value, value, value
    resamples = max(1, min(resamples, max(999, DRAWS_LIMIT // n)))
    for method in ("BCa", "percentile") if bca and n <= BCA_LIMIT else ("percentile",):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = stats.bootstrap(
                samples,
                statistic,
                n_resamples=resamples,
                batch=max(1, 2_000_000 // n),
                paired=len(samples) > 1,
                vectorized=True,
                confidence_level=confidence,
                method=method,
                rng=np.random.default_rng(seed),
            ).confidence_interval
        low, high = float(found.low), float(found.high)
        if math.isfinite(low) and math.isfinite(high):
            return value, min(low, value), max(high, value)
    return value, value, value


def proportion(name: str, hits: Sequence[bool], *, confidence: float = 0.95, unit: str = "%") -> Score:
    """Returns the share of hits in percent, with its Wilson interval.

    Args:
        name: what was measured.
        hits: one truth value for each item.
        confidence: of the interval, between 0 and 1.
        unit: of the result, which is a percentage.

    Raises:
        UserError: no items, or an item that is neither true nor false.
    """
    from scipy import stats

    _check_confidence(confidence)
    n = len(hits)
    if n == 0:
        raise UserError("no items to score", where=name)
    if any(hit is None or hit not in (True, False) for hit in hits):
        raise UserError("an item is neither right nor wrong", where=name)
    count = sum(bool(hit) for hit in hits)
    found = stats.binomtest(count, n).proportion_ci(confidence_level=confidence, method="wilson")
    value = 100 * count / n
    return Score(name, value, min(100 * float(found.low), value), max(100 * float(found.high), value), n, unit)


def mean(
    name: str,
    values: Sequence[float],
    *,
    unit: str = "",
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = 9999,
) -> Score:
    """Returns the mean with its bootstrap interval (BCa; percentile where BCa has no answer or n > 5,000).

    Cost: O(n * resamples) time, in batches of 2 million values.

    Raises:
        UserError: no values, or one that is not finite.
    """
    import numpy as np

    array = _floats(name, values)
    value, low, high = _interval(
        np.mean, [array], confidence=confidence, seed=seed, resamples=resamples, bca=array.size > 1
    )
    return Score(name, value, low, high, array.size, unit)


def paired(
    name: str,
    before: Sequence[float],
    after: Sequence[float],
    *,
    unit: str | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = 9999,
) -> Score:
    """Returns the mean of after - before over the same items, with a bootstrap interval on the pairs.

    Hits (truth values on both sides) give percentage points, unit "points"; numbers keep their own unit.

    Raises:
        UserError: lengths that differ, no values, or one that is not finite.
    """
    import numpy as np

    if len(before) != len(after):
        raise UserError(f"{len(before)} values before and {len(after)} after: they must be the same items", where=name)
    hits = all(isinstance(value, bool | np.bool_) for value in (*before, *after))
    first, second = _floats(name, before), _floats(name, after)
    difference = (second - first) * (100 if hits else 1)
    value, low, high = _interval(np.mean, [difference], confidence=confidence, seed=seed, resamples=resamples, bca=True)
    return Score(name, value, low, high, difference.size, ("points" if hits else "") if unit is None else unit)


def ratio(
    name: str,
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    unit: str = "×",
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = 9999,
) -> Score:
    """Returns median(numerator) / median(denominator) of two lists measured in turns, with a bootstrap interval.

    The interval is the percentile one, as BCa does not suit medians. Rounds are resampled whole: what slowed a round
    down slowed both sides.

    Raises:
        UserError: lengths that differ, no values, or a value that is not above 0.
    """
    import numpy as np

    if len(numerator) != len(denominator):
        raise UserError(f"{len(numerator)} values over {len(denominator)}: one pair for each round", where=name)
    above, below = _floats(name, numerator), _floats(name, denominator)
    if min(above.min(), below.min()) <= 0:
        raise UserError("every measurement must be above 0", where=name)

    def of_medians(top: Any, bottom: Any, axis: int = -1) -> Any:
        return np.median(top, axis=axis) / np.median(bottom, axis=axis)

    value, low, high = _interval(
        of_medians, [above, below], confidence=confidence, seed=seed, resamples=resamples, bca=False
    )
    return Score(name, value, low, high, above.size, unit)

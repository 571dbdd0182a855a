"""Plots as inline SVG that stretch to the page: positions in percent, text at its own size, no script needed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mezzo.core.runs import plain
from mezzo.core.stats import Score

POINTS = 600  # raw points drawn of one curve at most
BINS = 400  # means that the smooth line is made of at most
SMOOTH_FROM = 30  # points from which a curve gets a smooth line
LINE = 30  # height of one dot and its interval, in px
STYLES = "abcdef"  # classes of series: a colour and a dash pattern each; "base" is the grey, hollow one

HOVER = """
for (const figure of document.querySelectorAll("figure.curve")) {
  const data = JSON.parse(figure.querySelector("script").textContent), svg = figure.querySelector("svg.curves");
  const hair = svg.querySelector(".hair"), read = figure.querySelector(".read"), idle = read.textContent;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = data.low + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (data.high - data.low);
    let best = null;
    const near = data.series.map((s) => {
      let i = 0;
      s.x.forEach((x, k) => { if (Math.abs(x - at) < Math.abs(s.x[i] - at)) i = k; });
      if (best === null || Math.abs(s.x[i] - at) < Math.abs(best - at)) best = s.x[i];
      return s.name + " " + s.y[i] + (data.series.length > 1 ? " (at " + s.x[i] + ")" : "");
    });
    const place = data.high > data.low ? 100 * (best - data.low) / (data.high - data.low) : 50;
    hair.setAttribute("x1", place + "%"); hair.setAttribute("x2", place + "%");
    hair.setAttribute("visibility", "visible");
    read.textContent = data.label + " " + best + ":  " + near.join(",  ");
  });
  svg.addEventListener("pointerleave", () => { hair.setAttribute("visibility", "hidden"); read.textContent = idle; });
}
"""


@dataclass
class Curve:
    """One line to plot; curves with equal labels and unit share a plot.

    Attributes:
        name: such as "training" or "held out".
        x: positions, such as steps.
        y: one value for each position; None, NaN and infinite ones (1e300 and more) are not drawn.
        x_label: of the axis.
        y_label: of the axis.
        y_unit: of the values.
    """

    name: str
    x: list[float]
    y: list[float]
    x_label: str = "step"
    y_label: str = "loss"
    y_unit: str = "nats/token"

    def points(self) -> list[tuple[float, float]]:
        """Returns the finite (x, y) pairs in order of x."""
        pairs = [
            (float(x), float(y))
            for x, y in zip(self.x, self.y, strict=True)
            if x is not None and y is not None and abs(x) < 1e300 and abs(y) < 1e300
        ]
        return sorted(pairs, key=lambda pair: pair[0])


def as_html(value: object) -> str:
    """Returns a value's text as HTML, with control characters made visible and halves of surrogate pairs replaced."""
    clean = str(value).replace("\r\n", "\n").encode("utf-8", "replace").decode()
    return escape(re.sub(r"[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), clean))


def as_json(value: object) -> str:
    """Returns JSON that is safe inside a script element: no <, > or & in it."""
    text = json.dumps(plain(value), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def amount(score: Score, *, signed: bool = False) -> str:
    """Returns a score's value and unit as HTML, with a plus sign where asked for."""
    number = score.text(score.value)
    plus = "+" if signed and score.value > 0 and score.unit != "×" else ""
    return as_html(f"{plus}{number}{' ' if score.unit else ''}{score.unit}").replace(
        "-", "−", 1 if number[0] == "-" else 0
    )


def bounds(score: Score) -> str:
    """Returns a score's interval as HTML."""
    return f"[{as_html(score.text(score.low))}, {as_html(score.text(score.high))}]".replace("-", "−")


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns round numbers (1, 2 or 5 times a power of ten apart) from at or below `low` to at or above `high`.

    Args:
        low: the least value.
        high: the greatest value; where it equals `low` (but for rounding), the ticks surround it.
        most: the most steps.
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [index * step for index in range(first, last + 1)]


def tick_text(value: float, step: float) -> str:
    """Returns a tick's number with the decimals that its step calls for."""
    if abs(value) < step / 1e6:
        return "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 3 or abs(value) >= 1e7:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")
    return f"{value:,.{decimals}f}".replace("-", "−")


def _fit(window: Sequence[tuple[float, float]], weights: Sequence[float], at: float) -> float:
    """Returns the weighted least-squares line through the points of a window, at one x."""
    total = sum(weights)
    x_mean = sum(weight * x for weight, (x, _) in zip(weights, window, strict=True)) / total
    y_mean = sum(weight * y for weight, (_, y) in zip(weights, window, strict=True)) / total
    spread = sum(weight * (x - x_mean) ** 2 for weight, (x, _) in zip(weights, window, strict=True))
    if spread == 0:
        return y_mean
    rise = sum(weight * (x - x_mean) * (y - y_mean) for weight, (x, y) in zip(weights, window, strict=True))
    return y_mean + rise / spread * (at - x_mean)


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns a line without lag: means of up to 400 bins, then a local linear fit over 1/10 of them at each.

    The weights are triangular; a straight line stays as it is, up to both ends.

    Cost: O(n + 400^2 / 10).
    """
    size = math.ceil(len(points) / BINS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    reach = max(2, len(means) // 20)
    result = []
    for index, (x, _) in enumerate(means):
        first, last = max(0, index - reach), min(len(means), index + reach + 1)
        weights = [float(reach + 1 - abs(place - index)) for place in range(first, last)]
        result.append((x, _fit(means[first:last], weights, x)))
    return result


def thin(points: Sequence[tuple[float, float]], most: int = POINTS) -> list[tuple[float, float]]:
    """Returns at most `most` of the points, keeping the lowest and the highest of each stretch, so that spikes stay."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda pair: pair[1]), max(part, key=lambda pair: pair[1])}
        kept.extend(sorted(ends))
    return kept


def _path(points: Sequence[tuple[float, float]], frame: tuple[float, float, float, float], *, dots: bool) -> str:
    """Returns SVG path data in a box of 1000 by 1000; dots are strokes of no length with round ends."""
    left, right, low, high = frame
    places = [
        (f"{1000 * (x - left) / (right - left):.1f}", f"{1000 * (high - y) / (high - low):.1f}") for x, y in points
    ]
    if dots:
        return "".join(f"M{x} {y}h0" for x, y in places)
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def _axes(xs: Sequence[float], ys: Sequence[float], frame: tuple[float, float, float, float]) -> str:
    """Returns gridlines and tick labels; positions in percent of the plot."""
    left, right, low, high = frame
    parts = []
    for value in ys:
        y = f"{100 * (high - value) / (high - low):.2f}%"
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text x="0" y="{y}" dx="-10" dy=".35em" text-anchor="end">{tick_text(value, ys[1] - ys[0])}</text>'
        )
    for index, value in enumerate(xs):
        if not left <= value <= right:
            continue
        x = f"{100 * (value - left) / (right - left):.2f}%"
        rare = ' class="rare"' if index % 2 else ""  # hidden on narrow screens
        parts.append(f'<rect class="tick" x="{x}" y="100%" width="1" height="5"/>')
        parts.append(
            f'<text{rare} x="{x}" y="100%" dy="20" text-anchor="middle">{tick_text(value, xs[1] - xs[0])}</text>'
        )
    return "".join(parts)


def _describe(curves: Sequence[tuple[Curve, list[tuple[float, float]]]]) -> str:
    """Returns what the plot shows, for those who do not see it."""
    first = curves[0][0]
    unit = f" in {first.y_unit}" if first.y_unit else ""
    spans = [
        f"{curve.name}: {points[0][1]:.4g} at {points[0][0]:g}, {points[-1][1]:.4g} at {points[-1][0]:g}"
        for curve, points in curves
    ]
    return f"{first.y_label}{unit} by {first.x_label}. {'; '.join(spans)}."


def curves_svg(curves: Sequence[Curve]) -> str:
    """Returns one plot of curves that share their axes, or "" if none has a finite point."""
    drawn = [(curve, points) for curve in curves if (points := curve.points())]
    if not drawn:
        return ""
    every = [pair for _, points in drawn for pair in points]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    xs, ys = ticks(left, right, 8), ticks(min(y for _, y in every), max(y for _, y in every), 5)
    frame = (left, right, ys[0], ys[-1]) if right > left else (xs[0], xs[-1], ys[0], ys[-1])
    lines = []
    for index, (_, points) in enumerate(drawn):
        style = STYLES[index % len(STYLES)]
        many = len(points) >= SMOOTH_FROM
        lines.append(f'<path class="raw {style}{"" if many else " few"}" d="{_path(thin(points), frame, dots=True)}"/>')
        if len(points) > 1:
            path = _path(smooth(points) if many else points, frame, dots=False)
            lines.append(f'<path class="line {style}" d="{path}"/>')
    text, title = as_html(_describe(drawn)), as_html(f"{curves[0].y_label} by {curves[0].x_label}")
    return (
        f'<svg class="curves" role="img" aria-label="{text}"><title>{title}</title>{_axes(xs, ys, frame)}'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" overflow="visible">'
        f'{"".join(lines)}</svg><line class="hair" y1="0" y2="100%" visibility="hidden"/></svg>'
    )


def curves_data(curves: Sequence[Curve]) -> dict[str, object]:
    """Returns what the hover read-out needs: the span of x, and each curve's thinned points."""
    drawn = [(curve, points) for curve in curves if (points := curve.points())]
    every = [x for _, points in drawn for x, _ in points]
    series = [
        {
            "name": curve.name,
            "x": [x for x, _ in thin(points)],
            "y": [float(f"{y:.5g}") for _, y in thin(points)],
        }
        for curve, points in drawn
    ]
    return {"low": min(every), "high": max(every), "label": curves[0].x_label, "series": series}


def span(scores: Sequence[Score], *, zero: float | None = None) -> list[float]:
    """Returns the ticks of an axis that holds every interval; percentages get 0 to 100, `zero` is always on it."""
    values = [value for score in scores for value in (score.low, score.value, score.high) if math.isfinite(value)]
    if zero is not None:
        values.append(zero)
    if not values:
        return [0.0, 1.0]
    if all(score.unit == "%" for score in scores) and min(values) >= 0 and max(values) <= 100:
        return [0.0, 25.0, 50.0, 75.0, 100.0]
    return ticks(min(values), max(values), 6)


def intervals_svg(scores: Sequence[tuple[str, str, Score]], axis: Sequence[float], *, zero: float | None = None) -> str:
    """Returns one row of the dot-and-interval plot: one line for each (style, series name, score), from the top."""
    low, high = axis[0], axis[-1]

    def place(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.2f}%"

    parts = [f'<line class="grid" x1="{place(t)}" x2="{place(t)}" y1="0" y2="100%"/>' for t in axis]
    if zero is not None:
        parts.append(f'<line class="zero" x1="{place(zero)}" x2="{place(zero)}" y1="0" y2="100%"/>')
    words = []
    for line, (style, name, score) in enumerate(scores):
        words.append(f"{name}: {score}")
        if not all(math.isfinite(value) for value in (score.low, score.value, score.high)):
            continue
        y, ends = LINE * line + LINE / 2, (place(score.low), place(score.high))
        parts.append(f'<line class="bar {style}" x1="{ends[0]}" x2="{ends[1]}" y1="{y}" y2="{y}"/>')
        parts.extend(f'<line class="cap {style}" x1="{end}" x2="{end}" y1="{y - 4}" y2="{y + 4}"/>' for end in ends)
        parts.append(f'<circle class="dot {style}" cx="{place(score.value)}" cy="{y}" r="5.5"/>')
    text = as_html("; ".join(words))
    height = LINE * len(scores)
    opening = f'<svg class="track" role="img" aria-label="{text}" height="{height}">'
    return f"{opening}<title>{text}</title>{''.join(parts)}</svg>"


def axis_svg(axis: Sequence[float]) -> str:
    """Returns the tick labels below a dot-and-interval plot."""
    low, high = axis[0], axis[-1]
    texts = [
        f'<text{" class=rare" if index % 2 else ""} x="{100 * (value - low) / (high - low):.2f}%" y="16" '
        f'text-anchor="middle">{tick_text(value, axis[1] - axis[0])}</text>'
        for index, value in enumerate(axis)
    ]
    return f'<svg class="track" aria-hidden="true" height="22">{"".join(texts)}</svg>'


def _interval_row(label: str, series: Sequence[tuple[str, str, Score]], axis: list[float], zero: float | None) -> str:
    """Returns one row of a dot-and-interval plot: label, track, numbers."""
    if zero is None:
        items = "".join(
            f'<li><span class="key {style}"></span><span class="of">{as_html(name)}</span><b>{amount(score)}</b></li>'
            for style, name, score in series
        )
    else:
        score = series[0][2]
        clear = not score.low <= zero <= score.high
        verdict = "a clear difference" if clear else "may be chance"
        number = f"<b>{amount(score, signed=True)}</b> <small>{bounds(score)}</small>"
        items = f'<li>{number}<span class="of">{verdict}</span></li>'
    track = intervals_svg(series, axis, zero=zero)
    return (
        f'<div class="row"><div class="label">{as_html(label)}</div><div class="cell">{track}</div>'
        f'<ul class="values{"" if zero is None else " alone"}">{items}</ul></div>'
    )


def interval_plot(rows: Mapping[str, Sequence[tuple[str, str, Score]]], unit: str, zero: float | None = None) -> str:
    """Returns the rows (label to its series) of a dot-and-interval plot over one axis; `zero` marks differences."""
    axis = span([score for series in rows.values() for _, _, score in series], zero=zero)
    drawn = "".join(_interval_row(label, series, axis, zero) for label, series in rows.items())
    return (
        f'<div class="plot">{drawn}<div class="row axis"><div class="label">{as_html(unit)}</div>'
        f'<div class="cell">{axis_svg(axis)}</div><div></div></div></div>'
    )


def score_plots(scores: Mapping[str, Sequence[Score]]) -> str:
    """Returns one dot-and-interval plot for each unit."""
    styles = dict(zip(scores, ("base", *STYLES) if len(scores) > 1 else STYLES, strict=False))
    groups: dict[str, dict[str, list[tuple[str, str, Score]]]] = {}
    for column, items in scores.items():
        for score in items:
            row = groups.setdefault(score.unit, {}).setdefault(score.name, [])
            row.append((styles.get(column, STYLES[-1]), column, score))
    return "".join(f"<figure>{interval_plot(rows, unit)}</figure>" for unit, rows in groups.items())


def _legend(curves: Sequence[Curve]) -> str:
    items = "".join(
        f'<li><svg aria-hidden="true"><line class="swatch {STYLES[index % len(STYLES)]}" x2="100%" y1="5" y2="5"/>'
        f"</svg>{as_html(curve.name)}</li>"
        for index, curve in enumerate(curves)
    )
    return f'<ul class="legend">{items}</ul>'


def _numbers(curves: Sequence[Curve]) -> str:
    """Returns a table of each curve's first, lowest and last point, to unfold."""
    rows = []
    for curve in curves:
        points = curve.points()
        places = (points[0], min(points, key=lambda pair: pair[1]), points[-1])
        cells = "".join(f"<td>{y:.4g} <small>at {x:g}</small></td>" for x, y in places)
        rows.append(f'<tr><th scope="row">{as_html(curve.name)}</th><td>{len(points):,}</td>{cells}</tr>')
    head = "".join(f'<th scope="col">{name}</th>' for name in ("curve", "points", "first", "lowest", "last"))
    return (
        '<details><summary>Numbers</summary><div class="scroll" tabindex="0" role="region" aria-label="Numbers">'
        f'<table class="wide"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></details>'
    )


def _figure(curves: Sequence[Curve]) -> str:
    """Returns one plot with its legend, its numbers as a table, and the data for the read-out."""
    drawn = [curve for curve in curves if curve.points()]
    lost = sum(len(curve.x) - len(curve.points()) for curve in curves)
    first = curves[0]
    unit = f' <span class="small">{as_html(first.y_unit)}</span>' if first.y_unit else ""
    caption = f"<figcaption>{as_html(first.y_label)}{unit}</figcaption>"
    note = f"{lost} value{'s' if lost > 1 else ''} not finite, so not drawn." if lost else ""
    if not drawn:
        return f'<figure>{caption}<p class="small">No finite values. {note}</p></figure>'
    return (
        f'<figure class="curve">{caption}{_legend(drawn)}<p class="read">{note}</p>'
        f'<div class="box">{curves_svg(drawn)}</div><p class="xlabel">{as_html(first.x_label)}</p>{_numbers(drawn)}'
        f'<script type="application/json">{as_json(curves_data(drawn))}</script></figure>'
    )


def curve_plots(curves: Sequence[Curve]) -> str:
    """Returns one figure for each set of labels and unit."""
    groups: dict[tuple[str, str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.x_label, curve.y_label, curve.y_unit), []).append(curve)
    return "".join(_figure(group) for group in groups.values())

"""The page is whole, safe and readable, whatever is put into it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mezzo.core.errors import UserError
from mezzo.core.plots import BINS, POINTS, smooth, thin, tick_text, ticks
from mezzo.core.report import DIFF_TOKENS, STYLE, Curve, Sample, _marked, write_report
from mezzo.core.stats import Score, paired, proportion

VOID = {"meta", "br", "link", "line", "rect", "circle", "path"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\x1b\ud800\u2028"


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order; collects tags, attributes and text."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append((self.open[-1] if self.open else "", data))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def all(self, tag: str) -> list[str]:
        return [data for name, data in self.text if name == tag]

    def words(self) -> str:
        return " ".join(data for name, data in self.text if name not in ("script", "style"))


def full(text: str) -> dict[str, object]:
    """Every argument of a report, with `text` wherever a user's text can stand."""
    before, after = [False] * 8 + [True] * 2, [True] * 9 + [False]
    return {
        "title": text,
        "lead": text,
        "scores": {f"base{text}": [proportion(text, before)], text: [proportion(text, after, unit=f"u{text}")]},
        "differences": [paired(text, before, after)],
        "curves": [Curve(text, [1, 2], [3, 2], x_label=text, y_label=text, y_unit=text)],
        "samples": [Sample(text, text, {f"base{text}": f"no{text}", text: text}, {f"base{text}": False, text: True})],
        "settings": {text: text, "group": {text: [text, 1]}, "deep": {"a": {"b": None}}},
        "notes": [text],
        "commands": [text],
    }


def made(tmp_path: Path, **changes: object) -> str:
    arguments: dict[str, object] = {"title": "t", "lead": "l", "scores": {}, "settings": {}}
    write_report(tmp_path / "report.html", **(arguments | changes))
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_is_whole_and_has_every_part(tmp_path: Path) -> None:
    source = made(tmp_path, **full("plain words"))
    page = Page(source)
    assert page.all("h2") == ["Scores", "Curves", "Samples", "Notes", "Commands", "Settings"]
    assert page.all("h1") == page.all("title")[:1] == ["plain words"]
    assert ("html", {"lang": "en"}) in page.tags
    assert page.words().count("plain words") > 20
    targets = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert targets == {f"#{attributes['id']}" for tag, attributes in page.tags if tag == "section"}


def test_parts_without_content_are_left_out(tmp_path: Path) -> None:
    page = Page(made(tmp_path))
    assert page.all("h2") == []
    assert page.count("svg") == page.count("table") == page.count("article") == 0


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    source = made(tmp_path, **full("x"))
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"<!doctype html>", "", source))
    for tag, attributes in Page(source).tags:
        assert not {"src", "srcset", "action", "style", "onclick", "onload"} & attributes.keys(), tag
        assert (attributes.get("href") or "#").startswith("#")


def test_the_policy_allows_this_style_and_this_script_alone(tmp_path: Path) -> None:
    source = made(tmp_path, **full("x"))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', source)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    for tag, opening in (("style", "<style>"), ("script", "<script>")):
        content = source.split(opening)[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]


def test_what_users_write_stays_text(tmp_path: Path) -> None:
    tame, wild = Page(made(tmp_path, **full("tame"))), Page(made(tmp_path, **full(EVIL)))
    assert [tag for tag, _ in wild.tags if tag not in ("ins", "del")] == [
        tag for tag, _ in tame.tags if tag not in ("ins", "del")
    ]
    assert {key for _, attributes in wild.tags for key in attributes} == {
        key for _, attributes in tame.tags for key in attributes
    }
    shown = EVIL.replace("\x00", "␀").replace("\x1b", "␛").replace("\ud800", "?")
    assert wild.all("h1") == [shown]
    assert wild.all("code") == [shown]
    assert "\x00" not in wild.words()


def test_script_ends_in_curve_data_do_not_end_the_script(tmp_path: Path) -> None:
    source = made(tmp_path, curves=[Curve("</script><b>&", [1, 2, 3], [3, math.nan, 2])])
    data = re.findall(r'<script type="application/json">(.*?)</script>', source, re.DOTALL)
    assert [json.loads(item)["series"] for item in data] == [[{"name": "</script><b>&", "x": [1, 3], "y": [3, 2]}]]
    assert Page(source).count("b") == 0


def test_without_scripts_everything_is_there(tmp_path: Path) -> None:
    samples = [Sample(f"ask {n}", "yes", {"base": "no", "new": "yes"}, {"base": False, "new": True}) for n in range(3)]
    page = Page(made(tmp_path, samples=samples, commands=["mezzo --help"]))
    assert page.count("article") == 3
    assert all("hidden" not in attributes for tag, attributes in page.tags if tag == "article")
    filters = [attributes for tag, attributes in page.tags if attributes.get("class") == "filters"]
    assert [("hidden" in attributes) for attributes in filters] == [True]


def test_right_and_wrong_are_told_in_words(tmp_path: Path) -> None:
    judged = {"base": True, "one": False, "two": None}
    page = Page(made(tmp_path, samples=[Sample("ask", "a", {"base": "a", "one": "b", "two": " "}, judged)]))
    assert "✓ right" in page.words()
    assert "✗ wrong" in page.words()
    assert "not judged" in page.words()
    assert "empty answer" in page.words()


@pytest.mark.parametrize(
    ("first", "last", "tags"),
    [
        (True, True, "right"),
        (False, True, "right changed"),
        (True, False, "wrong changed"),
        (None, True, "right"),
        (True, None, ""),
    ],
)
def test_samples_are_tagged_for_the_filter(tmp_path: Path, first: bool, last: bool, tags: str) -> None:
    sample = Sample("ask", None, {"base": "a", "new": "b"}, {"base": first, "new": last})
    page = Page(made(tmp_path, samples=[sample]))
    assert [attributes["data-tags"] for tag, attributes in page.tags if tag == "article"] == [tags]


@pytest.mark.parametrize("seed", range(20))
def test_marks_never_change_the_answer(seed: int) -> None:
    chance = random.Random(seed)
    words = ["the", "cat", "<b>", "&", "sat", "42", "\n", "  ", "naïve", ",", "."]
    expected, answer = (" ".join(chance.choices(words, k=chance.randint(0, 15))) for _ in range(2))
    page = Page(f"<p>{_marked(expected, answer)}</p>")
    assert "".join(data for tag, data in page.text if tag != "del") == answer


def test_marks_show_what_differs() -> None:
    assert _marked("the cat sat", "the dog sat down") == "the <del>cat</del><ins>dog</ins> sat<ins> down</ins>"
    assert _marked("42", "41") == "<del>42</del><ins>41</ins>"
    assert _marked(" same ", "same\n") == "same\n"
    assert "<" not in _marked(
        "short", "something else that has nothing in common with it, at some length, as models do"
    )
    assert "<" not in _marked("a " * DIFF_TOKENS, "a " * DIFF_TOKENS + "b")


def test_equal_units_share_a_plot_and_names_a_row(tmp_path: Path) -> None:
    scores = {
        "base": [Score("accuracy", 10, 5, 20, 100, "%"), Score("loss", 2.5, 2.4, 2.6, 100, "nats/token")],
        "adapter": [Score("accuracy", 90, 80, 95, 100, "%"), Score("only here", 50, 40, 60, 100, "%")],
    }
    page = Page(made(tmp_path, scores=scores))
    assert page.count("figure") == 2
    labels = [attributes["aria-label"] for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert labels == [
        "base: 10.0 % [5.0, 20.0], n = 100; adapter: 90.0 % [80.0, 95.0], n = 100",
        "adapter: 50.0 % [40.0, 60.0], n = 100",
        "base: 2.50 nats/token [2.40, 2.60], n = 100",
    ]
    assert page.count("circle") == 4
    assert page.all("th").count("accuracy") == 1


def test_differences_tell_chance_from_change(tmp_path: Path) -> None:
    differences = [
        Score("up", 5.0, 1.0, 9.0, 50, "points"),
        Score("level", -1.0, -3.0, 1.0, 50, "points"),
        Score("slower", 1.2, 1.1, 1.3, 50, "×"),
        Score("same speed", 1.0, 0.9, 1.1, 50, "×"),
    ]
    words = Page(made(tmp_path, differences=differences)).words()
    assert words.count("a clear difference") == words.count("may be chance") == 2
    assert "+5.0 points" in words
    assert "−1.0 points" in words
    assert "+1.2" not in words


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_shown_as_none(tmp_path: Path, value: float) -> None:
    source = made(tmp_path, scores={"base": [Score("s", value, value, value, 3), Score("fine", 1, 1, 1, 1)]})
    assert "nan" not in source.split("<body>")[1].split("<script>")[0].lower()
    assert Page(source).count("circle") == 1


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([], []),
        ([5], [1.0]),
        ([1, 2], [3.0, 3.0]),
        ([1, 2, 3], [math.nan, None, math.inf]),
        ([1, 2, 3], [1.0, None, 2.0]),
        ([2, 2], [1.0, 2.0]),
        ([3, 1, 2], [0.0, -1e-9, 1e-9]),
        ([0, 1e9], [1e-12, 1e12]),
        ([1, 2], [-5.0, -4.0]),
        ([1, 2], [1.0, 1.0000000000000002]),
        ([1e15, 1e15 + 1], [1.0, 2.0]),
        (list(range(5000)), [math.sin(n) for n in range(5000)]),
    ],
)
def test_every_curve_draws_or_says_why_not(tmp_path: Path, x: list[float], y: list[float]) -> None:
    source = made(tmp_path, curves=[Curve("c", x, y)])
    page = Page(source)
    finite = [value for value in y if value is not None and math.isfinite(value)]
    assert ("No finite values" in page.words()) == (not finite)
    assert ("not finite, so not drawn" in page.words()) == (len(finite) < len(y))
    paths = [attributes["d"] for tag, attributes in page.tags if tag == "path"]
    for number in re.findall(r"[\d.e+-]+|nan|inf", " ".join(paths).replace("h0", "")):
        assert 0 <= float(number) <= 1000
    assert len(source) < 120_000


def test_curves_share_a_plot_by_labels_and_unit(tmp_path: Path) -> None:
    curves = [Curve("training", [1, 2], [2, 1]), Curve("held out", [1, 2], [2, 1]), Curve("rate", [1], [1], y_unit="")]
    page = Page(made(tmp_path, curves=curves))
    assert page.count("figure") == 2
    described = [attributes["aria-label"] for tag, attributes in page.tags if attributes.get("class") == "curves"]
    assert described[0] == "loss in nats/token by step. training: 2 at 1, 1 at 2; held out: 2 at 1, 1 at 2."


def test_a_curve_of_two_lengths_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="curve c"):
        made(tmp_path, curves=[Curve("c", [1, 2], [1.0])])
    assert list(tmp_path.iterdir()) == []


def test_the_same_content_makes_the_same_bytes(tmp_path: Path) -> None:
    assert made(tmp_path, **full("x")) == made(tmp_path, **full("x"))


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        made(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("seed", range(50))
def test_ticks_are_round_and_enclose(seed: int) -> None:
    chance = random.Random(seed)
    low = chance.uniform(-1, 1) * 10 ** chance.randint(-6, 6)
    high = low + chance.random() * 10 ** chance.randint(-3, 6)
    marks = ticks(low, high)
    step = marks[1] - marks[0]
    assert marks[0] <= low + step / 1e6
    assert marks[-1] >= high - step / 1e6
    assert 2 <= len(marks) <= 7
    assert float(f"{step:.2e}".split("e")[0]) in (1, 2, 5)
    assert len({tick_text(mark, step) for mark in marks}) == len(marks) or abs(low) / step > 100


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [(0.0, 0.1, "0"), (0.30000000000000004, 0.1, "0.3"), (1500, 500, "1,500"), (2e-4, 5e-5, "2e−4"), (-2, 1, "−2")],
)
def test_tick_numbers(value: float, step: float, text: str) -> None:
    assert tick_text(value, step) == text


def test_smoothing_keeps_straight_lines_and_calms_noise() -> None:
    straight = [(float(x), 3.0 - 0.01 * x) for x in range(BINS)]
    for (x, y), (x_smooth, y_smooth) in zip(straight, smooth(straight), strict=True):
        assert (x_smooth, y_smooth) == (x, pytest.approx(y))
    chance = random.Random(0)
    noisy = [(x, y + chance.gauss(0, 0.5)) for x, y in straight]
    errors = [abs(y - true) for (_, y), (_, true) in zip(smooth(noisy), straight, strict=True)]
    assert sum(errors) / len(errors) < 0.12
    assert len(smooth([(float(x), 1.0) for x in range(10 * BINS + 1)])) <= BINS


def test_thinning_keeps_spikes() -> None:
    points = [(float(x), 1.0) for x in range(10_000)]
    points[7777] = (7777.0, 99.0)
    kept = thin(points)
    assert len(kept) <= POINTS + 2
    assert (7777.0, 99.0) in kept
    assert kept == sorted(kept)


def luminance(colour: str) -> float:
    digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_text_colour_stands_out(theme: int) -> None:
    block = re.findall(r":root\{(.*?)\}", STYLE, re.DOTALL)[theme]
    colours = {name: luminance(value) for name, value in re.findall(r"--(\w+):#([0-9a-f]{3,6})", block)}
    assert colours.keys() >= {"bg", "panel", "ink", "muted", "a", "f", "base", "right", "wrong", "mark"}
    pairs = [(name, ground) for name in colours.keys() - {"bg", "panel", "line", "mark"} for ground in ("bg", "panel")]
    for name, ground in [*pairs, ("ink", "mark")]:
        light, dark = sorted((colours[name], colours[ground]), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, ground)


def test_the_style_serves_paper_phones_and_the_dark() -> None:
    for query in ("@media print", "(prefers-color-scheme:dark)", "(max-width:"):
        assert query in STYLE

"""A report: one HTML page that holds all it shows, and needs no network and no script."""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo import __version__
from mezzo.core.errors import UserError
from mezzo.core.files import atomic
from mezzo.core.plots import HOVER, Curve, amount, as_html, bounds, curve_plots, interval_plot, score_plots
from mezzo.core.runs import plain
from mezzo.core.stats import Score

DIFF_TOKENS = 600  # longer texts are not compared: difflib takes quadratic time

__all__ = ["Curve", "Sample", "write_report"]

STYLE = """
:root{color-scheme:light dark;--bg:#fbfcfd;--panel:#fff;--ink:#17202b;--muted:#566270;--line:#dce1e7;--base:#5d6978;
--a:#0a6a72;--b:#b4480c;--c:#6a3fb5;--d:#1f5fbf;--e:#a5286d;--f:#5a6a00;--right:#1b6b3a;--wrong:#b3261e;
--mark:#fdedb8;--mono:ui-monospace,"SF Mono","Cascadia Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media screen and (prefers-color-scheme:dark){:root{--bg:#12161c;--panel:#191f27;--ink:#e7ebf0;--muted:#a2adba;
--line:#303a46;--base:#a2adba;--a:#5cc8c2;--b:#f0a36b;--c:#b79bf2;--d:#86b3f5;--e:#ee8fc0;--f:#c0cf62;--right:#7fd39b;
--wrong:#ff9b92;--mark:#4d4013}}*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;print-color-adjust:exact;-webkit-print-color-adjust:exact}
body{margin:0;background:var(--bg);color:var(--ink);
font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
main,header,footer{max-width:60rem;margin:0 auto;padding:0 1.25rem}header{padding-top:3rem}
h1{font-size:clamp(1.6rem,1.2rem + 2vw,2.25rem);line-height:1.2;letter-spacing:-.015em;margin:0 0 .75rem;
text-wrap:balance}.lead{font-size:1.1rem;max-width:42rem;margin:0 0 1.5rem;color:var(--muted);white-space:pre-line}
nav{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.9rem}a{color:var(--a);text-underline-offset:.2em}
section{border-top:1px solid var(--line);margin-top:2.5rem;padding-top:1.5rem}
h2{font-size:1.3rem;line-height:1.3;margin:0 0 1rem}h3{font-size:1rem;margin:1.75rem 0 .5rem}
h1,h2,h3,p,li,td,th,dd,summary{overflow-wrap:anywhere}
.small{font-size:.875rem;color:var(--muted);margin:.25rem 0 1rem;max-width:42rem}
svg{display:block;width:100%;overflow:visible}
svg text{fill:var(--muted);font-size:12.5px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--line)}.tick{fill:var(--muted)}.zero{stroke:var(--muted);stroke-width:1.5;stroke-dasharray:3 3}
.row{display:grid;grid-template-columns:10rem minmax(0,1fr) 17rem;gap:0 1.5rem;align-items:center}
.row+.row:not(.axis){margin-top:.25rem}.row .label{font-weight:600;overflow-wrap:anywhere}
.row.axis .label{font-weight:400;font-size:.8rem;color:var(--muted);text-align:right}
.values{list-style:none;margin:0;padding:0;font-variant-numeric:tabular-nums}
.values li{min-height:30px;display:flex;align-items:center;gap:.5rem;line-height:1.25}
.values.alone small{white-space:nowrap}.values .of{color:var(--muted);flex:1;min-width:0}.values b{white-space:nowrap}
.values.alone li{display:block;padding:.25rem 0}.values.alone .of{display:block;font-size:.8rem}
.base{--c1:var(--base)}.a{--c1:var(--a)}.b{--c1:var(--b)}.c{--c1:var(--c)}.d{--c1:var(--d)}.e{--c1:var(--e)}
.f{--c1:var(--f)}
.key{flex:none;width:.8rem;height:.8rem;border-radius:50%;border:2.5px solid var(--c1);background:var(--c1)}
.key.base{background:var(--bg)}.bar{stroke:var(--c1);stroke-width:2.5}.cap{stroke:var(--c1);stroke-width:2}
.dot{fill:var(--c1);stroke:var(--c1);stroke-width:2.5}.dot.base{fill:var(--bg)}
figure{margin:0 0 2rem}figcaption{font-weight:600}figcaption .small{font-weight:400}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;margin:.25rem 0 0;padding:0;list-style:none;font-size:.875rem}
.legend li{display:flex;align-items:center;gap:.5rem}.legend svg{width:2rem;height:10px}
.read{min-height:1.4rem;margin:0;font-size:.875rem;color:var(--muted);font-variant-numeric:tabular-nums}
.box{padding:.75rem 1rem 2.25rem 3.5rem}.curves{height:clamp(13rem,30vw,19rem);touch-action:pan-y}
.line,.raw,.swatch{fill:none;stroke:var(--c1);stroke-width:2.25;vector-effect:non-scaling-stroke;
stroke-linejoin:round}.raw{stroke-width:3;stroke-linecap:round;opacity:.3}.raw.few{stroke-width:7;opacity:1}
.line.b,.swatch.b{stroke-dasharray:7 4}.line.c,.swatch.c{stroke-dasharray:2 3}
.line.d,.swatch.d{stroke-dasharray:10 3 2 3}
.line.e,.swatch.e{stroke-dasharray:4 2}.line.f,.swatch.f{stroke-dasharray:12 6}
.hair{stroke:var(--muted)}.xlabel{text-align:center;font-size:.8rem;color:var(--muted);margin:0 0 .25rem}
.scroll{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.45rem 1rem .45rem 0;border-bottom:1px solid var(--line)}
thead th,caption{color:var(--muted);font-weight:600;font-size:.8rem;text-align:left}
.wide td,.wide th{white-space:nowrap;overflow-wrap:normal}
.wide small,.values small{color:var(--muted);font-size:.8rem}
.wide th[scope=row]{white-space:normal;min-width:8rem}.settings th{width:14rem;font-weight:500}
.settings td{font-family:var(--mono);font-size:.82rem}details>summary{cursor:pointer;color:var(--a);font-size:.9rem}
article{background:var(--panel);border:1px solid var(--line);border-radius:.5rem;padding:1rem 1.25rem 1.25rem;
margin:0 0 1rem}
article h3{margin:0 0 .75rem;display:flex;flex-wrap:wrap;gap:0 1rem;justify-content:space-between;font-size:.9rem}
article h3 span{font-weight:400;color:var(--muted)}
article dl{margin:0;display:grid;gap:1rem 1.5rem;grid-template-columns:minmax(0,1fr)}article dl+dl{margin-top:1rem}
article .answers{grid-template-columns:repeat(auto-fit,minmax(min(16rem,100%),1fr))}article dl>div{min-width:0}
dt{font-size:.8rem;color:var(--muted);margin-bottom:.2rem;display:flex;gap:.75rem;justify-content:space-between}
dd{margin:0;white-space:pre-wrap;max-height:22rem;overflow:auto;unicode-bidi:isolate}
dd.answer{border-left:3px solid var(--line);padding-left:.75rem}
.right,.wrong{font-weight:600;white-space:nowrap}.right{color:var(--right)}.wrong{color:var(--wrong)}
dd.is-right{border-color:var(--right)}dd.is-wrong{border-color:var(--wrong);border-left-style:double;
border-left-width:5px}
ins{background:var(--mark);text-decoration:underline;text-decoration-thickness:1px;text-underline-offset:.2em;
border-radius:2px}del{color:var(--muted);text-decoration:line-through}del+ins{margin-left:.25em}
.empty{color:var(--muted);font-style:italic}
.filters{display:flex;flex-wrap:wrap;gap:.5rem;margin:0 0 1rem}.filters[hidden],article[hidden]{display:none}
button{font:inherit;font-size:.875rem;color:var(--ink);background:var(--panel);border:1px solid var(--muted);
border-radius:.4rem;padding:.3rem .75rem;cursor:pointer}
button[aria-pressed=true]{background:var(--ink);color:var(--bg);border-color:var(--ink)}
:focus-visible{outline:3px solid var(--a);outline-offset:2px}
.command{position:relative}.command button{position:absolute;top:.5rem;right:.5rem}
pre{margin:0 0 .75rem;background:var(--panel);border:1px solid var(--line);border-radius:.5rem;
padding:.85rem 5.5rem .85rem 1rem;white-space:pre-wrap;overflow-wrap:anywhere;
font:.85rem/1.5 var(--mono)}pre code{font:inherit;user-select:all;-webkit-user-select:all}
footer{color:var(--muted);font-size:.85rem;padding-top:2.5rem;padding-bottom:3rem}
@media (max-width:44rem){header{padding-top:1.75rem}.row{grid-template-columns:minmax(0,1fr)}
.row+.row:not(.axis){margin-top:1.25rem}
.row.axis .label{text-align:center;order:2}.row .values{order:-1}.row .label{order:-2}.cell{padding:0 .75rem}
.rare{display:none}
.values li{min-height:1.6rem}.box{padding-left:3rem;padding-right:.5rem}.settings th{width:40%}article{padding:.85rem}
.wide th[scope=row]{min-width:6rem}}
@media print{body{background:#fff;font-size:10pt}header{padding-top:0}
nav,.filters,button{display:none!important}
.scroll{overflow:visible}.wide td,.wide th{white-space:normal}
dd{max-height:none;overflow:visible}article,figure,.row,tr{break-inside:avoid}h2,h3{break-after:avoid}
article[hidden]{display:block}}
"""

SCRIPT = (
    '"use strict";'
    + HOVER
    + """
const filters = document.querySelector(".filters");
if (filters) {
  filters.hidden = false;
  filters.addEventListener("click", (event) => {
    const chosen = event.target.closest("button");
    if (!chosen) return;
    for (const button of filters.children) button.setAttribute("aria-pressed", button === chosen);
    for (const card of document.querySelectorAll("article"))
      card.hidden = chosen.value !== "all" && !card.dataset.tags.split(" ").includes(chosen.value);
  });
}
for (const block of document.querySelectorAll(".command")) {
  const button = document.createElement("button");
  button.type = "button"; button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const code = block.querySelector("code");
    try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(code); button.textContent = "Selected"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  block.append(button);
}
"""
)


@dataclass
class Sample:
    """One question with the answers to it.

    Attributes:
        prompt: the question as the model saw it.
        expected: the right answer, or None where there is none.
        answers: column ("base", "adapter") to what it answered.
        correct: column to whether that was right; None where nobody judged.
    """

    prompt: str
    expected: str | None
    answers: dict[str, str]
    correct: dict[str, bool | None]


def _score_table(scores: Mapping[str, Sequence[Score]], differences: Sequence[Score]) -> str:
    columns: dict[str, dict[str, Score]] = {name: {s.name: s for s in items} for name, items in scores.items()}
    if differences:
        columns["difference"] = {score.name: score for score in differences}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    head = "".join(f'<th scope="col">{as_html(name)}</th>' for name in columns)
    body = []
    for name in names:
        cells = []
        for label, column in columns.items():
            score = column.get(name)
            signed = label == "difference"
            cells.append(
                "<td>–</td>"
                if score is None
                else f"<td>{amount(score, signed=signed)} <small>{bounds(score)}<br>n = {score.n:,}</small></td>"
            )
        body.append(f'<tr><th scope="row">{as_html(name)}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table of scores"><table class="wide"><thead><tr>'
        f'<th scope="col">score</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _scores(scores: Mapping[str, Sequence[Score]], differences: Sequence[Score]) -> str:
    parts = [score_plots(scores)]
    if differences:
        parts.append("<h3>Differences, in pairs</h3>")
        for unit in dict.fromkeys(score.unit for score in differences):
            rows = {score.name: [("a", "difference", score)] for score in differences if score.unit == unit}
            parts.append(f"<figure>{interval_plot(rows, unit, 1.0 if unit == '×' else 0.0)}</figure>")
    parts.append(_score_table(scores, differences))
    return "".join(parts) + '<p class="small">Lines and brackets are intervals; n is the number of items.</p>'


def _marked(expected: str, answer: str) -> str:
    """Returns the answer as HTML with what it lacks (del) and what it adds (ins) against the expected text.

    Texts with little in common, or longer than 600 words and signs, are shown without marks.
    """
    wanted, got = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (expected.strip(), answer))
    if expected.strip() == answer.strip() or max(len(wanted), len(got)) > DIFF_TOKENS:
        return as_html(answer)
    matcher = difflib.SequenceMatcher(None, wanted, got, autojunk=False)
    if matcher.ratio() < 0.35 and len(got) > 12:
        return as_html(answer)
    parts = []
    for kind, start, end, first, last in matcher.get_opcodes():
        missing, extra = "".join(wanted[start:end]), "".join(got[first:last])
        if kind in ("delete", "replace") and missing.strip():
            parts.append(f"<del>{as_html(missing)}</del>")
        plain_text = kind in ("equal", "delete") or not extra.strip()
        parts.append(as_html(extra) if plain_text else f"<ins>{as_html(extra)}</ins>")
    return "".join(parts)


def _answer(sample: Sample, name: str) -> str:
    judged = sample.correct.get(name)
    mark = {
        True: '<span class="right">✓ right</span>',
        False: '<span class="wrong">✗ wrong</span>',
        None: "<span>not judged</span>",
    }[judged]
    answer = sample.answers[name]
    shown = as_html(answer) if sample.expected is None else _marked(sample.expected, answer)
    state = {True: " is-right", False: " is-wrong", None: ""}[judged]
    body = shown if answer.strip() else '<span class="empty">empty answer</span>'
    return f'<div><dt>{as_html(name)} {mark}</dt><dd class="answer{state}" dir="auto">{body}</dd></div>'


def _tags(sample: Sample) -> list[str]:
    """Returns "right" or "wrong" for the last column, and "changed" if the first was judged otherwise."""
    judged = [sample.correct.get(name) for name in sample.answers]
    if not judged or judged[-1] is None:
        return []
    changed = judged[0] is not None and judged[0] != judged[-1]
    return ["right" if judged[-1] else "wrong", *(["changed"] if changed else [])]


def _sample(number: int, sample: Sample) -> str:
    tags = _tags(sample)
    turn = ("wrong → right" if "right" in tags else "right → wrong") if "changed" in tags else ""
    expected = (
        "" if sample.expected is None else f'<div><dt>expected</dt><dd dir="auto">{as_html(sample.expected)}</dd></div>'
    )
    answers = "".join(_answer(sample, name) for name in sample.answers)
    return (
        f'<article data-tags="{" ".join(tags)}"><h3>Sample {number}<span>{turn}</span></h3><dl>'
        f'<div><dt>prompt</dt><dd dir="auto">{as_html(sample.prompt)}</dd></div>{expected}</dl>'
        f'<dl class="answers">{answers}</dl></article>'
    )


def _samples(samples: Sequence[Sample]) -> str:
    counts = {tag: sum(tag in _tags(sample) for sample in samples) for tag in ("changed", "right", "wrong")}
    last = next(reversed(samples[0].answers), "")
    names = {"changed": "Changed", "right": f"{last} right", "wrong": f"{last} wrong"}
    buttons = "".join(
        f'<button type="button" value="{tag}" aria-pressed="false">{as_html(names[tag])} ({count})</button>'
        for tag, count in counts.items()
    )
    filters = (
        f'<div class="filters" role="group" aria-label="Show samples" hidden><button type="button" value="all" '
        f'aria-pressed="true">All ({len(samples)})</button>{buttons}</div>'
    )
    marks = "<p class='small'>Against the expected text: <ins>added</ins> and <del>missing</del>.</p>"
    compared = any(sample.expected is not None for sample in samples)
    cards = "".join(_sample(number, sample) for number, sample in enumerate(samples, start=1))
    return (marks if compared else "") + (filters if any(counts.values()) else "") + cards


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        elif isinstance(item, list) and not any(isinstance(part, list | Mapping) for part in item):
            yield f"{prefix}{key}", ", ".join(map(str, item)) or "none"
        else:
            yield f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)


def _settings(settings: Mapping[str, Any]) -> str:
    """Returns a table of the plain settings, then one for each group (a mapping) with its name as caption."""
    values = plain(settings)
    alone = {key: item for key, item in values.items() if not isinstance(item, Mapping)}
    groups = {"": alone} | {key: item for key, item in values.items() if isinstance(item, Mapping)}
    tables = []
    for name, group in groups.items():
        rows = "".join(
            f'<tr><th scope="row">{as_html(key)}</th><td>{as_html(item)}</td></tr>' for key, item in _flat(group)
        )
        caption = f"<caption>{as_html(name)}</caption>" if name else ""
        if rows:
            tables.append(f'<div class="scroll"><table class="settings">{caption}<tbody>{rows}</tbody></table></div>')
    return "".join(tables)


def _commands(commands: Sequence[str]) -> str:
    return "".join(
        f'<div class="command"><pre tabindex="0"><code>{as_html(line)}</code></pre></div>' for line in commands
    )


def _notes(notes: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{as_html(note)}</li>' for note in notes)}</ul>" if notes else ""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _page(title: str, lead: str, sections: Mapping[str, str]) -> str:
    """Returns the page; its policy lets nothing run or load but the style and the script that are written here."""
    policy = (
        f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; base-uri 'none'; form-action 'none'"
    )
    names = {heading: f"part{number}" for number, heading in enumerate(sections, start=1)}
    links = "".join(f'<a href="#{name}">{heading}</a>' for heading, name in names.items())
    body = "".join(
        f'<section id="{names[heading]}" aria-labelledby="{names[heading]}h"><h2 id="{names[heading]}h">{heading}</h2>'
        f"{content}</section>"
        for heading, content in sections.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="referrer" content="no-referrer">'
        f"<title>{as_html(title)}</title><style>{STYLE}</style></head><body>"
        f'<header><h1>{as_html(title)}</h1><p class="lead">{as_html(lead)}</p>'
        f'<nav aria-label="Parts of this page">{links}</nav></header><main>{body}</main>'
        f"<footer>Made with Mezzo {__version__}</footer><script>{SCRIPT}</script></body></html>\n"
    )


def write_report(
    path: Path,
    *,
    title: str,
    lead: str,
    scores: Mapping[str, Sequence[Score]],
    differences: Sequence[Score] = (),
    curves: Sequence[Curve] = (),
    samples: Sequence[Sample] = (),
    settings: Mapping[str, Any],
    notes: Sequence[str] = (),
    commands: Sequence[str] = (),
) -> None:
    """Writes one self-contained HTML page, atomically. Parts without content are left out.

    Args:
        path: the file to write.
        title: heading of the page.
        lead: one or two sentences that say what came out.
        scores: column ("base", "adapter") to its scores; equal names share a row, equal units a plot.
        differences: paired differences (unit "×": ratios), drawn against 0 (1).
        curves: lines by step; those with equal labels and unit share a plot.
        samples: questions with the answers of each column; the last column is the one that is judged right or wrong.
        settings: what the run was made of; a mapping inside becomes a table with its key as caption.
        notes: limits and remarks, a sentence each.
        commands: shell lines to copy.

    Raises:
        UserError: a curve has more positions than values or fewer, or the file cannot be written.
    """
    for curve in curves:
        if len(curve.x) != len(curve.y):
            raise UserError(f"{len(curve.x)} positions but {len(curve.y)} values", where=f"curve {curve.name}")
    has_scores = any(scores.values()) or differences
    sections = {
        "Scores": _scores(scores, differences) if has_scores else "",
        "Curves": curve_plots(curves),
        "Samples": _samples(samples) if samples else "",
        "Notes": _notes(notes),
        "Commands": _commands(commands),
        "Settings": _settings(settings),
    }
    page = _page(title, lead, {heading: content for heading, content in sections.items() if content})
    with atomic(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")

"""The built-in practice task: a messy order sentence in, one JSON object out. The same for a seed."""

from __future__ import annotations

import json
import random

from mezzo.core.records import Row, Rows

FIELDS = ("customer", "item", "quantity", "date", "note")

_FIRST = (
    "Ada Bruno Carla Dmitri Elena Farid Greta Hugo Ines Jonas Katya Liam Mona Nils Olga Pavel Quentin Rosa Samir "
    "Tilda Umar Vera Wendel Xenia Yusuf Zora Amos Birgit Cyrus Delia Emil Fatima Gideon Hanna Ivo Judith Karim Lena "
    "Marek Nadia Oskar Petra Ralf Sonia Tomas Ulla Viktor Wanda Yara Zeno Anton Bella Cesar Dora Edgar Flora Goran "
    "Helga Igor Jana"
).split()
_LAST = (
    "Adler Bauer Castro Dolan Eriksen Fuchs Gallo Huber Ivanov Jensen Keller Lopez Moreau Novak Ortiz Petrov Quinn "
    "Rossi Silva Torres Ullman Vogel Weber Young Zeller Albers Brandt Cohen Duarte Engel Ferrer Grant Holm Ibrahim "
    "Jung Klein Lang Meyer Nolan Olsen Parker Ramos Schmid Thorne Urban Varga Walsh Yilmaz Zimmer Abbott Baker "
    "Carter Dalton Evans"
).split()
_COLOURS = "red blue green black white grey yellow brown silver purple orange pink".split()
_THINGS = (
    "mugs lamps chairs folders gloves towels baskets candles notebooks ladders buckets blankets cushions bottles "
    "clocks mirrors shelves trays vases hammers ropes brushes pillows plates spoons kettles jackets boots helmets "
    "tents wheels pumps valves filters cables fans heaters drills saws magnets hinges screws bolts tiles curtains "
    "aprons stools benches crates barrels"
).split()
_MONTHS = ("January February March April May June July August September October November December").split()
_NOTES = (
    "ring the bell",
    "leave it at the door",
    "call before delivery",
    "wrap it as a gift",
    "no plastic please",
    "use the back entrance",
    "invoice by email",
    "fragile",
    "deliver after noon",
    "ask for the manager",
    "two parcels if needed",
    "pay on delivery",
)
_PATTERNS = (
    "hi, {customer} here, need {quantity} {item} by {date}, {note}",
    "order for {customer}: {quantity} x {item}, due {date}. {note}",
    "pls send {quantity} {item} to {customer} on {date} - {note}",
    "{quantity} {item} for {customer}!! {note}. needed {date}",
    "{customer} wants {item}, {quantity} of them, for {date}; {note}",
    "can you get {customer} {quantity} {item} before {date}? {note}",
    "{note}. {customer} ordered {quantity} {item}, {date}",
    "for {date}: {item} ({quantity}), customer {customer}, {note}",
)


def practice_rows(count: int, *, seed: int = 0, held_out: bool = False) -> Rows:
    """Returns `count` rows of the task.

    Training and held-out rows share no first name, no surname and no thing: each list is cut in two by position.

    Args:
        count: number of rows, all different.
        seed: the same seed gives the same rows on every machine.
        held_out: draw from the held-out fifth of every list.
    """
    rng = random.Random(f"mezzo practice {seed} {held_out}")  # noqa: S311  # practice data, not a secret
    first, last, things = (_part(words, held_out) for words in (_FIRST, _LAST, _THINGS))
    rows: dict[str, Row] = {}
    while len(rows) < count:
        order = {
            "customer": f"{rng.choice(first)} {rng.choice(last)}",
            "item": f"{rng.choice(_COLOURS)} {rng.choice(things)}",
            "quantity": rng.randint(2, 99),
            "date": f"{rng.randint(1, 28)} {rng.choice(_MONTHS)}",
            "note": rng.choice(_NOTES),
        }
        text = rng.choice(_PATTERNS).format(**order)
        text = rng.choice((text, text.lower(), text.replace(", ", " ,"), f"{text} thx"))
        if text.islower():
            order = {key: value.lower() if isinstance(value, str) else value for key, value in order.items()}
        message = {"role": "user", "content": text}
        rows.setdefault(text, Row(len(rows) + 1, (message,), json.dumps(order)))
    kind = "held-out" if held_out else "training"
    return Rows.of(list(rows.values()), source=f"practice task ({kind}, seed {seed})", shape="prompt/completion")


def _part(words: list[str], held_out: bool) -> list[str]:
    return [word for position, word in enumerate(words) if (position % 5 == 4) == held_out]

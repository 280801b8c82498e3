"""Text that a seed writes: JSON, tables, logs, code with encoded bytes, conversations and excerpts.

Fields, names, numbers and times are drawn, so that texts of different seeds share a template of a line or two and no
long passage. Conversations quote documents of the other kinds.
"""

from __future__ import annotations

import base64
import json
import textwrap
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from random import Random
from typing import Any

from calibrate.prompts.retrieval import LISTS_OF_WORDS, WORDS, read_texts

Excerpt = Callable[[int], str]  # returns at most so many characters of another kind's document, none twice
Field = Callable[[Random, datetime], Any]
TEMPLATES = read_texts("templates")  # lists of them by name; of stack traces the head, and the template of its frames


def _draw_hex(rng: Random, digits: int) -> str:
    return f"{rng.getrandbits(4 * digits):0{digits}x}"


def _join_words(rng: Random, separator: str) -> str:
    return separator.join(rng.sample(WORDS, 2))


def _choose(name: str) -> Field:
    """Return a field that is one of the words of this name."""
    return lambda rng, now: rng.choice(LISTS_OF_WORDS[name])


def _draw_person(rng: Random) -> str:
    return f"{rng.choice(LISTS_OF_WORDS['first_names'])} {rng.choice(LISTS_OF_WORDS['last_names'])}"


# of records and templates
FIELDS: dict[str, Field] = {
    "id": lambda rng, now: rng.randrange(1, 10**7),
    "uuid": lambda rng, now: "-".join(_draw_hex(rng, digits) for digits in (8, 4, 4, 4, 12)),
    "hash": lambda rng, now: _draw_hex(rng, rng.choice((8, 12, 16, 40))),
    "created_at": lambda rng, now: now.isoformat(timespec="seconds"),
    "date": lambda rng, now: now.date().isoformat(),
    "person": lambda rng, now: _draw_person(rng),
    "email": lambda rng, now: f"{_draw_person(rng).lower().replace(' ', '.')}@{rng.choice(WORDS)}.example",
    "job": _choose("jobs"),
    "city": _choose("cities"),
    "word": _choose("words"),
    "product": lambda rng, now: _join_words(rng, " "),
    "service": lambda rng, now: _join_words(rng, "-"),
    "symbol": lambda rng, now: _join_words(rng, "_"),
    "path": lambda rng, now: "/".join(["", *rng.sample(WORDS, rng.randrange(2, 5))]),
    "state": _choose("states"),
    "status": _choose("statuses"),
    "currency": _choose("currencies"),
    "price": lambda rng, now: round(rng.lognormvariate(3, 1.5), 2),
    "count": lambda rng, now: rng.randrange(1, 200),
    "port": lambda rng, now: rng.randrange(1024, 65536),
    "bytes": lambda rng, now: int(rng.lognormvariate(9, 3)),
    "ms": lambda rng, now: round(rng.lognormvariate(3, 1), 3),
    "temperature": lambda rng, now: round(rng.gauss(15, 9), 1),
    "latitude": lambda rng, now: round(rng.uniform(-90, 90), 5),
    "longitude": lambda rng, now: round(rng.uniform(-180, 180), 5),
    "percent": lambda rng, now: round(100 * rng.random(), 1),
    "enabled": lambda rng, now: rng.random() < 0.7,
    "deleted_at": lambda rng, now: None if rng.random() < 0.8 else now.isoformat(timespec="seconds"),
    "address": lambda rng, now: f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}",
    "version": lambda rng, now: f"{rng.randrange(9)}.{rng.randrange(30)}.{rng.randrange(99)}",
    "comment": lambda rng, now: _fill(rng.choice(TEMPLATES["remarks"]), rng, now),
}
LISTS: dict[str, Field] = {
    "tags": lambda rng, now: rng.sample(WORDS, rng.randrange(1, 6)),
    "vector": lambda rng, now: [round(rng.gauss(0, 1), 4) for _ in range(rng.choice((3, 8, 24)))],
}


def _draw_bytes(rng: Random, now: datetime) -> bytes:
    """Draw what code keeps encoded: random bytes, as keys and compressed data are, or JSON."""
    if rng.random() < 0.7:
        return rng.randbytes(rng.randrange(30, 900))
    return json.dumps(_draw_record(_draw_form(rng, 0), rng, now)).encode()


def _draw_base64(rng: Random, now: datetime) -> str:
    return base64.b64encode(_draw_bytes(rng, now)).decode()


def _draw_dump(rng: Random, now: datetime) -> str:
    data = _draw_bytes(rng, now)
    return "\n".join(f"{start:08x}  {data[start : start + 16].hex(' ')}" for start in range(0, len(data), 16))


BYTES: dict[str, Field] = {
    "hex": lambda rng, now: _draw_bytes(rng, now)[:96].hex(),
    "base64": _draw_base64,
    "lines": lambda rng, now: textwrap.fill(_draw_base64(rng, now), 64),
    "octets": lambda rng, now: textwrap.fill(", ".join(f"0x{byte:02x}" for byte in _draw_bytes(rng, now)), 76),
    "dump": _draw_dump,
    "token": lambda rng, now: ".".join([_draw_base64(rng, now)[:36], _draw_base64(rng, now)[:150], _draw_hex(rng, 43)]),
}


class _Values:
    """The values of a template's names: a field or bytes, drawn anew wherever the name stands."""

    def __init__(self, rng: Random, now: datetime) -> None:
        self._rng, self._now = rng, now

    def __getitem__(self, name: str) -> Any:
        return (FIELDS.get(name) or BYTES[name])(self._rng, self._now)


def _fill(template: str, rng: Random, now: datetime) -> str:
    return template.format_map(_Values(rng, now))


def _draw_times(rng: Random, low: int, high: int) -> Iterator[datetime]:
    """Yield `low` to `high` moments from a random one on, seconds to hours apart."""
    now = datetime(2015, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=rng.uniform(0, 3e8))
    pace = 10 ** rng.uniform(-1, 4)
    for _ in range(rng.randrange(low, high)):
        now += timedelta(seconds=rng.expovariate(1 / pace))
        yield now


def write_json(rng: Random) -> str:
    """Write records of one drawn form: a document with indents, or a record a line."""
    form = _draw_form(rng, rng.randrange(3))
    records = [_draw_record(form, rng, now) for now in _draw_times(rng, 8, 40)]
    if rng.random() < 0.4:
        return "\n".join(json.dumps(record) for record in records)
    by_key = {f"{rng.choice(WORDS)}-{_draw_hex(rng, 6)}": record for record in records}
    page = {rng.choice(WORDS): records, "next": _draw_hex(rng, 16), "total": rng.randrange(10**5)}
    return json.dumps(rng.choice((records, by_key, page)), indent=rng.choice((1, 2, 2, 4)))


def _draw_form(rng: Random, depth: int) -> dict[str, Any]:
    """Draw names, each with the writer of its value: a field, a form, or a list with a form."""
    form: dict[str, Any] = {}
    for name in rng.sample(list(FIELDS), rng.randrange(3, 9)):
        form[f"{rng.choice(WORDS)}_{name}" if rng.random() < 0.4 else name] = FIELDS[name]
    form |= {name: field for name, field in LISTS.items() if rng.random() < 0.3}
    for _ in range(depth):
        inner = _draw_form(rng, depth - 1)
        form[_join_words(rng, "_")] = [inner] if rng.random() < 0.5 else inner
    return form


def _draw_record(form: Any, rng: Random, now: datetime) -> Any:
    if isinstance(form, dict):
        return {name: _draw_record(inner, rng, now) for name, inner in form.items()}
    if isinstance(form, list):
        return [_draw_record(form[0], rng, now) for _ in range(rng.randrange(1, 4))]
    return form(rng, now)


def write_table(rng: Random) -> str:
    """Write a table of fields and of numbers that drift: CSV with one of several separators, Markdown, or aligned."""
    fields = ["date"] * rng.randrange(2) + rng.sample([name for name in FIELDS if name != "date"], rng.randrange(2, 7))
    drifting = {f"{word}_{_draw_hex(rng, 2)}": rng.uniform(1, 1000) for word in rng.sample(WORDS, rng.randrange(5))}
    rows = [[*fields, *drifting]]
    for now in _draw_times(rng, 15, 80):
        drifting = {name: value * rng.lognormvariate(0, 0.05) for name, value in drifting.items()}
        cells = [str(FIELDS[name](rng, now)) for name in fields]
        cells += [f"{value:.3f}" for value in drifting.values()]
        rows.append(cells)
    words, city = rng.sample(WORDS, 3), rng.choice(LISTS_OF_WORDS["cities"])
    title = " ".join([*words, city, str(rng.randrange(1990, 2026))])
    separator = rng.choice(LISTS_OF_WORDS["separators"])
    if separator in ",;\t":
        quoted = [[f'"{cell}"' if separator in cell else cell for cell in row] for row in rows]
        return f"# {title}\n" + "\n".join(separator.join(row) for row in quoted)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = (separator.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return f"### {title}\n\n" + "\n".join(f"| {line} |" if separator == " | " else line for line in lines)


def write_log(rng: Random) -> str:
    """Write a program's log in one of several layouts; errors may bring a stack trace."""
    layout = rng.choice(TEMPLATES["layouts"])
    host = rng.choice(WORDS)
    trace, frame_below = rng.choice(list(TEMPLATES["frames"].items()))
    services = [_join_words(rng, "-") for _ in range(rng.randrange(1, 6))]
    events = TEMPLATES["events"]
    events = rng.sample(events, rng.randrange(5, len(events)))
    lines = []
    for now in _draw_times(rng, 30, 120):
        level = rng.choice(LISTS_OF_WORDS["levels"])
        event = _fill(rng.choice(events), rng, now)
        thread, service = rng.randrange(1, 999), rng.choice(services)
        named = {"now": now, "stamp": now.timestamp(), "thread": thread, "level": level, "event": event}
        lines.append(layout.format(host=host, service=service, **named))
        if level == "ERROR" and rng.random() < 0.4:
            frames = [trace, *[frame_below] * rng.randrange(2, 12), "caused by: {comment}"]
            lines += [_fill(frame, rng, now) for frame in frames]
    return "\n".join(lines)


def write_encoded(rng: Random) -> str:
    """Write code and configuration whose values are bytes in base64 or hex."""
    return "\n\n".join(_fill(rng.choice(TEMPLATES["code"]), rng, now) for now in _draw_times(rng, 4, 12))


def write_conversation(rng: Random, excerpt: Excerpt) -> tuple[tuple[str, str], ...]:
    """Write a system prompt and some exchanges, mostly about excerpts that the user pastes and the assistant quotes."""
    now = next(_draw_times(rng, 1, 2))

    def write_sentences(name: str, most: int) -> list[str]:
        return [_fill(template, rng, now) for template in rng.sample(TEMPLATES[name], rng.randrange(1, most))]

    turns = [("system", " ".join(write_sentences("system", 8)))]
    for _ in range(rng.randrange(2, 7)):
        pasted = excerpt(rng.randrange(400, 3000)) if rng.random() < 0.7 else ""
        turns.append(("user", "\n\n".join([*write_sentences("asked", 3), *([pasted] if pasted else [])])))
        lines = [line for line in pasted.splitlines() if line.strip()]
        quoted = [f"> {line[:120]}" for line in lines[rng.randrange(len(lines)) :][:2]] if lines else []
        reply = rng.sample([*write_sentences("replies", 6), *quoted], len(quoted) + 1)
        turns.append(("assistant", "\n\n".join(reply + write_sentences("replies", 3))))
    return tuple(turns)


def write_excerpt(rng: Random, excerpt: Excerpt) -> str:
    """Write an excerpt of another kind under a heading, as a search hands documents to a model."""
    source = rng.choice(LISTS_OF_WORDS["sources"])
    heading = _fill(f"[{source} {{count}}: {{path}}, {{date}}]", rng, next(_draw_times(rng, 1, 2)))
    return f"{heading}\n{excerpt(rng.randrange(600, 5000))}"

"""Timelines as SVG: spans in lanes, measured above simulated, on one axis of milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from commfuse_fx.machine.timeline import Span as Collective

Span = tuple[str, str, float, float]
"""(lane, name, begin, end); seconds from the begin of the step."""

WIDTH, LEFT, RIGHT = 1100, 150, 20
ROW, GAP, HEAD = 20, 4, 26
SAME = 1e-7
"""Seconds that nobody sees in a drawing."""
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#eeca3b", "#72b7b2", "#e45756", "#9d755d")


def blocked_and_sent(collectives: Iterable[Collective], begin: float, end: float) -> list[Span]:
    """Spans of a step that was measured from `begin` to `end`.

    Lanes: "compute", when the step was not blocked in a wait; "blocked", when it was, and for whom;
    "communication", from the start of each collective to its end.
    """
    found = list(collectives)
    spans: list[Span] = []
    reached = begin
    for each in sorted(found, key=lambda each: each.wait_entered):
        if each.wait_entered > reached:
            spans.append(("compute", "compute", reached - begin, each.wait_entered - begin))
        reached = max(reached, each.wait_left)
    if end > reached:
        spans.append(("compute", "compute", reached - begin, end - begin))
    spans += [("blocked", each.name, each.wait_entered - begin, each.wait_left - begin) for each in found]
    spans += [("communication", each.name, each.issued - begin, max(each.end, each.issued) - begin) for each in found]
    return spans


def spans_of_events(events: Iterable[Any]) -> list[Span]:
    """Spans of a simulation's events, which have `name`, `kind`, `stream`, `begin` and `end`.

    Lanes as in `blocked_and_sent`, but for transfers, whose lanes are named after their streams. Compute without a
    gap is one span; handing transfers over is compute.
    """
    spans: list[Span] = []
    lanes = {"compute": "compute", "issue": "compute", "wait": "blocked"}
    for event in sorted(events, key=lambda event: (lanes.get(event.kind) != "compute", event.begin, event.end)):
        lane = lanes.get(event.kind, f"communication {event.stream}")
        name, begin, end = str(event.name), float(event.begin), float(event.end)
        if lane == "compute":
            name = "compute"
            if spans and begin - spans[-1][3] < SAME:
                begin = spans.pop()[2]
        spans.append((lane, name, begin, end))
    return spans


def draw_timelines(title: str, measured: Sequence[Span], simulated: Sequence[Span]) -> str:
    """An SVG drawing of both; a group without spans is left out.

    Lanes stand in the order in which they first appear. Spans that begin below 0 were begun in the step before.
    Spans of one lane that overlap go into rows of their own.
    """
    groups = [(name, spans) for name, spans in (("measured", measured), ("simulated", simulated)) if spans]
    first = min((begin for _, spans in groups for _, _, begin, _ in spans if begin < 0.0), default=0.0)
    last = max((end for _, spans in groups for _, _, _, end in spans), default=0.0) or 1e-3
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    origin = LEFT - first * scale
    parts: list[str] = []
    top = 40
    colors: dict[str, str] = {}
    for group, spans in groups:
        parts.append(_text(10, top + 16, f"{group}: {max(end for _, _, _, end in spans) * 1e3:.1f} ms", bold=True))
        top += HEAD
        for lane in dict.fromkeys(lane for lane, _, _, _ in spans):
            rows = _rows([span for span in spans if span[0] == lane])
            parts.append(_text(10, top + 14, lane))
            for row in rows:
                parts += [_bar(span, top, origin, scale, colors) for span in row]
                top += ROW + GAP
        top += GAP * 3
    bottom = top
    axis: list[str] = []
    for tick in _ticks(last * 1e3):
        x = origin + tick / 1e3 * scale
        axis.append(f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        axis.append(_text(x, bottom + 16, f"{tick:g} ms", middle=True))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 30}" '
    head += 'font-family="sans-serif" font-size="12">'
    sheet = f'<rect width="{WIDTH}" height="{bottom + 30}" fill="#ffffff"/>'
    return "\n".join([head, sheet, _text(10, 22, title, bold=True), *axis, *parts, "</svg>"]) + "\n"


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Each span in the first row that is free when it begins."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span[2], span[3])):
        for row in rows:
            if row[-1][3] <= span[2]:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def _bar(span: Span, top: int, origin: float, scale: float, colors: dict[str, str]) -> str:
    _, name, begin, end = span
    color = colors.setdefault(name, COLORS[len(colors) % len(COLORS)])
    width = max((end - begin) * scale, 0.5)
    x = origin + begin * scale
    hint = escape(f"{name}: {begin * 1e3:.3f} to {end * 1e3:.3f} ms")
    bar = f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{ROW}" fill="{color}"><title>{hint}</title></rect>'
    # About 7 pixels a letter: a name that does not fit is left to the hint.
    return bar + (_text(x + 4, top + 14, name, fill="#ffffff") if len(name) * 7 + 8 < width else "")


def _ticks(longest: float) -> list[float]:
    """Between 4 and 10 round numbers from 0 to `longest`."""
    step = 1e-6
    while True:
        for factor in (1, 2, 5):
            if longest / (step * factor) < 10:
                return [round(step * factor * number, 9) for number in range(int(longest / (step * factor)) + 1)]
        step *= 10


def _text(x: float, y: float, text: str, bold: bool = False, middle: bool = False, fill: str = "#222222") -> str:
    style = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if middle else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{style}>{escape(text)}</text>'

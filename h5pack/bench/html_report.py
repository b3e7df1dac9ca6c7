"""A bench's report as one HTML page that needs nothing else."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable
from html import escape

from h5pack.bench.figure import svg_figure
from h5pack.bench.html_style import STYLE
from h5pack.bench.report import BenchReport, Recommendation
from h5pack.bench.result_file import write_result
from h5pack.bench.statements import (
    INTERRUPTED,
    NO_RECOMMENDATION,
    advice,
    facts,
    headline,
    legend,
    recommended_facts,
    unmeasured,
    version_words,
)
from h5pack.bench.tables import NUMBERS, Entry, Row, Table, all_tables, loss_table
from h5pack.bench.wording import plain
from h5pack.version import __version__

_CHOSEN, _ALIKE = "★", "≈"
# Neither scripts nor anything from elsewhere, whatever a path may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def html_report(report: BenchReport, made: datetime.datetime | None = None) -> str:
    """A report as an HTML page: recommendation, picture, tables, notes, machine.

    Parameters
    ----------
    report : BenchReport
    made : datetime, optional
        When; None: now.

    Raises
    ------
    OptionsError
        If there is no matplotlib, which draws the picture.
    """
    made = datetime.datetime.now().astimezone() if made is None else made
    parts = [
        "" if report.complete else f'<p class="banner">{_text(INTERRUPTED)}</p>',
        f"<h1>{_text(headline(report))}</h1>",
        _pairs(facts(report)),
        _recommendation(report.recommendation, report),
        _figure(report),
        *(_table(table) for table in all_tables(report)),
        _section("What the tables say", _pairs(legend(report, _CHOSEN, _ALIKE))),
        _section("Not measured", _items(unmeasured(report))),
        _foreign(report),
        _section("Notes", _items(report.notes)),
        _section("Versions", f'<p class="quiet">{_text(version_words(report.machine))}</p>'),
        f"<footer>Made by h5pack bench {_text(__version__)}, {made:%Y-%m-%d %H:%M %Z}</footer>",
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>h5pack bench: {_text(report.subject)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def write_html(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Write a report's page into a file; it is there whole, or not at all.

    Raises
    ------
    OptionsError
        If there is no matplotlib, or the file cannot be written.
    """
    write_result(path, html_report(report).encode("utf-8", "backslashreplace"))


def _text(text: str) -> str:
    return escape(plain(text))


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{_text(title)}</h2>\n{content}\n</section>" if content else ""


def _items(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _pairs(found: Iterable[tuple[str, str]]) -> str:
    """Names and texts; a name that comes again is not said again."""
    lines, last = [], ""
    for name, text in found:
        lines.append(f"<dt>{'' if name == last else _text(name)}</dt><dd>{_text(text)}</dd>")
        last = name
    return f"<dl>{''.join(lines)}</dl>" if lines else ""


def _code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>" if text else ""


def _recommendation(chosen: Recommendation | None, report: BenchReport) -> str:
    if chosen is None:
        return f'<section class="card"><p>{_text(NO_RECOMMENDATION)}</p></section>'
    return "\n".join(
        (
            f'<section class="card">\n<p><strong>{_text(advice(chosen))}</strong></p>',
            _pairs(recommended_facts(report, chosen)),
            _items(chosen.reasons),
            _code(chosen.command),
            _code(chosen.code),
            "</section>",
        )
    )


def _figure(report: BenchReport) -> str:
    if not any(one.speeds for one in report.measurements):
        return ""
    picture = svg_figure(report).replace("<svg ", f'<svg role="img" aria-label="{_text(headline(report))}" ', 1)
    return f"<figure>\n<div>{picture}</div>\n</figure>"


def _foreign(report: BenchReport) -> str:
    """What is wrong with a file of other making, what that costs, and what mends it."""
    loss = loss_table(report)
    parts = [
        _section(f"Faults of {report.subject}", _items(report.faults)),
        "" if loss is None else _table(loss),
        "" if report.cure is None else _section("Cure", _code(report.cure)),
    ]
    return "\n".join(part for part in parts if part)


def _table(table: Table) -> str:
    highest = max((entry.value or 0.0 for row in table.rows for entry in row.entries), default=0.0)
    firsts, at = set(), 0
    for _, heads in table.groups:
        firsts.add(at)
        at += len(heads)
    kinds = ['<{} class="lead">' if head not in NUMBERS else "<{}>" for head in table.lead]
    lead = "".join(kind.format("th") + f"{_text(head)}</th>" for kind, head in zip(kinds, table.lead, strict=True))
    names = [head for _, heads in table.groups for head in heads]
    heads_line = "".join(
        f'<th scope="col"{_first(number, firsts)}>{_text(head)}</th>' for number, head in enumerate(names)
    )
    titles = "".join(
        f'<th class="group" scope="colgroup" colspan="{len(heads)}">{_text(title)}</th>'
        for title, heads in table.groups
    )
    over = f'<tr><td class="lead" colspan="{len(table.lead)}"></td>{titles}</tr>'
    rows = "\n".join(_row(row, kinds, highest, firsts) for row in table.rows)
    about = f'<p class="quiet">{_text(table.about)}</p>\n' if table.about else ""
    head = f"{over if any(title for title, _ in table.groups) else ''}<tr>{lead}{heads_line}</tr>"
    return _section(
        f"{table.title[0].upper()}{table.title[1:]}",
        f'{about}<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>',
    )


def _first(number: int, firsts: set[int]) -> str:
    return ' class="first"' if number in firsts else ""


def _row(row: Row, kinds: list[str], highest: float, firsts: set[int]) -> str:
    mark = {">": f" {_CHOSEN}", "=": f" {_ALIKE}"}.get(row.mark, "")
    texts = [_text(text) for text in row.lead]
    texts[0] += mark
    lead = "".join(kind.format("td") + f"{text}</td>" for kind, text in zip(kinds, texts, strict=True))
    entries = "".join(_entry(entry, highest, number in firsts) for number, entry in enumerate(row.entries))
    kind = ' class="chosen"' if row.mark == ">" else ""
    return f"<tr{kind}>{lead}{entries}</tr>"


def _entry(entry: Entry, highest: float, first: bool) -> str:
    names = " ".join(name for name, wanted in (("speed", entry.value is not None), ("first", first)) if wanted)
    kind = f' class="{names}"' if names else ""
    part = f' style="--part:{entry.value / highest:.3f}"' if entry.value is not None and highest > 0 else ""
    extra = f" <small>{_text(entry.extra)}</small>" if entry.extra else ""
    return f"<td{kind}{part}>{_text(entry.text)}{extra}</td>"

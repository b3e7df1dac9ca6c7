"""A bench's report as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from h5pack.bench.report import BenchReport
from h5pack.bench.statements import (
    INTERRUPTED,
    NO_RECOMMENDATION,
    advice,
    facts,
    legend,
    recommended_facts,
    unmeasured,
)
from h5pack.bench.tables import NUMBERS, Table, all_tables, loss_table
from h5pack.bench.wording import plain

WIDTH = 100
_GAP = "  "
_NAME = 12


def bench_text(report: BenchReport) -> str:
    """A bench's report in lines of about 100 columns.

    What a bench did not come to measure is "-", with the reason below; a report that is not complete says so first.
    """
    blocks: list[list[str]] = [[] if report.complete else [INTERRUPTED]]
    blocks[0] += _named([(name if name != "subject" else "bench", text) for name, text in facts(report)])
    for table in all_tables(report):
        blocks.append(table_lines(table))
    blocks.append(_named(legend(report, ">", "=")))
    blocks.append(_items("not measured", unmeasured(report)))
    blocks.append(_items(f"faults of {plain(report.subject)}", map(plain, report.faults)))
    loss = loss_table(report)
    if loss is not None:
        blocks.append(table_lines(loss))
    if report.cure is not None:
        blocks.append([f"{'cure':<{_NAME}}{report.cure}"])
    blocks.append(_items("notes", map(plain, report.notes)))
    blocks.append(_recommendation(report))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def table_lines(table: Table) -> list[str]:
    """A table in lines of at most `WIDTH`, as far as that can be: columns that do not fit beside go below."""
    lead, parts = _lead_columns(table), _parts(table)
    lines = [table.title]
    if table.about:
        lines += _wrapped(table.about, "")
    for number, band in enumerate(_bands([len(part[0]) for part in parts], WIDTH - len(lead[0]))):
        if number:
            lines.append("")
        if any(table.groups[group][0] for group in band):
            lines.append(" " * len(lead[0]) + "".join(parts[group][0] for group in band).rstrip())
        for begin, *rest in zip(lead, *(parts[group][1:] for group in band), strict=True):
            lines.append("".join([begin, *rest]).rstrip())
    return lines


def _lead_columns(table: Table) -> list[str]:
    """The lines' beginnings, all of one width: the first is that of the heads."""
    lines = [("", table.lead), *((row.mark, row.lead) for row in table.rows)]
    widths = [max(len(cells[column]) for _, cells in lines) for column in range(len(table.lead))]
    texts = []
    for mark, cells in lines:
        # Names begin alike; numbers end alike.
        aligned = [
            text.rjust(width) if head in NUMBERS else text.ljust(width)
            for head, text, width in zip(table.lead, cells, widths, strict=True)
        ]
        texts.append(f"{mark:<1} {_GAP.join(aligned)}")
    return texts


def _columns(table: Table) -> list[tuple[str, int, int]]:
    """Of each column its head, the width of its texts, and that of what stands beside them."""
    columns = []
    for column, head in enumerate(head for _, heads in table.groups for head in heads):
        entries = [row.entries[column] for row in table.rows]
        extra = max((len(entry.extra) + 1 for entry in entries if entry.extra), default=0)
        text = max((len(entry.text) for entry in entries), default=0)
        columns.append((head, max(text, len(head) - extra), extra))
    return columns


def _parts(table: Table) -> list[list[str]]:
    """Of each group of columns its lines, all of one width: title, heads, and one for each row."""
    columns, parts, at = _columns(table), [], 0
    for title, heads in table.groups:
        lines = ["", *[""] * len(table.rows)]
        for column, (head, text, extra) in enumerate(columns[at : at + len(heads)], at):
            lines[0] += _GAP + head.rjust(text + extra)
            for number, row in enumerate(table.rows, 1):
                entry = row.entries[column]
                lines[number] += _GAP + entry.text.rjust(text) + f" {entry.extra}".ljust(extra)[:extra]
        at += len(heads)
        width = max(len(lines[0]), len(title) + len(_GAP))
        over = f" {title} ".center(width - len(_GAP), "-") if title and len(heads) > 1 else title.rjust(width - 2)
        parts.append([_GAP + over, *(line.rjust(width) for line in lines)])
    return parts


def _bands(sizes: list[int], room: int) -> list[range]:
    """Which groups of columns stand beside each other: about as many in each band, and as few bands as can be."""
    for count in range(1, len(sizes) + 1):
        each = -(-len(sizes) // count)
        bands = [range(begin, min(begin + each, len(sizes))) for begin in range(0, len(sizes), each)]
        if all(sum(sizes[group] for group in band) <= room for band in bands):
            return bands
    return [range(group, group + 1) for group in range(len(sizes))]


def _named(found: Iterable[tuple[str, str]], indent: str = "") -> list[str]:
    """Names and their texts in two columns."""
    lines = []
    last = ""
    for name, text in found:
        lines += _wrapped(text, indent + ("" if name == last else name).ljust(_NAME))
        last = name
    return lines


def _items(title: str, texts: Iterable[str]) -> list[str]:
    """Sentences under a title; nothing where there are none."""
    lines = [line for text in texts for line in _wrapped(text, "  - ")]
    return [title, *lines] if lines else []


def _wrapped(text: str, begin: str) -> list[str]:
    """A text in lines of at most `WIDTH`, the first behind `begin`, the others as far to the right."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * max(2, len(begin)),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _recommendation(report: BenchReport) -> list[str]:
    chosen = report.recommendation
    if chosen is None:
        return [NO_RECOMMENDATION]
    lines = ["recommendation", *_wrapped(advice(chosen), "  ")]
    lines += _named(recommended_facts(report, chosen), "  ")
    lines += [line for reason in chosen.reasons for line in _wrapped(plain(reason), "  - ")]
    for text in (chosen.command, chosen.code):
        if text:
            lines += ["", textwrap.indent(text, "    ")]
    return lines

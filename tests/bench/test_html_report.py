"""A report as one page: well formed, without anything from elsewhere, and with everything escaped."""

from __future__ import annotations

import datetime
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from h5pack.bench import html_report as module
from h5pack.bench.html_report import html_report, write_html
from h5pack.bench.tables import all_tables, loss_table
from tests.bench import reports

DATE = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone.utc)
VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its texts by element, and whether all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open:
            self.texts.append((self.open[-1], data))

    def all(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


@pytest.fixture(scope="module")
def page() -> str:
    return html_report(reports.foreign_report(), DATE)


def test_the_page_is_well_formed_and_needs_nothing_else(page: str) -> None:
    found = Page(page)
    assert found.open == []
    tags = {tag for tag, _ in found.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in found.seen:
        for name, value in attributes.items():
            assert not name.startswith("on"), tag
            if name in ("href", "src", "xlink:href", "action"):
                assert (value or "").startswith("#"), tag
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    (policy,) = (one["content"] for tag, one in found.seen if one.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_it_says_all_that_was_found(page: str) -> None:
    report = reports.foreign_report()
    found = Page(page)
    assert found.all("title") == ["h5pack bench: /data/celeba.h5"]
    assert found.all("h1")[0].startswith("Chunks of 36 rows (4 MiB) give 76,200 images/s")
    chosen = report.recommendation
    assert chosen is not None
    assert found.all("code") == [chosen.command, chosen.code, report.cure]
    items = found.all("li")
    assert {*chosen.reasons, *report.faults, *report.notes} <= set(items)
    assert any("202,599 images" in text for text in found.all("dd"))
    assert any("h5py 3.16.0" in text for text in found.all("p"))
    assert found.all("footer")[0].endswith("2026-01-02 03:04 UTC")
    assert page.count("<svg") == 1


def test_every_entry_of_every_table_is_there(page: str) -> None:
    report = reports.foreign_report()
    loss = loss_table(report)
    assert loss is not None
    wanted = [entry.text for table in (*all_tables(report), loss) for row in table.rows for entry in row.entries]
    cells = [text.strip() for text in Page(page).all("td")]
    for text in set(wanted):
        assert cells.count(text) >= wanted.count(text)
    titles = Page(page).all("h2")
    assert {f"{table.title[0].upper()}{table.title[1:]}" for table in all_tables(report)} <= set(titles)


def test_bars_are_parts_of_the_highest_figure_of_their_table(page: str) -> None:
    parts = [float(part) for part in re.findall(r'style="--part:([\d.]+)"', page)]
    tables = [*all_tables(reports.foreign_report()), loss_table(reports.foreign_report())]
    with_speeds = [
        table for table in tables if table is not None and any(one.value for row in table.rows for one in row.entries)
    ]
    assert parts.count(1.0) == len(with_speeds)
    assert 0 < min(parts) <= max(parts) == 1.0


def test_the_recommended_lines_are_marked(page: str) -> None:
    marked = re.findall(r'<tr class="chosen"><td class="lead">(.*?)</td>', page)
    assert set(marked) == {"36 rows ★"}
    assert "<td class=\"lead\">9 rows ≈</td>" in page  # fmt: skip


def test_everything_of_others_is_escaped() -> None:
    evil = "</title></svg><script>alert(1)</script><!--\"'&\x1b[0m\n\udc80"
    report = reports.foreign_report()
    report.subject = evil
    report.notes = [evil]
    report.faults = (evil,)
    report.cure = evil
    report.machine = {"processor": evil, "file_system": evil, "packages": {evil: evil}}
    report.measurements[0] = reports.failed(report.files[0], "sequential", "direct", "hot", evil)
    report.recommendation = reports.recommended(report.files[4], reasons=(evil,), command=evil, code=evil)
    found = Page(html_report(report, DATE))
    assert found.open == []
    assert "script" not in {tag for tag, _ in found.seen}
    assert found.all("code")[0] == evil
    assert any(text.startswith("</title></svg><script>") for text in found.all("li"))


def test_a_page_of_a_bench_that_was_stopped() -> None:
    found = Page(html_report(reports.empty(), DATE))
    assert found.open == []
    assert found.all("p")[0].startswith("interrupted: ")
    assert any(text.startswith("no recommendation") for text in found.all("p"))
    assert not [tag for tag, _ in found.seen if tag in ("svg", "table", "figure")]


def test_a_page_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "svg_figure", lambda report: "<svg ></svg>")
    report = reports.small_report()
    report.recommendation = reports.recommended(report.files[3], code="a = '\udc80ä'")
    write_html(report, tmp_path / "bench.html")
    assert os.listdir(tmp_path) == ["bench.html"]
    text = (tmp_path / "bench.html").read_text(encoding="utf-8")
    assert "a = &#x27;\\udc80ä&#x27;" in text
    assert text.startswith("<!doctype html>")

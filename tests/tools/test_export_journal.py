"""The journal tells what was written, wherever a kill cut it off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from h5pack.errors import ResumeError
from h5pack.tools.export_journal import ExportJournal
from h5pack.tools.export_rows import ExportPart

HEADER = {"h5pack": "1", "options": {"format": "png"}, "source": 7, "overwrite": False}


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[ExportJournal]:
    descriptor = os.open(tmp_path / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield ExportJournal(str(tmp_path / "journal"), descriptor)
    os.close(descriptor)


def part(first: int, count: int) -> ExportPart:
    found = ExportPart()
    for index in range(first, first + count):
        found.add(index, 100 + index, 2**32 - 1 - index)
    return found


def test_cut_off_anywhere(journal: ExportJournal, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal.start(HEADER)
    edges = [path.stat().st_size]
    for number in range(3):
        journal.append(part(4 * number, 4))
        edges.append(path.stat().st_size)
    journal.append(ExportPart(reasons={12: "truncated"}))
    assert path.stat().st_size == edges[-1]
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        whole = sum(length >= edge for edge in edges)
        assert journal.header() == (HEADER if whole else None)
        files = journal.written(13)
        sizes = [100 + index if index < 4 * (whole - 1) else -1 for index in range(13)]
        assert files.sizes.tolist() == sizes
        assert files.checksums[files.sizes >= 0].tolist() == [
            2**32 - 1 - i for i, size in enumerate(sizes) if size >= 0
        ]
        # What comes later is found again.
        journal.append(part(12, 1))
        assert journal.written(13).sizes.tolist() == [*sizes[:12], 112]


def test_a_changed_byte_spoils_its_line_alone(journal: ExportJournal, tmp_path: Path) -> None:
    journal.start(HEADER)
    for number in range(3):
        journal.append(part(number, 1))
    lines = (tmp_path / "journal").read_bytes().split(b"\n")
    lines[3] = lines[3].replace(b"101", b"991")
    (tmp_path / "journal").write_bytes(b"\n".join(lines))
    assert journal.written(3).sizes.tolist() == [100, -1, 102]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("h5pack", "2", "begun with another version of h5pack; give the same again"),
        ("options", {"format": "jpeg"}, "begun with other options; give the same again"),
        ("source", 8, r"begun with another file \(or the file has changed since\); give the same again"),
    ],
)
def test_another_export_is_refused(journal: ExportJournal, name: str, value: object, message: str) -> None:
    wanted = {key: HEADER[key] for key in ("h5pack", "options", "source")}
    journal.start(HEADER)
    assert journal.require(wanted) == HEADER
    with pytest.raises(ResumeError, match=message):
        journal.require({**wanted, name: value})
    journal.start({**HEADER, name: value})
    assert journal.require({**wanted, name: value})[name] == value
    assert journal.written(2).sizes.tolist() == [-1, -1]

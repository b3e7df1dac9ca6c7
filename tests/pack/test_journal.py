"""The journal: what was appended is read back, whatever happened behind it."""

from __future__ import annotations

import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from h5pack.errors import OutputBusyError, ResumeError
from h5pack.pack import journal as journal_module
from h5pack.pack.encode import ENCODED_IMAGE, EncodedRecord
from h5pack.pack.journal import Journal, JournalWriter, RowRecord, RowResults
from h5pack.pack.output import Output
from h5pack.pack.survey import Survey
from tests.crashing import interrupt


def record(start: int, rows: int = 5, max_gap: int = 1, sampled: int = 1, channels: int = 3) -> RowRecord:
    random = np.random.default_rng(start)
    return RowRecord(
        start + np.cumsum(random.integers(1, max_gap + 1, rows)) - 1, random.integers(0, 2, rows).astype(np.bool_),
        random.integers(0, 2**32, rows, np.uint32), start + np.arange(sampled),
        random.integers(0, 2**64, (sampled, 2, channels), np.uint64),
        {start + 1: "truncated", start + 2: "größer als \udcff erlaubt"},
    )  # fmt: skip


def same(one: RowRecord, other: RowRecord) -> bool:
    return one.reasons == other.reasons and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        and getattr(one, name).shape == getattr(other, name).shape
        for name in ("rows", "packed", "checksums", "sampled", "sums")
    )


@pytest.mark.parametrize("rows", [0, 1, 2, 12])
@pytest.mark.parametrize("max_gap", [1, 9])
@pytest.mark.parametrize(("start", "sampled", "channels"), [(0, 0, 3), (7, 3, 1), (2**50, 2, 3)])
def test_a_record_is_read_back_as_it_was(start: int, rows: int, max_gap: int, sampled: int, channels: int) -> None:
    made = record(start, rows, max_gap, sampled, channels)
    assert same(RowRecord.decode(made.encode()), made)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "o.h5.partial.journal")
    journal.start({"created": "now"}, np.arange(7, dtype=np.uint64))
    return journal


def write(journal: Journal, *appended: RowRecord) -> Path:
    before = set(journal.folder.glob("rows-*.log"))
    writer = JournalWriter(str(journal.folder))
    for each in appended:
        writer.append(each.encode())
    writer.close()
    (path,) = set(journal.folder.glob("rows-*.log")) - before
    return path


def starts(journal: Journal) -> list[int]:
    return sorted(int(found.rows[0]) for found in journal.records())


def test_plan_and_prints_are_kept_until_it_starts_again(journal: Journal) -> None:
    for plan in ({"created": "now"}, {"created": "later"}):
        assert journal.plan() == plan
        assert journal.fingerprints().tolist() == list(range(7))
        assert (starts(journal), journal.written()) == ([], None)
        write(journal, record(0))
        journal.save_written(record(0))
        journal.start({"created": "later"}, np.arange(7, dtype=np.uint64))


def test_a_journal_without_a_plan_has_none(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Journal(journal.folder / "nowhere").plan() is None
    for step in ("shutil.rmtree", "write_atomically"):
        with monkeypatch.context() as patch:
            patch.setattr(f"h5pack.pack.journal.{step}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                journal.start({}, np.zeros(3, np.uint64))
        assert journal.plan() is None


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"created"'])
def test_a_damaged_plan_is_an_error_and_no_silent_restart(journal: Journal, content: bytes) -> None:
    (journal.folder / "plan.json").write_bytes(content)
    with pytest.raises(ResumeError):
        journal.plan()


@pytest.mark.parametrize("content", [None, b"1234567"])
def test_damaged_fingerprints_are_an_error(journal: Journal, content: bytes | None) -> None:
    path = journal.folder / "prints.bin"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ResumeError):
        journal.fingerprints()


def test_leftovers_are_removed_if_the_note_of_replaced_shards_is_damaged(tmp_path: Path) -> None:
    output = Output(tmp_path / "o.h5")
    Journal(output.journal).start({}, np.zeros(3, np.uint64))
    (output.journal / "replaced.json").write_bytes(b"\xff")
    output.remove_leftovers()
    assert list(tmp_path.iterdir()) == []


def test_writers_of_one_process_at_once(journal: Journal) -> None:
    def work(first: int) -> None:
        writer = JournalWriter(str(journal.folder))
        for start in range(first, first + 500, 5):
            writer.append(record(start).encode())
        writer.close()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (0, 500, 1_000)))
    write(journal)
    assert starts(journal) == list(range(0, 1_500, 5))
    assert all(same(each, record(int(each.rows[0]))) for each in journal.records())


def test_a_last_record_that_is_cut_anywhere_is_left_out(journal: Journal) -> None:
    path = write(journal, record(0), record(5))
    kept = path.stat().st_size
    whole = write(journal, record(0), record(5), record(10)).read_bytes()
    for length in range(kept, len(whole)):
        path.write_bytes(whole[:length])
        assert starts(journal) == [0, 0, 5, 5, 10]
    path.write_bytes(whole)
    assert starts(journal) == [0, 0, 5, 5, 10, 10]


def test_reading_stops_at_a_flipped_byte_anywhere(journal: Journal) -> None:
    path = write(journal, record(10), record(15), record(20))
    whole = path.read_bytes()
    length = len(whole) // 3
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert starts(journal) == [10, 15, 20][: place // length], f"byte {place}"


@pytest.mark.parametrize("tail", [b"\0" * 400, b"\xff" * 400, struct.pack("<III", 0x4A503548, 2**32 - 1, 0)])
def test_junk_behind_the_last_record_is_left_out(journal: Journal, tail: bytes) -> None:
    """After a power cut a file may have grown without its content."""
    path = write(journal, record(0))
    path.write_bytes(path.read_bytes() + tail)
    assert starts(journal) == [0]


def test_records_of_an_earlier_layout_are_left_out(journal: Journal) -> None:
    path = write(journal, record(0))
    journal.save_written(record(0))
    earlier = struct.pack("<I", 0x4B503548)
    for one in (path, journal.folder / "written.bin"):
        one.write_bytes(earlier + one.read_bytes()[4:])
    assert starts(journal) == []
    assert journal.written() is None


def test_another_layout_of_payloads_needs_another_magic_number() -> None:
    """If this fails because a layout changed, change the magic number, too, and then the numbers here."""
    survey = Survey.of(2)
    survey.heights[:], survey.reasons = 7, {9: "truncated"}
    columns = ("heights", "widths", "decode_paths", "fingerprints", "orientations", "kept_bytes")
    encoded = EncodedRecord(np.ones(3, ENCODED_IMAGE), {4: "truncated"})
    sums, checksums = np.arange(6, dtype=np.uint64).reshape(1, 2, 3), np.arange(3, dtype=np.uint32)
    rows = RowRecord(
        np.array([5, 6, 9]), checksums > 0, checksums, np.array([6]), sums, {5: "truncated"}, checksums.reshape(1, 3)
    )
    payloads = [rows.encode(), survey.encode(8, columns), encoded.encode()]
    assert (journal_module._MAGIC, *map(zlib.crc32, payloads)) == (0x4B503552, 0x6DCF18A1, 0xF0EAC933, 0xB39A19B2)


def test_a_full_disk_ends_the_writer(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(str(journal.folder))
    writer.append(record(0).encode())
    write_some = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write_some(descriptor, data[:20]))
    with pytest.raises(OSError, match="No space"):
        writer.append(record(5).encode())
    monkeypatch.undo()
    writer.close()
    assert starts(journal) == [0]


def test_what_is_written_is_noted_whole_or_not_at_all(journal: Journal) -> None:
    noted = record(0, rows=40)
    journal.save_written(noted)
    found = journal.written()
    assert same(found, noted)
    path = journal.folder / "written.bin"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        assert journal.written() is None
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert journal.written() is None


def test_an_open_writer_is_waited_for_or_reported(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    write(journal, record(0))
    writer = JournalWriter(str(journal.folder))
    with monkeypatch.context() as patch:
        patch.setattr("h5pack.pack.journal._WAIT_SECONDS", 0.05)
        with pytest.raises(OutputBusyError):
            starts(journal)
    monkeypatch.setattr("h5pack.system.files.time.sleep", lambda _: writer.close())
    # A second wait would close the writer again, which is an error.
    assert starts(journal) == [0]


def test_an_image_that_is_packed_later_has_no_reason() -> None:
    results = RowResults(3, 3)
    for packed in ([False, True, False], [True, True, False]):
        found, none = np.array(packed), np.zeros(0, np.int64)
        reasons = {row: "truncated" for row in range(3) if not packed[row]}
        sums = np.zeros((0, 2, 3), np.uint64)
        results.add(RowRecord(np.arange(3), found, np.zeros(3, np.uint32), none, sums, reasons))
    assert results.record().reasons == {2: "truncated"}
    assert results.record().packed.tolist() == [True, True, False]

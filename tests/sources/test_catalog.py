"""The catalog: name tables, limits, checksums, and the reader of files."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from h5pack.errors import RejectedImageError, SourceError
from h5pack.read.hdf5 import encode_text
from h5pack.sources.catalog import Catalog, NameTable, Reject, one_split
from h5pack.sources.reader import FileReader, SourceReader

NAMES = st.binary(min_size=1, max_size=12).map(lambda data: os.fsdecode(data.replace(b"\0", b"0")))


def catalog(count: int = 10, **settings: object) -> Catalog:
    names, ids = one_split(count)
    return Catalog("flat", FileReader("/"), NameTable.of(f"{n}.jpg" for n in range(count)), names, ids, **settings)  # type: ignore[arg-type]


def test_names_are_refused_if_python_decodes_them_with_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")  # as with LC_ALL=en_US
    assert list(NameTable.of(["a.jpg"])) == ["a.jpg"]
    with pytest.raises(SourceError, match="PYTHONUTF8=1"):
        NameTable.of(["é.jpg"])


@settings(max_examples=33, deadline=None)
@given(st.lists(NAMES, max_size=12))
@example(["\udcff/größe/\udce9.jpg", "雪"])
@example(["a.jpg", "", "b/c.png"])
def test_a_name_table_gives_back_every_name(names: list[str]) -> None:
    table = NameTable.of(iter(names))
    assert len(table) == len(names)
    assert list(table) == names
    assert [table[index] for index in range(len(names))] == names
    assert [table[index] for index in range(-len(names), 0)] == names
    assert table.at(np.arange(len(names))[::-2]) == names[::-2]
    assert table.at(range(len(names))) == names
    for index in (len(names), -len(names) - 1):
        with pytest.raises(IndexError):
            table[index]
    assert list(pickle.loads(pickle.dumps(table))) == names
    for block in (1, 3, 99):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("h5pack.sources.catalog._BLOCK_NAMES", block)
            taken = table.take(np.arange(len(names))[::-2])
            encoded = list(table.encoded())
        assert list(taken) == names[::-2]
        assert encoded == [encode_text(name) for name in names]


@settings(max_examples=33, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_a_limit_takes_evenly_spaced_images_in_order(count: int, limit: int) -> None:
    kept = [int(name[:-4]) for name in catalog(count).evenly_spaced(limit).names]
    assert len(kept) == min(count, limit)
    assert kept[0] == 0
    gaps = set(np.diff(kept).tolist())
    assert max(gaps, default=1) - min(gaps, default=1) <= 1
    assert min(gaps, default=1) >= 1
    assert count - kept[-1] <= -(-count // min(count, limit))


def test_only_a_limit_that_leaves_images_out_leaves_rejects_out() -> None:
    images = catalog(5, rejects=(Reject("x", "y"),))
    assert images.evenly_spaced(4).rejects == ()
    assert all(images.evenly_spaced(limit) is images for limit in (5, 6, 2**62, 2**80))


def test_taking_keeps_rows_together() -> None:
    noted = {"rejects": (Reject("x", "y"),), "ignored": {"hidden": 3}}
    part = catalog(5, labels=np.arange(5), fields={"weight": np.arange(5) / 2}, **noted).take(np.array([4, 1]))
    assert list(part.names) == ["4.jpg", "1.jpg"]
    np.testing.assert_array_equal(part.labels, [4, 1])
    assert part.fields["weight"].tolist() == [2.0, 0.5]
    assert {"rejects": part.rejects, "ignored": part.ignored} == noted


def test_the_checksum_of_the_tables_sees_every_change() -> None:
    tables = {"labels": np.arange(4), "label_names": ("a", "b", "c", "\udcff")}
    changes: list[dict[str, object]] = [
        *({}, {"labels": np.array([0, 1, 3, 2])}, {"labels": None}, {"label_names": ("a", "b", "c", "e")}),
        *({"fields": {"f": np.zeros(4)}}, {"fields": {"g": np.zeros(4)}}, {"fields": {"f": np.ones(4)}}),
        {"rejects": (Reject("4.jpg", "no row"),)},
    ]
    checksums = [catalog(4, **{**tables, **change}).tables_checksum() for change in [*changes, {}]]
    assert (len(set(checksums)), checksums[0]) == (len(changes), checksums[-1])


def test_files_are_read_whole_and_by_their_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(256)) * 100
    (tmp_path / "x.jpg").write_bytes(content)
    (tmp_path / "empty").touch()
    os.utime(tmp_path / "x.jpg", ns=(5, 1_234_567_890_123_456_789))
    reader = FileReader(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    assert reader.read(0, "x.jpg") == content
    assert reader.read(0, str(tmp_path / "x.jpg")) == content
    assert reader.head("x.jpg", 10) == (content[:10], len(content), 1_234_567_890_123_456_789)
    assert reader.read(0, "empty") == b""
    with reader.open("x.jpg") as stream:
        assert stream.read(3) == content[:3]
    os.mkfifo(tmp_path / "pipe.jpg")
    for name in (".", "pipe.jpg", "/dev/null"):
        with pytest.raises(RejectedImageError):
            reader.read(0, name)
    assert len(os.listdir("/proc/self/fd")) == before
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, count: read(descriptor, min(count, 9_000)))
    assert reader.read(0, "x.jpg") == content


def test_missing_files_differ_from_failing_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    reader = FileReader(str(tmp_path))
    for name in ("missing", "file/below", "loop", "x" * 300):
        with pytest.raises(RejectedImageError):
            reader.survey(0, name, 100)
    for error in (OSError(errno.EIO, "input/output error"), OSError("no number")):
        monkeypatch.setattr(os, "open", Mock(side_effect=error))
        with pytest.raises(SourceError):
            reader.survey(0, "file", 100)


def test_arrays_of_one_size_are_never_surveyed_again() -> None:
    class Arrays(SourceReader):
        def uniform_size(self) -> tuple[int, int] | None:
            return 3, 4

    assert SourceReader().changing(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert Arrays().changing(np.arange(5)).tolist() == []

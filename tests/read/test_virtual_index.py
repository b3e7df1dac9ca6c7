"""Virtual datasets are read directly from their sources' chunks, with the same rows as h5py returns."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import DamagedRowsError, PackChangedError, ReadError
from h5pack.read.virtual_index import VirtualIndex
from tests.makers import hdf5_file
from tests.read import files
from tests.read.files import Mapped, engine_of, numbers, require_rows, write, write_virtual

CODED = ["gzip", "whole_gzip", "split"]
# Rows that were never filled are undefined when h5py reads them through a virtual dataset.
RAW = [storage for storage in files.WHOLE_ROWS if storage != "no_holes_filled"]
FORMS = {"raw": RAW, "coded": CODED, "mixed": [*RAW, *CODED, "compact"]}


SHAPE = (10, 30, 30)
ALL = slice(None)


def taken(
    at: int, file: str, shape: tuple[int, ...], first: int = 0, rows: int | None = None, name: str = "x"
) -> Mapped:
    """A mapping of `rows` rows (None: all) from row `first` on of a source of this shape."""
    rows = shape[0] if rows is None else rows
    return Mapped(slice(at, at + rows), file, shape, slice(first, first + rows), name)


def of_library(path: Path, name: str = "x") -> npt.NDArray[Any]:
    """Return all rows as h5py reads them, in native byte order."""
    with h5py.File(path) as file:
        values: npt.NDArray[Any] = file[name][()]
    return values.astype(values.dtype.newbyteorder("="))


@st.composite
def virtual_files(draw: st.DrawFn, folder: Path) -> tuple[Path, npt.NDArray[Any], str]:
    """A file whose dataset 'x' is virtual, its values, and the form of its sources."""
    dtype, form = draw(st.sampled_from(files.DTYPES)), draw(st.sampled_from(sorted(FORMS)))
    cut = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    fill = draw(st.sampled_from([0, 1]))
    path, mappings, at = folder / "v.h5", [], 0
    kept: dict[str, npt.NDArray[Any]] = {}
    expected: list[npt.NDArray[Any]] = []
    native = np.dtype(dtype).newbyteorder("=")
    for number in range(draw(st.integers(1, 4))):
        of, storage = draw(st.integers(1, 15)), draw(st.sampled_from(FORMS[form]))
        values = numbers((of, *cut), dtype, number)
        how = {"fill": draw(st.sampled_from([0, 1])), "chunk_rows": draw(st.integers(1, 5))}
        kept[f"s{number}.h5"] = write(folder / f"s{number}.h5", values, storage, **how)
    if draw(st.booleans()):
        kept["."] = write(path, numbers((7, *cut), dtype, 9), "contiguous", name="x0")
    for _ in range(draw(st.integers(0, 6))):
        hole = draw(st.integers(0, 3))
        expected.append(np.full((hole, *cut), fill, native))
        at += hole
        name = draw(st.sampled_from(sorted(kept)))
        first = draw(st.integers(0, len(kept[name]) - 1))
        rows = draw(st.integers(1, len(kept[name]) - first))
        mappings.append(taken(at, name, kept[name].shape, first, rows, "x0" if name == "." else "x"))
        expected.append(kept[name][first : first + rows])
        at += rows
    expected.append(np.full((draw(st.integers(0 if at else 1, 3)), *cut), fill, native))
    joined = np.concatenate(expected)
    nested = draw(st.booleans())
    mappings, name = draw(st.permutations(mappings)), "inner" if nested else "x"
    write_virtual(path, joined.shape, *mappings, dtype=dtype, name=name, fill=fill)
    if nested:
        first = draw(st.integers(0, len(joined) - 1))
        rows = draw(st.integers(1, len(joined) - first))
        inner = joined
        joined = np.concatenate([np.full((2, *cut), 1 - fill, native), inner[first : first + rows], inner[:1]])
        outer = [taken(at, ".", inner.shape, *part, "inner") for at, part in ((2, (first, rows)), (2 + rows, (0, 1)))]
        write_virtual(path, joined.shape, *outer, dtype=dtype, fill=1 - fill)
    return path, joined, form


@settings(max_examples=60)
@given(st.data())
def test_rows_equal_h5pys(data: st.DataObject) -> None:
    with files.drawn_limits(data.draw) as folder:
        path, values, form = data.draw(virtual_files(folder))
        assert np.array_equal(of_library(path), values)
        engine = engine_of(path)
        engine.files.max_open = data.draw(st.integers(1, 5))
        index = engine.indexes["x"]
        if index.library_reason is not None:
            assert "compact" in index.library_reason
        else:
            with h5py.File(path) as file:
                # Without mappings, older versions of h5py create a dataset that is not virtual.
                assert isinstance(index, VirtualIndex) == file["x"].is_virtual
            assert form != "raw" or index.raw
        rows = data.draw(files.row_lists(len(values)))
        files.require_every_read(engine, rows, values[np.array(rows, np.int64)])
        engine.close()


def four_sources(folder: Path, storage: str = "rows") -> npt.NDArray[Any]:
    """A file v.h5 over s0.h5 to s3.h5 of 10 to 13 rows, and its values."""
    kept = [write(folder / f"s{n}.h5", numbers((10 + n, 30, 30), "u1", n), storage) for n in range(4)]
    parts = [taken(at, f"s{n}.h5", kept[n].shape) for n, at in enumerate((0, 10, 21, 33))]
    write_virtual(folder / "v.h5", (46, 30, 30), *parts)
    return np.concatenate(kept)


def test_an_epoch_reads_each_byte_once_and_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = four_sources(tmp_path)
    with caplog.at_level(logging.DEBUG):
        engine = engine_of(tmp_path / "v.h5")
        require_rows(engine, values)
    assert not caplog.records
    chunks, size = 4 + 4 + 4 + 5, values.nbytes
    stats = engine.stats
    assert (stats.rows, stats.chunk_misses, stats.chunk_hits) == (46, chunks, 46 - chunks)
    assert (stats.bytes_wanted, stats.bytes_read, stats.amplification) == (size, size, 1.0)
    assert stats.reads >= 4


def test_sources_that_a_nested_mapping_leaves_out_are_not_opened(tmp_path: Path) -> None:
    values = four_sources(tmp_path)
    write_virtual(tmp_path / "w.h5", (20, 30, 30), taken(0, "v.h5", (46, 30, 30), first=10, rows=20))
    engine = engine_of(tmp_path / "w.h5")
    assert {Path(file.path).name for file in engine.indexes["x"].files} == {"s1.h5", "s2.h5"}
    assert np.array_equal(engine.read_batch("x", np.arange(20)), values[10:30])
    require_rows(engine, values[10:30])


# Shape and dtype of the virtual dataset, and its mappings: rows here, number of the source, rows there (None: all).
OTHER_MAPPINGS: dict[str, tuple[tuple[int, ...], str, list[tuple[Any, int, Any]]]] = {
    "strided": ((5, 30, 30), "u1", [(ALL, 0, np.s_[::2])]),
    "spread": ((20, 30, 30), "u1", [(np.s_[::2], 0, ALL)]),
    "part of rows": ((10, 30, 20), "u1", [(ALL, 0, np.s_[:, :, 5:25])]),
    "middle of rows": (SHAPE, "u1", [(np.s_[:, 5:25], 0, np.s_[:, 5:25])]),
    "side by side": ((10, 30, 60), "u1", [(np.s_[:, :, :30], 0, ALL), (np.s_[:, :, 30:], 1, np.s_[:10])]),
    "over each other": ((15, 30, 30), "u1", [(np.s_[:10], 0, ALL), (np.s_[4:15], 1, ALL)]),
    "other dtype": (SHAPE, "<i4", [(ALL, 0, ALL)]),
    "other rank": ((10, 900), "u1", [(ALL, 0, ALL)]),
    "single images": ((3, 30, 30), "u1", [(0, 5, None), (1, 7, None), (2, 8, None)]),
    "same rows with gaps": (SHAPE, "u1", [(np.s_[::2], 0, np.s_[::2])]),
    "one number": (SHAPE, "u1", [(np.s_[:1, :1, :1], 6, None), (np.s_[1:], 0, np.s_[:9])]),
}


@pytest.mark.parametrize(("shape", "dtype", "mappings"), OTHER_MAPPINGS.values(), ids=list(OTHER_MAPPINGS))
def test_other_mappings_are_read_through_the_library(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, mappings: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    four_sources(tmp_path)
    shapes = {0: SHAPE, 1: (11, 30, 30), 5: (30, 30), 6: (), 7: (30, 30), 8: (30, 30)}
    for number in (5, 6, 7, 8):
        hdf5_file(tmp_path / f"s{number}.h5", x=numbers(shapes[number], "u1", number) + 1)
    mapped = [Mapped(here, f"s{number}.h5", shapes[number], there) for here, number, there in mappings]
    values = of_library(write_virtual(tmp_path / "w.h5", shape, *mapped, dtype=dtype))
    assert values.any()
    with caplog.at_level(logging.DEBUG):
        engine = engine_of(tmp_path / "w.h5")
    assert len(caplog.records) == 1
    assert "virtual" in (engine.indexes["x"].library_reason or "")
    require_rows(engine, values)


ENDLESS = h5py.h5s.UNLIMITED


def space(size: tuple[int, ...], most: tuple[int, ...] | None = None, **selected: Any) -> h5py.h5s.SpaceID:
    """A space with a selection, which begins at row 0 where nothing else is said."""
    made = h5py.h5s.create_simple(size, most or size)
    if selected:
        made.select_hyperslab(**{"start": (0, 0, 0), "count": (1, 1, 1), **selected})
    return made


def low_level_virtual(path: Path, here: h5py.h5s.SpaceID, source: str, there: h5py.h5s.SpaceID) -> Path:
    """Write a mapping that h5py's high-level functions do not offer: a selection here and one in the source."""
    with h5py.File(path, "w", libver="latest") as file:
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_virtual(here, source.encode(), b"x", there)
        whole = here.copy()
        whole.select_all()
        h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, whole, create)
    return path


@pytest.mark.parametrize(
    ("size", "here", "source", "there", "reason"),
    [
        (10, {"block": (ENDLESS, 30, 30)}, "s0.h5", {"block": (ENDLESS, 30, 30)}, "consecutive whole rows"),
        (20, {"count": (ENDLESS, 1, 1), "stride": (10, 1, 1), "block": SHAPE}, "s%b.h5", {}, "%b"),
    ],
    ids=["growing", "blocks"],
)
def test_mappings_without_end_are_read_through_the_library(
    tmp_path: Path, size: int, here: dict[str, Any], source: str, there: dict[str, Any], reason: str
) -> None:
    for number in range(2):
        write(tmp_path / f"s{number}.h5", numbers(SHAPE, "u1", 20 + number), "extendable")
    most = (ENDLESS, 30, 30)
    in_source = space(SHAPE, most if there else None, **there)
    path = low_level_virtual(tmp_path / "v.h5", space((size, 30, 30), most, **here), source, in_source)
    values, engine = of_library(path), engine_of(path)
    assert values.any()
    assert reason in str(engine.indexes["x"].library_reason)
    require_rows(engine, values)


def test_adjacent_blocks_are_one_mapping(tmp_path: Path) -> None:
    """A selection of several adjacent blocks is a run of whole rows."""
    values = four_sources(tmp_path)
    blocks = space(SHAPE, start=(2, 0, 0), count=(3, 1, 1), stride=(2, 1, 1), block=(2, 30, 30))
    engine = engine_of(low_level_virtual(tmp_path / "b.h5", space((6, 30, 30)), "s0.h5", blocks))
    assert engine.indexes["x"].raw
    require_rows(engine, values[2:8])


def test_only_the_source_with_a_library_reason_uses_the_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ("rows", "compact")
    values = [write(tmp_path / f"{kind}.h5", numbers((9, 30, 30), "u1", n), kind) for n, kind in enumerate(kinds)]
    mapped = [taken(9 * n, f"{kind}.h5", (9, 30, 30)) for n, kind in enumerate(kinds)]
    write_virtual(tmp_path / "v.h5", (18, 30, 30), *mapped)
    with caplog.at_level(logging.DEBUG):
        engine = engine_of(tmp_path / "v.h5")
    (record,) = caplog.records
    assert "compact.h5" in record.getMessage()
    assert {Path(file.path).stem for file in engine.indexes["x"].files} == {*kinds}
    require_rows(engine, np.concatenate(values))
    assert engine.stats.amplification == 1.0


@pytest.mark.parametrize(("storage", "is_open"), [("rows", False), ("rows", True), ("whole_gzip", False)])
def test_a_source_that_was_replaced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, is_open: bool
) -> None:
    values = four_sources(tmp_path, storage)
    engine = engine_of(tmp_path / "v.h5")
    engine.check_unchanged()
    if is_open:
        engine.read("x", [25])
        monkeypatch.setattr("h5pack.read.storage.CHECK_SECONDS", -1)
    files.replaced(tmp_path / "s2.h5")
    with pytest.raises(PackChangedError, match=r"s2\.h5"):
        engine.check_unchanged()
    with pytest.raises(PackChangedError, match=r"s2\.h5"):
        engine.read("x", [0, 25, 40])
    assert np.array_equal(engine.read("x", [0, 40]), values[[0, 40]]), "other sources can still be read"


def test_unreadable_rows_are_named_by_their_source(tmp_path: Path) -> None:
    four_sources(tmp_path)
    engine = engine_of(tmp_path / "v.h5")
    rows = np.array([9, 21, 22, 23, 30])
    assert [engine.indexes["x"].describe(rows, place) for place in (0, 1, 2)] == [
        "'x' row 9",
        "'x' rows 0-2",
        "'x' rows 1-2",
    ]
    kept = os.stat(tmp_path / "s2.h5")
    place = int(engine.indexes["x"].addresses[4 + 4])
    os.truncate(tmp_path / "s2.h5", place + 900)
    os.utime(tmp_path / "s2.h5", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    with pytest.raises((ReadError, PackChangedError), match=r"s2\.h5"):
        engine.read("x", [21, 22])


def test_a_chunk_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    values = four_sources(tmp_path, "whole_gzip")
    files.flip_in_chunk(tmp_path / "s1.h5", 1)
    engine = engine_of(tmp_path / "v.h5")
    assert np.array_equal(engine.read("x", [10, 45]), values[[10, 45]])
    with pytest.raises(DamagedRowsError, match=r"s1\.h5") as caught:
        engine.read("x", [10 + 4])
    assert caught.value.rows == (3, 4, 5)


def test_cached_chunks_of_different_files_differ(tmp_path: Path) -> None:
    values = four_sources(tmp_path, "whole_gzip")
    engine = engine_of(tmp_path / "v.h5")
    for row in (0, 10, 21, 33, 0, 10, 21, 33):
        assert np.array_equal(engine.read("x", [row]), values[[row]])
    chunk = 3 * 900
    assert engine.chunks.cache.bytes == 4 * chunk
    assert engine.stats.reads == 4, "each was decoded once"
    engine.chunks.cache.capacity = 2 * chunk
    for row in range(44, -1, -1):
        engine.read("x", [row])
        assert engine.chunks.cache.bytes <= 2 * chunk, "all files share the room"


def test_decoded_bytes_count_whole_chunks_of_sources(tmp_path: Path) -> None:
    values = numbers((12, 900), "u1", 0)
    write(tmp_path / "s.h5", values, "whole_gzip", chunk_rows=4)
    rows = [0, 4, 9, 11, 5, 0]
    mappings = [taken(at, "s.h5", (12, 900), row, 1) for at, row in enumerate(rows)]
    engine = engine_of(write_virtual(tmp_path / "v.h5", (len(rows), 900), *mappings))
    for at, row in enumerate(rows):
        assert np.array_equal(engine.read("x", [at]), values[[row]])
    assert engine.decoded_bytes() == engine.chunks.cache.bytes == 12 * 900


def test_files_are_opened_when_they_are_read_and_few_stay_open(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"m{number}.h5", numbers((2, 600), "u1", number), "contiguous" if number % 2 else "rows")
    write_virtual(tmp_path / "v.h5", (40, 600), *(taken(2 * n, f"m{n}.h5", (2, 600)) for n in range(20)))
    engine, values = engine_of(tmp_path / "v.h5"), of_library(tmp_path / "v.h5")

    def open_files() -> int:
        return sum(files.descriptors(tmp_path / f"m{number}.h5") for number in range(20))

    def work(seed: int) -> None:
        dice = np.random.default_rng(seed)
        for _ in range(20):
            rows = dice.integers(0, 40, 20)
            assert np.array_equal(engine.read("x", rows), values[rows]), rows

    assert open_files() == 0
    assert np.array_equal(engine.read("x", [7, 6, 30]), values[[7, 6, 30]])
    assert open_files() == 2
    engine.files.max_open = 5
    require_rows(engine, values)
    assert open_files() == 5
    assert engine.stats.amplification == 1.0
    engine.close()
    assert open_files() == 0
    files.run_threads(4, work)
    assert engine.stats.rows == 3 + 40 + 4 * 20 * 20
    assert open_files() <= 5


def test_group_rows_are_those_of_most_sources(tmp_path: Path) -> None:
    for number, (rows, chunk_rows) in enumerate(((10, 4), (12, 6), (7, 4))):
        write(tmp_path / f"s{number}.h5", numbers((rows, 600), "u1", number), "rows", chunk_rows=chunk_rows)
    mapped = [taken(40 + 20 * n, f"s{n}.h5", (rows, 600)) for n, rows in enumerate((10, 12, 7))]
    write_virtual(tmp_path / "v.h5", (100, 600), *mapped)
    index = engine_of(tmp_path / "v.h5").indexes["x"]
    assert index.group_rows == 4
    assert index.starts.tolist() == [0, 40, 44, 48, 50, 60, 66, 72, 80, 84, 87]
    assert engine_of(write_virtual(tmp_path / "w.h5", (100, 600), *mapped[:2])).indexes["x"].group_rows == 6
    empty = engine_of(write_virtual(tmp_path / "e.h5", (100, 600), fill=7))
    assert empty.indexes["x"].group_rows == files.index_of(tmp_path / "e.h5").group_rows
    assert (empty.read("x", [99, 3]) == 7).all()
    assert empty.stats.reads == 0


def test_a_link_leads_to_a_file_that_is_read_directly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = four_sources(tmp_path)
    hdf5_file(tmp_path / "l.h5", images=h5py.ExternalLink("s1.h5", "x"), all=h5py.ExternalLink("v.h5", "x"))
    with caplog.at_level(logging.DEBUG):
        for name, there in (("images", values[10:21]), ("all", values)):
            engine = files.described(tmp_path / "l.h5", name)
            require_rows(engine, there, name)
            assert engine.stats.amplification == 1.0
            os.utime(tmp_path / "s1.h5", ns=(1, len(there)))
            with pytest.raises(PackChangedError, match=r"s1\.h5"):
                engine.check_unchanged()
    assert not caplog.records


def test_the_same_file_by_its_name(tmp_path: Path) -> None:
    values = write(tmp_path / "v.h5", numbers((9, 600), "u1"), "rows", name="own")
    (tmp_path / "other").symlink_to("v.h5")
    mapped = [taken(at, file, (9, 600), name="own") for at, file in ((0, "v.h5"), (9, "other"))]
    write_virtual(tmp_path / "v.h5", (18, 600), *mapped)
    engine = engine_of(tmp_path / "v.h5")
    assert np.array_equal(engine.read("x", [17, 0, 8, 9]), values[[8, 0, 8, 0]])
    assert files.descriptors(tmp_path / "v.h5") == 2, "one by each name"


def test_a_source_name_may_have_a_percent_sign(tmp_path: Path) -> None:
    values = write(tmp_path / "50%.h5", numbers((4, 600), "u1"), "rows")
    path = write_virtual(tmp_path / "v.h5", (4, 600), taken(0, "50%%.h5", (4, 600)))
    assert np.array_equal(of_library(path), values)
    engine = files.described(path, "x")
    assert engine.indexes["x"].raw
    assert np.array_equal(engine.read("x", [3, 0]), values[[3, 0]])


def test_a_source_that_has_grown_gives_the_rows_that_it_had(tmp_path: Path) -> None:
    values = write(tmp_path / "s.h5", numbers((6, 600), "u1"), "extendable")
    write_virtual(tmp_path / "v.h5", (6, 600), taken(0, "s.h5", (6, 600)))
    layout = h5py.VirtualLayout((6, 600), "u1")
    layout[...] = h5py.VirtualSource("s.h5", "x", (6, 600), maxshape=(None, 600))
    with h5py.File(tmp_path / "w.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("x", layout)
    with h5py.File(tmp_path / "s.h5", "a") as file:
        file["x"].resize(9, 0)
    for name in ("v.h5", "w.h5"):
        assert np.array_equal(engine_of(tmp_path / name).read("x", [5, 0]), values[[5, 0]]), name


def test_sources_of_unusual_numbers_use_the_library(tmp_path: Path) -> None:
    """The type has the same size and byte order, but fewer bits."""
    with h5py.File(tmp_path / "s.h5", "w") as file:
        kind = h5py.h5t.STD_U8LE.copy()
        kind.set_precision(5)
        files.low_level(file, "x", numbers((4, 600), "u1") % 20, h5py.h5p.create(h5py.h5p.DATASET_CREATE), kind)
    write_virtual(tmp_path / "v.h5", (4, 600), taken(0, "s.h5", (4, 600)))
    engine = engine_of(tmp_path / "v.h5")
    assert engine.indexes["x"].library_reason is not None
    require_rows(engine, of_library(tmp_path / "v.h5"))

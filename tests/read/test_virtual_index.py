"""Virtual datasets are read directly from their sources' chunks, with the same rows as h5py returns."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.errors import DamagedRowsError, PackChangedError, ReadError
from h5pack.read import engine as engine_module
from h5pack.read import read_plan as plan_module
from h5pack.read.engine import Engine, ReadStats
from h5pack.read.virtual_index import VirtualIndex
from tests.read.files import (
    DTYPES,
    WHOLE_ROWS,
    described,
    descriptors,
    engine_of,
    in_child,
    index_of,
    low_level,
    numbers,
    row_lists,
    run_threads,
    to_addresses,
    write,
)

CODED = ["gzip", "whole_gzip", "split"]
# Rows that were never filled are undefined when h5py reads them through a virtual dataset.
RAW = [storage for storage in WHOLE_ROWS if storage != "no_holes_filled"]
FORMS = {"raw": RAW, "coded": CODED, "mixed": [*RAW, *CODED, "compact"]}


@dataclass(frozen=True)
class Mapped:
    """A mapping: row `at` of the virtual dataset on are `rows` rows, from `first` on, of the `of` rows of a source."""

    at: int
    file: str
    name: str
    of: int
    first: int
    rows: int


def create(
    path: Path, shape: tuple[int, ...], dtype: str, mappings: list[Mapped], name: str = "x", fill: Any = None
) -> None:
    """Add a virtual dataset to a file."""
    layout = h5py.VirtualLayout(shape, dtype)
    for mapping in mappings:
        source = h5py.VirtualSource(mapping.file, mapping.name, (mapping.of, *shape[1:]), dtype)
        layout[mapping.at : mapping.at + mapping.rows] = source[mapping.first : mapping.first + mapping.rows]
    with h5py.File(path, "a", libver="latest") as file:
        file.create_virtual_dataset(name, layout, fillvalue=fill)


def of_library(path: Path, name: str = "x") -> npt.NDArray[Any]:
    """Return all rows as h5py reads them, in native byte order."""
    with h5py.File(path) as file:
        values: npt.NDArray[Any] = file[name][()]
    return values.astype(values.dtype.newbyteorder("="))


@st.composite
def virtual_files(draw: st.DrawFn, folder: Path) -> tuple[Path, npt.NDArray[Any], str]:
    """A file whose dataset 'x' is virtual, its values, and the form of its sources."""
    dtype, form = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(sorted(FORMS)))
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
        mappings.append(Mapped(at, name, "x0" if name == "." else "x", len(kept[name]), first, rows))
        expected.append(kept[name][first : first + rows])
        at += rows
    expected.append(np.full((draw(st.integers(0 if at else 1, 3)), *cut), fill, native))
    joined = np.concatenate(expected)
    nested = draw(st.booleans())
    create(path, joined.shape, dtype, draw(st.permutations(mappings)), "inner" if nested else "x", fill)
    if nested:
        first = draw(st.integers(0, len(joined) - 1))
        rows = draw(st.integers(1, len(joined) - first))
        inner = joined
        joined = np.concatenate([np.full((2, *cut), 1 - fill, native), inner[first : first + rows], inner[:1]])
        outer = [Mapped(2, ".", "inner", len(inner), first, rows), Mapped(2 + rows, ".", "inner", len(inner), 0, 1)]
        create(path, joined.shape, dtype, outer, "x", 1 - fill)
    return path, joined, form


@settings(max_examples=60)
@given(st.data())
def test_rows_equal_h5pys(data: st.DataObject) -> None:
    scatter_bytes = data.draw(st.sampled_from([1, engine_module.SCATTER_BYTES, 1 << 30]))
    gap_bytes = data.draw(st.sampled_from([0, 100, plan_module.MAX_GAP_BYTES]))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "SCATTER_BYTES", scatter_bytes)
        patch.setattr(plan_module, "MAX_GAP_BYTES", gap_bytes)
        path, values, form = data.draw(virtual_files(Path(folder)))
        library = of_library(path)
        assert np.array_equal(library, values)
        engine = engine_of(path)
        engine.files.max_open = data.draw(st.integers(1, 5))
        index = engine.indexes["x"]
        if index.library_reason is not None:
            assert "compact" in index.library_reason
        else:
            assert isinstance(index, VirtualIndex)
            assert form != "raw" or index.raw
        rows = data.draw(row_lists(len(values)))
        wanted = np.array(rows, np.int64)
        found = engine.read("x", rows)
        assert found.dtype == values.dtype
        assert np.array_equal(found, library[wanted])
        out = np.full_like(found, 1)
        assert engine.read("x", wanted, out) is out
        assert np.array_equal(out, library[wanted])
        stats = engine.snapshot()
        assert (stats.rows, stats.bytes_wanted) == (2 * len(rows), 2 * len(rows) * index.row_bytes)
        assert stats.chunk_hits + stats.chunk_misses == stats.rows
        if index.library_reason is None:
            assert stats.chunk_misses == 2 * len(set(index.chunks_of(wanted).tolist()))
        if index.raw and engine.can_scatter(index):
            absent = int((index.offsets_of(wanted, index.chunks_of(wanted)) < 0).sum())
            assert stats.bytes_read == 2 * (len(rows) - absent) * index.row_bytes
            assert np.array_equal(to_addresses(engine, wanted), library[wanted])
        engine.close()


def four_sources(folder: Path, storage: str = "rows", shape: tuple[int, ...] = (10, 30, 30)) -> npt.NDArray[Any]:
    """A file v.h5 over s0.h5 to s3.h5, and its values."""
    shapes = [(shape[0] + number, *shape[1:]) for number in range(4)]
    kept = [write(folder / f"s{n}.h5", numbers(size, "u1", n), storage) for n, size in enumerate(shapes)]
    starts = np.cumsum([0, *map(len, kept)]).tolist()
    mappings = [Mapped(starts[n], f"s{n}.h5", "x", len(kept[n]), 0, len(kept[n])) for n in range(4)]
    create(folder / "v.h5", (starts[-1], *shape[1:]), "u1", mappings)
    return np.concatenate(kept)


def test_an_epoch_reads_each_byte_once_and_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = four_sources(tmp_path)
    with caplog.at_level(logging.DEBUG):
        engine = engine_of(tmp_path / "v.h5")
        order = np.random.default_rng(0).permutation(len(values))
        assert np.array_equal(engine.read("x", order), values[order])
    assert not caplog.records
    chunks, size = 4 + 4 + 4 + 5, values.nbytes
    stats = engine.stats
    assert (stats.rows, stats.chunk_misses, stats.chunk_hits) == (46, chunks, 46 - chunks)
    assert (stats.bytes_wanted, stats.bytes_read, stats.amplification) == (size, size, 1.0)
    assert stats.reads >= 4


ALL = slice(None)
# Shape and dtype of the virtual dataset, and its mappings: rows here, number of the source, rows there.
OTHER_MAPPINGS: dict[str, tuple[tuple[int, ...], str, list[tuple[Any, int, Any]]]] = {
    "strided": ((5, 30, 30), "u1", [(ALL, 0, np.s_[::2])]),
    "spread": ((20, 30, 30), "u1", [(np.s_[::2], 0, ALL)]),
    "part of rows": ((10, 30, 20), "u1", [(ALL, 0, np.s_[:, :, 5:25])]),
    "middle of rows": ((10, 30, 30), "u1", [(np.s_[:, 5:25], 0, np.s_[:, 5:25])]),
    "side by side": ((10, 30, 60), "u1", [(np.s_[:, :, :30], 0, ALL), (np.s_[:, :, 30:], 1, np.s_[:10])]),
    "over each other": ((15, 30, 30), "u1", [(np.s_[:10], 0, ALL), (np.s_[4:15], 1, ALL)]),
    "other dtype": ((10, 30, 30), "<i4", [(ALL, 0, ALL)]),
    "other rank": ((10, 900), "u1", [(ALL, 0, ALL)]),
    "single images": ((3, 30, 30), "u1", [(0, 5, ()), (1, 7, ()), (2, 8, ())]),
    "one number": ((10, 30, 30), "u1", [(np.s_[:1, :1, :1], 6, ()), (np.s_[1:], 0, np.s_[:9])]),
}


@pytest.mark.parametrize(("shape", "dtype", "mappings"), OTHER_MAPPINGS.values(), ids=list(OTHER_MAPPINGS))
def test_other_mappings_are_read_through_the_library(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, mappings: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    four_sources(tmp_path)
    shapes = {0: (10, 30, 30), 1: (11, 30, 30), 5: (30, 30), 6: (), 7: (30, 30), 8: (30, 30)}
    for number in (5, 6, 7, 8):
        with h5py.File(tmp_path / f"s{number}.h5", "w") as file:
            file["x"] = numbers(shapes[number], "u1", number) + 1
    layout = h5py.VirtualLayout(shape, dtype)
    for here, number, there in mappings:
        source = h5py.VirtualSource(f"s{number}.h5", "x", shapes[number])
        layout[here] = source[there] if there != () else source
    with h5py.File(tmp_path / "w.h5", "w", libver="latest") as file:
        file.create_virtual_dataset("x", layout)
    values = of_library(tmp_path / "w.h5")
    assert values.any()
    with caplog.at_level(logging.DEBUG):
        engine = engine_of(tmp_path / "w.h5")
    assert len(caplog.records) == 1
    assert "virtual" in (engine.indexes["x"].library_reason or "")
    order = np.random.default_rng(0).integers(0, len(values), 30)
    assert np.array_equal(engine.read("x", order), values[order])


def low_level_virtual(path: Path, shape: Any, most: Any, here: Any, source: str, there: Any) -> None:
    """Write a mapping that h5py's high-level functions do not offer: a selection here and one in the source."""
    with h5py.File(path, "w", libver="latest") as file:
        create_ = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        space = h5py.h5s.create_simple(shape, most)
        here(space)
        create_.set_virtual(space, source.encode(), b"x", there)
        whole = h5py.h5s.create_simple(shape, most)
        h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, whole, create_)


def test_mappings_without_end_are_read_through_the_library(tmp_path: Path) -> None:
    four_sources(tmp_path)
    endless = h5py.h5s.UNLIMITED
    source = h5py.h5s.create_simple((10, 30, 30), (endless, 30, 30))
    source.select_hyperslab((0, 0, 0), (1, 1, 1), block=(endless, 30, 30))
    write(tmp_path / "s9.h5", numbers((10, 30, 30), "u1", 9), "extendable")
    low_level_virtual(
        tmp_path / "u.h5",
        (10, 30, 30),
        (endless, 30, 30),
        lambda space: space.select_hyperslab((0, 0, 0), (1, 1, 1), block=(endless, 30, 30)),
        "s9.h5",
        source,
    )
    blocks = h5py.h5s.create_simple((10, 30, 30))
    low_level_virtual(
        tmp_path / "b.h5",
        (20, 30, 30),
        (endless, 30, 30),
        lambda space: space.select_hyperslab((0, 0, 0), (endless, 1, 1), stride=(10, 1, 1), block=(10, 30, 30)),
        "p%b.h5",
        blocks,
    )
    for number in range(2):
        write(tmp_path / f"p{number}.h5", numbers((10, 30, 30), "u1", 20 + number), "rows")
    for name, reason in (("u.h5", "consecutive whole rows"), ("b.h5", "%b")):
        values = of_library(tmp_path / name)
        assert values.any()
        engine = engine_of(tmp_path / name)
        assert reason in str(engine.indexes["x"].library_reason)
        order = np.random.default_rng(0).permutation(len(values))
        assert np.array_equal(engine.read("x", order), values[order])


def test_adjacent_blocks_are_one_mapping(tmp_path: Path) -> None:
    """A selection of several adjacent blocks is a run of whole rows."""
    values = four_sources(tmp_path)
    source = h5py.h5s.create_simple((10, 30, 30))
    source.select_hyperslab((2, 0, 0), (3, 1, 1), stride=(2, 1, 1), block=(2, 30, 30))
    low_level_virtual(tmp_path / "b.h5", (6, 30, 30), (6, 30, 30), lambda space: space.select_all(), "s0.h5", source)
    engine = engine_of(tmp_path / "b.h5")
    assert engine.indexes["x"].raw
    assert np.array_equal(of_library(tmp_path / "b.h5"), values[2:8])
    assert np.array_equal(engine.read("x", [5, 0, 3]), values[[7, 2, 5]])


def test_only_the_source_with_a_library_reason_uses_the_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ("rows", "compact")
    values = [write(tmp_path / f"{kind}.h5", numbers((9, 30, 30), "u1", n), kind) for n, kind in enumerate(kinds)]
    mappings = [Mapped(9 * n, f"{kind}.h5", "x", 9, 0, 9) for n, kind in enumerate(kinds)]
    create(tmp_path / "v.h5", (18, 30, 30), "u1", mappings)
    with caplog.at_level(logging.DEBUG):
        engine = engine_of(tmp_path / "v.h5")
    (record,) = caplog.records
    assert "compact.h5" in record.getMessage()
    order = np.random.default_rng(0).permutation(18)
    assert np.array_equal(engine.read("x", order), np.concatenate(values)[order])
    assert engine.stats.amplification == 1.0


@pytest.mark.parametrize("storage", ["rows", "whole_gzip"])
def test_pickled_and_forked_while_open(tmp_path: Path, storage: str) -> None:
    values = four_sources(tmp_path, storage)
    engine, rows = engine_of(tmp_path / "v.h5"), np.array([45, 3, 20, 11, 3, 44])
    assert np.array_equal(engine.read("x", rows), values[rows])
    again: Engine = pickle.loads(pickle.dumps(engine))
    assert again.stats == ReadStats()
    assert again.files.own is again.chunks, "chunks are kept in one place"
    assert np.array_equal(again.read("x", rows), values[rows])
    assert in_child(lambda: np.array_equal(engine.read("x", rows), values[rows]) and engine.stats.rows == 6)
    assert np.array_equal(engine.read("x", rows), values[rows])
    assert (engine.stats.rows, again.stats.rows) == (12, 6)


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
    (tmp_path / "new").write_bytes((tmp_path / "s2.h5").read_bytes())
    os.replace(tmp_path / "new", tmp_path / "s2.h5")
    with pytest.raises(PackChangedError, match=r"s2\.h5"):
        engine.check_unchanged()
    with pytest.raises(PackChangedError, match=r"s2\.h5"):
        engine.read("x", [0, 25, 40])
    assert np.array_equal(engine.read("x", [0, 40]), values[[0, 40]]), "other sources can still be read"


def test_unreadable_rows_are_named_by_their_source(tmp_path: Path) -> None:
    four_sources(tmp_path)
    engine = engine_of(tmp_path / "v.h5")
    plan = engine.plan("x", np.array([9, 21, 22, 23, 30]))
    assert [plan.describe(place) for place in (0, 1, 2)] == ["'x' row 9", "'x' rows 0-2", "'x' rows 1-2"]
    kept = os.stat(tmp_path / "s2.h5")
    place = int(engine.indexes["x"].addresses[4 + 4])
    os.truncate(tmp_path / "s2.h5", place + 900)
    os.utime(tmp_path / "s2.h5", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    with pytest.raises((ReadError, PackChangedError), match=r"s2\.h5"):
        engine.read("x", [21, 22])


def test_a_chunk_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    values = four_sources(tmp_path, "whole_gzip")
    with h5py.File(tmp_path / "s1.h5") as file:
        chunk = file["x"].id.get_chunk_info(1)
    data = bytearray((tmp_path / "s1.h5").read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 255
    (tmp_path / "s1.h5").write_bytes(data)
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


def test_files_are_opened_when_they_are_read_and_few_stay_open(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"m{number}.h5", numbers((2, 600), "u1", number), "contiguous" if number % 2 else "rows")
    mappings = [Mapped(2 * number, f"m{number}.h5", "x", 2, 0, 2) for number in range(20)]
    create(tmp_path / "v.h5", (40, 600), "u1", mappings)
    engine, values = engine_of(tmp_path / "v.h5"), of_library(tmp_path / "v.h5")

    def open_files() -> int:
        return sum(descriptors(tmp_path / f"m{number}.h5") for number in range(20))

    def work(seed: int) -> None:
        dice = np.random.default_rng(seed)
        for _ in range(20):
            rows = dice.integers(0, 40, 20)
            assert np.array_equal(engine.read("x", rows), values[rows]), rows

    assert open_files() == 0
    assert np.array_equal(engine.read("x", [7, 6, 30]), values[[7, 6, 30]])
    assert open_files() == 2
    engine.files.max_open = 5
    order = np.random.default_rng(0).permutation(40)
    assert np.array_equal(engine.read("x", order), values[order])
    assert open_files() == 5
    assert engine.stats.amplification == 1.0
    engine.close()
    assert open_files() == 0
    run_threads(4, work)
    assert engine.stats.rows == 3 + 40 + 4 * 20 * 20
    assert open_files() <= 5


def test_group_rows_are_those_of_most_sources(tmp_path: Path) -> None:
    for number, (rows, chunk_rows) in enumerate(((10, 4), (12, 6), (7, 4))):
        write(tmp_path / f"s{number}.h5", numbers((rows, 600), "u1", number), "rows", chunk_rows=chunk_rows)
    mappings = [Mapped(40 + 20 * n, f"s{n}.h5", "x", rows, 0, rows) for n, rows in enumerate((10, 12, 7))]
    create(tmp_path / "v.h5", (100, 600), "u1", mappings)
    index = engine_of(tmp_path / "v.h5").indexes["x"]
    assert index.group_rows == 4
    assert isinstance(index, VirtualIndex)
    assert index.starts.tolist() == [0, 40, 44, 48, 50, 60, 66, 72, 80, 84, 87]
    create(tmp_path / "w.h5", (100, 600), "u1", mappings[:2])
    assert engine_of(tmp_path / "w.h5").indexes["x"].group_rows == 6
    create(tmp_path / "e.h5", (100, 600), "u1", [], fill=7)
    empty = engine_of(tmp_path / "e.h5")
    assert empty.indexes["x"].group_rows == index_of(tmp_path / "e.h5").group_rows
    assert (empty.read("x", [99, 3]) == 7).all()
    assert empty.stats.reads == 0


def test_a_link_leads_to_a_file_that_is_read_directly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = four_sources(tmp_path)
    with h5py.File(tmp_path / "l.h5", "w") as file:
        file["images"] = h5py.ExternalLink("s1.h5", "x")
        file["all"] = h5py.ExternalLink("v.h5", "x")
    with caplog.at_level(logging.DEBUG):
        for name, there in (("images", values[10:21]), ("all", values)):
            engine = described(tmp_path / "l.h5", name)
            order = np.random.default_rng(0).permutation(len(there))
            assert np.array_equal(engine.read(name, order), there[order])
            assert engine.stats.amplification == 1.0
            os.utime(tmp_path / "s1.h5", ns=(1, len(there)))
            with pytest.raises(PackChangedError, match=r"s1\.h5"):
                engine.check_unchanged()
    assert not caplog.records


def test_the_same_file_by_its_name(tmp_path: Path) -> None:
    values = write(tmp_path / "v.h5", numbers((9, 600), "u1"), "rows", name="own")
    (tmp_path / "other").symlink_to("v.h5")
    create(tmp_path / "v.h5", (18, 600), "u1", [Mapped(0, "v.h5", "own", 9, 0, 9), Mapped(9, "other", "own", 9, 0, 9)])
    engine = engine_of(tmp_path / "v.h5")
    assert np.array_equal(engine.read("x", [17, 0, 8, 9]), values[[8, 0, 8, 0]])
    assert descriptors(tmp_path / "v.h5") == 2, "one by each name"


def test_a_source_name_may_have_a_percent_sign(tmp_path: Path) -> None:
    values = write(tmp_path / "50%.h5", numbers((4, 600), "u1"), "rows")
    create(tmp_path / "v.h5", (4, 600), "u1", [Mapped(0, "50%%.h5", "x", 4, 0, 4)])
    assert np.array_equal(of_library(tmp_path / "v.h5"), values)
    engine = described(tmp_path / "v.h5", "x")
    assert engine.indexes["x"].raw
    assert np.array_equal(engine.read("x", [3, 0]), values[[3, 0]])


def test_a_source_that_has_grown_gives_the_rows_that_it_had(tmp_path: Path) -> None:
    values = write(tmp_path / "s.h5", numbers((6, 600), "u1"), "extendable")
    create(tmp_path / "v.h5", (6, 600), "u1", [Mapped(0, "s.h5", "x", 6, 0, 6)])
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
        low_level(file, "x", numbers((4, 600), "u1") % 20, h5py.h5p.create(h5py.h5p.DATASET_CREATE), kind)
    create(tmp_path / "v.h5", (4, 600), "u1", [Mapped(0, "s.h5", "x", 4, 0, 4)])
    engine = engine_of(tmp_path / "v.h5")
    assert engine.indexes["x"].library_reason is not None
    assert np.array_equal(engine.read("x", [3, 0, 1]), of_library(tmp_path / "v.h5")[[3, 0, 1]])

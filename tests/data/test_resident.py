"""Rows in memory: what was loaded, what is missing, and what is gathered, against the file itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import h5pack
from h5pack.data.resident import ResidentRows
from h5pack.errors import DamagedRowsError
from tests.data import packs

SETS: dict[str, npt.NDArray[np.int64]] = {
    "all": np.arange(packs.ROWS),
    "a span": np.arange(23, 78),
    "inside a chunk": np.arange(52, 57),
    "sparse": np.array([3, 4, 19, 40, 41, 49, 50, 88, 102]),
    "a span but for one": np.array([*range(20, 45), *range(46, 70)]),
    "one": np.array([37]),
}


def gathered(kept: ResidentRows, name: str, rows: npt.NDArray[np.int64], like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    out = np.zeros((len(rows), *like.shape[1:]), like.dtype.newbyteorder("="))
    kept.gather(name, rows, out)
    return out


def labels_in(kept: ResidentRows, rows: npt.NDArray[np.int64]) -> list[int]:
    return gathered(kept, "labels", rows, np.arange(1)).tolist()


@pytest.mark.parametrize("rows", SETS.values(), ids=SETS)
@pytest.mark.parametrize("kind", ["chunked", "contiguous", "gzip", "big-endian", "float", "small rows"])
def test_gather_gives_the_rows_of_the_file(tmp_path: Path, rows: npt.NDArray[np.int64], kind: str) -> None:
    shape = (3,) if kind == "small rows" else packs.SHAPE
    data = packs.values(shape=shape, dtype={"big-endian": ">u2", "float": "f4"}.get(kind, "u1"))
    table = packs.values(shape=(3,), dtype=">i4")
    settings: dict[str, Any] = {"contiguous": {"chunks": None}, "gzip": {"compression": "gzip"}}.get(kind, {})
    path = packs.write(tmp_path / "f.h5", images=data, labels=np.arange(packs.ROWS), table=table, **settings)
    dataset = h5pack.H5Dataset(path, fields=["table"])
    random = np.random.default_rng(0)
    whole, pieces = ResidentRows(dataset, rows), ResidentRows(dataset, rows)
    whole.load_all()
    assert whole.missing(rows) == []
    units = {int(row) // dataset.group_rows for row in rows}
    assert pieces.missing(rows) == sorted(units)
    for chunk in random.permutation(sorted(units)).tolist():
        pieces.load(chunk)
        units.remove(chunk)
        assert pieces.missing(rows) == sorted(units)
        assert pieces.missing(rows[rows // dataset.group_rows == chunk]) == []
    for kept in (whole, pieces):
        for wanted in (rows, rows[::-1], random.choice(rows, 70), rows[:0]):
            assert np.array_equal(gathered(kept, "images", wanted, data), data[wanted])
            assert labels_in(kept, wanted) == wanted.tolist()
            assert np.array_equal(gathered(kept, "table", wanted, table), table[wanted])


def test_a_chunk_brings_its_own_rows_and_no_others(tmp_path: Path) -> None:
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"))
    kept = ResidentRows(dataset, SETS["a span"])
    kept.load(3)
    assert dataset.stats().rows == 10
    kept.load(2)
    assert dataset.stats().rows == 17, "the range begins inside chunk 2"
    assert labels_in(kept, np.arange(23, 40)) == list(range(23, 40))
    assert not any(labels_in(kept, np.arange(40, 78))), "these were not loaded"
    assert kept.missing(np.array([23, 39, 77, 40, 41])) == [4, 7]


def test_some_fields_only_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.data.resident._BLOCK_ROWS", 7)
    dataset = h5pack.H5Dataset(packs.labelled(tmp_path / "f.h5"))
    read_rows, pieces = dataset.read_rows, []
    monkeypatch.setattr(dataset, "read_rows", lambda *args: pieces.append(len(args[1])) or read_rows(*args))
    for rows in SETS.values():
        kept = ResidentRows(dataset, rows, ["labels"])
        assert ("labels" in kept, "images" in kept) == (True, False)
        kept.load_all()
        assert labels_in(kept, rows) == rows.tolist()
    assert max(pieces) == 7
    assert dataset.stats().rows == 0, "no image was read"
    assert ResidentRows.bytes_needed(dataset, 10) == 10 * (576 + 8)


@pytest.mark.parametrize("dtype", ["u1", "f4", ">f8"])
@pytest.mark.parametrize("shape", [packs.SHAPE, (), (0, 4)])
def test_no_rows_and_rows_of_nothing(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    data = packs.values(11, shape, dtype)
    dataset = h5pack.H5Dataset(packs.write(tmp_path / "f.h5", None, images=data))
    empty = ResidentRows(dataset, np.empty(0, np.int64))
    empty.load_all()
    assert empty.missing(np.empty(0, np.int64)) == []
    kept = ResidentRows(dataset, np.arange(2, 11))
    kept.load_all()
    assert np.array_equal(gathered(kept, "images", np.array([10, 2]), data), data[[10, 2]])


@pytest.mark.parametrize("kind", ["plain", "big-endian", "gzip"])
def test_loading_again_leaves_the_rows_alone_at_every_moment(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two iterators may load the same chunk; one may gather from it while the other is at it."""
    data = packs.values(dtype=">u2" if kind == "big-endian" else "u2")
    path = packs.write(tmp_path / "f.h5", images=data, compression="gzip" if kind == "gzip" else None)
    dataset = h5pack.H5Dataset(path)
    kept = ResidentRows(dataset, np.arange(packs.ROWS))
    kept.load(4)
    rows = np.arange(40, 50)
    looks = []
    read = dataset.engine.read

    def watched(name: str, wanted: Any, out: Any = None) -> Any:
        """What the memory holds right before and after a read into it, which a byte swap would follow."""
        looks.append(gathered(kept, "images", rows, data))
        if out is not None:
            assert dataset.engine.indexes[name].dtype.isnative
            assert dataset.engine.indexes[name].library_reason is None
        found = read(name, wanted, out)
        looks.append(gathered(kept, "images", rows, data))
        return found

    monkeypatch.setattr(dataset.engine, "read", watched)
    kept.load(4)
    looks.append(gathered(kept, "images", rows, data))
    assert len(looks) == 3
    assert all(np.array_equal(look, data[rows]) for look in looks)


def test_damage_is_found_while_loading(tmp_path: Path) -> None:
    path = packs.converted(tmp_path)
    packs.flip(path, 12)
    dataset = h5pack.H5Dataset(path, check=True)
    kept = ResidentRows(dataset, np.arange(45))
    kept.load(0)
    with pytest.raises(DamagedRowsError, match="row 12"):
        kept.load(1)
    assert kept.missing(np.arange(45)) == [1, 2, 3, 4, 5, 6], "what is damaged is not taken for loaded"
    with pytest.raises(DamagedRowsError, match="row 12"):
        kept.load_all()

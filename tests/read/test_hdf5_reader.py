"""`H5Reader` gives the rows that h5py's own slicing gives, in the order asked for, for any dataset of numbers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from h5pack.read.hdf5_reader import H5Reader
from h5pack.read.storage import FileIdentity
from tests.read.files import in_child, numbers, write


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6)),
    rank=st.integers(1, 3),
    dtype=st.sampled_from(["u1", "<i2", ">i4", "f4", ">f8", "?"]),
    storage=st.sampled_from(["contiguous", "rows", "split", "gzip", "extendable"]),
    data=st.data(),
)
def test_rows_equal_h5pys(shape: tuple[int, ...], rank: int, dtype: str, storage: str, data: st.DataObject) -> None:
    shape = shape[:rank]
    rows = data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=50))
    values = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 100, shape).astype(dtype)
    settings_: dict[str, Any] = {
        "contiguous": {},
        "rows": {"chunks": (min(3, shape[0]), *shape[1:])},
        "split": {"chunks": tuple(max(1, size // 2) for size in shape)},
        "gzip": {"chunks": tuple(max(1, size // 2) for size in shape), "compression": "gzip", "shuffle": True},
        "extendable": {"chunks": (7, *shape[1:]), "maxshape": (None, *shape[1:])},
    }[storage]
    with tempfile.TemporaryDirectory() as folder:
        with h5py.File(Path(folder) / "f.h5", "w") as file:
            file.create_dataset("x", data=values, **settings_)
        path = str(Path(folder) / "f.h5")
        reader = H5Reader(path, FileIdentity.of(path))
        found, again = (np.empty((len(rows), *shape[1:]), values.dtype.newbyteorder("=")) for _ in range(2))
        reader.read("x", np.array(rows, np.int64), found)
        reader.close()
        reader.read("x", np.array(rows[::-1], np.int64), again)
        reader.close()
    assert np.array_equal(found, values[rows])
    assert np.array_equal(again, values[rows[::-1]])


def test_a_forked_child_opens_the_file_itself(tmp_path: Path) -> None:
    """It must not share a snapshot of the library's state with its parent."""
    values = write(tmp_path / "f.h5", numbers((9, 4), "i4"), "gzip")
    path = str(tmp_path / "f.h5")
    reader, out = H5Reader(path, FileIdentity.of(path)), np.empty((1, 4), "i4")
    reader.read("x", np.array([3]), out)
    inherited = reader._handles

    def child() -> bool:
        reader.read("x", np.array([5]), out)
        right = reader._handles is not inherited and np.array_equal(out, values[[5]])
        reader.close()
        return right

    assert in_child(child)
    assert reader._handles is inherited
    reader.read("x", np.array([7]), out)
    assert np.array_equal(out, values[[7]])

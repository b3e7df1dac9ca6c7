"""`H5Reader` in several processes. `test_engine` compares its rows with those of h5py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from h5pack.read.hdf5_reader import H5Reader
from h5pack.read.storage import FileIdentity
from tests.read.files import in_child, numbers, write


def test_a_forked_child_opens_the_file_itself(tmp_path: Path) -> None:
    """The inherited handle relies on library state that is only a copy of its parent's."""
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
    reader.close()
    reader.read("x", np.array([7]), out)
    assert np.array_equal(out, values[[7]])

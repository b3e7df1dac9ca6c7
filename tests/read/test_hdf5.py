"""Lists of the datasets of HDF5 files, and errors about files that cannot be opened or read."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

import h5pack
from h5pack.errors import H5PackError, PackFormatError, ReadError
from h5pack.read import hdf5
from h5pack.read.description import describe_file
from h5pack.read.hdf5 import find_item, list_datasets, open_file, read_rows, stored_names
from h5pack.sources.catalog import NameFilter
from h5pack.sources.detect import SourceOptions, open_source
from h5pack.sources.hdf5_catalog import HDF5Datasets, detect_names, hdf5_catalog
from tests.makers import flat_folder, hdf5_file

HDF5_TEXT = (
    "Can't synchronously read data (file read failed: time = Sat Nov 28 23:06:36 2026\n, filename = 'a.h5', file "
    "descriptor = 13, errno = 5, error message = 'Input/output error', buf = 0x5, total read size = 100)"
)
"""What HDF5 says about a disk that fails, with a line break."""

FAILURES = [OSError(errno.EIO, HDF5_TEXT), KeyError(HDF5_TEXT), RuntimeError(HDF5_TEXT), OSError(HDF5_TEXT)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hdf5")
    h5pack.convert(flat_folder(folder / "images", 3), folder / "o.h5", num_workers=1)
    return folder / "o.h5"


def require_one_line(error: pytest.ExceptionInfo[h5pack.H5PackError], path: Path) -> None:
    assert error.value.path == str(path)
    assert "\n" not in str(error.value)
    assert os.strerror(errno.EIO) in str(error.value)
    assert "damaged" not in str(error.value)


@pytest.mark.parametrize("failure", FAILURES[2:])
def test_a_file_on_a_disk_that_fails_is_not_called_damaged(
    pack: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(h5py, "File", Mock(side_effect=failure))
    with pytest.raises(PackFormatError) as caught:
        open_file(pack)
    require_one_line(caught, pack)


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    for read in (h5pack.info, h5pack.H5Dataset, h5pack.verify):
        with pytest.raises(PackFormatError, match="pipe"):
            read(tmp_path / "pipe.h5")


def test_a_file_that_is_written_in_swmr_mode_is_not_called_abandoned(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.swmr_mode = True
        copied = Path(shutil.copy(path, tmp_path / "copy.h5"))  # h5py would reuse an open file of this process
    with pytest.raises(PackFormatError, match="SWMR") as caught:
        open_file(copied)
    assert caught.value.path == str(copied)


def test_objects_whose_names_are_not_utf8_do_not_hide_others(tmp_path: Path) -> None:
    path = hdf5_file(tmp_path / "f.h5", images=np.zeros((2, 5, 5, 3), np.uint8))
    with h5py.File(path, "a") as file:
        file[b"caf\xe9"], file[b"\xff/y"], file[b"\xfe"] = 3, 4, h5py.ExternalLink("none.h5", "x")
        file[b"\xfd"] = h5py.ExternalLink("f.h5", "images")
    report = h5pack.info(path)
    assert [one.name for one in report.datasets] == ["caf\udce9", "images", "\udcff/y", "\udcfd"]
    assert [one.name for one in report.datasets if one.faults] == ["caf\udce9", "\udcff/y"]
    assert [(one.name, one.found) for one in report.links] == [("\udcfd", True), ("\udcfe", False)]
    listed = hdf5_catalog(path, HDF5Datasets(images="images"), NameFilter())
    assert (len(listed.names), len(listed.notes)) == (2, 3)
    with pytest.raises(PackFormatError, match="caf"):
        describe_file(path, "photos")


def test_images_and_fields_whose_names_are_not_utf8_are_to_be_renamed(pack: Path, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file[b"g\xff/images"] = np.zeros((2, 8, 8, 3), np.uint8)
    shutil.copy(pack, tmp_path / "p.h5")
    with h5py.File(tmp_path / "p.h5", "a") as file:
        file["fields/a"] = file[b"fields/b\xff/data"] = np.zeros(3)
    with pytest.raises(PackFormatError, match="rename") as caught:
        hdf5_catalog(tmp_path / "f.h5", HDF5Datasets(), NameFilter())
    assert caught.value.dataset == "g\udcff/images"
    assert h5pack.info(tmp_path / "f.h5", stats=True).stats == {}
    for read in (h5pack.info, open_source):
        with pytest.raises(PackFormatError, match="rename") as caught:
            read(tmp_path / "p.h5", *(SourceOptions(),) * (read is open_source))
        assert caught.value.dataset == "fields/b\udcff"


@pytest.mark.parametrize(
    ("read", "failure"),
    [*((describe_file, failure) for failure in FAILURES), (h5pack.info, FAILURES[0]), (hdf5_catalog, FAILURES[1])],
)
def test_metadata_on_a_disk_that_fails_is_not_called_damaged(
    pack: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., object], failure: Exception
) -> None:
    more = (HDF5Datasets(), NameFilter()) if read is hdf5_catalog else ()
    monkeypatch.setattr(h5py.AttributeManager, "__getitem__", Mock(side_effect=failure))
    with pytest.raises(H5PackError) as caught:
        read(pack, *more)
    require_one_line(caught, pack)


def test_an_index_that_does_not_fit_in_memory_is_not_called_damaged(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("images", (2**45, 2, 2), np.uint8, chunks=(1, 2, 2))
    with pytest.raises(PackFormatError, match="memory") as caught:
        describe_file(tmp_path / "f.h5")
    assert "damaged" not in str(caught.value)


def test_verify_does_not_call_a_file_on_a_disk_that_fails_damaged(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5py.AttributeManager, "__getitem__", Mock(side_effect=FAILURES[0]))
    report = h5pack.verify(pack, start_method="fork")
    assert not report.ok
    (problem,) = report.problems
    assert os.strerror(errno.EIO) in problem
    assert "\n" not in problem
    assert "damaged" not in problem


def test_a_slash_after_a_path_changes_nothing(pack: Path) -> None:
    assert h5pack.info(f"{pack}/") == h5pack.info(pack)
    assert detect_names(f"{pack}/", "images", "labels") == ("images", "labels")
    assert h5pack.verify(f"{pack}/", start_method="fork").ok


def test_rows_on_a_disk_that_fails_are_named_in_one_line(pack: Path) -> None:
    with h5py.File(pack) as file:
        dataset = Mock(file=file, shape=file["images"].shape, fillvalue=0)
        dataset.name = "/images"
        dataset.id.read.side_effect = OSError(errno.EIO, HDF5_TEXT)
        for name in ("get_space", "get_create_plist"):
            setattr(dataset.id, name, getattr(file["images"].id, name))
        with pytest.raises(ReadError) as caught:
            read_rows(dataset, np.arange(2), np.empty((2, *dataset.shape[1:]), np.uint8))
    require_one_line(caught, pack)


def test_the_limit_on_open_files_is_named(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h5py, "File", Mock(side_effect=OSError(errno.EMFILE, HDF5_TEXT)))
    with pytest.raises(PackFormatError, match="'ulimit -n'"):
        open_file(pack)


def test_datasets_are_listed_without_the_cells_of_matlab(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["deep/y"], file["#refs#/c"] = 1, 2
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["group/x"] = file["#refs#/a"] = file["#subsystem#/b"] = np.zeros(3)
        file["soft"], file["twice"] = h5py.SoftLink("/group/x"), file["group/x"]
        for name, target in (("one", "deep/y"), ("all", "deep"), ("none", "gone")):
            file[name] = h5py.ExternalLink("other.h5", target)
        assert sorted(list_datasets(file)) == ["all/y", "group/x", "one"]


def test_datasets_behind_loops_and_several_links_are_listed_as_hdf5_visits_them(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["b/x"], file["b/c/y"], file["z"], file["type"] = 1, 2, 3, np.dtype("i4")
        file["a"], file["b/loop"], file["b/c/root"], file["y"] = file["b"], file["b"], file["/"], file["b/x"]
        for group in (file, file["b"], file["b/c"]):
            visited: dict[h5py.Dataset, str] = {}  # by object, since HDF5 1.14.2 may visit one a second time

            def visit(name: str, item: object, found: dict[h5py.Dataset, str] = visited) -> None:
                if isinstance(item, h5py.Dataset):
                    found.setdefault(item, name)

            group.visititems(visit)
            listed = hdf5.list_datasets(group, ())
            assert list(listed) == list(visited.values())
            assert [opened() for opened in listed.values()] == list(visited)


def test_names_of_many_bytes_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "_BLOCK_BYTES", 10_000_000)
    hdf5_file(tmp_path / "f.h5", names=np.array([b"a", b"b"] * 8, "S9"))
    with h5py.File(tmp_path / "f.h5", "r+") as file:
        file.create_dataset("long", (16,), "S4000000", chunks=(1,))
        assert list(stored_names(file["names"])) == ["a", "b"] * 8
        tracemalloc.start()
        try:
            assert list(stored_names(file["long"])) == [""] * 16
            assert tracemalloc.get_traced_memory()[1] < 30_000_000
        finally:
            tracemalloc.stop()


def test_a_loop_of_soft_links_leads_to_no_object(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["images"], file["a"] = h5py.SoftLink("/a"), h5py.SoftLink("/images")
        assert find_item(file, "images") is None
        assert find_item(file, "images/x") is None
    for images in ("images", "images/x"):
        with pytest.raises(PackFormatError) as caught:
            describe_file(tmp_path / "f.h5", images)
        assert caught.value.dataset == images


def test_a_missing_object_is_none_whenever_garbage_is_collected(pack: Path) -> None:
    thresholds = gc.get_threshold()
    with h5py.File(pack) as file:

        def use(phase: str, info: dict[str, int]) -> None:
            len(file)  # a call of HDF5, as an object that is freed makes one

        gc.callbacks.append(use)
        try:
            for wait in range(80):
                gc.disable()
                tuples = [(wait, number) for number in range(2200)]  # so that Python keeps no memory of pairs to reuse
                gc.set_threshold(gc.get_count()[0] + wait)
                gc.enable()
                assert find_item(file, "nothing") is None
                del tuples
        finally:
            gc.enable()
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(use)


def test_a_message_opens_and_names_few_of_very_many_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hdf5_file(tmp_path / "f.h5", **{f"photos/{number}": np.zeros((2, 2, 3), np.uint8) for number in range(30)})
    monkeypatch.setattr(hdf5, "_MAX_SORTED", 25)
    opened: list[int] = []
    real = h5py.Dataset.__init__
    monkeypatch.setattr(h5py.Dataset, "__init__", lambda *args, **kw: opened.append(1) or real(*args, **kw))
    with pytest.raises(PackFormatError, match=r"photos/0.* and 10 more") as caught:
        describe_file(tmp_path / "f.h5")
    assert str(caught.value).count("'photos/") == 20
    assert len(opened) == 25

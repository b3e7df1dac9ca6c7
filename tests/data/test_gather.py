"""Rows copied to batches from memory: from the page cache, and from small fields that are held."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

import h5pack
from h5pack.data import samples
from h5pack.data.gather import CachedRows, HeldRows
from h5pack.data.iteration import serial_torch
from h5pack.errors import DamagedRowsError, PackChangedError
from h5pack.read import mapping
from h5pack.read.mapping import MappedDataset
from h5pack.system.files import drop_cache, file_system_type, make_hot
from tests.data import packs

ROW_SETS: dict[str, npt.NDArray[np.int64]] = {
    "all": np.arange(packs.ROWS),
    "a span": np.arange(23, 78),
    "sparse": np.array([3, 4, 19, 40, 41, 49, 50, 88, 102]),
    "one": np.array([37]),
    "none": np.empty(0, np.int64),
}


@pytest.mark.parametrize("rows", ROW_SETS.values(), ids=ROW_SETS)
@pytest.mark.parametrize("dtype", ["u1", ">i4"])
def test_held_rows_are_those_of_the_file(
    tmp_path: Path, rows: npt.NDArray[np.int64], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_BLOCK_ROWS", 7)
    table = packs.values(shape=(3,), dtype=dtype)
    path = packs.write(tmp_path / "f.h5", images=packs.values(), table=table)
    held = HeldRows(h5pack.H5Dataset(path, fields=["table"]), "table", rows)
    for wanted in (rows, rows[::-1], np.random.default_rng(0).choice(rows, 70) if len(rows) else rows):
        for kind in (table.dtype.newbyteorder("="), np.dtype(np.int64)):
            out = np.zeros((len(wanted), 3), kind)
            held.gather(wanted, out)
            assert np.array_equal(out, table[wanted])


def test_damage_is_found_when_rows_are_held(tmp_path: Path) -> None:
    path = packs.converted(tmp_path)
    packs.flip(path, 12, "labels")
    with pytest.raises(DamagedRowsError, match="row 12"):
        HeldRows(h5pack.H5Dataset(path, check=True), "labels", np.arange(45))


def mapped_images(paths: Path | list[Path]) -> MappedDataset:
    """The images of one file, or of several, all in the page cache."""
    for path in paths if isinstance(paths, list) else [paths]:
        make_hot(path)
    dataset = h5pack.H5Dataset(paths)
    mapped, rows = dataset.engine.mapped("images"), np.arange(len(dataset))
    assert mapped.ready(rows, rows)
    return mapped


@pytest.mark.parametrize("chunks", [None, 1, 10])
@pytest.mark.parametrize(
    ("shape", "dtype", "unit"),
    [((32,), "u1", 16), ((5, 8), "u1", 8), ((7,), ">i4", 4), ((7,), "u2", 2), ((577,), "u1", 1), ((8, 3), "f8", 16)],
)
def test_mapped_rows_are_those_of_the_file(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, unit: int, chunks: int | None
) -> None:
    values = packs.values(shape=shape, dtype=dtype)
    mapped = mapped_images(packs.write(tmp_path / "f.h5", chunks, images=values))
    everything = np.arange(packs.ROWS)
    found = CachedRows(mapped)
    if mapped.array is None:
        assert unit % found._unit == 0, "chunks may begin at any multiple of 8 bytes"
    for wanted in (everything, everything[::-1], np.random.default_rng(0).choice(everything, 70), everything[:0]):
        # Batches have rows in the middle of a larger array.
        out = np.zeros((len(wanted) + 2, *shape), values.dtype)
        found.gather(found.locate(wanted), out[1:-1])
        assert np.array_equal(out[1:-1], values[wanted])
        assert not out[0].any()
        assert not out[-1].any()


@pytest.mark.parametrize("shape", [(32,), (577,)])
def test_mapped_rows_of_several_files_are_those_of_the_files(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = packs.values(3 * packs.ROWS, shape)
    parts = np.split(values, [40, 51, 200])
    paths = [packs.write(tmp_path / f"{number}.h5", 10, images=part) for number, part in enumerate(parts)]
    mapped = mapped_images(paths)
    assert mapped.mapping._address % (2 << 20) == 0
    everything, random = np.arange(len(values)), np.random.default_rng(0)
    cached = CachedRows(mapped)
    window = np.concatenate([np.arange(first, first + 30) for first in (190, 20, 111, 35)])
    for wanted in (everything, window, random.choice(everything, 500), np.array([51, 50, 51, 39, 40]), everything[:0]):
        out = np.zeros((len(wanted), *shape), values.dtype)
        found = cached.locate(wanted)
        cached.gather(found, out)
        assert np.array_equal(out, values[wanted])
        assert sorted(found.files) == sorted({int(row >= 40) + int(row >= 51) + int(row >= 200) for row in wanted})


@pytest.mark.parametrize("when", ["before", "during"])
def test_each_of_several_files_is_checked(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [packs.write(tmp_path / f"{number}.h5", 10, images=packs.values(50, (577,))) for number in range(3)]
    mapped = mapped_images(paths)
    cached, out = CachedRows(mapped), np.empty((10, 577), np.uint8)
    whole, others = cached.locate(np.arange(0, 150, 15)), cached.locate(np.arange(10))
    copied: list[bool] = []

    def select(*args: Any, **kwargs: Any) -> None:
        copied.append(True)
        if when == "during":
            os.utime(paths[1])

    if when == "before":
        os.truncate(paths[1], 4_096)
    monkeypatch.setattr(np, "take", select)
    with pytest.raises(PackChangedError) as caught:
        cached.gather(whole, out)
    assert caught.value.path == str(paths[1])
    assert copied == [True] * (when == "during"), "bytes of a file that was cut short are not touched"
    cached.gather(others, out)


def test_gathering_leaves_the_number_of_threads_alone(tmp_path: Path) -> None:
    mapped = mapped_images(packs.write(tmp_path / "f.h5", 10, images=packs.values(shape=(577,))))

    def work() -> tuple[int, bool]:
        torch.set_num_threads(2)
        before = torch.get_num_threads()
        with serial_torch:
            serial = torch.get_num_threads()
        cached = CachedRows(mapped)
        cached.gather(cached.locate(np.arange(5)), np.empty((5, 577), np.uint8))
        return serial, torch.get_num_threads() == before

    whole = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert packs.in_time(work) == (1, True)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(whole)


@pytest.mark.parametrize("dtype", ["u1", ">i4"])
def test_rows_that_left_the_page_cache_before_they_are_copied_are_read(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packs.write(tmp_path / "f.h5", images=packs.values(dtype=dtype), labels=np.arange(packs.ROWS))
    expected = packs.reference(h5pack.H5Dataset(path), 1, 8, window=2)[0]
    make_hot(path)
    monkeypatch.setattr("h5pack.data.chunk_groups.CHECK_SECONDS", -1.0)
    monkeypatch.setattr("h5pack.data.loader._SMALL_BLOCK_BYTES", 1)
    # Of the batches, which are short, say no.
    ready = Mock(side_effect=lambda first, last: len(first) != 8)
    monkeypatch.setattr("h5pack.read.mapping.MappedDataset.ready", ready)
    with h5pack.H5Loader(h5pack.H5Dataset(path), 8, window=2, num_threads=2) as loader:
        assert packs.all_same(list(loader), expected)
    # The other batches have rows of two windows.
    assert [len(call.args[0]) for call in ready.mock_calls].count(8) >= 8


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("suits", [True, False])
def test_rows_on_the_disk_are_loaded_or_read(
    tmp_path: Path, suits: bool, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first epoch of a file that is not in the page cache, and the second, in which it is."""
    monkeypatch.setattr("h5pack.read.mapping._BLOCK_FILE_SYSTEMS", [file_system_type(tmp_path)] * suits)
    path = packs.labeled(tmp_path / "f.h5")
    order: dict[str, Any] = {"window": 2, "seed": 3, "streams": streams}
    expected = packs.reference(h5pack.H5Dataset(path), 2, 8, **order)
    loaded: list[bool] = []
    load = MappedDataset.load
    monkeypatch.setattr(MappedDataset, "load", lambda *runs: loaded.append(load(*runs)) or loaded[-1])
    dataset = h5pack.H5Dataset(path)
    with h5pack.H5Loader(dataset, 8, num_threads=2, **order) as loader:
        # Now, because the kernel reads ahead when the metadata is read.
        if drop_cache(path):
            pytest.skip("this file system keeps files in the page cache")
        assert all(packs.all_same(list(loader), epoch) for epoch in expected)
    assert loaded
    assert set(loaded) == {suits and mapping._kernel_reads_blocks()}
    assert dataset.stats().amplification == 1.0


def test_rows_in_the_page_cache_take_no_private_memory(tmp_path: Path) -> None:
    shape, rows = (256, 256, 3), 400
    path = packs.write(tmp_path / "f.h5", 8, images=np.zeros((rows, *shape), np.uint8) + 1)
    make_hot(path)

    def private() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))

    with h5pack.H5Loader(h5pack.H5Dataset(path), 4, num_threads=1, window=2) as loader:
        for _ in loader:
            pass
        before = private()
        for _ in range(3):
            for (images,) in loader:
                assert images[0, 0, 0, 0] == 1
        assert private() - before < rows * int(np.prod(shape)) / 4


@pytest.mark.parametrize("streams", [1, 2])
def test_cached_and_other_groups_may_take_turns(tmp_path: Path, streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches come from the mapping, by preadv, and from both in turn."""
    path = packs.labeled(tmp_path / "f.h5")
    make_hot(path)
    order: dict[str, Any] = {"window": 2, "seed": 3, "streams": streams}
    expected = packs.reference(h5pack.H5Dataset(path), 1, 8, **order)[0]
    for wanted in ([True], [False], [True, False], [False, False, True]):
        ready = Mock(side_effect=itertools.cycle(wanted))
        monkeypatch.setattr("h5pack.read.mapping.MappedDataset.ready", ready)
        # After a longer pause of the machine, `ready` would be asked again, out of turn.
        monkeypatch.setattr("h5pack.data.chunk_groups.CHECK_SECONDS", 3600.0)
        monkeypatch.setattr("h5pack.data.pipeline._MERGED_BYTES", 1)
        dataset = h5pack.H5Dataset(path)
        with h5pack.H5Loader(dataset, 8, num_threads=2, **order) as loader:
            assert packs.all_same(list(loader), expected)
        assert ready.call_count >= 5
        assert dataset.stats().rows == packs.ROWS + (-packs.ROWS % streams)
        assert dataset.stats().amplification == 1.0

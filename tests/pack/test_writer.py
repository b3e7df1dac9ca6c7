"""Tasks cover the missing rows once; they are large at first, and small at the end."""

from __future__ import annotations

import gc
import itertools
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import h5pack
from h5pack.errors import RejectedImageError, SourceError
from h5pack.format.row_offsets import RowOffsets
from h5pack.pack import writer
from h5pack.pack.conversion import Conversion
from h5pack.pack.plan import ConvertPlan
from h5pack.pack.row_order import RowOrder
from h5pack.pack.writer import Images, WriteJob, WriteTask, read_ahead, write_tasks
from h5pack.sources.reader import SourceReader
from tests.makers import flat_folder, quick, save

IMAGES = 8
JOB = WriteJob("o.h5.partial", "journal", None, "auto", 0)  # type: ignore[arg-type]


@pytest.fixture
def plan(tmp_path: Path) -> ConvertPlan:
    """The plan of a few small images, each of them repeated as 2,500 rows in chunks of 7."""
    source = flat_folder(tmp_path / "in", IMAGES, (12, 10))
    with Conversion(source, tmp_path / "o.h5", **quick(chunk_rows=7, order="sorted")) as conversion:
        found = conversion.plan()
    origins = np.repeat(np.arange(IMAGES), 2_500)
    return replace(found, row_order=RowOrder(origins, np.array([0, len(origins)])))


def tasks_of(plan: ConvertPlan, missing: np.ndarray, num_workers: int) -> list[WriteTask]:
    chunk_bytes = 7 * plan.row_bytes
    offsets = RowOffsets(4_096 + np.arange(-(-plan.rows // 7)) * chunk_bytes, 7, plan.row_bytes)
    return list(write_tasks(plan, JOB, [offsets], missing, num_workers))


def sizes_of(tasks: list[WriteTask]) -> list[int]:
    return [sum(len(group.rows) for group in task.groups) for task in tasks]


@pytest.mark.parametrize("num_workers", [1, 3, 16])
def test_tasks_cover_the_missing_rows_once(plan: ConvertPlan, num_workers: int) -> None:
    missing = np.flatnonzero(np.random.default_rng(num_workers).random(plan.rows) < 0.7)
    tasks = tasks_of(plan, missing, num_workers)
    groups = [group for task in tasks for group in task.groups]
    assert np.array_equal(np.concatenate([group.rows for group in groups]), missing)
    for group in groups:
        assert group.images.indices == plan.row_order.origins[group.rows].tolist()
        assert np.array_equal(group.offsets, 4_096 + group.rows * plan.row_bytes)


@pytest.mark.parametrize("num_workers", [1, 2, 16])
def test_the_first_tasks_are_large_and_the_last_ones_small(plan: ConvertPlan, num_workers: int) -> None:
    tasks = sizes_of(tasks_of(plan, np.arange(plan.rows), num_workers))
    share = plan.rows / num_workers
    # A task ends at the end of a chunk.
    assert share / 2 - 7 <= tasks[0] <= share / 2
    assert max(tasks[-num_workers:]) <= share / 64
    assert all(later <= earlier + 7 for earlier, later in itertools.pairwise(tasks))
    assert len(tasks) < 16 * num_workers


def test_the_bytes_of_a_task_are_limited(plan: ConvertPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = np.arange(plan.rows)
    monkeypatch.setattr(writer, "TASK_BYTES", 700 * plan.row_bytes)
    assert max(sizes_of(tasks_of(plan, missing, 2))) == 700
    # Also the bytes of the images that are read.
    monkeypatch.setattr(writer, "_TASK_SOURCE_BYTES", 350 * -(-plan.source_bytes // IMAGES))
    assert max(sizes_of(tasks_of(plan, missing, 2))) == 350
    monkeypatch.setattr(plan.catalog.reader.__class__, "row_bytes", 5 * plan.row_bytes)
    assert max(sizes_of(tasks_of(plan, missing, 2))) == 140
    monkeypatch.setattr(writer, "TASK_BYTES", 1)
    assert set(sizes_of(tasks_of(plan, missing, 2))) == {1}


@pytest.mark.parametrize("whole_pages", [(), (0,), (0, 1)])
def test_rows_of_several_machines_that_share_pages_are_divided_by_chunk(
    plan: ConvertPlan, whole_pages: tuple[int, ...]
) -> None:
    offsets = [RowOffsets(np.arange(10) << 16, 7, 4_096 if number in whole_pages else 360) for number in (0, 1)]
    tasks = list(write_tasks(plan, replace(JOB, durable=True), offsets, np.arange(70), 16))
    chunks = [chunk for task in tasks for chunk in {int(row) // 7 for group in task.groups for row in group.rows}]
    assert (len(chunks) == 10) == (whole_pages != (0, 1))


def test_images_that_are_not_files_are_divided_further(plan: ConvertPlan) -> None:
    tasks = sizes_of(tasks_of(replace(plan, source_bytes=0), np.arange(plan.rows), 2))
    assert max(tasks) <= plan.rows / 32


@pytest.mark.parametrize("settings", [{"size": 8}, {"keep": "jpeg", "max_side": 8}], ids=str)
@pytest.mark.parametrize("width", [2**31 - 1, 2**32 - 1])
def test_a_gigantic_image_is_named_or_rejected(tmp_path: Path, width: int, settings: dict[str, Any]) -> None:
    found = flat_folder(tmp_path / "s", 3)
    save(found / "bomb.png", 1)
    data = bytearray((found / "bomb.png").read_bytes())
    data[16:24] = struct.pack(">II", width, 2**20)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (found / "bomb.png").write_bytes(data)
    keywords = quick(max_pixels=2**60, **settings)
    if width > 2**31:
        assert h5pack.convert(found, tmp_path / "o.h5", **keywords).rejects == 1
        return
    with pytest.raises(SourceError) as caught:
        h5pack.convert(found, tmp_path / "o.h5", **keywords)
    assert caught.value.path == "bomb.png"


class ListReader(SourceReader):
    """Reads from a list, which may contain errors; `reads` counts what was read."""

    def __init__(self, sources: list[Any]) -> None:
        self.sources, self.reads = sources, 0

    def read(self, index: int, name: str) -> Any:
        self.reads += 1
        if isinstance(self.sources[index], Exception):
            raise self.sources[index]
        return self.sources[index]


FILE, PIXELS, REJECTED = bytes(50_000), np.zeros((2, 2, 3), np.uint8), RejectedImageError("it is damaged")


@pytest.mark.parametrize(
    ("sources", "masks", "reads"),
    [
        ([FILE] * 5, [], [3, 3, 3, 5, 5]),
        ([FILE * 9] * 3, [], [1, 2, 3]),
        ([FILE, FILE, PIXELS, PIXELS, FILE], [], [3, 3, 3, 4, 5]),
        ([FILE, REJECTED, FILE, FILE], [], [2, 2, 4, 4]),
        ([FILE] * 3, [["m.png"] * 3], [1, 2, 3]),
        ([], [], []),
    ],
)
def test_small_files_are_read_together(
    sources: list[Any], masks: list[list[str]], reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_BLOCK_BYTES", 130_000)
    reader = ListReader(sources)
    numbers = list(range(len(sources)))
    images = Images(numbers, [f"{number}.jpg" for number in numbers], [0] * len(sources), masks)
    found = [(image, source, reader.reads) for image, source in read_ahead(reader, images)]
    assert [image for image, _, _ in found] == list(images)
    assert [source for _, source, _ in found] == [str(one) if one is REJECTED else one for one in sources]
    assert [count for _, _, count in found] == reads


class FailsLater:
    """A map-style dataset, of which every other sample fails when it is read again; `reads` counts how often."""

    def __init__(self) -> None:
        self.reads = [0] * 40

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> np.ndarray:
        self.reads[index] += 1
        if self.reads[index] > 1 and index % 2:
            raise ValueError
        return np.zeros((6, 5, 3), np.uint8)


def test_rejects_keep_no_rows_in_memory(tmp_path: Path) -> None:
    """An error that is kept refers to a traceback, and so to frames: to buffers of rows, and to files."""
    gc.collect()
    gc.disable()
    try:
        before = sum(type(one) is RejectedImageError for one in gc.get_objects())
        assert h5pack.convert(FailsLater(), tmp_path / "o.h5", **quick()).rejects == 20
        assert sum(type(one) is RejectedImageError for one in gc.get_objects()) <= before
    finally:
        gc.enable()


class SameArray:
    """A map-style dataset that returns the same array for each sample, with other values."""

    pixels = np.zeros((6, 5, 3), np.uint8)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> np.ndarray:
        self.pixels[...] = index
        return self.pixels


def test_a_dataset_may_return_the_same_array_again(tmp_path: Path) -> None:
    h5pack.convert(SameArray(), tmp_path / "o.h5", **quick(order="sorted"))
    with h5py.File(tmp_path / "o.h5") as file:
        assert np.array_equal(
            file["images"][:], np.tile(np.arange(100, dtype=np.uint8)[:, None, None, None], (6, 5, 3))
        )


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_rejects_within_a_block_leave_the_others(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, checksums and statistics are the same for blocks of one row and of all rows."""
    monkeypatch.setattr(writer, "_BLOCK_BYTES", block_bytes)
    source = flat_folder(tmp_path / "in", 40, (12, 10))
    names = sorted(path.name for path in source.iterdir())
    for name in names[3], names[4], names[17], names[39]:
        path = source / name
        path.write_bytes(path.read_bytes()[:-60])
    report = h5pack.convert(source, tmp_path / "o.h5", **quick(order="sorted"))
    assert (report.images, report.rejects) == (36, 4)
    kept = [name for number, name in enumerate(names) if number not in (3, 4, 17, 39)]
    with h5py.File(tmp_path / "o.h5") as file:
        assert [name.decode() for name in file["filenames"][:]] == kept
        rows = file["images"][:]
        expected = [np.asarray(Image.open(source / name).convert("RGB")) for name in kept]
        assert np.array_equal(rows, np.stack(expected))
        assert file["checksums/images"][:].tolist() == [zlib.crc32(row) for row in rows]
        assert np.allclose(file["statistics/mean"][:], rows.mean((0, 1, 2)) / 255, rtol=1e-12)

"""Tasks cover the missing rows once; they are large at first, and small at the end."""

from __future__ import annotations

import itertools
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import h5pack
from h5pack.errors import SourceError
from h5pack.format.row_offsets import RowOffsets
from h5pack.pack import writer
from h5pack.pack.conversion import Conversion
from h5pack.pack.plan import ConvertPlan, RowOrder
from h5pack.pack.writer import WriteJob, WriteTask, write_tasks
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

"""The estimate of a conversion's time: what is sampled, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from h5pack.errors import SourceError
from h5pack.pack import estimate
from h5pack.pack.conversion import Conversion
from h5pack.pack.estimate import _samples, estimate_seconds
from h5pack.sources.reader import FileReader
from tests.makers import flat_folder, hdf5_file, pixels, quick, truncate


def test_the_time_of_later_tasks_is_divided_among_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = flat_folder(tmp_path / "in", 20)
    for compression, (first, after) in {"none": (2.5, 1.0), "gzip": (2.5, 1.0)}.items():
        with Conversion(source, tmp_path / "o.h5", **quick(compression=compression)) as conversion:
            plan = conversion.plan()
            # The mean of CPU times, and the median of the rest, of which a task may have far more than another.
            several = [(True, 9.0, 0.0), (False, 0.8, 0.5), (False, 0.2, 90.0), (False, 0.5, 0.5)]
            for results, mean in ((several, after), ([(True, 2.0, 0.5)], first)):
                monkeypatch.setattr(estimate, "run", lambda *_, results=results, **__: iter(results))
                for workers in (1, 4):
                    seconds = estimate_seconds(plan, None, workers)  # type: ignore[arg-type]
                    assert seconds == pytest.approx(20 * mean / workers, abs=0.11)


@pytest.mark.parametrize(
    ("num_workers", "method", "compression"), [(1, None, "none"), (2, None, "gzip"), (2, "spawn", "zstd")]
)
def test_images_are_sampled_in_workers_without_writing(
    tmp_path: Path, num_workers: int, method: str | None, compression: str
) -> None:
    source = flat_folder(tmp_path / "in", 40, (60, 50))
    for number in range(0, 40, 3):
        truncate(source / f"{number:05d}.jpg")
    settings = quick(num_workers=num_workers, start_method=method, compression=compression, size=32)
    with Conversion(source, tmp_path / "o.h5", **settings) as conversion:
        assert 0 < conversion.estimate_seconds() < 1_000
        assert sorted(index for indices in _samples(conversion.plan()) for index in indices) == list(range(40))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("settings", [{}, {"keep": "jpeg"}, {"keep": "jpeg", "max_side": 16}], ids=str)
@pytest.mark.parametrize(
    ("target", "error"),
    [("images.decode.Decoder.decode", MemoryError()), ("sources.reader.FileReader.read", OSError(5, "I/O error"))],
)
def test_an_image_that_cannot_be_read_or_decoded_is_named_when_it_is_written(
    tmp_path: Path, settings: dict[str, Any], target: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    with Conversion(flat_folder(tmp_path / "in", 1), tmp_path / "o.h5", **quick(**settings)) as conversion:
        conversion.plan()
        monkeypatch.setattr(f"h5pack.{target}", fail)
        assert conversion.estimate_seconds() > 0
        with pytest.raises(SourceError) as caught:
            conversion.run()
    assert caught.value.path == "00000.jpg"


def test_rows_read_with_their_chunk_are_sampled_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_TASK_BYTES", 8 * 840)
    images = np.stack([pixels(number) for number in range(23)])
    path = hdf5_file(tmp_path / "in.h5")
    with h5py.File(path, "a") as file:
        file.create_dataset("images", data=images, chunks=(5, 20, 14, 3), compression="gzip")
    with Conversion(path, tmp_path / "o.h5", **quick()) as conversion:
        tasks = list(_samples(conversion.plan()))
        assert all(len(indices) in (8, 10) for indices in tasks[:-1])
        groups = [sorted({index // 5 for index in indices}) for indices in tasks]
        assert sorted(group for found in groups for group in found) == list(range(5))
        assert sorted(index for indices in tasks for index in indices) == list(range(23))
        assert conversion.estimate_seconds() > 0


def test_large_chunks_of_small_images_are_sampled_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((2_000, 8, 8), np.uint8)
    path = hdf5_file(tmp_path / "in.h5")
    with h5py.File(path, "a") as file:
        file.create_dataset("images", data=images, chunks=(1_000, 8, 8), compression="gzip")
    for limit, expected in ((64 * 1_000, [1_000, 1_000]), (64 * 999, [999, 999]), (64 * 10, [256, 256])):
        monkeypatch.setattr(estimate, "_GROUP_BYTES", limit)
        with Conversion(path, tmp_path / "o.h5", **quick(mode="gray")) as conversion:
            assert list(map(len, _samples(conversion.plan()))) == expected


def test_few_encoded_images_of_a_group_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding takes longer than reading them with the rest of their group, such as a Parquet file's row group."""
    monkeypatch.setattr(estimate, "_MAX_TASK_IMAGES", 4)
    monkeypatch.setattr(FileReader, "groups", lambda _, indices: np.zeros(len(indices), np.int64))
    with Conversion(flat_folder(tmp_path / "in", 9), tmp_path / "o.h5", **quick()) as conversion:
        assert list(map(len, _samples(conversion.plan()))) == [4]


class Large:
    """A dataset whose samples are counted."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 3_000

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return np.zeros((9, 9, 3), np.uint8)


def test_an_eighth_of_the_images_is_enough(tmp_path: Path) -> None:
    dataset = Large()
    with Conversion(dataset, tmp_path / "o.h5", **quick()) as conversion:
        conversion.plan()
        dataset.read.clear()
        conversion.estimate_seconds()
    assert 0 < len(dataset.read) <= 3_000 // 8 + 2 * 256
    # Spread over the whole source.
    assert max(dataset.read) - min(dataset.read) > 2_000

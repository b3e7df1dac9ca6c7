"""What is diagnosed: settings and files that are refused, facts of those that are not, and the loaders measured."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import h5pack
from h5pack import cli
from h5pack.device.batch import images_of
from h5pack.doctor.device_stages import DeviceStages
from h5pack.doctor.diagnose import Diagnosis
from h5pack.doctor.loaders import DiagnoseSettings, HostLoaders
from h5pack.doctor.target import Target, touch_batch
from h5pack.errors import OptionsError, PackFormatError
from h5pack.format import schema
from h5pack.monitor.bottleneck import Encoding, Evidence, Stage
from tests.data.packs import ROWS, converted, threads_end, values, write
from tests.doctor import users
from tests.makers import flat_folder, quick, save
from tests.read.encoded_files import write_encoded


def settings(path: str | Path, **changes: Any) -> DiagnoseSettings:
    usual: dict[str, Any] = {"batch_size": 16, "window": 2, "dtype": "float32", "seconds": 60.0, "device": "cpu"}
    usual |= {"images": schema.IMAGES, "labels": schema.LABELS, "model": users.cheap}
    return DiagnoseSettings(path=path, **{**usual, **changes})


@contextmanager
def opened(path: Path, **changes: Any) -> Iterator[Target]:
    """A target that has loaded its first batch."""
    with closing(Target(settings(path, **changes))) as target:
        target.warm(0.0)
        target.load_sample()
        yield target


def evidence(path: Path, **changes: Any) -> Evidence:
    with opened(path, **changes) as target:
        return target.evidence()


def test_senseless_settings_are_refused(path: Path) -> None:
    for changes, parameters in (
        *(({name: -1}, (f"{name}=-1",)) for name in ("batch_size", "window", "num_threads", "num_workers")),
        ({"num_threads": 2, "num_workers": 2}, ("num_threads", "num_workers")),
        *(({"seconds": value}, (f"seconds={value}",)) for value in (0.0, float("inf"), float("nan"))),
        *(({name: value}, (f"{name}={value!r}",)) for name, value in (("dtype", "int8"), ("model", "module:name"))),
        ({"transform": 3}, ("transform=3",)),
        # Refused when the device is known.
        *(({"device": "meta"}, ("device",)), ({"device": "gpu"}, ("device='gpu'",))),
        ({"device": "cpu", "pin_memory": True}, ("pin_memory=True",)),
    ):
        with pytest.raises(OptionsError) as caught:
            Target(settings(path, **changes))
        assert caught.value.parameters == parameters


def test_settings_keep_numpy_numbers_as_python_numbers(path: Path) -> None:
    found = settings(path, batch_size=np.int64(4), window=np.int32(2), num_threads=np.uint8(1), seconds=np.float32(2))
    values = (found.batch_size, found.window, found.num_threads, found.seconds)
    assert json.loads(json.dumps(values)) == [4, 2, 1, 2.0]


def test_files_that_cannot_be_diagnosed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no HDF5")
    write(tmp_path / "none.h5", labels=np.arange(3))
    write(tmp_path / "empty.h5", chunks=None, images=np.zeros((0, 4, 4, 3), np.uint8))
    pack = converted(tmp_path)
    for path, changes, word in (
        *((tmp_path / name, {}, name) for name in ("missing.h5", "text", "none.h5", "empty.h5")),
        (pack, {"split": "no_such_split"}, "no_such_split"),
        (pack, {"labels": "no_such_labels"}, "no_such_labels"),
    ):
        with pytest.raises(PackFormatError, match=word):
            Target(settings(path, **changes))


def test_the_datasets_of_another_file_are_detected_and_its_faults_named(tmp_path: Path) -> None:
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("train/x", data=np.zeros((40, 3, 96, 96), np.uint8), chunks=(40, 3, 8, 8))
        file["train/y"] = np.arange(40)[:, None] % 4
    with Diagnosis(settings(path)) as diagnosis:
        assert diagnosis.target.dataset.names == ("train/x", "train/y")
        report = diagnosis.report()
        assert report.target.faults == h5pack.info(path).datasets[0].faults != ()
        assert all(name in report.to_text() for name in ("'train/x'", "'train/y'"))
    with h5py.File(path, "a") as file:
        file["train/img"] = file["train/x"][()]
    with pytest.raises(PackFormatError) as caught:
        Diagnosis(settings(path))
    assert caught.value.parameters == ("images=NAME",)


@pytest.mark.parametrize(("split", "rows", "batch_size"), [(None, 1, 1), ("test", 12, 3)])
def test_a_batch_of_too_many_rows_is_lowered(tmp_path: Path, split: str | None, rows: int, batch_size: int) -> None:
    path = converted(tmp_path) if split else write(tmp_path / "one.h5", chunks=1, images=values(1))
    with opened(path, split=split, model=None, batch_size=256) as target:
        target.make_step()
        found, known = target.describe(), target.evidence()
        # The one row has no labels.
        assert (target.failures, found.rows, found.labels) == ({}, rows, split is not None)
        assert (known.batch_rows, known.epoch_batches) == (batch_size, rows // batch_size)
        assert (target.batch_size, target.loaders.make().batch_size) == (batch_size, batch_size)
        assert found.asked_batch_size == 256
    if split:
        with opened(path, split=split, batch_size=3) as target:
            assert (target.batch_size, target.describe().asked_batch_size) == (3, None)


def test_the_stored_bytes_of_jpegs_and_virtual_files(tmp_path: Path) -> None:
    h5pack.convert(flat_folder(tmp_path / "in", 12, size=(60, 80)), tmp_path / "k.h5", **quick(keep="jpeg"))
    source = write(tmp_path / "s.h5", images=np.ones((4_000, 8, 12, 3), np.uint8))
    layout = h5py.VirtualLayout((4_000, 8, 12, 3), "u1")
    layout[:] = h5py.VirtualSource(source, "images", (4_000, 8, 12, 3))
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_virtual_dataset("images", layout)
    with h5py.File(tmp_path / "k.h5") as file:
        jpegs = file["encoded/data"].size
    for path, low, high in ((tmp_path / "k.h5", jpegs, jpegs), (tmp_path / "v.h5", 4_000 * 288, 4_000 * 288 + 99_999)):
        with opened(path, batch_size=4) as target:
            assert low <= target._stored_bytes() <= high


@pytest.mark.parametrize("failure", [torch.cuda.OutOfMemoryError("out of memory"), MemoryError(), RuntimeError("a\nb")])
def test_only_a_batch_that_does_not_fit_on_the_device_is_called_too_large(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Small(DeviceStages):
        def __init__(self, device: Any, batch: Any, normalize: Any) -> None:
            if len(batch[0]) > 12:
                raise failure
            super().__init__(device, batch, normalize)

    monkeypatch.setattr("h5pack.doctor.target.DeviceStages", Small)
    path, is_plain = write(tmp_path / "f.h5", images=values()), type(failure) is RuntimeError
    with pytest.raises(RuntimeError if is_plain else OptionsError) as caught:
        h5pack.diagnose(path, batch_size=20, seconds=60, device="cpu")
    assert getattr(caught.value, "parameters", None) == (None if is_plain else ("batch_size",))
    assert cli.main(["doctor", str(path), "--batch-size", "20", "--device", "cpu"]) == (1 if is_plain else 2)
    assert capsys.readouterr().err.count("\n") == 1


def test_what_a_file_decodes_is_known(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.fromarray(np.zeros((9, 7, 3), np.uint8)).save(picture, "png")
    write_encoded(tmp_path / "x.h5", 40 * [picture.getvalue()])
    for path, encoding, is_float in (
        (write(tmp_path / "z.h5", compression="gzip", images=values()), Encoding.CHUNKS, False),
        (write(tmp_path / "p.h5", chunks=(10, 8, 12, 3), images=values()), Encoding.PARTS, False),
        (tmp_path / "x.h5", Encoding.IMAGES, False),
        (write(tmp_path / "f.h5", images=values(dtype="f4")), None, True),
    ):
        found = evidence(path, num_workers=0)
        assert (found.encoding, found.library_reason, found.fits_cache) == (encoding, None, True)
        # An H5Loader decodes such small files only in the first epoch, but encoded images in every one.
        assert evidence(path).encoding is (encoding if encoding is Encoding.IMAGES else None)
        assert (found.stored_float, found.loaded_float) == (is_float, is_float)


def test_images_of_several_sizes_are_measured_as_crops_of_one_size(tmp_path: Path) -> None:
    flat_folder(tmp_path / "in", 8)
    save(tmp_path / "in" / "other.jpg", 9, (30, 50))
    h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **quick(keep="jpeg"))
    for changes in ({}, {"num_workers": 0, "transform": np.shape}):
        with opened(tmp_path / "o.h5", **changes) as target:
            assert images_of(next(iter(target.loaders.make()))).shape[1:] == (224, 224, 3)
            assert "224x224x3 uint8, RandomResizedCrop" in target.describe().images
            # The transform of a DataLoader makes the sizes equal by itself, as in the training.
            assert (target.loaders.transformed_dataset.decoder is None) == bool(changes)


@pytest.mark.parametrize("transform", [users.forgetful_transform, torch.Tensor.numpy, torch.sum])
def test_a_transform_that_returns_no_images_fails(path: Path, transform: Any) -> None:
    with opened(path, transform=transform) as target:
        failure = target.failures[Stage.TRANSFORM]
        assert "TypeError" in failure
        assert "image_key" not in failure
        assert target.loaders.transform is None


def test_a_transform_that_makes_floats_is_known(path: Path) -> None:
    found = evidence(path, transform=users.to_float)
    assert found.loaded_float
    assert found.loaded_row_bytes == 4 * found.stored_row_bytes == 4 * 576
    found = evidence(path, num_workers=0, transform=users.of_one_image)
    assert (found.num_workers, found.num_threads, found.loaded_float) == (0, None, True)


Make = Callable[..., HostLoaders]


@pytest.fixture
def make(dataset: h5pack.H5Dataset) -> Iterator[Make]:
    made: list[HostLoaders] = []

    def make(**changes: Any) -> HostLoaders:
        made.append(HostLoaders(dataset, settings(dataset.path, **changes), pin_memory=False))
        return made[-1]

    yield make
    for one in made:
        one.close()


def labels_of(loader: Any) -> list[int]:
    return sorted(label for _, labels in loader for label in labels.tolist())


def test_an_h5loader_yields_all_rows_or_the_first(make: Make) -> None:
    loaders = make(transform=users.to_float, num_threads=3)
    loader = loaders.make()
    assert isinstance(loader, h5pack.H5Loader)
    assert next(iter(loader))[0].dtype == torch.uint8
    assert next(iter(loaders.make(transform=True)))[0].dtype == torch.float32
    assert (loaders.parallel, loader.num_threads) == (3, 3)
    assert labels_of(loader) == list(range(ROWS))
    assert labels_of(loaders.make(40)) == list(range(40))
    loaders.close()
    assert threads_end()


def test_a_dataloader_yields_the_same(make: Make) -> None:
    loaders = make(transform=users.of_one_image, num_workers=1)
    plain, transformed = loaders.make(40), loaders.make(40, transform=True)
    assert labels_of(plain) == list(range(40))
    images, labels = next(iter(transformed))
    assert torch.equal(images, torch.from_numpy(values()[labels]).permute(0, 3, 1, 2).float() / 255)
    prefetched, ready = loaders.prefetch_of(plain)
    assert (loaders.parallel, prefetched, ready()) == (1, 2, 0)
    workers = [*plain._iterator._workers, *transformed._iterator._workers]
    loaders.close()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()


def test_ready_images_are_counted_in_an_h5loader(make: Make) -> None:
    loaders = make(num_threads=1)
    loader = loaders.make()
    prefetched, ready = loaders.prefetch_of(loader)
    assert (prefetched, ready()) == (2 * loader.plan.max_group_batches + 2, 0)
    iterator = iter(loader)
    next(iterator)
    assert ready() % 16 == 0


def test_an_h5loader_prefetches_fewer_batches_if_memory_is_short(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5pack.data.loader.available_memory", lambda: 300_000)
    loaders = make(num_threads=1, window=8)
    loader = loaders.make()
    assert loaders.prefetch_of(loader)[0] == loader.prefetch_factor < 2 * loader.plan.max_group_batches + 2


def test_batches_of_any_kind_are_touched() -> None:
    images = torch.zeros(4, 3, 8, 8)
    assert touch_batch([images, torch.zeros(4)]) == 4
    assert touch_batch(images.to(memory_format=torch.channels_last)) == 4
    assert touch_batch(torch.zeros(0, 3)) == touch_batch("nothing") == 0

"""Packs that keep JPEG files: the very bytes, the same for any number of workers and after kills."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import h5pack
from h5pack import cli
from h5pack.errors import (
    NoImagesError,
    NoSpaceError,
    OptionsError,
    OutputExistsError,
    RejectedImageError,
    ResumeError,
    SourceError,
)
from h5pack.images.encode import JpegEncoder
from h5pack.pack import writer
from h5pack.pack.conversion import Conversion
from h5pack.pack.kept import plan_data_chunks
from tests.crashing import Change, convert_until, distinct_steps, interrupt, kill_while_held, leftovers, require_resumes
from tests.makers import hdf5_file, pixels, quick, save, truncate
from tests.read.encoded_files import decoded, encode, write_encoded
from tests.read.files import flip

SIDES = [(20, 14), (31, 90), (120, 64), (64, 64), (9, 200)]


def options(**settings: Any) -> dict[str, Any]:
    return quick(keep="jpeg", **settings)


def photos(root: Path) -> Path:
    """60 JPEG files of several sizes in two splits of two classes, 4 of which cannot be packed."""
    for number in range(60):
        split, label = ("train", "val")[number % 5 == 4], "xy"[number % 2]
        save(root / split / label / f"{number:02}.jpg", number, SIDES[number % 5])
    truncate(root / "train" / "x" / "10.jpg", 0.9)
    truncate(root / "train" / "y" / "21.jpg", 0.05)
    truncate(root / "val" / "x" / "44.jpg", 0.7)
    (root / "train" / "y" / "31.jpg").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("source") / "in")


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an uninterrupted conversion."""
    out = tmp_path_factory.mktemp("whole") / "o.h5"
    h5pack.convert(source, out, **options())
    return out.read_bytes()


def stored(path: Path) -> dict[str, bytes]:
    """What h5py sees in a pack: the bytes of each file, by name."""
    with h5py.File(path) as file:
        assert "images" not in file
        data, edges = file["encoded/data"][()].tobytes(), file["encoded/offsets"][()].tolist()
        names = [name.decode() for name in file["filenames"][()]]
        assert (edges[0], edges[-1]) == (0, len(data))
        found = [data[first:last] for first, last in itertools.pairwise(edges)]
        assert [tuple(size) for size in file["encoded/size"][()]] == [decoded(row).shape[:2] for row in found]
        return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_a_pack_holds_the_very_bytes(source: Path, tmp_path: Path, order: str) -> None:
    out = tmp_path / "o.h5"
    report = h5pack.convert(source, out, **options(order=order))
    assert (report.images, report.rejects) == (56, 4)
    files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*.jpg")}
    found = stored(out)
    assert len(found) == 56
    assert all(files[name] == data for name, data in found.items())
    dataset = h5pack.H5Dataset(out, check=True)
    assert {name: len(rows) for name, rows in dataset.splits.items()} == {"train": 45, "val": 11}
    for name, sample in zip(dataset.filenames or [], dataset, strict=True):
        assert dataset.classes[sample.label] == Path(name).parent.name
        assert np.array_equal(sample.image, decoded(files[name]))
    assert (order == "sorted") == (list(found) == sorted(found))
    assert h5pack.verify(out, num_workers=1).ok
    rejects = [line.partition(",")[0] for line in (tmp_path / "o.h5.rejects.csv").read_text().splitlines()[1:]]
    assert rejects == ["train/x/10.jpg", "train/y/21.jpg", "train/y/31.jpg", "val/x/44.jpg"]


@pytest.mark.parametrize(("settings", "rejects"), [({}, 1), ({"max_side": 13_377}, 0), ({"max_side": 13_378}, 1)])
def test_images_that_readers_refuse_are_rejected(tmp_path: Path, settings: dict[str, int], rejects: int) -> None:
    """Whatever `max_pixels` is. Only the header says that the image is huge."""
    data = bytearray(save(tmp_path / "in" / "a.jpg").read_bytes())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 13_378, 13_378)
    (tmp_path / "in" / "a.jpg").write_bytes(data)
    save(tmp_path / "in" / "b.jpg")
    with Conversion(tmp_path / "in", tmp_path / "o.h5", **options(max_pixels=10**9, **settings)) as conversion:
        assert len(conversion.plan().rejects) == rejects
        if rejects:
            conversion.run()
            assert [sample.image.shape for sample in h5pack.H5Dataset(tmp_path / "o.h5")] == [(20, 14, 3)]


def test_statistics_are_those_of_all_pixels_of_the_train_split(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "o.h5").write_bytes(whole)
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", "train")
    values = np.concatenate([np.asarray(sample.image).reshape(-1, 3) for sample in dataset]) / 255
    assert dataset.mean == pytest.approx(values.mean(0), abs=1e-12)
    assert dataset.std == pytest.approx(values.std(0), abs=1e-12)


def test_the_file_does_not_depend_on_workers_or_ways_of_writing(source: Path, whole: bytes, tmp_path: Path) -> None:
    for settings in ({"num_workers": 3}, {"io": "direct"}, {"io": "buffered"}, {"compat": False, "num_workers": 2}):
        h5pack.convert(source, tmp_path / "o.h5", **options(overwrite=True, **settings))
        assert (tmp_path / "o.h5").read_bytes() == whole, settings
    h5pack.convert(source, tmp_path / "o.h5", **options(overwrite=True, compat=True))
    assert len(stored(tmp_path / "o.h5")) == 56


def test_killed_at_every_third_step(source: Path, whole: bytes, tmp_path: Path) -> None:
    """`test_killed_while_images_are_encoded` has other steps of the same phases."""
    third = lambda changes: distinct_steps(changes, first=True)[::3]  # noqa: E731
    assert require_resumes(source, tmp_path / "o.h5", options(), third) == whole
    assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}


def test_killed_while_workers_copy(source: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    kill_while_held(source, out, options(), (writer, "read_kept"), 9)
    assert h5pack.convert(source, out, **options(resume=True, num_workers=2)).resumed_rows > 0
    assert out.read_bytes() == whole


def test_lost_and_changed_bytes_are_copied_again(source: Path, whole: bytes, tmp_path: Path) -> None:
    """A power cut: the journal says that all rows are written, but the disk has lost some."""
    out = tmp_path / "o.h5"
    for when in ("finish.complete", "conversion.finish.make_tables"):
        convert_until(f"h5pack.pack.{when}", source, out, options())
        partial = tmp_path / "o.h5.partial"
        data = bytearray(partial.read_bytes())
        data[-40_000:-30_000] = bytes(10_000)
        partial.write_bytes(data)
        h5pack.convert(source, out, **options(resume=True))
        assert out.read_bytes() == whole
        out.unlink()


def test_a_file_that_changes_during_the_conversion_is_an_error(tmp_path: Path) -> None:
    source, out = photos(tmp_path / "in"), tmp_path / "o.h5"
    path = source / "train" / "x" / "00.jpg"
    with Conversion(source, out, **options()) as conversion:
        conversion.plan()
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises(SourceError) as caught:
            conversion.run()
    assert caught.value.path == "train/x/00.jpg"
    with pytest.raises(ResumeError):
        h5pack.convert(source, out, **options(resume=True))
    assert not out.exists()


def test_resume_of_a_complete_pack(source: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    out.write_bytes(whole)
    report = h5pack.convert(source, out, **options(resume=True))
    assert (report.images, report.rejects, report.already_complete) == (56, 4, True)
    with pytest.raises(OutputExistsError):
        h5pack.convert(source, out, **options(resume=True, seed=4))


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_a_folder_without_whole_files(tmp_path: Path, name: str) -> None:
    truncate(save(tmp_path / "in" / name, 1, (60, 50)), 0.8)
    with pytest.raises(NoImagesError):
        h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **options())
    assert leftovers(tmp_path) == {"in"}


def test_a_damaged_image_with_an_end_marker_is_packed_and_left_out_of_the_statistics(tmp_path: Path) -> None:
    """Only its bytes are promised. Reading it says that it is damaged."""
    save(tmp_path / "in" / "a.jpg", 1)
    path = truncate(save(tmp_path / "in" / "b.jpg", 2, (120, 90)))
    path.write_bytes(path.read_bytes() + b"\xff\xd9")
    h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **options())
    dataset = h5pack.H5Dataset(tmp_path / "o.h5")
    rows = dict(zip(dataset.filenames, dataset.engine.read_bytes("encoded", np.arange(2)), strict=True))
    assert rows["b.jpg"] == path.read_bytes()


def test_an_exif_orientation_and_bytes_after_the_end_marker_are_kept(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path / "in" / "a.jpg", 1, (30, 50), exif=exif)
    path.write_bytes(path.read_bytes() + b"maker's notes")
    h5pack.convert(path.parent, tmp_path / "o.h5", **options())
    assert h5pack.H5Dataset(tmp_path / "o.h5")[0].image.shape == (50, 30, 3)
    assert stored(tmp_path / "o.h5") == {"a.jpg": path.read_bytes()}


@pytest.mark.parametrize(
    "given",
    [{"size": 8}, {"size": 8, "fit": "pad"}, {"mode": "gray"}, {"layout": "nchw"}, {"compression": "gzip"},
     {"chunk_rows": 4}, {"chunk_bytes": 4096}],
)  # fmt: skip
def test_options_of_pixels_are_refused_by_name(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(OptionsError) as caught:
        h5pack.convert(tmp_path, tmp_path / "o.h5", keep="jpeg", **given)
    assert set(given) < set(caught.value.parameters)


@pytest.mark.parametrize("given", [{"max_side": 9}, {"quality": 50}, {"keep": "png"}, {"keep": "jpeg", "quality": 101}])
def test_wrong_options_of_kept_files(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        h5pack.convert(tmp_path, tmp_path / "o.h5", **given)


def test_chunks_waste_little() -> None:
    for size in (1, 65_536, 10**6, 10**8, 10**9, 10**12):
        chunks = plan_data_chunks(size)
        assert (chunks.bytes & (chunks.bytes - 1), 65_536 <= chunks.bytes <= 4 << 20) == (0, True)
        assert (chunks.count - 1) * chunks.bytes < size <= chunks.count * chunks.bytes
        assert chunks.bytes == 65_536 or chunks.count >= 256


def test_a_dry_run_says_how_many_bytes_are_kept(source: Path, tmp_path: Path) -> None:
    with Conversion(source, tmp_path / "o.h5", **options()) as conversion:
        plan = conversion.plan()
        size = sum(path.stat().st_size for path in source.rglob("*.jpg"))
        assert 0 < plan.to_json()["encoded_bytes"] < size
        assert (plan.to_json()["shape"], plan.notes()) == ([56], ())
        assert 0 < conversion.estimate_seconds() < 60
        report = conversion.run()
    assert os.path.getsize(tmp_path / "o.h5") == report.bytes <= plan.file_bytes + (1 << 20)


def test_a_plan_with_images_to_encode_gives_no_upper_bound(tmp_path: Path) -> None:
    # Noise takes far more bytes than the photos on which estimates are based.
    noise = np.random.default_rng(0).integers(0, 256, (8, 256, 256, 3), np.uint8)
    for number, image in enumerate(noise):
        (tmp_path / "in").mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / "in" / f"{number}.png")
    for settings, bound in ((options(), "about"), (quick(), "at most")):
        settings["overwrite"] = True
        with Conversion(tmp_path / "in", tmp_path / "o.h5", **settings) as conversion:
            plan = conversion.plan()
        size = h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **settings).bytes
        assert (size > plan.file_bytes) == (bound == "about")
        assert f"file     {bound} " in plan.to_text()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs beside images of other formats, 3 of which cannot be decoded."""
    root = tmp_path_factory.mktemp("mixed") / "in"
    for number in range(40):
        ending = ("jpg", "png", "jpg", "bmp")[number % 4]
        save(root / f"{number % 3}" / f"{number:02}.{ending}", number, SIDES[number % 5])
    Image.fromarray(pixels(3, (40, 30))).convert("L").save(root / "0" / "gray.png")
    Image.fromarray(pixels(4, (40, 30))).convert("RGBA").save(root / "1" / "alpha.png")
    Image.fromarray(pixels(5, (80, 60))).convert("L").save(root / "1" / "gray.jpg")
    truncate(root / "0" / "21.png", 0.8)
    truncate(root / "0" / "33.png", 0.8)
    truncate(root / "1" / "10.jpg", 0.8)
    return root


MIXED: dict[str, Any] = {"max_side": 64, "quality": 80}


@pytest.fixture(scope="module")
def whole_mixed(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("whole") / "o.h5"
    h5pack.convert(mixed, out, **options(**MIXED))
    return out.read_bytes()


@pytest.mark.parametrize("max_side", [None, 64])
def test_only_what_must_be_is_encoded(mixed: Path, tmp_path: Path, max_side: int | None) -> None:
    out = tmp_path / "o.h5"
    report = h5pack.convert(mixed, out, **options(max_side=max_side))
    assert (report.images, report.rejects) == (40, 3)
    found, kept = stored(out), 0
    for name, data in found.items():
        source = (mixed / name).read_bytes()
        height, width = decoded(source).shape[:2]
        if name.endswith(".jpg") and (max_side is None or max(height, width) <= max_side):
            assert data == source
            kept += 1
            continue
        with Image.open(mixed / name) as image:
            image = image if image.mode == "L" else image.convert("RGB")
            if max_side is not None and max(image.size) > max_side:
                scale = max_side / max(image.size)
                image = image.resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.BICUBIC)
            assert data == encode(image, quality=90)
    assert kept == (20 if max_side is None else 7)
    assert h5pack.verify(out, num_workers=1).ok
    assert h5pack.H5Dataset(out, check=True)[7].image.ndim == 3


def test_encoded_images_do_not_depend_on_workers(mixed: Path, whole_mixed: bytes, tmp_path: Path) -> None:
    for settings in ({"num_workers": 3}, {"io": "direct"}):
        h5pack.convert(mixed, tmp_path / "o.h5", **options(overwrite=True, **MIXED, **settings))
        assert (tmp_path / "o.h5").read_bytes() == whole_mixed, settings


def test_killed_while_images_are_encoded(mixed: Path, whole_mixed: bytes, tmp_path: Path) -> None:
    def steps(changes: list[Change]) -> list[int]:
        last = max(step for step, change in enumerate(changes) if "encoded-" in change and "unlink" not in change)
        early = distinct_steps(changes[: last + 12], first=False)[::2]
        return early + distinct_steps(changes, first=False)[2 * len(early) :: 3]

    assert require_resumes(mixed, tmp_path / "o.h5", options(**MIXED), steps) == whole_mixed
    assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}


def test_lost_encoded_bytes_are_encoded_again(mixed: Path, whole_mixed: bytes, tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    for when in ("resume.UnfinishedPack.allocate", "finish.complete"):
        convert_until(f"h5pack.pack.{when}", mixed, out, options(**MIXED))
        (data,) = (tmp_path / "o.h5.partial.journal").glob("encoded-*.bin")
        data.write_bytes(bytes(3_000) + data.read_bytes()[3_000:-500])
        h5pack.convert(mixed, out, **options(resume=True, **MIXED))
        assert out.read_bytes() == whole_mixed
        out.unlink()


def test_a_damaged_copy_of_an_encoded_image_does_not_hide_an_intact_one(
    mixed: Path, whole_mixed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder = tmp_path / "o.h5", tmp_path / "o.h5.partial.journal"
    convert_until("h5pack.pack.resume.UnfinishedPack.allocate", mixed, out, options(**MIXED))
    (log,), (data,) = folder.glob("encoded-*.log"), folder.glob("encoded-*.bin")
    shutil.copy(log, folder / "encoded-~.log")
    (folder / "encoded-~.bin").write_bytes(bytes(data.stat().st_size))
    monkeypatch.setattr(JpegEncoder, "encode", lambda *_: 1 / 0)
    h5pack.convert(mixed, out, **options(resume=True, **MIXED))
    assert out.read_bytes() == whole_mixed


def test_arrays_are_encoded(tmp_path: Path) -> None:
    """Rows of an HDF5 dataset, gray ones too, and samples of a dataset in Python."""
    values = np.stack([pixels(seed, (30, 20)) for seed in range(9)])
    hdf5_file(tmp_path / "color.h5", images=values, labels=np.arange(9))
    hdf5_file(tmp_path / "gray.h5", images=values[:, :, :, 0])
    for name, images in (("color", values), ("gray", values[:, :, :, 0])):
        h5pack.convert(tmp_path / f"{name}.h5", tmp_path / "o.h5", **options(order="sorted", overwrite=True))
        assert list(stored(tmp_path / "o.h5").values()) == [encode(image, quality=90) for image in images]
    h5pack.convert(list(zip(values, range(9), strict=True)), tmp_path / "o.h5", **options(overwrite=True))
    dataset = h5pack.H5Dataset(tmp_path / "o.h5")
    assert all(np.array_equal(image, decoded(encode(values[label], quality=90))) for image, label in dataset)


def test_encoded_rows_of_other_files_are_kept(tmp_path: Path) -> None:
    """Those of a pack, too, whose order, names, labels and splits are kept."""
    rows = [encode(pixels(seed, (20 + seed, 14))) for seed in range(9)]
    write_encoded(tmp_path / "foreign.h5", rows)
    h5pack.convert(tmp_path / "foreign.h5", tmp_path / "a.h5", **options())
    assert sorted(stored(tmp_path / "a.h5").values()) == sorted(rows)
    h5pack.convert(tmp_path / "a.h5", tmp_path / "b.h5", **options(order="sorted"))
    assert list(stored(tmp_path / "b.h5").items()) == list(stored(tmp_path / "a.h5").items())
    h5pack.convert(tmp_path / "a.h5", tmp_path / "pixels.h5", **quick(size=8))
    assert h5pack.H5Dataset(tmp_path / "pixels.h5").targets is not None
    assert h5pack.H5Dataset(tmp_path / "pixels.h5")[3].image.shape == (8, 8, 3)


def test_info_verify_preview_and_export(source: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    out.write_bytes(whole)
    files = stored(out)
    report = h5pack.info(out, stats=True)
    assert report.pack["encoded"] == {"images": 56, "bytes": sum(map(len, files.values())), "longer_sides": [20, 200]}
    assert len(report.opening) == 1
    with pytest.raises(OptionsError):
        h5pack.bench(out)
    assert h5pack.preview(out, tmp_path / "sheet.png").images > 0
    exported = h5pack.export(out, tmp_path / "back", num_workers=1)
    assert (exported.format, exported.copied_files, exported.lost) == ("jpeg", 56, ())
    assert {name: (tmp_path / "back" / name).read_bytes() for name in files} == files
    again = tmp_path / "again.h5"
    command = exported.again.replace("again.h5", str(again)).split()
    assert command[-2:] == ["--keep", "jpeg"]
    assert cli.main([*command[1:], "--quiet", "--workers", "1"]) == 0
    assert stored(again) == files
    # A row that differs from its checksum is damaged, although it could be decoded.
    name = next(iter(files))
    flip(out, whole.index(files[name]) + len(files[name]) - 9, 3)
    (row,) = h5pack.export(out, tmp_path / "some", num_workers=1).damaged
    assert (row.row, row.name) == (0, name)
    assert h5pack.verify(out, num_workers=1).damaged == {"encoded": [0]}


def test_a_repacked_file_can_still_be_verified(whole: bytes, tmp_path: Path) -> None:
    """Another program has compressed the bytes, so only the HDF5 library can read them."""
    out = tmp_path / "o.h5"
    out.write_bytes(whole)
    files = stored(out)
    with h5py.File(out, "r+") as file:
        data = file["encoded/data"][()]
        del file["encoded/data"]
        file.create_dataset("encoded/data", data=data, chunks=(5_000,), compression="gzip")
    assert h5pack.verify(out, num_workers=1).ok
    rows = np.arange(56)
    dataset = h5pack.H5Dataset(out, check=True)
    assert dataset.engine.read_bytes("encoded", rows) == list(files.values())
    dataset.close()
    with h5py.File(out, "r+") as file:
        file["checksums/encoded"][9] = 1
    assert h5pack.verify(out, num_workers=1).damaged == {"encoded": [9]}


def test_an_interruption_while_images_are_encoded_lets_go_of_the_journal(
    mixed: Path, whole_mixed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, encode_jpeg, calls = tmp_path / "o.h5", JpegEncoder.encode, itertools.count()

    def interrupted(*arguments: Any) -> Any:
        return encode_jpeg(*arguments) if next(calls) < 9 else interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(JpegEncoder, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            h5pack.convert(mixed, out, **options(**MIXED))
    assert leftovers(tmp_path) == {"o.h5.partial", "o.h5.partial.journal"}
    h5pack.convert(mixed, out, **options(resume=True, **MIXED))
    assert out.read_bytes() == whole_mixed


def test_strict_stops_at_the_first_image_that_cannot_be_encoded(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(RejectedImageError):
        h5pack.convert(mixed, tmp_path / "o.h5", **options(strict=True, exclude="*10.jpg"))
    report = h5pack.convert(mixed, tmp_path / "o.h5", **options(resume=True, exclude="*10.jpg"))
    assert (report.images, report.rejects) == (40, 2)


def test_a_full_disk_while_images_are_encoded(mixed: Path, whole_mixed: bytes, small_disk: Path) -> None:
    out, hog = small_disk / "o.h5", small_disk / "hog"
    hog.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - 20_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("h5pack.pack.output.Output.require_space", lambda *_, **__: None)
        with pytest.raises(NoSpaceError):
            h5pack.convert(mixed, out, **options(**MIXED))
    hog.unlink()
    h5pack.convert(mixed, out, **options(resume=True, **MIXED))
    assert out.read_bytes() == whole_mixed

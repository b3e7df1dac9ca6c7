"""Masks are packed beside their images: the same rows, windows, rejects, resumes and bytes."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

import h5pack
from h5pack.errors import DamagedRowsError, H5PackError, OptionsError, PackFormatError, ResumeError, SourceError
from h5pack.format.checksums import row_checksums
from h5pack.pack import finish
from h5pack.pack.conversion import Conversion
from h5pack.pack.file_structure import Addresses
from tests.crashing import convert_until, distinct_steps, leftovers, lose_pages, require_resumes
from tests.exporter.folders import pixels_of
from tests.makers import expected, hdf5_file, numbers, pair_folders, pixels, quick, save, tar_file, truncate, zip_file

SETTINGS = quick(source_kind="pairs", chunk_rows=8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pairs, of which 4 images and 9 masks cannot be decoded, so that rows move and chunks go."""
    root = pair_folders(tmp_path_factory.mktemp("source"), 60, (60, 50))
    for number in (3, 8, 21, 59):
        truncate(root / "images" / f"{number:03d}.jpg")
    for number in range(5, 50, 5):
        truncate(root / "masks" / f"{number:03d}.png")
    return root


def pack_of(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return {
            "images": file["images"][()],
            "masks": file["fields/masks"][()],
            "names": [name.decode() for name in file["filenames"][()]],
            "checksums": file["checksums/fields/masks"][()],
        }


@pytest.mark.parametrize(
    ("order", "settings"), [("shuffled", {}), ("sorted", {"compression": "gzip:1"}), ("shuffled", {"compat": True})]
)
def test_masks_are_in_the_rows_of_images(source: Path, tmp_path: Path, order: str, settings: dict[str, Any]) -> None:
    out = tmp_path / "o.h5"
    report = h5pack.convert(source, out, **SETTINGS, order=order, **settings)
    assert (report.images, report.rejects) == (47, 13)
    pack = pack_of(out)
    for row, name in enumerate(pack["names"]):
        mask = pixels_of(source / name.replace("images", "masks").replace("jpg", "png"))
        assert np.array_equal(pack["masks"][row], mask), name
        assert np.array_equal(mask, numbers(int(name[7:10]), (60, 50)))
        with Image.open(source / name) as image:
            assert np.array_equal(pack["images"][row], np.asarray(image)), name
    assert np.array_equal(pack["checksums"], row_checksums(pack["masks"]))
    with h5py.File(out) as file:
        assert file["fields/masks"].attrs["kind"] == b"mask"
        assert file["fields/masks"].chunks[0] == file["images"].chunks[0] == 8
    assert h5pack.verify(out).ok


@pytest.fixture(scope="module", params=["none", "gzip:1"])
def compression(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_killed_at_every_step(source: Path, tmp_path: Path, compression: str) -> None:
    """Also when masks move, because images or masks cannot be decoded, and fewer chunks remain."""
    out, settings = tmp_path / "o.h5", {**SETTINGS, "compression": compression}
    every = 1 if compression == "none" else 4
    require_resumes(source, out, settings, lambda changes: distinct_steps(changes, first=True)[::every])
    assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}
    report = h5pack.verify(out)
    assert (report.ok, report.rows) == (True, 47)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of an uninterrupted conversion."""
    out = tmp_path_factory.mktemp("whole") / "o.h5"
    h5pack.convert(source, out, **SETTINGS)
    return out


@pytest.mark.parametrize("settings", [{"num_workers": 3}, {"io": "buffered"}, {"num_workers": 2, "io": "direct"}])
def test_workers_and_ways_of_writing_give_the_same_bytes(
    source: Path, whole: Path, tmp_path: Path, settings: Any
) -> None:
    h5pack.convert(source, tmp_path / "o.h5", **{**SETTINGS, **settings})
    assert (tmp_path / "o.h5").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("where", ["complete", "move_rows"])
def test_lost_pages_are_decoded_again(
    source: Path, whole: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.h5"
    convert_until(f"h5pack.pack.finish.{where}", source, out, SETTINGS)
    lose_pages(tmp_path / "o.h5.partial")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    h5pack.convert(source, out, **SETTINGS, resume=True)
    assert out.read_bytes() == whole.read_bytes()


def test_other_addresses_of_the_chunks_of_masks_are_an_error(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_structure = finish.write_structure

    def elsewhere(*arguments: Any) -> Addresses:
        images, *masks = write_structure(*arguments)
        return images, *(addresses + 4096 for addresses in masks)

    monkeypatch.setattr(finish, "write_structure", elsewhere)
    with pytest.raises(H5PackError) as caught:
        h5pack.convert(source, tmp_path / "o.h5", **SETTINGS)
    assert caught.value.path == str(tmp_path / "o.h5.partial")
    assert not finish.is_complete(tmp_path / "o.h5.partial")
    monkeypatch.undo()
    h5pack.convert(source, tmp_path / "o.h5", **SETTINGS, resume=True)
    assert (tmp_path / "o.h5").read_bytes() == whole.read_bytes()


def test_a_damaged_row_of_masks_alone_is_written_again(source: Path, whole: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "o.h5", tmp_path / "o.h5.partial"
    convert_until("h5pack.pack.journal.Journal.save_written", source, out, SETTINGS)
    with h5py.File(whole) as file:
        offset = file["fields/masks"].id.get_chunk_info(2).byte_offset
    with partial.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xaa" * 100)
    report = h5pack.convert(source, out, **SETTINGS, resume=True)
    assert report.resumed_rows < 60
    assert out.read_bytes() == whole.read_bytes()


def test_a_changed_mask_ends_a_resume(tmp_path: Path) -> None:
    source, out = pair_folders(tmp_path / "in", 12), tmp_path / "o.h5"
    convert_until("h5pack.pack.finish.complete", source, out, SETTINGS)
    Image.fromarray(numbers(99, (20, 14))).save(source / "masks" / "004.png")
    with pytest.raises(ResumeError, match=r"images/004\.jpg"):
        h5pack.convert(source, out, **SETTINGS, resume=True)


def turned_square(root: Path, number: int, size: tuple[int, int], rows: slice, columns: slice, ending: str) -> None:
    """An image with a white square that is the class 9 of its mask, and with one of the Exif orientations."""
    image, mask = np.zeros((*size, 3), np.uint8), np.zeros(size, np.uint8)
    image[rows, columns], mask[rows, columns] = 255, 9
    exif = Image.Exif()
    exif[0x0112] = 1 + number % 8
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(root / "images" / f"{number}.{ending}", exif=exif, quality=95)
    Image.fromarray(mask).save(root / "masks" / f"{number}.png")


@pytest.mark.parametrize(("fit", "layout"), [("crop", "nhwc"), ("pad", "nchw"), ("stretch", "nhwc")])
def test_a_point_in_image_and_mask_stays_together(tmp_path: Path, fit: str, layout: str) -> None:
    """A white square in the image is the class 9 of the mask, whatever the size and the orientation."""
    for number in range(16):
        rows, columns = slice(20 + number, 28 + number), slice(15 + number, 23 + number)
        turned_square(tmp_path / "in", number, (60 + number, 90 - 3 * number), rows, columns, "png")
    settings = quick(source_kind="pairs", size=(32, 40), fit=fit, resample="nearest", layout=layout, order="sorted")
    h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **settings)
    pack = pack_of(tmp_path / "o.h5")
    images = pack["images"] if layout == "nhwc" else pack["images"].transpose(0, 2, 3, 1)
    assert np.array_equal(pack["masks"] == 9, images[:, :, :, 0] == 255)
    assert ((pack["masks"] == 9).sum((1, 2)) > 4).all()
    assert (fit == "pad") == bool((pack["masks"] == 255).any())
    assert set(np.unique(pack["masks"]).tolist()) <= {0, 9, 255}
    with Image.open(tmp_path / "in" / "images" / "5.png") as image:
        moved = {"crop": ImageOps.fit, "pad": ImageOps.pad, "stretch": Image.Image.resize}[fit]
        upright = moved(ImageOps.exif_transpose(image), (40, 32), Image.Resampling.NEAREST)
    assert np.array_equal(images[pack["names"].index("images/5.png")], np.asarray(upright))


def test_16_bit_masks_become_int32(tmp_path: Path) -> None:
    source = pair_folders(tmp_path / "in", 6)
    wide = np.arange(280, dtype=np.uint16).reshape(20, 14) * 200
    Image.fromarray(wide).save(source / "masks" / "002.png")
    for compression in ("none", "gzip:1"):
        out = tmp_path / f"{compression[:1]}.h5"
        h5pack.convert(source, out, **SETTINGS, compression=compression, order="sorted")
        pack = pack_of(out)
        assert pack["masks"].dtype == np.int32
        assert np.array_equal(pack["masks"][2], wide)
        assert np.array_equal(pack["masks"][3], numbers(3, (20, 14)))
        assert h5pack.verify(out).ok


def test_each_bad_pair_has_its_reason(tmp_path: Path) -> None:
    source = pair_folders(tmp_path / "in", 12)
    masks = source / "masks"
    (masks / "000.png").unlink()
    (masks / "001.png").write_bytes(b"no image")
    Image.fromarray(numbers(2, (21, 14))).save(masks / "002.png")
    Image.fromarray(pixels(3)).save(masks / "003.png")
    save(masks / "004.tif", 4)
    Image.fromarray(numbers(5, (14, 20))).save(masks / "005.png")
    (masks / "006.png").unlink()
    (masks / "006.png").symlink_to("nowhere.png")
    (masks / "007.png").write_bytes(b"")
    for name in ("100.png", "101.png"):
        Image.fromarray(numbers(1, (20, 14))).save(masks / name)
    out = tmp_path / "o.h5"
    with Conversion(source, out, **SETTINGS) as conversion:
        plan = conversion.plan()
        assert plan.to_json()["ignored"] == {"files of 'masks' without an image": 2}
        assert plan.to_json()["fields"] == ["masks"]
        assert len(plan.rejects) == 8, "all are known before anything is written"
    report = h5pack.convert(source, out, **SETTINGS)
    assert (report.images, report.rejects) == (4, 8)
    with h5py.File(out) as file:
        reasons = dict(zip(file["rejects/filenames"].asstr()[()], file["rejects/reasons"].asstr()[()], strict=True))
    assert sorted(reasons) == [f"images/00{number}.jpg" for number in range(8)]
    # A reason names the mask, unless it is unknown which file that is.
    assert [number for number in range(8) if f"masks/00{number}.png" in reasons[f"images/00{number}.jpg"]] == [
        *(1, 2, 3, 5, 6, 7)
    ]
    assert out.stat().st_size <= json.loads(json.dumps(plan.to_json()))["bytes"]


def test_splits_and_val(tmp_path: Path) -> None:
    for split in ("train", "val"):
        pair_folders(tmp_path / "in", 5, images=f"images/{split}", masks=f"masks/{split}")
    h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **SETTINGS)
    assert dict(h5pack.H5Dataset(tmp_path / "o.h5").splits) == {"train": range(5), "val": range(5, 10)}
    pair_folders(tmp_path / "other", 20)
    h5pack.convert(tmp_path / "other", tmp_path / "p.h5", **SETTINGS, val=0.25, limit=16)
    pack = pack_of(tmp_path / "p.h5")
    for name, mask in zip(pack["names"], pack["masks"], strict=True):
        assert np.array_equal(mask, numbers(int(name[7:10]), (20, 14)))
    assert dict(h5pack.H5Dataset(tmp_path / "p.h5").splits) == {"train": range(12), "val": range(12, 16)}


def test_what_cannot_be_combined_with_masks(tmp_path: Path) -> None:
    pair_folders(tmp_path / "in", 4)
    with pytest.raises(OptionsError, match="draft"):
        h5pack.convert(tmp_path / "in", tmp_path / "o.h5", **SETTINGS, size=8, draft=True)
    assert leftovers(tmp_path) == {"in"}


@pytest.mark.parametrize("fields", [(), "masks", "fields/masks"])
def test_masks_of_a_pack_are_packed_again(tmp_path: Path, fields: str) -> None:
    h5pack.convert(pair_folders(tmp_path / "in", 20), tmp_path / "a.h5", **SETTINGS, compression="gzip:1")
    before = pack_of(tmp_path / "a.h5")
    h5pack.convert(tmp_path / "a.h5", tmp_path / "b.h5", **quick(fields=fields, seed=3, size=(10, 7), fit="stretch"))
    after = pack_of(tmp_path / "b.h5")
    for name, mask in zip(after["names"], after["masks"], strict=True):
        assert np.array_equal(mask, before["masks"][before["names"].index(name)][1::2, 1::2])


DTYPES = [(dtype, (6, 8, 12)) for dtype in ("uint8", "bool", "uint16", "int32", "uint32", "int64", "uint64")]


@pytest.mark.parametrize(("dtype", "shape"), [*DTYPES, ("uint8", (6, 8, 12, 1)), ("int64", (6, 1, 8, 12))])
def test_masks_of_any_hdf5_file(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    masks = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 128, (6, 8, 12)).astype(dtype)
    path = hdf5_file(tmp_path / "a.h5", images=np.zeros((6, 8, 12, 3), np.uint8), seg=masks.reshape(shape))
    h5pack.convert(path, tmp_path / "b.h5", **quick(fields="seg", order="sorted"))
    with h5py.File(tmp_path / "b.h5") as file:
        assert file["fields/seg"].dtype == (np.uint8 if dtype in ("uint8", "bool") else np.int32)
        assert np.array_equal(file["fields/seg"][()], masks)
    h5pack.convert(path, tmp_path / "c.h5", **quick(fields="seg", order="sorted", size=(8, 6)))
    with h5py.File(tmp_path / "c.h5") as file:
        assert np.array_equal(file["fields/seg"][()], masks[:, :, 3:9])


@pytest.mark.parametrize(("dtype", "wrong"), [("uint32", 2**31), ("int64", -(2**31) - 1), ("uint64", 2**63)])
def test_a_row_of_an_hdf5_file_whose_mask_exceeds_int32_is_rejected(tmp_path: Path, dtype: str, wrong: int) -> None:
    masks = np.zeros((3, 8, 12), dtype)
    masks[0], masks[1, 2, 3] = 2**31 - 1, wrong
    path = hdf5_file(tmp_path / "a.h5", images=np.zeros((3, 8, 12, 3), np.uint8), seg=masks)
    h5pack.convert(path, tmp_path / "b.h5", **quick(fields="seg", order="sorted"))
    with h5py.File(tmp_path / "b.h5") as file:
        assert file["rejects/filenames"][()].tolist() == [b"images/00000001"]
        np.testing.assert_array_equal(file["fields/seg"][()], masks[::2].astype(np.int32), strict=True)


def test_masks_that_a_manifest_names(tmp_path: Path) -> None:
    source = pair_folders(tmp_path / "in", 10)
    lines = ["image,mask,label,other,split"]
    lines += [f"images/{one:03d}.jpg,masks/{one:03d}.png,{one % 3},masks/{9 - one:03d}.png,train" for one in range(9)]
    lines += ["images/009.jpg,,1,masks/000.png,val"]
    (source / "list.csv").write_text("\n".join(lines))
    settings = quick(mask_columns=["mask", "other"], order="sorted", chunk_rows=4)
    assert h5pack.convert(source / "list.csv", tmp_path / "o.h5", **settings).images == 9
    with h5py.File(tmp_path / "o.h5") as file:
        assert np.array_equal(file["fields/mask"][()], [numbers(one, (20, 14)) for one in range(9)])
        assert np.array_equal(file["fields/other"][()], [numbers(9 - one, (20, 14)) for one in range(9)])
        assert file["labels"][()].tolist() == [one % 3 for one in range(9)]
        assert file["rejects/reasons"][()].tolist() == [b"no path in column 'mask'"]
    assert h5pack.verify(tmp_path / "o.h5").ok
    for columns in ({"mask_columns": "nothing"}, {"mask_columns": "mask", "field_columns": "mask"}):
        with pytest.raises((SourceError, OptionsError)):
            h5pack.convert(source / "list.csv", tmp_path / "p.h5", **quick(**columns))
    with pytest.raises(OptionsError):
        h5pack.convert(source / "images", tmp_path / "p.h5", **quick(mask_columns="mask"))


KEPT = quick(source_kind="pairs", keep="jpeg")


def kept_masks(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The masks of a pack of PNG files, by the names of their images, as a reader who knows only Pillow sees them."""
    with h5py.File(path) as file:
        data, offsets = file["fields/masks/data"][()], file["fields/masks/offsets"][()]
        names = [name.decode() for name in file["filenames"][()]]
        sizes = file["encoded/size"][()]
        assert file["fields/masks"].attrs["kind"] == b"mask"
    found = {}
    for row, name in enumerate(names):
        with Image.open(io.BytesIO(data[offsets[row] : offsets[row + 1]].tobytes())) as image:
            found[name] = np.asarray(image)
        assert found[name].shape == tuple(sizes[row])
    return found


def test_kept_files_with_masks(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.h5"
    report = h5pack.convert(source, out, **KEPT)
    assert (report.images, report.rejects) == (47, 13)
    with h5py.File(out) as file:
        data, offsets = file["encoded/data"][()], file["encoded/offsets"][()]
        for row, name in enumerate(file["filenames"].asstr()[()]):
            assert data[offsets[row] : offsets[row + 1]].tobytes() == (source / name).read_bytes()
    for name, mask in kept_masks(out).items():
        assert np.array_equal(mask, numbers(int(name[7:10]), (60, 50)))
    assert h5pack.verify(out).ok
    dataset = h5pack.H5Dataset(out, fields=["masks"], with_rows=True, check=True)
    names = dataset.filenames
    for batch in (*h5pack.H5Loader(dataset, 10), *DataLoader(dataset, 10, collate_fn=dataset.collate)):
        assert (batch.masks.dtype, batch.masks.shape[1:]) == (torch.uint8, (60, 50))
        for mask, row in zip(batch.masks, batch.rows.tolist(), strict=True):
            assert np.array_equal(mask, numbers(int(names[row][7:10]), (60, 50)))


@pytest.mark.parametrize("settings", [{}, {"max_side": 20}])
def test_masks_of_kept_files_follow_orientation_and_size(tmp_path: Path, settings: dict[str, int]) -> None:
    """A white square in the image is the class 9 of the mask; sizes and orientations differ."""
    root = tmp_path / "in"
    for number in range(16):
        turned_square(root, number, (48 + 4 * (number // 8), 64), slice(8, 24), slice(16, 40), "jpg")
    h5pack.convert(root, tmp_path / "o.h5", **KEPT, **settings)
    masks = kept_masks(tmp_path / "o.h5")
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["masks"], with_rows=True)
    names = dataset.filenames
    for sample in dataset:
        assert np.array_equal(sample.masks, masks[names[sample.row]])
        assert sample.masks.shape == sample.image.shape[:2]
        differs = (sample.masks == 9) != (sample.image[:, :, 0] > 127)
        # JPEG blurs edges, and a smaller image has pixels of both sides.
        assert differs.float().mean() < (0.07 if settings else 0.01)
        assert max(sample.masks.shape) == settings.get("max_side", 64)
        if settings:
            mask = pixels_of(root / names[sample.row].replace("images", "masks").replace("jpg", "png"))
            turned = ImageOps.exif_transpose(Image.open(root / names[sample.row]))
            upright = mask if turned.size == mask.shape[::-1] and int(names[sample.row][7:-4]) % 8 == 0 else None
            if upright is not None:
                size = (sample.masks.shape[1], sample.masks.shape[0])
                slow = Image.fromarray(upright).resize(size, Image.Resampling.NEAREST)
                assert np.array_equal(sample.masks, np.asarray(slow))


@pytest.mark.parametrize("settings", [{}, {"max_side": 40}])
def test_kept_masks_are_resumed_at_every_step(source: Path, tmp_path: Path, settings: dict[str, int]) -> None:
    out, keywords, every = tmp_path / "o.h5", {**KEPT, **settings}, 4 if settings else 2
    whole = require_resumes(source, out, keywords, lambda changes: distinct_steps(changes, first=True)[::every])
    assert leftovers(tmp_path) == {"o.h5", "o.h5.rejects.csv"}
    h5pack.convert(source, tmp_path / "p.h5", **{**keywords, "num_workers": 3})
    assert (tmp_path / "p.h5").read_bytes() == whole


def test_kept_masks_of_16_bits_and_those_that_do_not_fit(tmp_path: Path) -> None:
    source = pair_folders(tmp_path / "in", 6)
    wide = np.arange(280, dtype=np.uint16).reshape(20, 14) * 200
    Image.fromarray(wide).save(source / "masks" / "002.png")
    (source / "masks" / "003.png").unlink()
    Image.fromarray(wide.astype(np.int32) * 2).save(source / "masks" / "003.tif")
    h5pack.convert(source, tmp_path / "o.h5", **KEPT, order="sorted")
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["masks"])
    assert len(dataset) == 5
    assert dataset[2].masks.dtype == torch.int32
    assert np.array_equal(dataset[2].masks, wide)
    assert np.array_equal(dataset[3].masks, numbers(4, (20, 14)))
    # Into pixels, and back to files.
    h5pack.convert(tmp_path / "o.h5", tmp_path / "p.h5", **quick(order="sorted"))
    with h5py.File(tmp_path / "p.h5") as file:
        assert np.array_equal(file["fields/masks"][2], wide)
    h5pack.export(tmp_path / "o.h5", tmp_path / "back", num_workers=1)
    assert np.array_equal(pixels_of(tmp_path / "back" / "masks" / "002.png"), wide)
    assert (tmp_path / "back" / "images" / "002.jpg").read_bytes() == (source / "images" / "002.jpg").read_bytes()


def test_the_plan_counts_kept_masks_once_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, size, held, truncate = tmp_path / "in", 8 * 512 * 512, [0], os.ftruncate
    for folder, ending in (("images", "jpg"), ("masks", "png")):
        (source / folder).mkdir(parents=True)
        for number in range(8):
            noise = np.random.default_rng(number).integers(0, 256, (512, 512), np.uint8)
            content = noise if folder == "masks" else np.full((512, 512, 3), 30 * number, np.uint8)
            Image.fromarray(content).save(source / folder / f"{number}.{ending}")

    def measuring(descriptor: int, length: int) -> None:
        held.append(sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("o.h5*/**/*") if path.is_file()))
        held[-1] += sum(path.stat().st_blocks * 512 for path in tmp_path.glob("o.h5*") if path.is_file())
        truncate(descriptor, length)

    monkeypatch.setattr("h5pack.pack.kept._BYTES_PER_MASK_PIXEL", 1.1)
    monkeypatch.setattr(os, "ftruncate", measuring)
    with Conversion(source, tmp_path / "o.h5", keep="jpeg", source_kind="pairs", num_workers=1) as conversion:
        needed = conversion.plan().needed_bytes
        conversion.run()
    assert 3 * size < max(held) <= needed < 4 * size


def test_damaged_kept_masks(tmp_path: Path) -> None:
    h5pack.convert(pair_folders(tmp_path / "in", 6), tmp_path / "o.h5", **KEPT)
    with h5py.File(tmp_path / "o.h5", "r+") as file:
        offsets = file["fields/masks/offsets"][()]
        file["fields/masks/data"][offsets[4] + 50] ^= 255
    assert h5pack.verify(tmp_path / "o.h5").damaged == {"fields/masks": [4]}
    dataset = h5pack.H5Dataset(tmp_path / "o.h5", fields=["masks"])
    assert dataset[3].masks.shape == (20, 14)
    with pytest.raises(DamagedRowsError):
        dataset[4]
    for wrong in (10**9, -1):
        with h5py.File(tmp_path / "o.h5", "r+") as file:
            file["fields/masks/offsets"][3] = wrong
        with pytest.raises(PackFormatError):
            h5pack.H5Dataset(tmp_path / "o.h5", fields=["masks"])
        assert h5pack.verify(tmp_path / "o.h5").problems


@pytest.mark.parametrize("settings", [{}, {"size": (16, 10), "layout": "nchw"}, {"mode": "gray"}])
def test_further_images_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """A second image, decoded like the first one; packed again and exported."""
    monkeypatch.chdir(tmp_path)
    lines = ["image,other,mask"]
    for number in range(9):
        size = (24, 18) if settings.get("size") and number % 2 else (20, 14)
        save(Path("in") / "other" / f"{number}.jpg", 100 + number, size)
        lines.append(f"images/{number:03d}.jpg,other/{number}.jpg,masks/{number:03d}.png")
    pair_folders(Path("in"), 9)
    truncate(Path("in") / "other" / "4.jpg")
    (Path("in") / "list.csv").write_text("\n".join(lines))
    keywords = quick(order="sorted", **settings)
    columns = {"image_columns": "other", "mask_columns": "mask"}
    report = h5pack.convert("in/list.csv", "a.h5", **keywords, **columns)
    assert (report.images, report.rejects) == (8, 1)
    mode = "L" if settings.get("mode") == "gray" else "RGB"
    with h5py.File("a.h5") as file:
        assert file["fields/other"].attrs["kind"] == b"image"
        others = file["fields/other"][()]
        assert others.shape == file["images"].shape
        for row, name in enumerate(file["filenames"].asstr()[()]):
            pixels = others[row] if settings.get("layout") != "nchw" else others[row].transpose(1, 2, 0)
            source = Path("in") / "other" / f"{int(name[7:10])}.jpg"
            assert np.array_equal(pixels, expected(source, settings.get("size"), mode))
    assert h5pack.verify("a.h5").ok
    sample = h5pack.H5Dataset("a.h5", fields=["other", "mask"])[0]
    assert sample.other.shape == sample.image.shape
    h5pack.preview("a.h5")
    again = {name: settings[name] for name in ("layout", "mode") if name in settings}
    h5pack.convert("a.h5", "b.h5", **quick(order="sorted", **again))
    report_of_export = h5pack.export("a.h5", "out", num_workers=1)
    assert "--image-columns other" in report_of_export.again
    h5pack.convert("out/manifest.csv", "c.h5", **quick(order="sorted", **again), **columns)
    for path in ("b.h5", "c.h5"):
        with h5py.File(path) as file:
            assert np.array_equal(file["fields/other"][()], others)
            assert file["fields/mask"].shape[:1] == (8,)


def test_further_images_are_of_the_same_size_and_not_kept(tmp_path: Path) -> None:
    root = pair_folders(tmp_path / "in", 4)
    save(root / "other.png", 0, (21, 14))
    lines = ["image,other", "images/000.jpg,images/001.jpg", "images/001.jpg,other.png", "images/002.jpg,nothing.jpg"]
    (root / "list.csv").write_text("\n".join(lines))
    report = h5pack.convert(root / "list.csv", tmp_path / "o.h5", **quick(image_columns="other"))
    assert (report.images, report.rejects) == (1, 2)
    with h5py.File(tmp_path / "o.h5") as file:
        assert file["rejects/reasons"].asstr()[()].tolist() == [
            "its image other.png: its size is 21x14, but its image's size is 20x14",
            "its image nothing.jpg: file not found",
        ]
    with pytest.raises(OptionsError, match="keep"):
        h5pack.convert(root / "list.csv", tmp_path / "p.h5", **quick(image_columns="other", keep="jpeg"))
    with pytest.raises(OptionsError) as caught:
        h5pack.convert(tmp_path / "o.h5", tmp_path / "p.h5", **quick(keep="jpeg"))
    assert caught.value.parameters == ("keep='jpeg'",)


def samples(masks: list[Any]) -> list[dict[str, Any]]:
    """A dataset of dicts with masks of many types; None: without a mask."""
    made = [{"image": pixels(index), "label": index % 3, "note": "x", "mask": mask} for index, mask in enumerate(masks)]
    return [{key: value for key, value in one.items() if value is not None} for one in made]


def test_masks_of_a_dataset_in_python(tmp_path: Path) -> None:
    mask = numbers(0, (20, 14))
    good = [mask, torch.from_numpy(mask), Image.fromarray(mask), mask[None], mask[:, :, None], mask > 3]
    bad = [
        None, mask.astype(float), mask[:, :5], np.stack([mask] * 3, axis=2), [[1, 2], [3]], Image.new("RGB", (14, 20)),
    ]  # fmt: skip
    report = h5pack.convert(samples(good + bad), tmp_path / "o.h5", **quick(order="sorted"))
    assert (report.images, report.rejects) == (6, 6)
    with h5py.File(tmp_path / "o.h5") as file:
        assert file["fields/mask"].dtype == np.uint8
        for row, stored in enumerate(file["fields/mask"][()]):
            assert np.array_equal(stored, mask > 3 if row == 5 else mask)
            assert np.array_equal(file["images"][row], pixels(row))
    wide = [torch.from_numpy(mask).long() * 1000, torch.from_numpy(mask).long() << 40]
    for workers in (1, 2):
        out = tmp_path / f"{workers}.h5"
        h5pack.convert(samples([*wide, mask]), out, **quick(order="sorted", num_workers=workers, size=(10, 7)))
        with h5py.File(out) as file:
            assert (file["fields/mask"].dtype, len(file["fields/mask"])) == (np.int32, 2)
            assert np.array_equal(file["fields/mask"][0], mask[1::2, 1::2].astype(int) * 1000)
    h5pack.convert(h5pack.H5Dataset(out, fields=["mask"]), tmp_path / "again.h5", **quick(order="sorted"))
    with h5py.File(out) as file, h5py.File(tmp_path / "again.h5") as again:
        assert np.array_equal(file["fields/mask"][()], again["fields/mask"][()])


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_pairs_in_an_archive(source: Path, tmp_path: Path, form: str) -> None:
    archive = {"tar": tar_file, "zip": zip_file}[form](tmp_path / f"a.{form}", source)
    h5pack.convert(source, tmp_path / "folder.h5", **SETTINGS)
    for workers in (1, 2):
        h5pack.convert(archive, tmp_path / "a.h5", **{**SETTINGS, "num_workers": workers}, overwrite=True)
        assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "folder.h5").read_bytes()
    with pytest.raises(SourceError, match="pairs"):
        h5pack.convert(archive, tmp_path / "b.h5", **quick())
    h5pack.convert(archive, tmp_path / "k.h5", **KEPT)
    assert len(kept_masks(tmp_path / "k.h5")) == 47

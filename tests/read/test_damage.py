"""Damaged files are read correctly or refused by an error of one line that names the damage."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest

import h5pack
from h5pack.errors import DamagedRowsError, H5PackError
from h5pack.system.processes import open_executor
from tests.makers import quick, split_folders
from tests.read.files import flip, index_of, numbers
from tests.read.read_damaged import read_all


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", {"train": {"x": 31, "y": 26}, "test": {"x": 5, "y": 9}}, (16, 12))
    h5pack.convert(source, folder / "sound.h5", **quick(chunk_rows=7))
    return folder / "sound.h5"


def row_places(path: Path) -> npt.NDArray[np.int64]:
    """Byte offset of each image."""
    index = index_of(path, "images")
    rows = np.arange(index.rows)
    return index.addresses[rows // index.chunk_rows] + rows % index.chunk_rows * index.row_bytes


def metadata_places(path: Path) -> npt.NDArray[np.int64]:
    """Offsets of all bytes outside the images, except pages without content: metadata, labels, and other tables."""
    content = np.fromfile(path, np.uint8)
    free = np.repeat(np.add.reduceat(content, np.arange(0, len(content), 512), dtype=np.int64) > 0, 512)[: len(content)]
    size = index_of(path, "images").row_bytes
    for start in row_places(path).tolist():
        free[start : start + size] = False
    return np.flatnonzero(free)


def damage_metadata(path: Path, folder: Path, count: int, seed: int) -> list[Path]:
    """Copies of a file with a flipped bit, with a few random bytes, or with a span of zeros."""
    sound, places, dice = path.read_bytes(), metadata_places(path), random.Random(seed)
    allowed = set(places.tolist())
    copies = []
    for number in range(count):
        data = bytearray(sound)
        place = int(dice.choice(places))
        if number % 3 == 0:
            data[place] ^= 1 << dice.randrange(8)
        elif number % 3 == 1:
            for _ in range(dice.randrange(2, 9)):
                data[int(dice.choice(places))] = dice.randrange(256)
        else:
            for zeroed in allowed.intersection(range(place, place + dice.choice([4, 16, 64, 256, 1024]))):
                data[zeroed] = 0
        copies.append(folder / f"{number:03}.h5")
        copies[-1].write_bytes(data)
    return copies


def test_flipped_bytes_in_images_are_named(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The metadata is sound, so `verify` may run in this process, which is faster.
    monkeypatch.setattr("h5pack.inspect.verify.open_executor", lambda *_, **__: open_executor(1, None, None))
    places, dice = row_places(pack), random.Random(1)
    size = index_of(pack, "images").row_bytes
    with h5py.File(pack) as file:
        names = [name.decode() for name in file["filenames"]]
    for _ in range(25):
        path = Path(shutil.copy(pack, tmp_path / "o.h5"))
        row = dice.randrange(len(places))
        flip(path, int(places[row]) + dice.randrange(size), dice.randrange(1, 256))
        report = h5pack.verify(path)
        assert not report.ok
        assert (report.damaged, report.problems) == ({"images": [row]}, ())
        assert report.filenames == {row: names[row]}
        dataset = h5pack.H5Dataset(path, check=True)
        order = np.array(dice.sample(range(len(places)), len(places)))
        with pytest.raises(DamagedRowsError) as caught:
            dataset.read_rows("images", order)
        assert "\n" not in str(caught.value)
        assert (caught.value.path, caught.value.dataset, caught.value.rows) == (str(path), "images", (row,))
        with pytest.raises(DamagedRowsError):
            dataset[row]
        dataset.read_rows("images", np.delete(np.arange(len(places)), row))
        dataset.read_rows("labels", np.array([row]))
        dataset.close()


def test_packs_of_damaged_metadata_are_read_right_or_refused(
    pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = read_all(pack, damage_metadata(pack, tmp_path, 100, seed=2), check=True)
    for path, (outcome, text) in outcomes.items():
        assert outcome in ("right", "refused", "killed"), f"{path.name}: {outcome} {text}"
        assert (outcome, text) != ("killed", str(int(signal.SIGALRM))), f"{path.name} hangs"
    counts = Counter(outcome for outcome, _ in outcomes.values())
    assert min(counts["right"], counts["refused"]) > 20, "some of the damage matters, and some does not"
    # h5pack cannot prevent that the HDF5 library crashes, but `verify` must report it.
    for path in print_crashed(outcomes, capsys):
        with contextlib.suppress(H5PackError):
            assert not h5pack.verify(path, start_method="fork").ok


@pytest.mark.parametrize("libver", ["earliest", "v108"])
def test_files_without_checksums_raise_only_h5pack_errors(
    tmp_path: Path, libver: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage to formats that have no checksums reaches h5pack, which cannot notice all of it."""
    sound = tmp_path / "sound.h5"
    with h5py.File(sound, "w", libver=libver) as file:
        file.create_dataset("images", data=numbers((40, 8, 8, 3), "u1"), chunks=(7, 8, 8, 3))
        file["labels"] = np.arange(40)
    flipped = bytearray(sound.read_bytes())
    flipped[int(row_places(sound)[5])] ^= 1
    known = {"wrong": bytes(flipped), "refused": b"hello", "right": sound.read_bytes()}
    for name, data in known.items():
        (tmp_path / name).write_bytes(data)
    copies = [*damage_metadata(sound, tmp_path, 40, seed=3), *(tmp_path / name for name in known)]
    outcomes = read_all(sound, copies, check=False)
    assert [outcomes[tmp_path / name][0] for name in known] == list(known)
    for path, (outcome, text) in outcomes.items():
        assert outcome in ("right", "wrong", "refused", "killed"), f"{path.name}: {outcome} {text}"
    print_crashed(outcomes, capsys)


def print_crashed(outcomes: dict[Path, tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> list[Path]:
    """Print, and return, the files that HDF5 crashes on."""
    crashed = [path for path, (outcome, _) in outcomes.items() if outcome == "killed"]
    if crashed:
        with capsys.disabled():
            print(f"\nHDF5 {h5py.version.hdf5_version} crashes or hangs on {[path.name for path in crashed]}")
    return crashed

"""Damaged files are refused in one line that names the damage, or read right; never anything else."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest

import h5pack
from h5pack.errors import DamagedRowsError, H5PackError
from h5pack.system.processes import open_executor
from tests.makers import quick, split_folders
from tests.read.files import index_of, numbers

Outcome = tuple[str, str]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = split_folders(folder / "in", {"train": {"x": 31, "y": 26}, "test": {"x": 5, "y": 9}}, (16, 12))
    h5pack.convert(source, folder / "sound.h5", **quick(chunk_rows=7))
    return folder / "sound.h5"


def row_places(path: Path) -> npt.NDArray[np.int64]:
    """Byte offset of each image."""
    index = index_of(path, "images")
    assert index.library_reason is None
    rows = np.arange(index.rows)
    return index.addresses[rows // index.chunk_rows] + rows % index.chunk_rows * index.row_bytes


def metadata_places(path: Path) -> npt.NDArray[np.int64]:
    """All bytes that belong to no image: the structure, and the data of labels, checksums and other tables."""
    free = np.ones(path.stat().st_size, np.bool_)
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
            for zeroed in range(place, min(len(data), place + dice.choice([4, 16, 64, 256, 1024]))):
                if zeroed in allowed:
                    data[zeroed] = 0
        copies.append(folder / f"{number:03}.h5")
        copies[-1].write_bytes(data)
    return copies


def read_all(sound: Path, copies: list[Path], *, check: bool) -> dict[Path, Outcome]:
    """How reading each copy went, in processes of their own."""
    how = "checked" if check else "unchecked"
    command = [sys.executable, "-m", "tests.read.read_damaged", how, str(sound), *map(str, copies)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [name for name, _, _ in lines] == [copy.name for copy in copies]
    return {copy: (outcome, words) for copy, (_, outcome, words) in zip(copies, lines, strict=True)}


def require_one_line(path: Path, words: str) -> None:
    assert "\n" not in words
    assert str(path) in words, "the error says which file"


def require_survival(crashed: list[Path]) -> None:
    """What brings the HDF5 library down is no fault of ours, but `verify` must say so and live."""
    for path in crashed:
        try:
            assert not h5pack.verify(path, start_method="fork").ok
        except H5PackError as error:
            require_one_line(path, str(error))


def test_100_flipped_bytes_in_images_are_named(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The structure is sound, so that `verify` needs no other process to look at it.
    monkeypatch.setattr("h5pack.inspect.verify.open_executor", lambda *_: open_executor(1, None, None))
    sound, places, dice = pack.read_bytes(), row_places(pack), random.Random(1)
    size = index_of(pack, "images").row_bytes
    with h5py.File(pack) as file:
        names = [name.decode() for name in file["filenames"]]
    path = tmp_path / "o.h5"
    for _ in range(100):
        data = bytearray(sound)
        row = dice.randrange(len(places))
        data[int(places[row]) + dice.randrange(size)] ^= dice.randrange(1, 256)
        path.write_bytes(data)
        report = h5pack.verify(path)
        assert not report.ok
        assert (report.damaged, report.problems) == ({"images": [row]}, ())
        assert report.filenames == {row: names[row]}
        dataset = h5pack.H5Dataset(path, check=True)
        order = np.array(dice.sample(range(len(places)), len(places)))
        with pytest.raises(DamagedRowsError, match=rf"o\.h5: 'images' row {row} differs") as caught:
            dataset.read_rows("images", order)
        require_one_line(path, str(caught.value))
        assert caught.value.rows == (row,)
        with pytest.raises(DamagedRowsError):
            dataset[row]
        others = np.delete(np.arange(len(places)), row)
        assert len(dataset.read_rows("images", others)) == len(others)
        assert not dataset.read_rows("labels", np.array([row])).shape[1:]
        dataset.close()


def test_100_packs_of_damaged_metadata(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = damage_metadata(pack, tmp_path, 100, seed=2)
    outcomes = read_all(pack, copies, check=True)
    crashed = []
    for path, (outcome, words) in outcomes.items():
        if outcome == "killed":
            assert int(words) != signal.SIGALRM, f"{path.name} hangs"
            crashed.append(path)
        else:
            assert outcome in ("right", "refused"), f"{path.name}: {outcome} {words}"
        if outcome == "refused":
            require_one_line(path, words)
    counts = [sum(outcome == name for outcome, _ in outcomes.values()) for name in ("right", "refused")]
    assert min(counts) > 20, "some of the damage matters, and some does not"
    if crashed:
        with capsys.disabled():
            print(f"\nHDF5 {h5py.version.hdf5_version} crashes on {[path.name for path in crashed]}")
    require_survival(crashed)


@pytest.mark.parametrize("libver", ["earliest", "v108"])
def test_files_without_checksums_raise_only_h5pack_errors(
    tmp_path: Path, libver: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage to formats that have no checksums reaches h5pack; what it cannot know of it cannot refuse."""
    sound = tmp_path / "sound.h5"
    with h5py.File(sound, "w", libver=libver) as file:
        file.create_dataset("images", data=numbers((40, 8, 8, 3), "u1"), chunks=(7, 8, 8, 3))
        file["labels"] = np.arange(40)
    outcomes = read_all(sound, damage_metadata(sound, tmp_path, 40, seed=3), check=False)
    for path, (outcome, words) in outcomes.items():
        assert outcome in ("right", "wrong", "refused", "killed"), f"{path.name}: {outcome} {words}"
        if outcome == "refused":
            require_one_line(path, words)
    crashed = [path for path, (outcome, _) in outcomes.items() if outcome == "killed"]
    if crashed:
        with capsys.disabled():
            print(f"\nHDF5 {h5py.version.hdf5_version} crashes or hangs on {[path.name for path in crashed]}")


def test_read_damaged_distinguishes_all_outcomes(pack: Path, tmp_path: Path) -> None:
    """The reading of damaged files sees what it should see."""
    data, place = bytearray(pack.read_bytes()), int(row_places(pack)[5])
    data[place] ^= 1
    (tmp_path / "flipped.h5").write_bytes(data)
    (tmp_path / "text.h5").write_text("hello")
    (tmp_path / "same.h5").write_bytes(pack.read_bytes())
    copies = [tmp_path / name for name in ("flipped.h5", "text.h5", "same.h5")]
    outcomes = read_all(pack, copies, check=False)
    assert [outcome for outcome, _ in outcomes.values()] == ["wrong", "refused", "right"]
    assert outcomes[copies[1]][1] == f"PackFormatError: {copies[1]}: not an HDF5 file; check the path"

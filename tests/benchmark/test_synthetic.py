"""The generated pictures are the same for the same arguments, differ between classes, and look like photographs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from h5pack.benchmark import synthetic


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.jpg")}


def test_images_depend_on_the_seed_and_not_on_workers(tmp_path: Path) -> None:
    for name, workers, seed in (("a", 1, 0), ("b", 2, 0), ("c", 1, 1)):
        synthetic.make_folder(tmp_path / name, 11, (40, 30), classes=2, workers=workers, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")
    assert sorted(len(list(folder.iterdir())) for folder in (tmp_path / "a").iterdir()) == [5, 6]
    with Image.open(next((tmp_path / "a").rglob("*.jpg"))) as image:
        assert image.size == (30, 40)


def test_the_spectrum_falls_as_natural_images_do() -> None:
    gray = synthetic.dead_leaves(0, 1, 256).mean(2)
    power = np.abs(np.fft.fft2(gray - gray.mean())) ** 2
    frequency = np.hypot(np.fft.fftfreq(256)[:, None], np.fft.fftfreq(256)[None])
    bands = [(0.01, 0.02), (0.02, 0.04), (0.04, 0.08), (0.08, 0.16)]
    means = [power[(frequency >= low) & (frequency < high)].mean() for low, high in bands]
    slope = np.polyfit(np.log([low for low, _ in bands]), np.log(means), 1)[0]
    assert -3.5 < slope < -1.2, "power falls about with the square of the frequency"


def test_the_command_line(tmp_path: Path) -> None:
    assert synthetic.main([str(tmp_path / "x"), "--count", "5", "--size", "32", "--classes", "2"]) == 0
    assert len(contents(tmp_path / "x")) == 5
    with pytest.raises(SystemExit) as caught:
        synthetic.main([str(tmp_path / "y"), "--size", "2000x16"])
    assert (caught.value.code, (tmp_path / "y").exists()) == (2, False)

"""Folders of exported images: what they hold, and exports that are stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from h5pack.exporter.exporter import export


def files_of(folder: Path) -> dict[str, Path]:
    """The images below a folder, by their paths without endings."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".csv"]
    return {str(path.relative_to(folder).with_suffix("")): path for path in found}


def pixels_of(path: Path) -> npt.NDArray[Any]:
    with Image.open(path) as image:
        return np.asarray(image)


def tree(folder: Path) -> dict[str, bytes]:
    """All that a folder holds."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else b"a folder" for name, path in found.items()}


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as stream:
        byte = os.pread(stream.fileno(), 1, place)
        os.pwrite(stream.fileno(), bytes([byte[0] ^ 1]), place)


def stopped(*arguments: Any, **keywords: Any) -> None:
    """Export up to the last step."""
    stop = mock.patch("h5pack.exporter.exporter.ExportFolder.publish", side_effect=KeyboardInterrupt)
    with stop, pytest.raises(KeyboardInterrupt):
        export(*arguments, **keywords)

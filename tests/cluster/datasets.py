"""Map-style datasets that workers of a Dask cluster import, and that disturb them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.makers import pixels


class Pictures:
    """Images of 20 x 14 pixels that are made when they are read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        return pixels(index)


class Deadly(Pictures):
    """Kills the process that reads sample 30, as long as less than `times` files are in a folder."""

    def __init__(self, count: int, folder: Path, times: int) -> None:
        super().__init__(count)
        self.folder, self.times = folder, times

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        if index == 30 and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Held(Pictures):
    """Reading sample 30 again, after the survey, waits until a file is removed."""

    def __init__(self, count: int, file: Path) -> None:
        super().__init__(count)
        self.file = file

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        while index == 30 and self.file.exists():
            self.file.with_name("reached").touch()
            time.sleep(0.01)
        return super().__getitem__(index)

"""What the comparison asks of each way of feeding images: convert a folder, open the result, go through epochs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peer_ways.image_folder import ImageFolder

Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Reading:
    """What every way is asked for.

    Attributes
    ----------
    batch : int
        Images a batch; the last one of an epoch may be smaller.
    workers : int
        Threads, or worker processes where it has those; 0: in this process.
    seed : int
        Of the order, where it takes one.
    """

    batch: int
    workers: int
    seed: int


class Opened(Protocol):
    """A dataset that is open."""

    def epoch(self) -> Generator[Batch, None, None]:
        """The batches of the next epoch: images uint8 (n, H, W, 3) or (n, 3, H, W), labels (n,); arrays or tensors.

        A batch is looked at before the next one is asked for. The caller may stop early and close the iterator.
        """

    def close(self) -> None:
        """Stop its threads and processes."""


class Way(ABC):
    """A way of storing images and of reading them back as shuffled batches.

    Attributes
    ----------
    settings : str
        How it is used, and why so: one line for the result file.
    packages : tuple of str
        The distributions whose versions the result names.
    tried : tuple of int
        Numbers of workers of which the fastest is taken, where its documentation leaves the number open.
    compiles : bool
        It compiles at the first batch of each opening; a cold epoch is then the second one, after another drop.
    may_be_cut : bool
        An epoch may be left early without harm to the next one: a DataLoader's may. Others go on reading what was left,
        or do not keep rows of which they saw a part only.
    parallel : str
        What "workers" are to it: threads, processes, or nothing: it reads in the calling thread.
    """

    settings: str
    packages: tuple[str, ...]
    tried: tuple[int, ...] = ()
    compiles = False
    may_be_cut = False
    parallel = "processes"

    @abstractmethod
    def convert(self, source: ImageFolder, out: Path, workers: int) -> int:
        """Store all images and labels in the folder `out`; returns how many processes or threads decoded."""

    def describe(self, workers: int) -> str:
        """How many threads or processes read, in words."""
        if self.parallel == "nothing" or not workers:
            return "1 thread"
        return f"{workers} {self.parallel}"

    @abstractmethod
    def open(self, out: Path, reading: Reading) -> Opened:
        """Open what `convert` stored."""

"""What is known of the file, the loader and the machine, besides the stages' figures."""

from __future__ import annotations

from dataclasses import dataclass

from h5pack.feed.cpu_time import BUSY
from h5pack.wording import counted


@dataclass(frozen=True)
class Facts:
    """Evidence for a verdict. None: not known.

    Attributes
    ----------
    cpus : int
        That this process may use.
    machine_cpus : int
        That the machine has.
    workers : int or None
        Of a DataLoader; None: an `H5Loader` feeds.
    threads : int
        Of the `H5Loader`; with a DataLoader its workers, at least 1.
    on_gpu : bool
        Whether the step runs on a CUDA device.
    batch_rows : int
        Rows of the batches.
    epoch_batches : int
        Batches of an epoch of what was measured.
    row_bytes : int
        Bytes of an image as the file gives it.
    handed_bytes : int
        Bytes of an image as the loader hands it out, after `--transform`.
    handed_float : bool
        Whether that is in floating point.
    stored_float : bool
        Whether the file holds floating point.
    pinned : bool
        Whether batches are in pinned memory.
    encoding : str or None
        How the file's rows are encoded, in words; None: they lie there as they are.
    library : str or None
        Why rows come through the HDF5 library; None: they are read directly.
    fits_cache : bool
        Whether what a split takes in the file fits into the memory that is available, so that the page cache can keep
        it from the first epoch on.
    fits_resident : bool
        Whether its images, decoded, fit there, so that `H5Loader` can keep them.
    transformed : bool
        Whether there is a `--transform`.
    reading_share : float or None
        Of the time of a single thread that reads from the page cache: the part in which it ran or was ready to, 0 to 1.
        The rest it waited, for a disk or a network.
    transform_share : float or None
        The same of a single thread that calls the transform.
    half_batch : float or None
        Images a second of the step with half the batch, over those with all of it.
    synchronisations : float or None
        How often a step waits for the device.
    synchronised_at : str or None
        Where, the first time.
    gpus : int
        That torch sees.
    world_size : int
        Processes of this training.
    idle_gpus : int or None
        Of the others, how many do nothing.
    load : float or None
        The machine's load average of the last minute, before anything was measured.
    stall : float or None
        Of the time of everything together, the part in which the step waited, 0 to 1.
    """

    cpus: int
    machine_cpus: int
    workers: int | None
    threads: int
    on_gpu: bool
    batch_rows: int
    epoch_batches: int
    row_bytes: int
    handed_bytes: int
    handed_float: bool = False
    stored_float: bool = False
    pinned: bool = False
    encoding: str | None = None
    library: str | None = None
    fits_cache: bool = True
    fits_resident: bool = True
    transformed: bool = False
    reading_share: float | None = None
    transform_share: float | None = None
    half_batch: float | None = None
    synchronisations: float | None = None
    synchronised_at: str | None = None
    gpus: int = 0
    world_size: int = 1
    idle_gpus: int | None = None
    load: float | None = None
    stall: float | None = None

    @property
    def feeder(self) -> str:
        """What feeds, and how many of it, in words."""
        if self.workers is None:
            return f"H5Loader with {counted(self.threads, 'thread')}"
        return f"a DataLoader with {counted(self.workers, 'worker')}"

    @property
    def option(self) -> str:
        """The option that says how many read at once."""
        return "--threads" if self.workers is None else "--workers"

    @property
    def units(self) -> str:
        """What reads at once, in words."""
        return "threads" if self.workers is None else "workers"

    @property
    def crowded(self) -> bool:
        """Whether other processes keep a good part of the machine's CPUs busy."""
        return self.load is not None and self.load > _CROWDED * self.machine_cpus

    @property
    def transform_waits(self) -> bool:
        """Whether the user's transform waits more than it computes."""
        return self.transform_share is not None and self.transform_share < WAITS

    def busy(self, cpus_used: float | None) -> bool | None:
        """Whether the loader's threads or workers use all the CPUs that they can use; None: that is not known."""
        return None if cpus_used is None else cpus_used >= BUSY * min(self.threads, self.cpus)


_CROWDED = 0.5
"""Processes that want to run, for each of the machine's CPUs, from which on they are in the way."""
WAITS = 0.5
"""The part of its time below which a thread counts as waiting."""

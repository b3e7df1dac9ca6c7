"""Which ways are compared, without importing any of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.peer_ways.way import Way


@dataclass(frozen=True)
class Listed:
    """A way's place in the comparison.

    Attributes
    ----------
    key : str
        What ``--only`` calls it.
    name : str
        What tables and plots call it.
    module : str
        The module of `benchmarks.peer_ways` that has it; importing that imports the peer.
    store : str
        The folder of what it converts to. Ways of one store share it, and the first one converts.
    ours : bool
        h5pack's.
    """

    key: str
    name: str
    module: str
    store: str
    ours: bool = False

    def load(self) -> Way:
        """The way itself.

        Raises
        ------
        ImportError
            If the peer is not installed, or does not load.
        """
        way: Way = importlib.import_module(f"benchmarks.peer_ways.{self.module}").WAYS[self.key]
        return way


LISTING = (
    Listed("h5loader", "H5Loader", "h5pack_way", "pack", ours=True),
    Listed("h5loader-file", "H5Loader (resident='no')", "h5pack_way", "pack", ours=True),
    Listed("h5dataset", "H5Dataset + DataLoader", "h5pack_way", "pack", ours=True),
    Listed("ffcv", "FFCV", "ffcv_way", "ffcv"),
    Listed("webdataset", "WebDataset", "webdataset_way", "webdataset"),
    Listed("mosaic", "MosaicML Streaming", "mosaic_way", "mosaic"),
    Listed("litdata", "LitData", "litdata_way", "litdata"),
    Listed("lmdb", "LMDB", "lmdb_way", "lmdb"),
    Listed("dali", "DALI on the CPU", "dali_way", "dali"),
    Listed("tensorstore", "tensorstore (zarr3)", "tensorstore_way", "tensorstore"),
    Listed("memmap", "np.memmap", "memmap_way", "memmap"),
    Listed("h5py", "h5py (whole-image chunks)", "h5py_way", "h5py"),
    Listed("h5py-auto", "h5py (guessed chunks)", "h5py_way", "h5py-auto"),
    Listed("h5py-recipe", "h5py (chunks that cut images)", "h5py_way", "h5py-recipe"),
    Listed("jpeg", "JPEG folder + Pillow", "jpeg_way", "jpeg"),
)


def chosen(keys: str | None) -> tuple[Listed, ...]:
    """The ways that ``--only`` names, in the order of the listing; all without it.

    Raises
    ------
    ValueError
        If a name is not in the listing.
    """
    if keys is None:
        return LISTING
    wanted = [key.strip() for key in keys.split(",") if key.strip()]
    known = [listed.key for listed in LISTING]
    if unknown := sorted(set(wanted) - set(known)):
        raise ValueError(f"--only: no way is called {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(listed for listed in LISTING if listed.key in wanted)

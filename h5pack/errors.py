"""The error tree.

::

    H5PackError
    ├── OptionsError (ValueError)            an option's value makes no sense
    ├── SourceError (ValueError)             the source cannot be read as asked
    │   ├── NoImagesError                    it holds no readable image
    │   └── SizesDifferError                 images differ in size where they must be of one
    ├── RejectedImageError (ValueError)      one image cannot be packed (reported; raised with ``strict``)
    ├── OutputExistsError (FileExistsError)  the output, or an unfinished one, is already there
    ├── OutputBusyError (BlockingIOError)    another conversion is writing this output
    ├── NoSpaceError (OSError)               the output does not fit on its file system
    ├── ResumeError (ValueError)             the interrupted conversion is another one
    ├── WorkerError (RuntimeError)           a worker process died
    ├── PackFormatError (ValueError)         not an HDF5 file, or not the datasets that were asked for
    │   └── IncompletePackError              a pack whose conversion did not finish
    ├── PackChangedError (RuntimeError)      the file was replaced while it was in use
    ├── ReadError (OSError)                  the file, or the disk under it, gave fewer bytes than the rows have
    ├── DamagedRowsError (ValueError)        rows that differ from their checksums, or cannot be decoded
    ├── StateError (ValueError)              a saved state belongs to another order of rows
    └── LoaderError (RuntimeError)           a loader's iterator was used where it cannot work

Every message is one line that says what happened, where (file, dataset, rows) and what to do next.
"""

from __future__ import annotations


class H5PackError(Exception):
    """Base of every error that h5pack raises on purpose."""


class OptionsError(H5PackError, ValueError):
    """An option's value makes no sense, alone or beside the others."""


class SourceError(H5PackError, ValueError):
    """The source is missing, ambiguous, or its tables do not fit its images."""


class NoImagesError(SourceError):
    """The source holds no image that can be read."""


class SizesDifferError(SourceError):
    """Images differ in size: those of a source, without ``size``; or encoded rows that should make a batch."""


class RejectedImageError(H5PackError, ValueError):
    """One image cannot be packed.

    A conversion collects these in its rejects table; with ``strict`` the first one is raised.
    """


class OutputExistsError(H5PackError, FileExistsError):
    """The output, or an unfinished conversion to it, is already there."""


class OutputBusyError(H5PackError, BlockingIOError):
    """Another conversion is writing the same output."""


class NoSpaceError(H5PackError, OSError):
    """The output does not fit on its file system."""


class ResumeError(H5PackError, ValueError):
    """``resume`` was asked for, but the interrupted conversion had other options or another source."""


class WorkerError(H5PackError, RuntimeError):
    """A worker process died."""


class PackFormatError(H5PackError, ValueError):
    """Not an HDF5 file, not a pack, or a pack without the dataset or split that was asked for."""


class IncompletePackError(PackFormatError):
    """A pack whose conversion did not finish."""


class PackChangedError(H5PackError, RuntimeError):
    """The file under a dataset was replaced or rewritten since the dataset was made."""


class ReadError(H5PackError, OSError):
    """The file, or the disk under it, gave fewer bytes than the rows have."""


class DamagedRowsError(H5PackError, ValueError):
    """Rows whose bytes differ from their checksums, or are no image that can be decoded.

    Attributes
    ----------
    rows : tuple of int
        Their numbers in the dataset; empty where a DataLoader's worker raised it, as torch carries only the message.
    """

    def __init__(self, message: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class StateError(H5PackError, ValueError):
    """A saved state belongs to another order of rows: another seed, batch size, window, number of ranks, ..."""


class LoaderError(H5PackError, RuntimeError):
    """A loader's iterator was used in a forked child, or after it was closed."""

"""The exceptions that h5pack raises.

::

    H5PackError
    ├── OptionsError (ValueError)            an option's value is invalid
    ├── SourceError (ValueError)             the source is missing, ambiguous or cannot be read
    │   ├── NoImagesError                    no image is selected, or none can be read
    │   └── SizesDifferError                 images differ in size although they must have the same size
    ├── RejectedImageError (ValueError)      one image cannot be packed (raised only with ``strict``)
    ├── OutputExistsError (FileExistsError)  the output, finished or unfinished, already exists
    ├── OutputBusyError (BlockingIOError)    another process is writing this output
    ├── NoSpaceError (OSError)               the output or temporary files do not fit on the disk
    ├── ResumeError (ValueError)             the interrupted conversion had other options or another source
    ├── WorkerError (RuntimeError)           a worker process died, or cannot be used
    ├── PackFormatError (ValueError)         a file is missing, damaged, not a pack, or lacks a requested dataset
    │   └── IncompletePackError              a pack's conversion did not finish
    ├── PackChangedError (RuntimeError)      the file was replaced or rewritten while it was in use
    ├── ReadError (OSError)                  rows cannot be read: the file was truncated, or its storage failed
    ├── DamagedRowsError (ValueError)        rows do not match their checksums, or cannot be decoded
    ├── StateError (ValueError)              a saved state is damaged, or belongs to another order of rows
    └── LoaderError (RuntimeError)           a loader cannot return a batch, for example in a forked child

Every message is one line (unless a path has several): what is wrong, where (file, dataset, rows) and, where possible,
what to do next.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class H5PackError(Exception):
    """Base class of h5pack's errors. Wrong indices and unknown keywords raise an IndexError or TypeError instead.

    Parameters
    ----------
    message : str
        One line: what is wrong, where, and what to do. It names parameters in Python syntax (``overwrite=True``).
    path : str or path, optional
        The file or folder that the error is about.
    dataset : str, optional
        The dataset in that file.
    rows : sequence of int, optional
        The affected rows of that dataset.
    parameters : sequence of str, optional
        The substrings of `message` that name parameters, verbatim (``"overwrite=True"``, ``"size"``). The command line
        replaces them with its own options (``--overwrite``, ``--size``).

    Attributes
    ----------
    path : str or None
    dataset : str or None
    rows : tuple of int
    parameters : tuple of str
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str | os.PathLike[str] | None = None,
        dataset: str | None = None,
        rows: Sequence[int] = (),
        parameters: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else os.fspath(path)
        self.dataset = dataset
        self.rows = tuple(int(row) for row in rows)
        self.parameters = tuple(parameters)

    @classmethod
    def at(
        cls,
        path: str | os.PathLike[str],
        problem: str,
        *parameters: str,
        dataset: str | None = None,
        rows: Sequence[int] = (),
    ) -> Self:
        """Return the error about a file or folder: its message is the path, a colon and the `problem`."""
        return cls(f"{path}: {problem}", path=path, dataset=dataset, rows=rows, parameters=parameters)


class OptionsError(H5PackError, ValueError):
    """An option's value is invalid, by itself or in combination with other options."""


class SourceError(H5PackError, ValueError):
    """The source is missing, ambiguous or cannot be read, or its tables (such as labels) do not match its images.

    Also raised if the output's folder does not exist or is not writable.
    """


class NoImagesError(SourceError):
    """No image is selected, or none can be read."""


class SizesDifferError(SourceError):
    """Images that must have the same size differ in size.

    The same size is required of the images of a source if ``size`` is not given, of images to append and those of the
    pack, and of the encoded images of one batch.
    """


class RejectedImageError(H5PackError, ValueError):
    """One image cannot be packed.

    By default, a conversion lists such images in its rejects table. With ``strict``, it raises this error for the first
    one.
    """


class OutputExistsError(H5PackError, FileExistsError):
    """The output already exists, finished or unfinished."""


class OutputBusyError(H5PackError, BlockingIOError):
    """Another process is writing the same output."""


class NoSpaceError(H5PackError, OSError):
    """The output, or temporary files, do not fit on their file system."""


class ResumeError(H5PackError, ValueError):
    """A conversion cannot be resumed, because it began with other options, another source or other package versions.

    Also raised if the journal of the interrupted conversion is damaged.
    """


class WorkerError(H5PackError, RuntimeError):
    """Worker processes died, cannot start or cannot use the source, or a cluster cannot be used."""


class PackFormatError(H5PackError, ValueError):
    """A file is missing, damaged, not HDF5 or not a pack, has a newer format, or lacks a requested dataset or split.

    Also raised if the decoder of a compressed dataset is not installed.
    """


class IncompletePackError(PackFormatError):
    """A pack is incomplete, because its conversion, or a part of an array job, did not finish."""


class PackChangedError(H5PackError, RuntimeError):
    """The file of an open dataset was replaced or rewritten after the dataset object was created."""


class ReadError(H5PackError, OSError):
    """Rows cannot be read: the file is too short, the disk reports an error, or the file cannot be reopened."""


class DamagedRowsError(H5PackError, ValueError):
    """Rows do not match their checksums, or cannot be decoded.

    `rows` is empty if the error was raised in a DataLoader worker, because PyTorch passes only the message to the main
    process.
    """


class StateError(H5PackError, ValueError):
    """A saved state is damaged or belongs to another order of rows, or a loader keeps no state.

    For example, the seed, the shuffle window or the batch size of all ranks together differ. Another number of ranks is
    an error only if the state cannot be converted to it.
    """


class LoaderError(H5PackError, RuntimeError):
    """A loader cannot return a batch.

    For example, its iterator is used in a forked child, was closed, or has failed before. Other reasons are a thread
    that cannot start, and a worker process that cannot pass a batch to the main process through shared memory.
    """

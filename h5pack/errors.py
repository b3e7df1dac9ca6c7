"""The exceptions that h5pack raises.

::

    H5PackError
    ├── OptionsError (ValueError)            an option's value is invalid
    ├── SourceError (ValueError)             the source is missing, ambiguous or cannot be read
    │   ├── NoImagesError                    no image is selected, or none can be read
    │   └── SizesDifferError                 images differ in size although they must have the same size
    ├── RejectedImageError (ValueError)      one image cannot be packed (raised only with ``strict``)
    ├── OutputExistsError (FileExistsError)  the output, finished or unfinished, already exists
    ├── OutputBusyError (BlockingIOError)    another process or call is writing this output
    ├── NoSpaceError (OSError)               the output or temporary files do not fit on the disk, or exceed a limit
    ├── ResumeError (ValueError)             a conversion cannot be resumed, for example with other options
    ├── WorkerError (RuntimeError)           a worker process died, or cannot be used
    ├── PackFormatError (ValueError)         a file is missing, damaged, not a pack, or lacks a requested dataset
    │   └── IncompletePackError              a pack's conversion did not finish
    ├── PackChangedError (RuntimeError)      the file was replaced or rewritten while it was in use
    ├── ReadError (OSError)                  rows cannot be read: the file was truncated, or its storage failed
    ├── DamagedRowsError (ValueError)        rows do not match their checksums, or cannot be decoded
    ├── StateError (ValueError)              a state cannot be saved or loaded, for example with another order of rows
    └── LoaderError (RuntimeError)           a loader cannot return a batch, for example in a forked child

A message says what is wrong, where (file, dataset, rows) and, where possible, what to do next. It is one line, unless
it quotes a path or an error of another library that contains a line break.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class H5PackError(Exception):
    """Base class of h5pack's errors.

    Two kinds of errors are not an H5PackError. ``dataset[index]`` raises IndexError if the index is out of range. An
    unknown keyword argument raises TypeError.

    Parameters
    ----------
    message : str
        What is wrong, where, and what to do, in one line. It names parameters in Python syntax (``overwrite=True``).
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
        """Return an error about a file or folder, with the message "PATH: PROBLEM". `parameters` as for the class."""
        return cls(f"{path}: {problem}", path=path, dataset=dataset, rows=rows, parameters=parameters)


class OptionsError(H5PackError, ValueError):
    """An option's value is invalid: by itself, together with other options, for the given data, or on this machine."""


class SourceError(H5PackError, ValueError):
    """The source is missing, ambiguous or cannot be read, or its tables (such as labels) do not match its images.

    Also raised in these cases:

    - The output cannot be created, for example because its folder does not exist or is not writable.
    - The packs to join, or a pack and the source to append to it, differ, for example in their fields.
    """


class NoImagesError(SourceError):
    """No image is selected, or none can be read."""


class SizesDifferError(SourceError):
    """Images that must have the same size differ in size.

    Images must have the same size in these cases:

    - All images of a source, if it is converted with neither ``size`` nor ``keep``.
    - The new images of `append` and the images of the pack, if the pack was made with neither ``size`` nor ``keep``.
    - The encoded images of a batch, if they are decoded without a crop or a resize.
    """


class RejectedImageError(H5PackError, ValueError):
    """One image cannot be packed.

    By default, a conversion lists such images in its rejects table. With ``strict``, it raises this error for the first
    one.
    """


class OutputExistsError(H5PackError, FileExistsError):
    """The output already exists, finished or unfinished."""


class OutputBusyError(H5PackError, BlockingIOError):
    """Another process, or another call in this process, is writing the same output."""


class NoSpaceError(H5PackError, OSError):
    """The output or temporary files do not fit on their file system, or exceed a quota or a limit on file sizes."""


class ResumeError(H5PackError, ValueError):
    """A conversion cannot be resumed, because it began with other options, another source or other package versions.

    Also raised if the journal of the interrupted conversion is damaged.
    """


class WorkerError(H5PackError, RuntimeError):
    """A worker process died, cannot start, or cannot receive or read the source; or a Dask cluster cannot be used."""


class PackFormatError(H5PackError, ValueError):
    """A file is missing, damaged, not HDF5 or not a pack, has a newer format, or lacks a requested dataset or split.

    Also raised if the decoder of a compressed dataset is not installed.
    """


class IncompletePackError(PackFormatError):
    """A pack is incomplete, because its conversion, or a part of an array job, did not finish.

    Also raised by a part of an array job if another run has finished, replaced or discarded its files.
    """


class PackChangedError(H5PackError, RuntimeError):
    """The file of an open dataset was replaced, rewritten or removed after the dataset object was created."""


class ReadError(H5PackError, OSError):
    """Rows cannot be read: the file is too short, the disk reports an error, or the file cannot be reopened."""


class DamagedRowsError(H5PackError, ValueError):
    """Rows do not match their checksums, or cannot be decoded.

    `rows` is empty if the error was raised in a DataLoader worker, because PyTorch passes only the message to the main
    process.
    """


class StateError(H5PackError, ValueError):
    """The state of a sampler or loader cannot be saved or loaded.

    - A state cannot be loaded if it is damaged or belongs to another order of rows. For example, it was saved with
      another seed, shuffle window or global batch size (``batch_size`` times ``num_replicas``).
    - A state that was saved with another number of ranks cannot be loaded if it cannot be converted to this number.
    - A loader that keeps no state cannot save one. In the middle of an epoch, neither can a DataLoader with
      ``in_order=False``.
    """


class LoaderError(H5PackError, RuntimeError):
    """A loader cannot return a batch, for one of these reasons:

    - The loader's iterator is used in a forked child process, was closed, or has raised an error before.
    - A thread cannot start.
    - A worker process cannot pass a batch to the main process through shared memory.
    - A transform raised StopIteration.
    """

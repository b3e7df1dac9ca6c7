"""`h5pack join`: make one pack of the rows of several packs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import numpy as np

from h5pack.combine.combination import Combination
from h5pack.combine.parts import Part, added_statistics, merge, open_part
from h5pack.combine.write import CombineReport, write_combination, write_virtual
from h5pack.errors import OptionsError
from h5pack.pack.options import output_path
from h5pack.system.files import require_other_files
from h5pack.system.parameters import flags


def join(
    packs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    virtual: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = False,
) -> CombineReport:
    """Make one pack of the rows of several packs. With `virtual`, make a small file that refers to the packs.

    Each split gets its rows from all packs, in the order of `packs`. The classes of the first pack keep their numbers.
    Classes that the first pack does not have get the next numbers.

    Parameters
    ----------
    packs : sequence of path
        At least two packs. All must have images of the same size, or all must keep JPEG files. All must have the same
        layout, the same kind of labels, and the same fields.
    out : path
        The file to create. If it is a symbolic link, the file that it leads to is written, and all other files are
        created beside that file.
    virtual : bool
        Copy no images, but write HDF5 virtual datasets that refer to the packs. If a pack is itself a virtual file,
        they refer to the files that store its rows. Afterwards, the paths of all these files relative to `out` must not
        change. `out` stores copies of the tables. If the packs keep JPEG files, `out` also stores copies of the masks.
    overwrite : bool
        Replace an existing output once the new one is complete, and discard an unfinished one.
    resume : bool
        Continue an interrupted join of the same packs. If the output is already complete, only check that it was made
        of these packs. With `virtual`, `resume` has no effect.
    progress : bool
        Show a progress bar on standard error if it is a terminal.

    Returns
    -------
    CombineReport

    Raises
    ------
    H5PackError
        If a pack is missing, is damaged or does not match the first one, if class names of two packs differ only in
        case, and for the same reasons as `h5pack.convert`.

    Examples
    --------
    >>> h5pack.join(["monday.h5", "tuesday.h5"], "both.h5")  # doctest: +SKIP
    """
    (virtual,) = flags(virtual=virtual)
    if not isinstance(packs, Sequence) or isinstance(packs, (str, bytes)) or len(packs) < 2:
        raise OptionsError("packs needs at least two paths, not counting the output", parameters=("packs",))
    target = output_path(out)
    parts: list[Part] = [open_part(path) for path in packs]
    require_other_files([target], itertools.chain.from_iterable(part.reader.paths() for part in parts))
    merged = merge(parts)
    order = np.argsort(merged.split_ids, kind="stable")
    plan = Combination.of("join", parts, merged, order, added_statistics(parts, merged.split_names))
    if virtual:
        return write_virtual(plan, target, overwrite=overwrite)
    return write_combination(plan, target, overwrite=overwrite, resume=resume, progress=progress)

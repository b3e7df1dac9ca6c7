"""The walk over a folder: every image file below it, in a fixed order, whatever the file system's own."""

from __future__ import annotations

import errno
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from h5pack.errors import SourceError

IMAGE_SUFFIXES = frozenset(
    f".{ending}"
    for line in (
        "jpg jpeg jpe jfif png apng bmp dib gif tif tiff webp avif avifs heic heif jp2 j2k jpx jpf",
        "ppm pgm pbm pnm pfm tga pcx sgi ico icns dds qoi psd",
    )
    for ending in line.split()
)
"""Names with these endings are taken for images; what a file really is, its content tells."""


@dataclass(frozen=True)
class NameFilter:
    """Which names of a source are wanted.

    Attributes
    ----------
    include : tuple of str
        Shell patterns over the path relative to the source; where given, a file must match one, and its ending
        does not matter.
    exclude : tuple of str
        Shell patterns; a file that matches one is passed over.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def refusal(self, relative: str) -> str | None:
        """Why the file is passed over, as a kind to count; None if it is wanted."""
        name = relative[relative.rfind("/") + 1 :]
        if self.exclude and any(_matches(relative, name, pattern) for pattern in self.exclude):
            return "excluded"
        if self.include:
            return None if any(_matches(relative, name, pattern) for pattern in self.include) else "not included"
        if name[:1] == ".":
            return "hidden"
        dot = name.rfind(".")
        suffix = name[dot:].lower() if dot > 0 else ""
        return None if suffix in IMAGE_SUFFIXES else f"{suffix or 'no suffix'} files"

    def excludes_below(self, folder: str) -> bool:
        """Whether every path below `folder` is excluded, whatever its name."""
        return any(pattern.endswith("*") and fnmatchcase(f"{folder}/", pattern) for pattern in self.exclude)


def _matches(relative: str, name: str, pattern: str) -> bool:
    return fnmatchcase(relative, pattern) or fnmatchcase(name, pattern)


@dataclass
class Walk:
    """The folders below a root that hold wanted files.

    Attributes
    ----------
    folders : dict of str to str
        Folder relative to the root ("" is the root itself) to its sorted file names, joined by NUL (which no name
        holds), so that a million names cost no million objects.
    order : list of str
        The folders, sorted.
    ignored : Counter
        What was passed over, by kind.
    """

    folders: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)

    def names(self, folder: str) -> list[str]:
        """Sorted names of the wanted files in `folder`, without the folder."""
        return self.folders[folder].split("\0")

    def below(self, top: str) -> Iterator[str]:
        """Paths relative to the root of all wanted files in and below the folder `top`, folder by folder."""
        for folder in self._folders_below(top):
            lead = f"{folder}/" if folder else ""
            for name in self.names(folder):
                yield lead + name

    def _folders_below(self, top: str) -> list[str]:
        if not top:
            return self.order
        # "a/" to "a0" is what starts with "a/": "0" follows "/" in Unicode.
        first, last = bisect_left(self.order, f"{top}/"), bisect_left(self.order, f"{top}0")
        return ([top] if top in self.folders else []) + self.order[first:last]


def walk(root: str, names: NameFilter, top: str = "") -> Walk:
    """Find all wanted files below `root`; links to files and folders are followed, loops of links are not.

    Parameters
    ----------
    root : str
        Names are relative to it.
    names : NameFilter
    top : str
        Look only in and below this folder of `root`.

    Raises
    ------
    SourceError
        If a folder cannot be listed, and is not excluded with all that is below it.
    """
    found = Walk()
    stack: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while stack:
        folder, above = stack.pop()
        path = os.path.join(root, folder) if folder else root
        try:
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                found.ignored["loops of links"] += 1
                continue
            wanted = []
            with os.scandir(path) as entries:
                for entry in entries:
                    relative = f"{folder}/{entry.name}" if folder else entry.name
                    if _is_folder(entry):
                        if not _is_visible(entry.name):
                            found.ignored["hidden folders"] += 1
                        else:
                            stack.append((relative, above | {identity}))
                        continue
                    refusal = names.refusal(relative)
                    if refusal is None:
                        wanted.append(entry.name)
                    else:
                        found.ignored[refusal] += 1
        except OSError as error:
            if names.excludes_below(folder):
                found.ignored["excluded folders"] += 1
                continue
            raise SourceError(
                f"{path}: cannot be listed ({error.strerror}); mend that, or leave it out with --exclude"
            ) from error
        if wanted:
            found.folders[folder] = "\0".join(sorted(wanted))
    found.order = sorted(found.folders)
    return found


def child_folders(root: str) -> list[str]:
    """Sorted names of the visible folders directly below `root`."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if _is_visible(entry.name) and _is_folder(entry))


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        # A link that leads to itself: no folder, and no reason to stop; reading it as a file gives the reject.
        if error.errno != errno.ELOOP:
            raise
        return False

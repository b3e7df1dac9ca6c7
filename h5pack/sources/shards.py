"""Sources of several files (shards): which files they are, their order, and the splits that their names denote."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from h5pack.errors import SourceError
from h5pack.sources.catalog import NameFilter, one_split
from h5pack.sources.folders import (
    is_folder,
    is_split_name,
    is_visible,
    numbered_splits,
    split_words,
    suffix_pattern,
    walk,
)

TAR_SUFFIXES = (".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
TABLE_SUFFIXES = (".parquet", ".arrow")
_BRACES = re.compile(r"\{([^{}]*,[^{}]*|\d+\.\.\d+)\}")
_MAX_FILES = 1_000_000


@dataclass(frozen=True)
class Shards:
    """The files of a source, in the order of the brace pattern or of the MDS index, else sorted."""

    root: Path  # the folder that contains the files
    names: list[str]  # paths of the files, relative to `root`
    wanted: NameFilter  # selects samples in the files

    @property
    def paths(self) -> list[Path]:
        """Paths of the files."""
        return [self.root / name for name in self.names]

    @property
    def named(self) -> Path:
        """The path to name in errors about all samples: the file if there is only one, else the folder."""
        return self.paths[0] if len(self.names) == 1 else self.root

    @property
    def prefixes(self) -> list[str]:
        """For each file, the prefix of its samples' names: the file's path without suffix, plus "/".

        The prefix is "" if there is only one file.
        """
        if len(self.names) == 1:
            return [""]
        ending = "|".join(map(re.escape, sorted((*TAR_SUFFIXES, *TABLE_SUFFIXES), key=len, reverse=True)))
        return [re.sub(f"({ending})$", "", name, flags=re.IGNORECASE) + "/" for name in self.names]

    def split_ids(self, counts: Sequence[int]) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
        """Return the `split_names` and `split_ids` of a catalog with ``counts[i]`` samples of file i.

        The split of a file is named by one of its folders, or else by a word of the file name, such as "train" in
        ``train-00000-of-00002.parquet``. If a file has none or several of these names, all files form one split.
        """
        found = [_split_of(name) for name in self.names]
        if None in found:
            return one_split(sum(counts))
        names, ids = numbered_splits([str(name) for name in found])
        return names, np.repeat(ids, counts)


def _split_of(name: str) -> str | None:
    folders, _, file = name.rpartition("/")
    named = [folder for folder in folders.split("/") if is_split_name(folder)]
    named = named or split_words(file)
    return named[0] if len({name.lower() for name in named}) == 1 else None


def shards_kind(path: Path, wanted: NameFilter) -> str:
    """Return "webdataset" or "parquet" if all shards of a folder, or of a brace pattern, are of that kind, else "".

    In a folder, only visible shards that are not excluded are considered. If patterns of `include` match some of them,
    only these are considered. The result is "" if `wanted` also selects files that are not shards, such as images, or
    if the folder has links to folders.
    """
    if not os.path.isdir(path):
        return _kind_of(itertools.islice(expand_braces(str(path)), _MAX_FILES))
    found: list[str] = []
    folders, not_excluded = [""], NameFilter((), wanted.exclude)
    while folders:
        folder = folders.pop()
        # os.walk would list a whole folder before the first image shows that this is not a folder of shards.
        with contextlib.suppress(OSError), os.scandir(path / folder) as entries:
            for entry in entries:
                relative = f"{folder}/{entry.name}" if folder else entry.name
                if is_folder(entry):
                    if is_visible(entry.name):
                        if entry.is_symlink():
                            # Do not follow the link, which may lead to a folder above. It may also lead to images.
                            return ""
                        folders.append(relative)
                elif _kind_of([entry.name]):
                    if is_visible(entry.name) and not_excluded.allows(relative):
                        found.append(relative)
                elif wanted.refusal(relative) is None:
                    return ""
    return _kind_of([name for name in found if wanted.include and wanted.allows(name)] or found)


def _kind_of(names: Iterable[str]) -> str:
    endings = {(name.lower().endswith(TAR_SUFFIXES), name.lower().endswith(TABLE_SUFFIXES)) for name in names}
    return {(True, False): "webdataset", (False, True): "parquet"}.get(endings.pop(), "") if len(endings) == 1 else ""


def find_shards(path: Path, wanted: NameFilter, suffixes: Sequence[str]) -> Shards:
    """Return the files of a source, which is a file, a brace pattern such as ``shard-{000..010}.tar``, or a folder.

    For a folder, return the visible files that have one of the `suffixes`, in lower or upper case, and are not
    excluded. A pattern of `include` that matches one of these files selects files; other patterns select samples.
    Raise SourceError if a file of a brace pattern is missing.
    """
    if os.path.isdir(path):
        names = list(walk(str(path), NameFilter(tuple(map(suffix_pattern, suffixes)), wanted.exclude)).below(""))
        files = tuple(pattern for pattern in wanted.include if any(map(NameFilter((pattern,)).allows, names)))
        if files:
            names = [name for name in names if NameFilter(files).allows(name)]
        samples = tuple(pattern for pattern in wanted.include if pattern not in files)
        return Shards(path, names, NameFilter(samples, wanted.exclude))
    paths: dict[str, None] = {}  # A dict, not a list, because braces may name a file twice.
    for name in [str(path)] if os.path.exists(path) else expand_braces(str(path)):
        paths[name] = None
        if len(paths) > _MAX_FILES:
            raise SourceError.at(path, f"names more than {_MAX_FILES:,} files; give a pattern of fewer files")
    missing = next((one for one in paths if not os.path.isfile(one)), None)
    if missing is not None:
        what = "not a regular file" if os.path.exists(missing) else "no such file"
        raise SourceError.at(missing, f"{what}; check the path or the pattern")
    root = os.path.commonpath([os.path.dirname(one) for one in paths])
    return Shards(Path(root), [os.path.relpath(one, root) if root else one for one in paths], wanted)


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield the names to which a shell would expand a pattern with ``{000..010}`` or ``{a,b}``. Keep other braces."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    choices: Iterable[str] = match[1].split(",")
    if bounds is not None:
        first, last = int(bounds[1]), int(bounds[2])
        # As in a shell, numbers are padded with zeros if one of the bounds is.
        padded = any(bound.startswith("0") and len(bound) > 1 for bound in bounds.groups())
        width = max(map(len, bounds.groups())) if padded else 0
        step = 1 if first <= last else -1
        choices = (f"{number:0{width}d}" for number in range(first, last + step, step))
    for choice in choices:
        yield from expand_braces(pattern[: match.start()] + choice + pattern[match.end() :])

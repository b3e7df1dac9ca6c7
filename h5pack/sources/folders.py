"""Folders of images as sources: listing of files, and catalogs of flat, class and split folders.

A `Listing` comes from a folder (`walk`) or from the names of an archive's members (`list_names`). Both become catalogs
by the same rules.
"""

from __future__ import annotations

import errno
import os
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from h5pack.errors import NoImagesError, SourceError
from h5pack.format import schema
from h5pack.sources.catalog import Catalog, NameFilter, NameTable, Note, one_split
from h5pack.sources.reader import FileReader
from h5pack.system.text import first_names


@dataclass
class Listing:
    """The selected files and the visible folders below a root, which is a folder or an archive."""

    root: str  # path of the folder or archive
    # The keys are folders with selected files, relative to the root ("" is the root). Each value is the sorted names of
    # a folder's selected files, joined into one string by NUL, because a million str objects would take much memory.
    folders: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # the keys of `folders`, sorted
    ignored: Counter[str] = field(default_factory=Counter)  # numbers of skipped files and folders, by category
    # By path of a folder relative to the root: the sorted names of its visible subfolders, including empty ones.
    subfolders: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    top: str = ""  # path of the root relative to the source; "" if the root is the source

    def names(self, folder: str) -> list[str]:
        """Return the sorted names of the selected files in `folder`, without its path."""
        return self.folders[folder].split("\0")

    def counts(self, top: str) -> dict[str, int]:
        """Return the numbers of selected files directly in `top` and in each folder below, by folder, sorted."""
        return {folder: self.folders[folder].count("\0") + 1 for folder in self._folders_below(top)}

    def below(self, top: str) -> Iterator[str]:
        """Yield the paths, relative to the root, of all selected files in and below the folder `top`."""
        for folder in self._folders_below(top):
            lead = f"{folder}/" if folder else ""
            for name in self.names(folder):
                yield lead + name

    def filled(self, top: str = "") -> list[str]:
        """Return the names of the subfolders of `top` that have selected files, directly or in deeper folders."""
        return [name for name in self.subfolders[top] if self._folders_below(os.path.join(top, name))]

    def inside(self, top: str) -> Listing:
        """Return the listing of the folder `top`, which becomes the root. `ignored` still counts the whole listing."""
        start = len(top) + 1
        found = Listing(os.path.join(self.root, top), ignored=self.ignored, top=os.path.join(self.top, top))
        found.order = [folder[start:] for folder in self._folders_below(top)]
        found.folders = {folder[start:]: self.folders[folder] for folder in self._folders_below(top)}
        below = (folder for folder in self.subfolders if f"{folder}/".startswith(f"{top}/"))
        found.subfolders.update((folder[start:], self.subfolders[folder]) for folder in below)
        return found

    def _folders_below(self, top: str) -> list[str]:
        if not top:
            return self.order
        # Strings that start with "a/" sort between "a/" and "a0", because "0" follows "/" in Unicode.
        first, last = bisect_left(self.order, f"{top}/"), bisect_left(self.order, f"{top}0")
        return ([top] if top in self.folders else []) + self.order[first:last]


def walk(root: str, wanted: NameFilter, top: str = "") -> Listing:
    """Find all files that the filter `wanted` selects in the folder `top` of `root` and its visible subfolders.

    The order does not depend on the file system. Links are followed, except to a folder above the link. Raise
    SourceError if a folder or link cannot be read and is not excluded, or if links lead to a folder on too many paths.
    """
    found = Listing(root)
    stack: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    visits: Counter[tuple[int, int]] = Counter()
    while stack:
        folder, above = stack.pop()
        path = os.path.join(root, folder) if folder else root
        try:
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                found.ignored["loops of links"] += 1
                continue
            visits[identity] += 1
            if visits[identity] > _MAX_VISITS:  # A few folders with links to each other have billions of paths.
                problem = f"links lead here on over {_MAX_VISITS:,} paths; remove some of the links"
                raise SourceError.at(os.path.realpath(path), problem)
            selected, below = _list_folder(path, folder, wanted, found.ignored)
        except OSError as error:
            # A link that cannot be followed may stand for a file, so a pattern may exclude it by its own name.
            is_excluded = os.path.islink(path) and not NameFilter((), wanted.exclude).allows(folder)
            if is_excluded or wanted.excludes_below(folder):
                found.ignored["excluded folders"] += 1
                continue
            problem = f"cannot be read ({error.strerror}); make it readable, or skip its content with exclude"
            raise SourceError.at(path, f"{problem} (a pattern like 'FOLDER/*')", "exclude") from error
        stack += [(name, above | {identity}) for name in below]
        if below:
            found.subfolders[folder] = sorted(map(os.path.basename, below))
        if selected:
            found.folders[folder] = "\0".join(sorted(selected))
    found.order = sorted(found.folders)
    return found


def list_names(root: str, files: Iterable[str], folders: Iterable[str], wanted: NameFilter) -> Listing:
    """Return the listing that `walk` would return for a folder of these files and folders (relative paths)."""
    found, visible, hidden = Listing(root), set[str](), set[str]()
    in_folder = defaultdict[str, list[str]](list)
    for file in files:
        in_folder[file.rpartition("/")[0]].append(file)
    for folder in {*in_folder, *folders}:
        parts = folder.split("/") if folder else []
        paths = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        first = next((number for number, name in enumerate(parts) if not is_visible(name)), len(parts))
        visible.update(paths[:first])
        if first < len(parts):
            hidden.add(paths[first])
            continue
        refusals = {file: wanted.refusal(file) for file in in_folder.get(folder, ())}
        found.ignored.update(refusal for refusal in refusals.values() if refusal is not None)
        if selected := sorted(file.rpartition("/")[2] for file, refusal in refusals.items() if refusal is None):
            found.folders[folder] = "\0".join(selected)
    if hidden:
        found.ignored["hidden folders"] = len(hidden)
    for folder in sorted(visible):
        above, _, name = folder.rpartition("/")
        found.subfolders[above].append(name)
    found.order = sorted(found.folders)
    return found


def _list_folder(path: str, folder: str, wanted: NameFilter, ignored: Counter[str]) -> tuple[list[str], list[str]]:
    """Return the names of a folder's selected files, and the paths of its visible subfolders relative to the root."""
    selected, below = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            relative = f"{folder}/{name}" if folder else name
            if is_folder(entry):
                if is_visible(name):
                    below.append(relative)
                else:
                    ignored["hidden folders"] += 1
            elif (refusal := wanted.refusal(relative)) is None:
                selected.append(name)
            else:
                ignored[refusal] += 1
    return selected, below


def is_visible(name: str) -> bool:
    """Return whether a folder of this name is listed: not "__MACOSX", and not a name with a leading dot."""
    return not name.startswith(".") and name != "__MACOSX"


def suffix_pattern(suffix: str) -> str:
    """Return a shell pattern for names that end in `suffix` (lower case), in any case: "*.[pP][nN][gG]" for ".png"."""
    return "*" + re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", suffix)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder or a link to a folder.

    If the system does not allow to follow a link, assume that the link leads to a folder.
    """
    try:
        return entry.is_dir()
    except OSError as error:
        # A link that leads to itself is treated as a file, and becomes a rejected image when it cannot be read.
        return error.errno != errno.ELOOP


# Names that denote a split, with the rank by which splits are ordered in a pack.
_SPLIT_RANKS = {
    "train": 0, "training": 0, "tr": 0,
    "val": 1, "valid": 1, "validation": 1, "dev": 1,
    "test": 2, "testing": 2,
}  # fmt: skip
_SPLIT_START = re.compile(f"({'|'.join(sorted(_SPLIT_RANKS, key=len, reverse=True))})[_-]?(.*)", re.IGNORECASE)


def split_rank(name: str) -> int:
    """Return the rank of a split by the words in its name: 0 training, 1 validation, 2 test, 3 none or several."""
    ranks = {_SPLIT_RANKS[word.lower()] for word in split_words(name)}
    return ranks.pop() if len(ranks) == 1 else 3


def is_split_name(name: str) -> bool:
    """Return whether a folder with this name is a split by convention: train, val, test or a variant of these."""
    return name.lower() in _SPLIT_RANKS


def split_words(name: str) -> list[str]:
    """Return those words of a name that denote a split, such as "train" in ``train2017``, ``trainA`` or ``x-train``."""
    return [word for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name) if is_split_name(word)]


def split_and_role(folder: str) -> tuple[str, str]:
    """Return the split at the start of a folder's name, or "", and the rest: "train", "masks" for "train_masks"."""
    match = _SPLIT_START.fullmatch(folder)
    return (match[1], match[2]) if match is not None else ("", folder)


def split_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names in the order of a pack: training, validation, test, others; ties in order of name."""
    return tuple(sorted(set(names), key=lambda name: (split_rank(name), name)))


def numbered_splits(splits: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """Return the `split_names` and `split_ids` of a catalog, given the split of each image."""
    names = split_order(splits)
    numbers = {name: number for number, name in enumerate(names)}
    return names, np.array([numbers[split] for split in splits], np.int32)


def flat(found: Listing) -> Catalog:
    """Return a catalog of all images below the root, at any depth, without labels."""
    names = NameTable.of(found.below(""))
    return Catalog("flat", FileReader(found.root), names, *one_split(len(names)), ignored=dict(found.ignored))


def classes(found: Listing) -> Catalog:
    """Return a catalog with one class for each folder directly in the root, including folders without images.

    As in torchvision's ImageFolder, a class includes the images in deeper folders.
    """
    folders = found.subfolders[""]
    if found.folders.get(""):
        advice = "move them into a class, or pack all images without labels with source_kind='flat'"
        raise _mixed(found.root, "class", repr(found.names("")[0]), advice, "source_kind='flat'")
    counts = [sum(found.counts(folder).values()) for folder in folders]
    return Catalog(
        "classes",
        FileReader(found.root),
        NameTable.of(name for folder in folders for name in found.below(folder)),
        *one_split(sum(counts)),
        labels=np.repeat(np.arange(len(folders)), counts),
        label_names=tuple(folders),
        ignored=dict(found.ignored),
        notes=_class_notes(found, [""], folders),
    )


def _class_notes(found: Listing, tops: list[str], classes: Iterable[str]) -> tuple[Note, ...]:
    """Return a note on classes without images, and one on class folders whose images are in several deeper folders.

    `tops` are the folders that contain the folders of the classes.
    """
    folders = [os.path.join(top, name) for top in tops for name in found.filled(top)]
    empty = sorted({*classes}.difference(map(os.path.basename, folders)))
    text = f"classes without images, which also get a number: {first_names(empty)}; remove folders that are not classes"
    notes = (Note(text),) if empty else ()
    deeper = [folder for folder in folders if folder not in found.folders and len(found.counts(folder)) > 1]
    if not deeper:
        return notes
    some = ", ".join(map(repr, [*found.counts(deeper[0])][:2]))
    text = f"classes whose images are in several deeper folders: {len(deeper):,}, such as {deeper[0]!r} ({some})"
    text = f"{text}; if the deeper folders are the classes, pack a manifest that names the class of each image"
    return (*notes, Note(text))


# Usual names of folders of images and of folders of their masks, in lower case and without "_" and "-".
IMAGE_FOLDERS = frozenset((
    "images", "image", "image2", "imgs", "img", "inputs", "input", "photos", "jpegimages", "jpg", "rgb", "leftimg8bit",
))  # fmt: skip
TARGET_FOLDERS = frozenset((
    "masks", "mask", "labels", "label", "annotations", "annotation", "segmentations", "segmentation", "targets",
    "segmentationclass", "segmentationobject", "groundtruth", "gt", "gtfine", "trimaps", "depth", "edges", "mattes",
    "anno", "annot",
))  # fmt: skip
_MAX_VISITS = 10_000  # of one folder, by different paths
# The limits of `first_files`: the number of folders, and the number of characters of a folder's file names.
_PROBED_FOLDERS, _PROBED_LENGTH = 100, 4096


def _refuse_pairs(found: Listing, folders: list[str], kind: str) -> None:
    """Raise SourceError if two folders, such as "train" and "train_masks", are named like images and their masks.

    `kind`, "classes" or "splits", is the kind of source that the folders would otherwise be packed as.
    """
    images = next((folder for folder in folders if is_named(folder, IMAGE_FOLDERS)), None)
    targets = next((folder for folder in folders if is_named(folder, TARGET_FOLDERS)), None)
    for folder in folders:
        split, role = split_and_role(folder)
        if is_named(role, TARGET_FOLDERS) and split in folders:
            images, targets, kind = split, folder, "splits"
            break
    if images is not None and targets is not None:
        doubt = f"{images!r} and {targets!r} are probably images and their masks, not {kind}"
        name = os.path.basename(targets)
        _, role = split_and_role(name)
        raise _masks_error(found.root, doubt, f"*{role if is_named(role, TARGET_FOLDERS) else name}/*", kind)


def _masks_error(root: str, doubt: str, pattern: str, kind: str) -> SourceError:
    """Return the error for masks among images. `pattern` matches the masks. With `kind`, both are packed as images."""
    ways = "source_kind='pairs'", f"exclude={pattern!r}", f"source_kind={kind!r}"
    advice = "pack them as pairs with {}, leave the masks out with {}, or pack both as images with {}".format(*ways)
    return SourceError.at(root, f"{doubt}; {advice}", *ways)


def is_named(folder: str, names: frozenset[str]) -> bool:
    """Return whether `names` contains a folder's name, in lower case and without "_" and "-", or its last word."""
    words = re.split("[_-]", os.path.basename(folder).lower())
    return "".join(words) in names or words[-1] in names


def splits(found: Listing) -> Catalog:
    """Return a catalog with one split per folder. A split consists of class folders, or of images without labels.

    Images without labels get the label -1 if other splits have classes; if none has, the catalog has no labels.
    """
    split_names = split_order(found.filled())
    if not split_names:
        names = ", ".join(found.subfolders[""]) or "there are none"
        raise NoImagesError.at(found.root, f"no images in its split folders ({names}); check the path")
    if found.folders.get(""):
        raise _mixed(found.root, "split", repr(found.names("")[0]), "move them into a split, or skip them with exclude")
    tops = {split: _class_folder(found, split) for split in split_names}
    others = {name for top in tops.values() if top for name in found.filled(top)}
    # If a split has only one class, and the class is named like a folder of images, only other splits show that it is
    # a class.
    tops = {split: top or _class_folder(found, split, others) for split, top in tops.items()}
    class_tops = [top for top in tops.values() if top]
    label_names = tuple(sorted({name for top in class_tops for name in found.subfolders[top]}))
    index = {name: number for number, name in enumerate(label_names)}
    rows = [
        (number, index[folder[len(top) + 1 :].partition("/")[0]] if top else schema.NO_LABEL, count)
        for number, (split, top) in enumerate(tops.items())
        for folder, count in found.counts(split).items()
    ]
    split_ids, labels, counts = np.array(rows, np.int64).T
    return Catalog(
        "splits",
        FileReader(found.root),
        NameTable.of(name for split in split_names for name in found.below(split)),
        split_names,
        np.repeat(split_ids.astype(np.int32), counts),
        labels=np.repeat(labels, counts) if label_names else None,
        label_names=label_names or None,
        ignored=dict(found.ignored),
        notes=_class_notes(found, class_tops, label_names),
    )


def _class_folder(found: Listing, split: str, classes: Collection[str] = ()) -> str:
    """Return the folder whose subfolders are the classes of a split; "" if the split has no classes.

    The search begins with the folder `split`. It continues in a subfolder, such as ``train/images``, if all images are
    below this subfolder, and its name is that of its parent folder or is usual for a folder of images. A subfolder that
    is one of `classes`, the known classes of other splits, is a class.
    """
    top = split
    while filled := found.filled(top):
        is_known = any(name in classes for name in filled)
        if top in found.folders:
            if top != split and not is_known:
                break
            example = f"{found.names(top)[0]!r} beside {filled[0]!r}"
            advice = "move them into a class, or skip them with exclude"
            raise _mixed(os.path.join(found.root, top), "class", example, advice)
        is_of_images = is_named(filled[0], IMAGE_FOLDERS) or filled[0] == os.path.basename(top)
        if is_known or len(filled) > 1 or not is_of_images:
            return top
        top = os.path.join(top, filled[0])
    return ""


def _mixed(folder: str, kind: str, example: str, advice: str, parameter: str = "exclude") -> SourceError:
    """Return the error for a folder that contains images beside class or split folders."""
    return SourceError.at(folder, f"has images beside its {kind} folders, such as {example}; {advice}", parameter)


def only_folder(found: Listing) -> str:
    """Return the deepest folder whose subfolders hold all files; "" if this is the root, or if there is none.

    A folder that is named like a split, such as "train", is not entered.
    """
    path = ""
    while len(filled := found.filled(path)) == 1 and not is_split_name(filled[0]):
        below = os.path.join(path, filled[0])
        if not found.folders.keys().isdisjoint((path, below)):
            break
        path = below
    return path


def arranged(found: Listing, kind: str) -> Catalog:
    """Return the catalog of a listing; `kind` is "flat", "splits", "classes", or "folder" to infer it."""
    if kind == "splits" and any(map(split_words, found.filled(only_folder(found)))):
        return _inside(found, splits)
    return {"flat": flat, "splits": splits, "classes": classes, "folder": _inferred}[kind](found)


def _inside(found: Listing, catalog_of: Callable[[Listing], Catalog]) -> Catalog:
    """Return ``catalog_of(found)``. If all paths are like ``images/cat/1.jpg``, treat the folder ``images`` as root."""
    if not (only := only_folder(found)):
        return catalog_of(found)
    catalog = catalog_of(found.inside(only))
    names = NameTable.of(f"{only}/{name}" for name in catalog.names)
    return replace(catalog, reader=FileReader(found.root), names=names, about=f"in {only!r}")


def _inferred(found: Listing) -> Catalog:
    """Return the catalog of a listing, whose kind is inferred from names; raise SourceError if they are ambiguous."""
    catalog = _inside(found, _by_names)
    if (beside := mask_beside_image(found)) is not None:
        doubt = "{1!r} is probably the mask of {0!r}, not an image of its own".format(*beside)
        # After the ending, the pattern requires "." or "_", so that it does not match all files of a folder "a_mask/".
        raise _masks_error(found.root, doubt, f"*{beside[2]}{'' if beside[2][0] == '.' else '[._]'}*", catalog.kind)
    return catalog


def mask_beside_image(found: Listing) -> tuple[str, str, str] | None:
    """Return the path of an image, the path of its mask in the same folder, and the ending of the mask's name; or None.

    The ending is the word that follows the name of the image, such as "_mask". It is ".png" if a folder has at least
    three files, and they look like pairs of a JPEG image and a PNG mask of the same name. Only the first files of the
    first folders are compared.
    """
    for folder, files in first_files(found):
        names = {os.path.splitext(name)[0]: name for name in files}
        # An image and its mask share a stem. The last name may be cut off, so it may have a stem of its own.
        if len(files) > 2 and 2 * len(names) <= len(files) + 1 and (pair := jpeg_and_png(folder, *files[:2])):
            return pair
        for stem, name in names.items():
            match = re.fullmatch("(.+)([_-]([A-Za-z]+))", stem)
            if match is not None and match[1] in names and match[3].lower() in TARGET_FOLDERS:
                return os.path.join(folder, names[match[1]]), os.path.join(folder, name), match[2]
    return None


def first_files(found: Listing) -> Iterator[tuple[str, list[str]]]:
    """Yield each of the first folders, and the names of its first files, of which the last may be cut off."""
    for folder in found.order[:_PROBED_FOLDERS]:
        yield folder, found.folders[folder][:_PROBED_LENGTH].split("\0")


def jpeg_and_png(folder: str, one: str, other: str) -> tuple[str, str, str] | None:
    """Return the paths of a JPEG and a PNG file, and the ending of the latter, if two names are of such a pair."""
    (stem, suffix), (other_stem, other_suffix) = map(os.path.splitext, (one, other))
    names = {suffix.lower(): one, other_suffix.lower(): other}
    image, mask = names.get(".jpg") or names.get(".jpeg"), names.get(".png")
    if stem != other_stem or not image or not mask:
        return None
    return os.path.join(folder, image), os.path.join(folder, mask), mask[-4:]


def _by_names(found: Listing) -> Catalog:
    """Return the catalog of a listing, of the kind that its folders suggest. A lone folder "images" is not a class."""
    filled = found.filled()
    if not filled or (len(filled) == 1 and is_named(filled[0], IMAGE_FOLDERS)):
        return flat(found)
    kind = "splits" if all(map(is_split_name, filled)) else "classes"
    _refuse_pairs(found, filled, kind)
    for folder in filled:
        _refuse_pairs(found, [f"{folder}/{name}" for name in found.filled(folder)], kind)
    if kind == "classes":
        _refuse_no_classes(found, filled)
    return arranged(found, kind)


def _refuse_no_classes(found: Listing, folders: list[str]) -> None:
    """Raise SourceError if, by their names, some of the folders are probably not classes."""
    named = [folder for folder in folders if is_split_name(folder)]
    words = [split_words(folder) for folder in folders]
    ranks = {split_rank(word): folder for folder, some in zip(folders, words, strict=True) for word in some}
    inner = next((f"{folder}/{name}" for folder in folders for name in found.filled(folder) if is_split_name(name)), "")
    alike = {re.sub("[0-9]+", "", folder) for folder in folders}
    lead, kinds, other = "", ["source_kind='splits'", "source_kind='classes'"], "exclude"
    if named:
        odd = next(folder for folder in folders if folder not in named)
        doubt = f"{named[0]!r} looks like a split and {odd!r} like a class"
        other = f"exclude={os.path.join(found.top, odd, '*')!r}"
    elif len(ranks) > 1 and 2 * sum(map(bool, words)) >= len(words):
        doubt = "{!r} and {!r} look like splits".format(*ranks.values())
    elif len(folders) > 1 == len(alike) and IMAGE_FOLDERS & {*re.split("[^a-z]+", min(alike).lower())}:
        doubt = f"{folders[0]!r} and {folders[-1]!r} look like parts of one folder of images"
        kinds[0] = "source_kind='flat'"
    elif inner:
        doubt = f"{inner!r} looks like a split, not like a part of a class"
        lead, kinds = f"pack {os.path.dirname(inner)!r} alone, or ", kinds[1:]
    else:
        return
    advice = f"{lead}give {' or '.join(kinds)}, or leave a folder out with {other}"
    raise SourceError.at(found.root, f"{doubt}; {advice}", *kinds, other)

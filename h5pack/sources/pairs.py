"""Folders of images and of their masks as a source."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable

from h5pack.errors import SourceError
from h5pack.format import schema
from h5pack.format.fields import is_field_name, require_field_names
from h5pack.sources.catalog import Catalog, NameFilter, NameTable, PixelField, Reject, one_split
from h5pack.sources.folders import (
    IMAGE_FOLDERS,
    TARGET_FOLDERS,
    Listing,
    first_files,
    is_named,
    is_split_name,
    jpeg_and_png,
    mask_beside_image,
    numbered_splits,
    only_folder,
    split_and_role,
)
from h5pack.sources.reader import FileReader


def pairs(found: Listing, wanted: NameFilter) -> Catalog:
    """Return a catalog of images with masks. An image and its mask have the same stem, but different roles.

    For example, ``images/a.jpg`` and ``masks/a.png`` have the stem "a", and the roles "images" and "masks".
    `_files_by_stem` and `_by_image` define stems and roles. Each role of masks becomes a field of the same name, or
    "masks" if a field cannot have that name. `wanted` filters only the images.
    """
    ignored = Counter(found.ignored)
    files = _files_by_stem(found)
    images, targets = _roles(found.root, sorted(files.keys() - {""}))
    fields = [target if is_field_name(target) else "masks" for target in targets]
    require_field_names(f"{found.root}: its masks in {', '.join(map(repr, targets))}", fields, found.root)
    for role in files.keys() - {images, *targets}:
        ignored["other images"] += sum(map(len, files[role].values()))
    for target in targets:
        files[target] = _by_image(files[target], files[images])
    names: list[str] = []
    stems: list[str] = []
    rejects = []
    for name, stem in sorted((name, stem) for stem, some in files[images].items() for name in some):
        if not wanted.allows(name):
            ignored[str(wanted.refusal(name))] += 1
        elif wrong := next((target for target in targets if len(files[target].get(stem, ())) != 1), ""):
            count = "several files" if stem in files[wrong] else "no file"
            rejects.append(Reject(name, f"{count} of its name in {wrong!r}"))
        else:
            names.append(name)
            stems.append(stem)
    if not names and rejects:
        problem = (
            f"no image in {images!r} has exactly one mask in each folder of masks; {rejects[0].name!r} "
            f"has {rejects[0].reason}; give each mask the name of its image, except for the "
            "suffix, and leave out other files with exclude"
        )
        raise SourceError.at(found.root, problem, "exclude")
    for target in targets:
        unused = sum(len(some) for stem, some in files[target].items() if stem not in files[images])
        ignored[f"files of {target!r} without an image"] += unused
    splits = [next(filter(is_split_name, stem.split("/")[:-1]), "") for stem in stems]
    masks = (NameTable.of(files[target][stem][0] for stem in stems) for target in targets)
    about = f"images in {images!r}, masks in {', '.join(map(repr, targets))}"
    return Catalog(
        "pairs",
        FileReader(found.root),
        NameTable.of(names),
        *(numbered_splits(splits) if splits and all(map(is_split_name, splits)) else one_split(len(splits))),
        pixel_fields=tuple(PixelField(name, schema.MASK, table) for name, table in zip(fields, masks, strict=True)),
        rejects=tuple(rejects),
        ignored=dict(+ignored),
        # Leave out the text if the roles are not names of folders, as in "train_masks/a.png" or "a_mask.png".
        about=about if any(f"/{images}/" in f"/{name}" for name in names[:1]) else "",
    )


def _files_by_stem(found: Listing) -> dict[str, dict[str, list[str]]]:
    """Return the paths of the files as ``files[role][stem]``. A role distinguishes images, masks and other files.

    Three kinds of paths have the role "masks" and the stem "train/a": "masks/train/a.png", "train/masks/a.png" and
    "train_masks/a.png". If no folder is named like images or masks, "train/a_mask.png" also has this role and stem, or
    "train/a.png" beside "train/a.jpg". A file that is not in a folder of any role has the role "".
    """
    top = only_folder(found)
    filled = found.filled(top)
    inner = {name for folder in filled for name in found.filled(os.path.join(top, folder))}
    by_split = all(map(is_split_name, filled))
    starts = [split_and_role(folder) for folder in filled]
    by_start = not by_split and all(split for split, _ in starts) and _any_named(role for _, role in starts)
    position = int(by_split or (_any_named(inner) and not _any_named(filled)))
    beside = None
    if not by_start and not _any_named([*filled, *inner]):
        # A pair of one name suffices, because some images may lack a mask.
        beside = mask_beside_image(found) or _first_of_one_name(found)
    files: dict[str, dict[str, list[str]]] = {}
    for name in found.below(top):
        *folders, stem = os.path.splitext(name)[0].removeprefix(f"{top}/").split("/")
        if beside is not None:
            is_mask = name.lower().endswith(".png") if beside[2][0] == "." else stem.endswith(beside[2])
            role = "masks" if is_mask else "images"
            stem = stem.removesuffix(beside[2])
        elif len(folders) <= position:
            role = ""
        elif by_start:
            folders[0], role = split_and_role(folders[0])
            role = role or "images"
        else:
            role = folders.pop(position)
        files.setdefault(role, {}).setdefault("/".join([*folders, stem]), []).append(name)
    return files


def _first_of_one_name(found: Listing) -> tuple[str, str, str] | None:
    """Return the first pair of a JPEG image and a PNG mask of the same name, like `mask_beside_image`; None if none."""
    for folder, files in first_files(found):
        for one, other in itertools.pairwise(files):
            if pair := jpeg_and_png(folder, one, other):
                return pair
    return None


def _any_named(folders: Iterable[str]) -> bool:
    return any(is_named(folder, IMAGE_FOLDERS | TARGET_FOLDERS) for folder in folders)


def _roles(root: str, folders: list[str]) -> tuple[str, list[str]]:
    """Return the role of images and the roles of masks; raise SourceError if the names do not determine them."""
    images = [folder for folder in folders if is_named(folder, IMAGE_FOLDERS)]
    targets = [folder for folder in folders if is_named(folder, TARGET_FOLDERS)]
    others = [folder for folder in folders if folder not in (*images, *targets)]
    if len(others) == 1 and len(images) + len(targets) == 1:
        images, targets = images or others, targets or others
    if len(images) != 1 or not targets:
        names = ", ".join(map(repr, folders)) or "none"
        problem = (
            f"its folders ({names}) must be one folder of images and one or several of masks; name them "
            "'images' and 'masks', or skip other folders with exclude"
        )
        raise SourceError.at(root, problem, "exclude")
    return images[0], targets


def _by_image(masks: dict[str, list[str]], images: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the files of masks by the stem of their image. `masks` and `images` are files by their own stem.

    If no mask has the stem of an image, the part that all stems of masks share is replaced by the part that all stems
    of images share. This part is the folders at the beginning, such as "trimaps/" in "trimaps/a", without splits at
    their end, and an ending that begins with "_" or "-", such as "_mask" in "a_mask".
    """
    if not masks or not images or masks.keys() & images.keys():
        return masks
    (lead, ending), (image_lead, image_ending) = _shared(masks), _shared(images)
    found: dict[str, list[str]] = {}
    for stem, files in masks.items():
        found.setdefault(image_lead + stem.removeprefix(lead).removesuffix(ending) + image_ending, []).extend(files)
    return found


def _shared(stems: Iterable[str]) -> tuple[str, str]:
    """Return the first folders that all stems share, without splits at their end, and the ending that all stems share.

    The folders end in a slash. The ending begins with "_" or "-".
    """
    folders, names = zip(*map(os.path.split, stems), strict=True)
    folder = os.path.commonpath(folders)
    while is_split_name(os.path.basename(folder)):
        folder = os.path.dirname(folder)
    parts = [re.split("(?=[_-])", name)[:0:-1] for name in names]
    # If the smallest and the largest list begin with the same items, so do all lists, because they are between the two.
    extremes = zip(min(parts), max(parts), strict=False)
    ending = [part for part, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], extremes)]
    return folder and f"{folder}/", "".join(ending[::-1])

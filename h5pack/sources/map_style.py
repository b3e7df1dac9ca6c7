"""A map-style dataset (a Python object) as a source: its samples, and the names and splits in its attributes.

Types of datasets are recognized by names of classes and attributes, because `h5pack.sources` does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from h5pack.errors import H5PackError, RejectedImageError, SourceError
from h5pack.format import schema
from h5pack.format.fields import (
    FieldValueError,
    FieldValues,
    is_numeric_dtype,
    parse_ragged,
    parse_values,
    require_field_names,
)
from h5pack.images.decode import eight_bits
from h5pack.images.headers import DecodePath, ImageHeader
from h5pack.images.masks import mask_numbers, narrow_mask
from h5pack.sources.catalog import Catalog, NameTable, Note, PixelField, one_split, sample_name, split_ids, unused_note
from h5pack.sources.folders import numbered_splits
from h5pack.sources.hdf5_catalog import channel_axes
from h5pack.sources.hdf5_rows import PixelForm
from h5pack.sources.manifest import ManifestColumns
from h5pack.sources.reader import SourceReader, SurveyedImage, fingerprint
from h5pack.system.text import error_line, short_repr

IMAGE, LABEL = "image", "label"
MASKS = ("mask", "masks")
"""The keys that masks have in samples."""
_TRIED_SAMPLES = 16
"""Maximum number of samples to try to read. The first sample that can be read shows which keys are masks."""
_UNENCODABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""What a `NameTable` cannot store: NUL, and surrogates that do not stand for a byte of a file name."""
_NOT_UINT8 = (
    "images must be uint8 (0 to 255); leave out the transform that changed them (such as ToTensor), or convert floats "
    "in 0..1 with (255 * image).round() to uint8"
)


class MapStyleDataset(Protocol):
    """A map-style dataset as defined by PyTorch, with a length and an integer index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ReadSample(NamedTuple):
    """The image, label and fields of one sample, and the names of the parts that are not packed."""

    pixels: npt.NDArray[np.uint8]  # (H, W, 1 or 3)
    label: npt.NDArray[Any] | None  # int64 () or uint8 (K,)
    unused: tuple[str, ...]
    fields: dict[str, Any]  # by name: an array, a text, a list of texts, or None


@dataclass(frozen=True)
class MapStyleReader(SourceReader):
    """Reads images, labels, fields and masks of a map-style dataset."""

    dataset: MapStyleDataset
    indices: npt.NDArray[np.int64] | None = None  # the sample of each image; None means that image i is sample i
    fields: ManifestColumns = field(default_factory=ManifestColumns)  # keys of samples that become fields
    masks: tuple[str, ...] = ()  # keys of the masks
    has_labels = True
    # One cached sample as (index, sample), because an image and its masks are read one after the other.
    _last: tuple[int, Any] = field(default=(-1, None), init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": (-1, None)}

    def read_field(self, number: int, index: int, name: str) -> npt.NDArray[Any]:
        key = self.masks[number]
        mask = _parts(self._given(self.sample_index(index)))[2].get(key)
        try:
            return _mask(key, mask)
        except (RejectedImageError, MemoryError):
            raise
        except Exception as error:
            raise RejectedImageError(f"{key!r} cannot be converted to numbers ({error_line(error)})") from error

    def read(self, index: int, name: str) -> npt.NDArray[np.uint8]:
        return self.sample(self.sample_index(index)).pixels

    def survey(self, index: int, name: str, max_pixels: int) -> SurveyedImage:
        number = self.sample_index(index)
        pixels, label, unused, fields = self.sample(number)
        header = ImageHeader(pixels.shape[0], pixels.shape[1], DecodePath.PILLOW)
        described = f"{number}\0{name}\0{pixels.shape}\0{None if label is None else label.tolist()}"
        mark = fingerprint(described.encode("utf-8", "surrogateescape"))
        return SurveyedImage(header, mark, label, unused, fields=fields)

    def changing(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # No image is checked, because a fingerprint does not depend on pixels, and computing it takes as long as
        # reading the sample.
        return indices[:0]

    def take(self, indices: npt.NDArray[np.int64]) -> MapStyleReader:
        return replace(self, indices=indices if self.indices is None else self.indices[indices])

    def sample_index(self, index: int) -> int:
        return index if self.indices is None else int(self.indices[index])

    def sample(self, index: int) -> ReadSample:
        """Return a sample; raise RejectedImageError if the dataset fails, a value is unsupported or a key missing."""
        image, label, others = _parts(self._given(index))
        names = self.fields.all_fields
        missing = [name for name in names if name not in others]
        if missing:
            raise RejectedImageError(f"the dataset gave a sample without {missing[0]!r}")
        unused = tuple(str(name) for name in others if name not in names and name not in self.masks)
        try:
            fields = {name: _value(others[name]) for name in names}
            return ReadSample(_pixels(image), None if label is None else _label(label), unused, fields)
        except (RejectedImageError, MemoryError):
            raise
        except Exception as error:
            # Pillow decodes a lazily opened image only at this point, and NumPy rejects ragged lists and some tensors.
            raise RejectedImageError(
                f"the dataset's sample cannot be converted to arrays ({error_line(error)})"
            ) from error

    def _given(self, index: int) -> Any:
        """Return sample `index` of the dataset; raise RejectedImageError if the dataset raises an exception."""
        last, given = self._last
        if last != index:
            try:
                given = self.dataset[index]
            except MemoryError:
                raise  # The machine is short of memory. A later run may read the sample.
            except Exception as error:
                raise RejectedImageError(f"the dataset raised {error_line(error)}") from error
            if self.masks:
                object.__setattr__(self, "_last", (index, given))
        return given


def map_style_catalog(dataset: MapStyleDataset, fields: ManifestColumns | None = None) -> Catalog:
    """Return the catalog of a map-style dataset. Labels, and fields other than masks, are added after the survey."""
    fields = fields or ManifestColumns()
    require_field_names(f"the {type(dataset).__name__}", fields.all_fields)
    if not (_has_length(dataset) and hasattr(dataset, "__getitem__")):
        raise SourceError(
            f"the source is of type {type(dataset).__name__}; give a path, or a map-style dataset with __len__ and "
            "__getitem__"
        )
    known = _known(dataset)
    names = known.names or [""] * known.count
    splits = known.splits
    if splits is not None:
        # A subset may have no sample of some splits.
        used, ids = np.unique(splits[1], return_inverse=True)
        splits = tuple(splits[0][number] for number in used.tolist()), ids.astype(np.int32)
    escaped = (_UNENCODABLE.sub(lambda found: ascii(found[0])[1:-1], name) for name in names)
    table = NameTable.of(name or sample_name(index) for index, name in enumerate(escaped))
    masks = _mask_keys(dataset, known.count)
    return Catalog(
        "dataset",
        MapStyleReader(dataset, fields=fields, masks=masks),
        table,
        *(splits or one_split(known.count)),
        label_names=known.classes,
        pixel_fields=tuple(PixelField(name, schema.MASK, table) for name in masks),
        notes=known.notes,
        about=type(dataset).__name__,
    )


def with_fields(catalog: Catalog, samples: Sequence[dict[str, Any] | None]) -> Catalog:
    """Return the catalog with fields. `samples` has the `ReadSample.fields` of each image, None for rejected images."""
    reader = catalog.reader
    if not isinstance(reader, MapStyleReader) or not reader.fields.all_fields:
        return catalog
    found: dict[str, FieldValues] = {}
    for name in reader.fields.all_fields:
        values = [None if sample is None else sample[name] for sample in samples]
        kind = dict(reader.fields.coordinates).get(name, schema.ARRAY)
        try:
            if kind == schema.ARRAY:
                found[name] = parse_values(values)
            else:
                # An empty list of boxes or points may have any shape, so treat it like a missing value.
                lists = [None if value is None or np.size(value) == 0 else value for value in values]
                found[name] = parse_ragged(lists, kind, reader.fields.box_format)
        except FieldValueError as error:
            parameter = "fields" if kind == schema.ARRAY else schema.KINDS[kind].parameter
            raise SourceError(
                f"{catalog.shown(error.row)} of the dataset: {name!r} {error}; leave it out of {parameter}",
                rows=[reader.sample_index(error.row)],
                parameters=(parameter, *error.parameters),
            ) from None
    return replace(catalog, fields=found)


def _mask_keys(dataset: Any, count: int) -> tuple[str, ...]:
    """Return those of `MASKS` that the first readable sample has. The survey rejects samples that cannot be read."""
    for index in range(min(count, _TRIED_SAMPLES)):
        try:
            others = _parts(dataset[index])[2]
        except Exception:
            continue
        return tuple(name for name in MASKS if others.get(name) is not None)
    return ()


def with_labels(catalog: Catalog, labels: npt.NDArray[Any] | None, unused: Iterable[str]) -> Catalog:
    """Return the catalog with labels, class names if they fit, and a note that lists the `unused` parts of samples."""
    names, notes = catalog.label_names, catalog.notes
    notes += unused_note("parts of samples", sorted(unused), "keys of dicts can be packed with fields", "fields")
    if labels is not None and names is not None:
        table = labels.ndim == 2
        held = f"{labels.shape[1]} columns" if table else f"labels from {labels.min()} to {labels.max()}"
        fits = labels.shape[1] == len(names) if table else bool(-1 <= labels.min() <= labels.max() < len(names))
        if not fits:
            notes += (Note(f"not packed: the names of {len(names):,} classes, because the dataset has {held}"),)
            names = None
    if labels is None:
        names = None
    elif labels.ndim == 2 and names is None:
        names = tuple(f"label_{column}" for column in range(labels.shape[1]))
    return replace(catalog, labels=labels, label_names=names, notes=notes)


@dataclass(frozen=True)
class _Known:
    """Properties of a dataset and its samples that are known from its attributes, without reading any sample."""

    count: int
    names: Sequence[str] | None = None  # names of the samples' files
    classes: tuple[str, ...] | None = None  # names of the classes, or of the columns of labels
    splits: tuple[tuple[str, ...], npt.NDArray[np.int32]] | None = None  # as `split_names` and `split_ids` of a catalog
    notes: tuple[Note, ...] = ()


def _has_length(dataset: Any) -> bool:
    try:
        return len(dataset) >= 0
    except TypeError:  # Arrays and tensors without axes have the method, but no length.
        return False


def _known(dataset: Any) -> _Known:
    count = len(dataset)
    known = _known_of_subset(dataset, count) or _known_of_parts(dataset, count) or _Known(count)
    return replace(
        known,
        names=_file_names(dataset, count) or known.names,
        classes=_class_names(dataset) or known.classes,
        splits=_splits(dataset, count) or known.splits,
    )


def _attribute(dataset: Any, name: str) -> Any:
    """Return an attribute of a dataset; None if there is none, or if a property raises anything but an H5PackError."""
    try:
        return getattr(dataset, name, None)
    except H5PackError:
        raise
    except Exception:
        return None


def _is_a(dataset: Any, *kinds: str) -> bool:
    """Return whether a dataset's class or a base class is one of `kinds`, such as "torch.Subset".

    Other classes may use attributes of the same names for something else.
    """
    return any(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in kinds for kind in type(dataset).__mro__)


def _known_of_subset(dataset: Any, count: int) -> _Known | None:
    """Return the properties of a ``Subset``, taken from the dataset that it selects from.

    Return None for other types, and if the indices do not fit that dataset.
    """
    whole, indices = _attribute(dataset, "dataset"), _attribute(dataset, "indices")
    if not _is_a(dataset, "torch.Subset") or not hasattr(whole, "__len__"):
        return None
    known = _known(whole)
    try:
        positions = [range(known.count)[index] for index in indices]
    except (TypeError, IndexError):
        return None
    if len(positions) != count:
        return None
    return replace(
        known,
        count=count,
        names=None if known.names is None else [known.names[position] for position in positions],
        splits=None if known.splits is None else (known.splits[0], known.splits[1][positions]),
    )


def _known_of_parts(dataset: Any, count: int) -> _Known | None:
    """Return the properties of a ``ConcatDataset`` or ``ConcatPack``, joined from its parts; None if impossible."""
    if not _is_a(dataset, "torch.ConcatDataset", "h5pack.ConcatPack"):
        return None
    datasets = _attribute(dataset, "datasets")
    if not isinstance(datasets, (list, tuple)) or not all(hasattr(part, "__len__") for part in datasets):
        return None
    parts = [_known(part) for part in datasets]
    if not parts or sum(part.count for part in parts) != count:
        return None
    names, splits, classes = None, None, parts[0].classes
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    if any(part.classes != classes for part in parts):
        notes += (Note("not packed: the names of classes, which differ among the datasets"),)
        classes = None
    if any(part.names for part in parts):
        names = [name for part in parts for name in part.names or [""] * part.count]
    if any(part.splits for part in parts):
        of_parts = [part.splits or one_split(part.count) for part in parts]
        splits = numbered_splits([own[number] for own, ids in of_parts for number in ids.tolist()])
    return _Known(count, names, classes, splits, notes)


def _file_names(dataset: Any, count: int) -> list[str] | None:
    """Return the samples' file names, from ``filenames`` (`H5Dataset`) or ``samples`` or ``imgs`` (torchvision)."""
    for attribute in ("filenames", "samples", "imgs"):
        entries = _attribute(dataset, attribute)
        if not isinstance(entries, (list, tuple)) or len(entries) != count:
            continue
        paths = [entry[0] if isinstance(entry, (list, tuple)) and entry else entry for entry in entries]
        # Bytes with NUL characters may be the images themselves.
        if all(
            b"\0" not in path if isinstance(path, bytes) else isinstance(path, (str, os.PathLike)) for path in paths
        ):
            return _relative([os.fsdecode(path) for path in paths], _attribute(dataset, "root"))
    return None


def _relative(names: list[str], root: Any) -> list[str]:
    """Return paths relative to `root` if all are below it, else relative to their common folder if all are absolute.

    Otherwise, return `names` unchanged.
    """
    if isinstance(root, (str, bytes, os.PathLike)):
        folder = os.path.join(os.fsdecode(root), "")
        if all(name.startswith(folder) for name in names):
            return [name[len(folder) :].lstrip("/") for name in names]
    if not names or not all(map(os.path.isabs, names)):
        return names
    # The common folder has single slashes, so replace repeated slashes in the names. `normpath` alone would keep two
    # slashes at the start.
    names = ["/" + os.path.normpath(name).lstrip("/") for name in names]
    # All names sort between the smallest and the largest, so the common folder of these two contains all of them.
    common = os.path.commonpath([os.path.dirname(min(names)), os.path.dirname(max(names))])
    return [name[len(common) :].lstrip("/") for name in names]


def _class_names(dataset: Any) -> tuple[str, ...] | None:
    """Return the names of a dataset's classes, or of an `H5Dataset`'s label columns."""
    features = _attribute(dataset, "features")  # in Hugging Face datasets
    label = features.get(LABEL) if isinstance(features, Mapping) else None
    columns = _attribute(dataset, "columns") if _attribute(dataset, "label_name") else None
    for names in (_attribute(dataset, "classes"), _attribute(label, "names"), columns):
        if isinstance(names, (list, tuple)) and names:
            # torchvision's ImageNet has several names for each class.
            texts = [", ".join(map(str, name)) if isinstance(name, (list, tuple)) else name for name in names]
            if all(isinstance(name, str) for name in texts):
                return tuple(texts)
    indices = _attribute(dataset, "class_to_idx")
    if isinstance(indices, Mapping) and indices and all(isinstance(name, str) for name in indices):
        ordered = sorted(indices, key=lambda name: indices[name])
        if [indices[name] for name in ordered] == list(range(len(ordered))):
            return tuple(ordered)
    return None


def _splits(dataset: Any, count: int) -> tuple[tuple[str, ...], npt.NDArray[np.int32]] | None:
    """Return the splits of an `H5Dataset`, whose samples are the rows ``dataset.rows`` of a file; else None."""
    if not _is_a(dataset, "h5pack.H5Dataset") or len(dataset.rows) != count:
        return None
    parts = (dataset.rows, *dataset.splits.values())
    ends = [rows.stop if isinstance(rows, range) else int(rows.max(initial=-1)) + 1 for rows in parts]
    names, ids = split_ids(dataset.splits, max(ends), f"the {type(dataset).__name__}")
    return names, ids[np.asarray(dataset.rows, np.int64)]


def _parts(sample: Any) -> tuple[Any, Any, dict[Any, Any]]:
    """Return the image of a sample, its label or None, and its other parts by key, or by position such as "[2]"."""
    if isinstance(sample, tuple) and IMAGE in getattr(sample, "_fields", ()):
        sample = sample._asdict()  # type: ignore[attr-defined]
    if isinstance(sample, Mapping):
        if IMAGE not in sample:
            keys = ", ".join(repr(key) for key in sample) or "none"
            raise RejectedImageError(f"the dataset gave a sample with the keys {keys}; {IMAGE!r} is needed")
        return sample[IMAGE], sample.get(LABEL), {key: sample[key] for key in sample if key not in (IMAGE, LABEL)}
    if not isinstance(sample, (tuple, list)):
        return sample, None, {}
    if not sample:
        raise RejectedImageError("the dataset gave an empty sample; expected an image, or an image and a label")
    others = {f"[{number}]": part for number, part in enumerate(sample[2:], 2)}
    return sample[0], sample[1] if len(sample) > 1 else None, others


def _value(value: Any) -> Any:
    """Return the value of a field: a text, a list of texts, None, or else an array."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value):
        return [*value]
    array = np.asarray(value)
    if not is_numeric_dtype(array.dtype):
        problem = f"the dataset gave {short_repr(value)}, {array.dtype}, as the value of a field"
        raise RejectedImageError(f"{problem}; expected a text, a list of texts, or real numbers of at most 64 bits")
    return array


def _pixels(image: Any) -> npt.NDArray[np.uint8]:
    """Return the pixels, uint8 (h, w, 1 or 3), of a Pillow image, or of a uint8 array or tensor. Alpha is dropped.

    If an array has three axes, the last one is the channel axis if its length is 1 to 4; otherwise, the first one is.
    """
    if hasattr(image, "convert") and hasattr(image, "getbands"):
        image = eight_bits(image)
        image = image.convert("L" if image.getbands() == ("L",) else "RGB")
    array = np.asarray(image)
    if array.dtype != np.uint8:
        raise RejectedImageError(f"the dataset gave {array.dtype} pixels; {_NOT_UINT8}")
    axes = channel_axes(array.shape)
    if not axes or 0 in array.shape:
        expected = "(H, W), (H, W, C) or (C, H, W), C from 1 to 4"
        raise RejectedImageError(f"the dataset gave an image of shape {array.shape}; expected {expected}")
    return PixelForm(axes[0]).pixels(array)


def _mask(name: str, mask: Any) -> npt.NDArray[Any]:
    """Convert a Pillow image, or an array or tensor of integers or bools, to a mask, uint8 or int32 (H, W)."""
    if mask is None:
        raise RejectedImageError(f"the dataset gave a sample without {name!r}, but the first readable sample has it")
    array = mask_numbers(mask) if hasattr(mask, "convert") and hasattr(mask, "getbands") else np.asarray(mask)
    if array.ndim == 3 and 1 in (array.shape[0], array.shape[2]):
        array = array[0] if array.shape[0] == 1 else array[:, :, 0]
    if array.ndim != 2 or array.dtype.kind not in "biu" or 0 in array.shape:
        raise RejectedImageError(
            f"the dataset gave {name!r} as {array.dtype} {array.shape}; expected integers of shape (H, W), not empty"
        )
    return narrow_mask(array)


def _label(label: Any) -> npt.NDArray[Any]:
    array = np.asarray(label)
    if array.dtype.kind in "iub" and array.ndim == 0 and int(array) <= np.iinfo(np.int64).max:
        return array.astype(np.int64)
    if array.dtype.kind in "iub" and array.ndim == 1 and array.size and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8)
    raise RejectedImageError(
        f"the dataset gave the label {short_repr(label)}; expected an integer, or a 1-D array of integers in 0..255"
    )

"""A map-style dataset from Python as a source: ``dataset[i] -> (image, label)`` or ``image``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from h5pack.errors import RejectedImageError, SourceError
from h5pack.sources.catalog import Catalog, NameTable, Reader, one_split


class MapStyle(Protocol):
    """What torch calls a map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class DatasetReader(Reader):
    """Reads images, and labels, out of a map-style dataset.

    Attributes
    ----------
    dataset : MapStyle
        Its images are uint8 arrays (H, W), (H, W, 1) or (H, W, 3), or Pillow images.
    """

    dataset: MapStyle

    def read(self, index: int, name: str) -> npt.NDArray[np.uint8]:
        # A limited catalog numbers anew; the name keeps the dataset's own index.
        return self.sample(int(name))[0]

    def sample(self, index: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any] | None]:
        """The pixels, uint8 (H, W, C) with C 1 or 3, and the label, int64 () or uint8 (K,), of one sample.

        Raises
        ------
        RejectedImageError
            If the dataset raises, or returns something else.
        """
        try:
            sample = self.dataset[index]
        except Exception as error:
            raise RejectedImageError(f"the dataset raised {type(error).__name__}: {error}") from error
        image, label = sample, None
        if isinstance(sample, (tuple, list)):
            if len(sample) < 2:
                raise RejectedImageError(f"the dataset gave {len(sample)} values; expected an image and a label")
            image, label = sample[0], sample[1]
        try:
            return _pixels(image), None if label is None else _label(label)
        except RejectedImageError:
            raise
        except Exception as error:
            # Pillow decodes a lazily opened image only here, and numpy refuses ragged lists and foreign tensors.
            raise RejectedImageError(f"the dataset's sample raised {type(error).__name__}: {error}") from error


def mapped(dataset: MapStyle) -> Catalog:
    """Catalog a map-style dataset; labels are learnt by the survey, which must read every sample for them.

    Raises
    ------
    SourceError
        If `dataset` is not map-style.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise SourceError(
            f"the {type(dataset).__name__}: neither a path nor a map-style dataset, which has a length and an index; "
            "give one of these"
        )
    count = len(dataset)
    split_names, split_ids = one_split(count)
    names = NameTable.of(f"{index:08d}" for index in range(count))
    return Catalog("dataset", DatasetReader(dataset), names, split_names, split_ids)


def _pixels(image: Any) -> npt.NDArray[np.uint8]:
    if hasattr(image, "convert") and hasattr(image, "getbands"):
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            raise RejectedImageError(f"the dataset gave an image of mode {image.mode}; images must be of 8 bits")
        image = image.convert("L" if image.getbands() == ("L",) else "RGB")
    array = np.asarray(image)
    if array.dtype != np.uint8:
        raise RejectedImageError(f"the dataset gave {array.dtype} pixels; images must be uint8")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape:
        raise RejectedImageError(
            f"the dataset gave an image of shape {array.shape}; expected (H, W), (H, W, 1) or (H, W, 3)"
        )
    return array


def _label(label: Any) -> npt.NDArray[Any]:
    array = np.asarray(label)
    if array.dtype.kind in "iub" and array.ndim == 0 and array <= np.iinfo(np.int64).max:
        return array.astype(np.int64)
    if array.dtype.kind in "iub" and array.ndim == 1 and array.size and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8)
    raise RejectedImageError(
        f"the dataset gave the label {label!r}; expected an integer, or a row of integers in 0..255"
    )

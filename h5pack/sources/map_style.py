"""A map-style dataset (a Python object) as a source; ``dataset[i]`` returns ``image`` or ``(image, label)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from h5pack.errors import RejectedImageError, SourceError
from h5pack.images.headers import DecodePath, ImageHeader
from h5pack.sources.catalog import Catalog, NameTable, SourceReader, SurveyedImage, fingerprint, one_split


class MapStyleDataset(Protocol):
    """A map-style dataset as defined by PyTorch, with a length and an integer index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class MapStyleReader(SourceReader):
    """Reads images (uint8 arrays (H, W), (H, W, 1 or 3), or Pillow images) and labels of a map-style dataset."""

    dataset: MapStyleDataset
    has_labels = True

    def read(self, index: int, name: str) -> npt.NDArray[np.uint8]:
        # In a catalog limited to some images, `index` counts only these; `name` is still the dataset's index.
        return self.sample(int(name))[0]

    def survey(self, index: int, name: str, max_pixels: int) -> SurveyedImage:
        pixels, label = self.sample(int(name))
        header = ImageHeader(pixels.shape[0], pixels.shape[1], DecodePath.PILLOW)
        described = f"{name}\0{pixels.shape}\0{None if label is None else label.tolist()}"
        return SurveyedImage(header, fingerprint(described.encode()), label)

    def sample(self, index: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any] | None]:
        """Return the pixels, uint8 (H, W, 1 or 3), and the label, int64 () or uint8 (K,) or None, of one sample.

        Raise RejectedImageError if the dataset raises an exception or returns unsupported values.
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
            # Pillow decodes a lazily opened image only at this point, and NumPy rejects ragged lists and some tensors.
            raise RejectedImageError(
                f"the dataset's sample cannot be converted to pixels and a label ({type(error).__name__}: {error})"
            ) from error


def map_style_catalog(dataset: MapStyleDataset) -> Catalog:
    """Return the catalog of a map-style dataset, without labels.

    The survey adds the labels, because getting them means reading every sample.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise SourceError(
            f"the source is of type {type(dataset).__name__}; give a path, or a map-style dataset with __len__ and "
            "__getitem__"
        )
    count = len(dataset)
    names = NameTable.of(f"{index:08d}" for index in range(count))
    return Catalog("dataset", MapStyleReader(dataset), names, *one_split(count))


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
        expected = "(H, W), (H, W, 1) or (H, W, 3)"
        raise RejectedImageError(f"the dataset gave an image of shape {array.shape}; expected {expected}")
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

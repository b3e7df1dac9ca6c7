"""Memory from the C library's allocator: what HDF5's filter plugins take, free and give."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

_library = ctypes.CDLL(None)
_malloc, _free = _library.malloc, _library.free
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_free.restype, _free.argtypes = None, [ctypes.c_void_p]


class Block:
    """A piece of memory, freed with its last array.

    Parameters
    ----------
    size : int
        Bytes in use.
    address : int, optional
        Of memory that came from malloc, and is this block's from now on; None: new memory.

    Raises
    ------
    MemoryError
    """

    def __init__(self, size: int, address: int | None = None) -> None:
        self.size = size
        self.address = _malloc(max(1, size)) if address is None else address
        if not self.address:
            raise MemoryError(f"no memory for {size:,} bytes")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            _free(self.address)

    def release(self) -> int:
        """The address, for somebody else to free."""
        address, self.address = self.address, None
        assert address is not None
        return address

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.address, False)}

    def array(self) -> npt.NDArray[np.uint8]:
        """Its bytes; the array keeps it alive, so it must not be released meanwhile."""
        return np.asarray(self)

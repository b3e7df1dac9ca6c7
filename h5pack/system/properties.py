"""Properties that are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class cached_property(Generic[_T]):
    """`functools.cached_property` without a lock.

    Before Python 3.12, `functools.cached_property` holds one lock for all objects while a value is computed. If another
    thread forks meanwhile, the lock stays locked in the child, which then waits forever when it computes the property.
    Without a lock, two threads may both compute the value. So every computation must return an equal value.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> _T:
        if instance is None:
            return self  # type: ignore[return-value]
        # Once the value is in the object's dict, Python finds it there and does not call this method.
        value = instance.__dict__[self._name] = self._compute(instance)
        return value

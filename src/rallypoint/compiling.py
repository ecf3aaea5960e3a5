"""What mypyc is told about a class, without its package at run time. Pure, and for every part."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_extensions import mypyc_attr as mypyc_attr
else:
    _Class = TypeVar("_Class", bound=type)

    def mypyc_attr(**_: object) -> Callable[[_Class], _Class]:
        return lambda decorated: decorated

"""The versions of the packages that stacks are in, found beside their files; nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rallypoint.stacks.activity import MachineActivity

_PACKAGE: Final = re.compile(r"(?P<folder>.*[/\\](?:site|dist)-packages)[/\\](?P<name>\w+)")
_MOST: Final = 8


def versions_in(machine: MachineActivity) -> tuple[str, ...]:
    """`torch 2.13.0, accelerate 1.2.0`; empty if no stack is in a package."""
    frames = (frame for rank in machine.ranks for frame in rank.stack)
    found = (_PACKAGE.match(frame.file) for frame in frames)
    packages = dict.fromkeys((each["folder"], each["name"]) for each in found if each)
    told = [text for place in list(packages)[:_MOST] for text in _version(*place)]
    return (", ".join(told),) if told else ()


def _version(folder: str, name: str) -> Iterator[str]:
    """From the folder `torch-2.13.0.dist-info`."""
    for info in Path(folder).glob(f"{name}-*.dist-info"):
        yield f"{name} {info.name.removeprefix(f'{name}-').removesuffix('.dist-info')}"

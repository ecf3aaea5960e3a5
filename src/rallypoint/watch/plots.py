"""How figures look and where they go: for those of `bench` and of `timeline`.

One file is to be readable on white paper and on a dark page. So the ground is transparent, and every colour
stands out from both: its contrast is at least 3 to 1 against `GROUNDS`. Text becomes paths in an SVG: a
reader without our font would get another one, whose words are of other lengths. The same data gives the same
bytes.

matplotlib is imported by functions alone, so that all else works without it.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from rallypoint.errors import RallypointError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK: Final = "#767b81"
"""Of text and axes."""
GRID: Final = "#8a8f95"
"""It has to be seen like all else, so it is thin and dotted instead of pale."""
GROUNDS: Final = ("#ffffff", "#0d1117")

_METADATA: Final[dict[str, dict[str, None]]] = {
    # A date would make each file differ, and a version those of two machines.
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

_RC: Final[dict[str, Any]] = {
    "font.family": "DejaVu Sans",  # it comes with matplotlib
    "font.size": 9.0,
    "svg.fonttype": "path",
    "svg.hashsalt": "rallypoint",  # without one, the names of clip paths are random
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.0,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "hatch.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linestyle": (0, (0.6, 3.0)),
    "grid.linewidth": 0.5,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}


def check_plot(path: Path) -> None:
    """UsageError if no figure can be saved there; to be called before anything else is done."""
    if path.suffix.lower() not in _METADATA:
        raise UsageError(f"{path} is no SVG, PNG or PDF", hint="let the name end with .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", hint="make it, or write to another one")
    need_matplotlib()


@contextmanager
def drawing(*, math: bool = True) -> Iterator[None]:
    """Draw by our settings alone, whatever the user's matplotlibrc says, and leave matplotlib as it was.

    Without `math`, a dollar sign in a text is a dollar sign.
    """
    need_matplotlib()
    import matplotlib

    settings: MutableMapping[str, Any] = cast("MutableMapping[str, Any]", matplotlib.rcParams)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings.update(_RC, **{"text.parse_math": math})
        yield


def write(figure: Figure, path: Path, title: str | None = None) -> None:
    """Save a figure; its title is read to people who cannot see it."""
    suffix = path.suffix.lower()
    metadata = {**_METADATA[suffix], **({"Title": title} if title else {})}
    try:
        figure.savefig(path, format=suffix[1:], dpi=150, transparent=True, metadata=metadata)
    except OSError as error:
        raise RallypointError(f"cannot write {path}: {error.strerror or error}") from error


def need_matplotlib() -> None:
    """UsageError if it is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"figures need matplotlib: {error}",
            hint="pip install '.[bench]' in a clone of Rallypoint, or leave the figures out",
        ) from error

"""Draws figures the same way for light and dark pages, and writes them as PNG and SVG."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Theme = Literal["light", "dark"]
# Draws the figure; colours come from the theme by matplotlib's own settings.
Draw = Callable[[], Any]

# Okabe and Ito's colours, which people with any colour vision can tell apart; lighter on dark.
COLOURS: dict[Theme, tuple[str, ...]] = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B27D00", "#3A8FC2", "#555555"),
    "dark": ("#56B4E9", "#F08A4B", "#2FC79A", "#E6A1C9", "#E9B94D", "#9AD0F0", "#BBBBBB"),
}
MARKERS = "osD^vP*X"
_PAGE: dict[Theme, tuple[str, str, str]] = {  # background, ink, grid
    "light": ("#ffffff", "#1f2328", "#d0d7de"),
    "dark": ("#0d1117", "#e6edf3", "#3d444d"),
}
WIDTH = 7.6  # inches: a page's width, so that letters of 9 points stay that size


def new_figure(height: float = 3.4, width: float = WIDTH) -> Any:
    """An empty figure at page width."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        raise ValueError("the paper's figures need matplotlib: pip install 'spartan-sparsity[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


@contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """What is drawn meanwhile has this theme; the background is opaque, so that no page shines through."""
    try:
        import matplotlib as mpl
        from cycler import cycler  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ModuleNotFoundError:
        raise ValueError("the paper's figures need matplotlib: pip install 'spartan-sparsity[plot]'") from None
    background, ink, grid = _PAGE[theme]
    colours = {"figure.facecolor": background, "axes.facecolor": background, "savefig.facecolor": background}
    colours |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink)
    colours |= {"grid.color": grid, "legend.facecolor": background, "legend.edgecolor": grid}
    plain = {
        "font.size": 9,
        "axes.titlesize": 10,
        "legend.fontsize": 8,
        "axes.grid": True,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
    }
    plain |= {"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.6, "lines.markersize": 4.5}
    # The same bytes every time: no random ids.
    with mpl.rc_context(
        {**colours, **plain, "axes.prop_cycle": cycler(color=COLOURS[theme]), "svg.hashsalt": "spartan"}
    ):
        yield


def ink() -> str:
    """The theme's colour of text and lines."""
    import matplotlib as mpl

    return str(mpl.rcParams["text.color"])


def write_figure(draw: Draw, stem: Path) -> list[Path]:
    """Write stem.png and stem.svg for light pages, stem-dark.png and stem-dark.svg for dark ones."""
    written = []
    themes: tuple[Theme, ...] = ("light", "dark")
    for theme in themes:
        with themed(theme):
            figure = draw()
            for kind in ("png", "svg"):
                path = stem.with_name(f"{stem.name}{'-dark' if theme == 'dark' else ''}.{kind}")
                figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
                written.append(path)
    return written

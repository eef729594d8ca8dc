"""A sweep as a picture. Needs matplotlib (the `plots` extra)."""

from __future__ import annotations

from pathlib import Path

from headwater.errors import ConfigError
from headwater.sim.sweep import Swept


def draw(swept: Swept, path: Path) -> None:
    """Samples a second against what was swept first; a line for each value of the others."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a picture needs matplotlib; install it: pip install '.[plots]' in a checkout") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for point, outcome in swept.points:
        lines.setdefault(point[1:], []).append((point[0], outcome.samples_per_s))
    figure, axis = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    for rest, points in lines.items():
        label = ", ".join(f"{name} {value:g}" for name, value in zip(swept.names[1:], rest, strict=True))
        axis.plot(*zip(*sorted(points), strict=True), "o-", label=label or None, markersize=3, linewidth=1.4)
    axis.set(title="simulated (estimated)", xlabel=swept.names[0], ylabel="samples/s", xscale="log", yscale="log")
    axis.spines[["top", "right"]].set_visible(False)
    if any(lines) and len(lines) > 1:
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

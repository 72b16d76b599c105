"""Plots: matplotlib's SVG, made to sit inside a page, or alone, and follow its light or dark colours."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

#: Colours that matplotlib draws with, each replaced by a variable of the page. They must be colours that nothing else
#: produces, so they are no shades that matplotlib blends.
_INKS = {
    "#010203": "var(--ink)",
    "#020304": "var(--muted)",
    "#030405": "var(--grid)",
    "#040506": "var(--gpu)",
    "#050607": "var(--cpu)",
    "#060708": "var(--disk)",
    "#070809": "var(--accent)",
}
INK, MUTED, GRID, GPU, CPU, DISK, ACCENT = _INKS

#: colour, marker and line of each profile: told apart without colour too
STYLES: Mapping[str, tuple[str, str, str]] = {
    "gpu": (GPU, "s", "-"),
    "cpu": (CPU, "o", "-"),
    "disk": (DISK, "^", "-"),
}


@dataclass(frozen=True)
class Line:
    """One series: its words, points, and how it is drawn; ``hollow`` marks values that somebody else reported."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    marker: str = ""
    style: str = "-"
    hollow: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart with one vertical axis; ``title`` is also what a screen reader says."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    x_ticks: Sequence[float] = field(default_factory=tuple)
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)
    #: for shares in percent: limits that do not follow the values
    y_limits: tuple[float, float] | None = None


def draw(chart: Chart) -> str:
    """The chart as an ``<svg>`` element: no fixed size, no fonts of its own, colours from the page's variables."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    settings = {
        "svg.fonttype": "none",
        # ids of clip paths must differ between the charts of one page, and be the same in every run
        "svg.hashsalt": chart.name,
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": MUTED,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "grid.color": GRID,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.3, 2.9))
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for line in chart.lines:
            axes.plot(
                [x for x, _ in line.points],
                [y for _, y in line.points],
                color=line.colour,
                marker=line.marker or None,
                linestyle=line.style,
                linewidth=1.8,
                markersize=5.5,
                markerfacecolor="none" if line.hollow else line.colour,
                label=line.label,
                clip_on=False,
            )
        if chart.log_x:
            axes.set_xscale("log", base=2)
        if chart.x_ticks:
            axes.xaxis.set_major_locator(FixedLocator(list(chart.x_ticks)))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _compact(value)))
        axes.yaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]) if chart.y_limits else MaxNLocator(nbins=5))
        highest = max((y for line in chart.lines for _, y in line.points), default=1.0) or 1.0
        low, high = chart.y_limits or (0.0, highest * 1.06)
        # the names of the marks need room above the curves
        axes.set_ylim(bottom=low, top=high * 1.3 if chart.marks else high)
        axes.grid(visible=True, axis="y", linewidth=0.8)
        axes.tick_params(length=0)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        end = max((x for line in chart.lines for x, _ in line.points), default=1.0)
        named = -1.0
        for at, words in chart.marks:
            axes.axvline(at, color=GRID, linewidth=1)
            # names closer than this would lie over each other
            if at < named + end * 0.055:
                continue
            named = at
            axes.annotate(
                words,
                (at, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -2),
                textcoords="offset points",
                fontsize=8,
                color=MUTED,
                rotation=90,
                va="top",
                ha="left",
            )
        if len(chart.lines) > 1:
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(0, 1.0),
                ncols=3,
                fontsize=8.5,
                borderaxespad=0.2,
                handlelength=1.8,
                columnspacing=1.2,
            )
        figure.tight_layout(pad=0.6)
        buffer = io.StringIO()
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return _for_page(buffer.getvalue(), chart)


def as_file(chart: Chart) -> str:
    """The chart as a file of its own, with the report's colours, light or dark as the reader's system has it."""
    palette = (files("kvfleet") / "report_templates" / "palette.css").read_text(encoding="utf-8")
    look = f"{palette}svg {{ font-family: system-ui, sans-serif; background: var(--card); }}"
    svg = draw(chart).replace("<title>", f"<style>\n{look}\n</style><title>", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{svg}'


def _for_page(svg: str, chart: Chart) -> str:
    """Strip what belongs to a file of its own, and let the page decide colours, font and width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    view = re.search(r'viewBox="([^"]+)"', head)
    for colour, variable in _INKS.items():
        body = body.replace(colour, variable)
    body = re.sub(r"font: [^;\"]*?([\d.]+)px[^;\"]*", r"font-size: \1px; font-family: inherit", body)
    # ids of groups (figure_1, axes_1) repeat in every chart and nothing refers to them
    body = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|legend|matplotlib\.axis|xtick|ytick|PathCollection)[^"]*"', "", body
    )
    box = view.group(1) if view else "0 0 353 223"
    return (
        f'<svg class="chart" role="img" aria-label="{_attribute(chart.title)}" viewBox="{box}" '
        f'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f"<title>{_attribute(chart.title)}</title>{body}"
    )


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def _compact(value: float) -> str:
    """Axis numbers for people: 0, 0.5, 12, 1.5k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def by_concurrency(
    name: str,
    title: str,
    y_label: str,
    measured: Mapping[str, Sequence[tuple[float, float]]],
    reported: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Chart:
    """A figure against concurrency, one line a profile; ``reported`` values are hollow and dotted."""
    lines = [
        Line(profile, points, STYLES[profile][0], STYLES[profile][1], STYLES[profile][2])
        for profile, points in measured.items()
        if points
    ]
    lines += [
        Line(f"{profile} (article)", points, STYLES[profile][0], STYLES[profile][1], ":", hollow=True)
        for profile, points in (reported or {}).items()
        if points
    ]
    return against_concurrency(name, title, "requests at a time", y_label, lines)


def against_concurrency(name: str, title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> Chart:
    """``lines`` over concurrency, with a tick at every one that was measured."""
    ticks = sorted({x for line in lines for x, _ in line.points})
    return Chart(name, title, x_label, y_label, lines, log_x=True, x_ticks=ticks)


def timeline(
    name: str,
    title: str,
    y_label: str,
    lines: Sequence[Line],
    marks: Sequence[tuple[float, str]],
    y_limits: tuple[float, float] | None = None,
) -> Chart:
    """Figures over the seconds of a load, with a mark where each run begins."""
    return Chart(name, title, "seconds", y_label, lines, marks=marks, y_limits=y_limits)


def series(samples: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0) -> list[tuple[float, float]]:
    """Points of ``key`` over ``at_s``; samples that lack it are gaps."""
    return [(float(entry["at_s"]), float(entry[key]) * factor) for entry in samples if entry.get(key) is not None]

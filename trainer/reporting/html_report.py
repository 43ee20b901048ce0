"""One self-contained HTML page about one or several runs, made from their metrics files, and the loss curve as a picture."""

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator

from common.files import atomic_file
from common.wording import counted, printable
from trainer.reporting.records import CHARTS, LOSS, Chart, RunRecords, downsample, notes, quality, smooth

# evaluations before the last one whose samples are shown
N_EARLIER = 20
COLOURS = ("#2f6fde", "#d9542b", "#2a9d63", "#8a4fd3", "#b8860b", "#c23b80", "#5a7d8c", "#7a5c3e")
# colours of words and lines in a picture; a page puts its own in their place
INK, GRID = "#222222", "#dddddd"
STYLES: dict[str, dict[str, Any]] = {
    # Evaluations are few points, far from each other.
    "val_loss": {"linestyle": "--", "marker": "o", "markersize": 3},
}


def write_report(metrics_paths: Iterable[str | Path], page: Path) -> Path:
    """Write an HTML page about the runs of `metrics_paths`, and their loss curves as a picture beside it. Returns the picture's path.

    Errors: UserError for a file without metrics; OSError.
    """
    runs = [RunRecords.read(path) for path in metrics_paths]
    # path of each run's files relative to the runs' common folder
    paths = [run.path.resolve().with_name(run.name) for run in runs]
    common = os.path.commonpath([path.parent for path in paths])
    names = [path.relative_to(common).as_posix() for path in paths]
    # None: recorded by a job without a fingerprint of its data
    fingerprints = {str(run.start_record("data").get("fingerprint")) for run in runs} - {"None"}
    loader = FileSystemLoader(Path(__file__).parent)
    # Text is escaped, never run.
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, finalize=for_browser)
    content = environment.get_template("report.html").render(
        runs=list(zip(names, runs, strict=True)),
        read_different_data=len(fingerprints) > 1,
        charts=draw_charts(runs, names),
        figures=table([dict(run.figures()) for run in runs]),
        settings=table([run.start_record("settings") for run in runs]),
        machine=table([{**run.start_record("machine"), **run.start_record("versions")} for run in runs]),
        summary=summary,
        quality=quality,
        largest=max((bits for run in runs for _, bits in quality(run)), default=1.0),
        notes=notes,
        samples=samples,
    )
    with atomic_file(page) as file:
        # A file name that is not UTF-8 holds lone surrogates, which are shown as \udcff.
        file.write(content.encode(errors="backslashreplace"))
    picture = page.with_name(page.name.removesuffix(".html").removesuffix(".report") + ".loss.png")
    with atomic_file(picture) as file:
        file.write(loss_picture(runs, names))
    return picture


def for_browser(value: object) -> object:
    """Value that a template writes: characters that reorder or hide text are spelt out; drawings are markup already."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def draw(
    runs: Sequence[RunRecords], names: Sequence[str], chart: Chart, size: tuple[float, float] = (4.6, 2.9)
) -> Figure:
    """Draw the curves of each run; x: tokens trained. size: in inches."""
    curves = [run.curves(chart) for run in runs]
    marks = runs[0].ends_of_passes() if chart is LOSS and len(runs) == 1 else []
    # Not pyplot, which keeps every figure until it is closed and looks for a display.
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    lines: list[Any] = []
    for tokens in marks:
        axes.axvline(tokens, color=INK, linewidth=0.8, linestyle=":", alpha=0.6)
    several_runs = len(curves) > 1
    several_fields = len({curve.field for of_run in curves for curve in of_run}) > 1
    for i, (of_run, name) in enumerate(zip(curves, names, strict=True)):
        for j, curve in enumerate(of_run):
            x, y = curve.x, curve.y
            # One colour per run if there are several, else one per field
            colour = COLOURS[(i if several_runs else j) % len(COLOURS)]
            words = [name] * several_runs + [curve.label] * several_fields
            # matplotlib draws no lone surrogates, and takes text between two $ for a formula.
            label = printable(" ".join(words)).encode(errors="backslashreplace").decode().replace("$", r"\$")
            if curve.is_noisy:
                axes.plot(*downsample(x, y), color=colour, alpha=0.3, linewidth=0.8)
                x, y = smooth(x, y)
            # A line through one point would not show.
            style = STYLES.get(curve.field, {}) if len(x) > 1 else {"marker": "o"}
            lines += axes.plot(*downsample(x, y), color=colour, linewidth=1.6, label=label, **style)
    for run, colour in zip(runs, cycle(COLOURS) if several_runs else [INK], strict=False):
        if chart is LOSS and (end := run.expected_end):
            point = axes.errorbar(end.tokens, end.loss, end.loss * end.error, color=colour, fmt="D", capsize=3)
            point.set_label("expected end")
            lines.append(point)
    lowest, highest = axes.dataLim.intervaly
    if chart.logarithmic and 0 < 3 * lowest < highest:
        axes.set_yscale("log")
        # Powers of ten alone would give one or two labels.
        if highest < 30 * lowest:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if highest >= 1000 else "{x:.4g}")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("tokens trained" + "; dotted: a pass over the text ends" * bool(marks), color=INK)
    axes.tick_params(colors=INK, length=0)
    axes.grid(color=GRID, linewidth=0.6)
    axes.spines[:].set_visible(False)
    if len(lines) > 1:
        # Above the axes, in as many columns as fit: about 11 characters to the inch.
        columns = max(1, int(11 * size[0] // max(len(str(line.get_label())) + 4 for line in lines)))
        figure.legend(handles=lines, loc="outside upper left", ncols=columns, labelcolor=INK, frameon=False)
    return figure


def loss_picture(runs: Sequence[RunRecords], names: Sequence[str]) -> bytes:
    """The loss curves of the runs over the tokens trained, as a PNG."""
    figure = draw(runs, names, LOSS, size=(8, 4.5))
    # A title of the figure would be drawn over the legend of several runs.
    figure.axes[0].set_title(LOSS.title, loc="left")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def draw_charts(runs: Sequence[RunRecords], names: Sequence[str]) -> list[tuple[str, Markup]]:
    """[(caption, SVG)] of the charts that have data."""
    drawn = []
    for number, chart in enumerate(CHARTS):
        # The curves of all experts of several runs would be a tangle.
        if not any(run.curves(chart) for run in runs) or (len(runs) > 1 and chart.fields == ("expert_load/*",)):
            continue
        drawing = io.StringIO()
        # The salt makes the ids of a drawing unique in the page.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"chart{number}"}):
            draw(runs, names, chart).savefig(drawing, format="svg", transparent=True)
        svg = drawing.getvalue()
        # HTML has no XML declaration within a page, and only the page knows whether it is dark or light.
        svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(GRID, "var(--grid)")
        drawn.append((chart.title, Markup(svg)))
    return drawn


def table(columns: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str], bool]]:
    """[(label, text of each column, whether they differ)]; a column has a run's values."""
    rows = []
    # a set that keeps its order
    for label in dict.fromkeys(label for column in columns for label in column):
        texts = [str(column.get(label, "–")) for column in columns]
        rows.append((label, texts, len(set(texts)) > 1))
    return rows


def samples(run: RunRecords) -> list[tuple[int, str, str]]:
    """[(update, prompt, continuation)], latest first: of the last evaluation and of at most N_EARLIER before it."""
    updates = sorted({update for update, *_ in run.samples}, reverse=True)
    chosen = updates[:: math.ceil(len(updates) / (N_EARLIER + 1))]
    return [sample for sample in sorted(run.samples, key=lambda sample: -sample[0]) if sample[0] in chosen]


def summary(run: RunRecords) -> str:
    """The line below the title: model, data and starts."""
    data = run.start_record("data")
    resumed = f", resumed {counted(len(run.starts) - 1, 'time')}" if len(run.starts) > 1 else ""
    try:
        documents = counted(data["documents"], "conversation" if run.trains_answers else "document")
        return (
            f"{run.start_record('model')['parameters'] / 1e6:,.2f} M parameters, {documents} in rows that are {data['fill']:.1%} "
            f"full; started {run.starts[0]['started']}{resumed}"
        )
    except (LookupError, TypeError, ValueError):
        # No start, or one of another program or version
        return f"from {run.path.name}"

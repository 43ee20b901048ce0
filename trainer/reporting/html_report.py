"""One self-contained HTML page about one or several runs, made from their metrics files: curves, samples, settings."""

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullLocator

from common.files import atomic_file
from common.wording import counted, printable
from trainer.reporting.charts import LOSS, Chart, recorded_charts, recorded_commands
from trainer.reporting.records import FIGURES, Floats, RunRecords, is_number

# Evaluations with samples that are shown beside the last one.
EARLIER = 20
# Parts of a thinned curve, with two points each.
BUCKETS = 300
COLOURS = ("#2f6fde", "#d9542b", "#2a9d63", "#8a4fd3", "#b8860b", "#c23b80", "#5a7d8c", "#7a5c3e")
# Stand for the page's own colours in a drawing.
INK = "#010203"
GRID = "#040506"


def write_report(metrics_paths: Iterable[str | Path], page: str | Path, png: str | Path | None = None) -> None:
    """Write the HTML page (and the loss curves as a picture) about the runs of `metrics_paths`.

    Errors: UserError for a file without metrics.
    """
    runs = [RunRecords(path) for path in metrics_paths]
    names = distinct_names(runs)
    with atomic_file(page) as file:
        # a file name that is not UTF-8 holds lone surrogates, which are shown as \\udcff
        file.write(html_page(runs, names).encode(errors="backslashreplace"))
    if png:
        figure = draw(runs, names, LOSS, ink="#222222", grid="#dddddd", size=(8, 4.5))
        # A title of the figure would be drawn over the legend of several runs.
        figure.axes[0].set_title(LOSS.caption, loc="left", fontsize=12)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120, facecolor="white", metadata={"Software": None})
        with atomic_file(png) as file:
            file.write(picture.getvalue())


def distinct_names(runs: Sequence[RunRecords]) -> list[str]:
    """A name for each run: its file's, with as many folders before it as tell it from the others."""
    paths = [run.path.resolve().with_name(run.name) for run in runs]
    names = [path.name for path in paths]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    # matplotlib draws no lone surrogates, of which a name that is not UTF-8 has some.
    return [printable(name).encode(errors="backslashreplace").decode() for name in names]


# ------------------------------------------------------------------------------------------------ curves


def thin(x: Floats, y: Floats, buckets: int = BUCKETS) -> tuple[Floats, Floats]:
    """At most 2 * buckets + 2 points of a curve: the smallest and largest of each bucket, the first and the last."""
    if len(x) <= 2 * buckets + 2:
        return x, y
    edges = np.linspace(0, len(x), buckets + 1).astype(int)
    kept = {0, len(x) - 1}
    for lo, hi in zip(edges[:-1], edges[1:], strict=True):
        kept.add(int(lo + np.argmin(y[lo:hi])))
        kept.add(int(lo + np.argmax(y[lo:hi])))
    chosen = np.array(sorted(kept))
    return x[chosen], y[chosen]


def smooth(x: Floats, y: Floats, buckets: int = BUCKETS // 3) -> tuple[Floats, Floats]:
    """Means over buckets of equal numbers of points."""
    edges = np.linspace(0, len(x), min(buckets, len(x)) + 1).astype(int)
    sizes = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / sizes, np.add.reduceat(y, edges[:-1]) / sizes


def draw(
    runs: Sequence[RunRecords],
    names: Sequence[str],
    chart: Chart,
    ink: str = INK,
    grid: str = GRID,
    size: tuple[float, float] = (4.6, 2.9),
) -> Figure:
    """A matplotlib Figure with a curve for each run and field; x: tokens trained."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    lowest = math.inf
    highest = 0.0
    handles: list[Line2D] = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        for j, field in enumerate(chart.fields):
            if field not in run.curves:
                continue
            # Colours tell the runs apart, or the fields of a single run.
            number = i if len(runs) > 1 else j
            colour = COLOURS[number % len(COLOURS)]
            words = [name] if len(runs) > 1 else []
            if len(chart.fields) > 1:
                words.append(LABELS.get(field, field.split("/")[-1]))
            _, values = run.curves[field]
            lowest = min(lowest, float(values.min()))
            highest = max(highest, float(values.max()))
            handles += _draw_curve(axes, run, field, colour, " ".join(words))
    _set_axes(axes, chart.logarithmic, lowest, highest, ink, grid)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    if len(handles) > 1:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, int(11 * size[0] // (longest + 4)))
        legend = figure.legend(
            handles=handles, fontsize=10, labelcolor=ink, loc="outside upper left", ncols=columns, frameon=False
        )
        # A name with two $ is no formula.
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


LABELS = {"loss": "training", "val_loss": "validation"}
NOISY = ("loss", "grad_norm", "tokens_per_second")


def _draw_curve(axes: Axes, run: RunRecords, field: str, colour: str, label: str) -> list[Line2D]:
    """One curve; one with much noise is drawn smooth over a pale one of all its values."""
    x, y = run.curves[field]
    style: dict[str, Any] = {}
    if field == "val_loss":
        style = {"linestyle": "--", "marker": "o", "markersize": 3}
    if len(x) == 1:
        style["marker"] = "o"
    if field in NOISY and len(x) > 100:
        axes.plot(*thin(x, y), color=colour, alpha=0.3, linewidth=0.8)
        x, y = smooth(x, y)
    return axes.plot(*thin(x, y), color=colour, linewidth=1.6, label=label, **style)


def _set_axes(axes: Axes, logarithmic: bool, lowest: float, highest: float, ink: str, grid: str) -> None:
    """Scales, marks and colours of a chart whose values lie between lowest and highest."""
    if logarithmic and lowest > 0 and highest / lowest > 3:
        axes.set_yscale("log")
        # Hardly a power of ten to mark.
        if highest / lowest < 30:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if highest >= 1000 else FuncFormatter(_four_digits))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("tokens trained", color=ink, fontsize=10)
    axes.tick_params(colors=ink, labelsize=10, length=0)
    axes.grid(color=grid, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _four_digits(value: float, _: int | None) -> str:
    return f"{value:.4g}"


def svg(figure: Figure, salt: str) -> Markup:
    """A figure as inline SVG in the page's own colours. salt: keeps the names within it apart from other figures'."""
    drawing = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    text = drawing.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace(GRID, "var(--grid)")
    # matplotlib has escaped what names and labels hold.
    return Markup(text)


# ------------------------------------------------------------------------------------------------ page


# A line of a table: (label, text of each run, whether the runs differ).
Line = tuple[str, list[str], bool]


def html_page(runs: Sequence[RunRecords], names: Sequence[str]) -> str:
    """The page as text, from report.html."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, finalize=shown)
    of_each_run = []
    for run, name in zip(runs, names, strict=True):
        of_each_run.append((name, summary(run), samples(run), go_on(run)))
    figures = []
    for label, field, write in FIGURES:
        figures += table_line(label, [run.last(field) for run in runs], write)
    return environment.get_template("report.html").render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        runs=of_each_run,
        names=names,
        figures=figures,
        charts=charts(runs, names),
        settings=side_by_side([run.settings for run in runs]),
        machine=side_by_side([machine(run) for run in runs]),
    )


def shown(value: object) -> object:
    """What the template writes: text that a browser shows and does not obey; drawings are markup already."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def charts(runs: Sequence[RunRecords], names: Sequence[str]) -> list[tuple[str, Markup]]:
    """[(caption, SVG)] of what the runs' jobs have asked for, as far as there is anything to draw."""
    drawn = []
    for number, chart in enumerate(charts_of(runs)):
        curves = [run.curves[field] for run in runs for field in chart.fields if field in run.curves]
        is_zero = not any(values.any() for _, values in curves)
        if curves and not (chart.unless_zero and is_zero):
            drawn.append((chart.caption, svg(draw(runs, names, chart), f"chart{number}")))
    return drawn


def charts_of(runs: Sequence[RunRecords]) -> list[Chart]:
    """The charts of all runs, each once, with the fields in place of "name/*"."""
    found: dict[str, Chart] = {}
    for run in runs:
        start = run.starts[-1] if run.starts else {}
        for chart in recorded_charts(start.get("charts")):
            fields: list[str] = []
            for field in chart.fields:
                if not field.endswith("/*"):
                    fields.append(field)
                elif len(runs) == 1:
                    fields += [name for name in run.curves if name.startswith(field.removesuffix("*"))]
            found.setdefault(chart.caption, chart._replace(fields=tuple(fields)))
    return list(found.values())


def table_line(label: str, values: Sequence[Any], write: Callable[[Any], str]) -> list[Line]:
    """The line of a table in a list; none where no run has a value. write: how a value is shown."""
    if all(value is None for value in values):
        return []
    texts = ["–" if value is None else write(value) for value in values]
    differs = any(value != values[0] for value in values)
    return [(label, texts, differs)]


def side_by_side(dicts: Sequence[dict[str, Any]]) -> list[Line]:
    """A line for each name in any of the dicts, in order of appearance."""
    names: dict[str, None] = {}
    for of_run in dicts:
        names.update(dict.fromkeys(of_run))
    lines = []
    for name in names:
        values = [str(of_run[name]) if name in of_run else None for of_run in dicts]
        lines += table_line(name, values, str)
    return lines


def samples(run: RunRecords) -> list[tuple[int, str, str]]:
    """[(update, prompt, continuation)], latest first: of the last evaluation and of EARLIER before it, evenly chosen."""
    updates = sorted({sample["update"] for sample in run.samples})
    places = np.linspace(0, len(updates) - 1, min(len(updates), EARLIER + 1)).astype(int)
    chosen = {updates[i] for i in places}
    found = []
    # Stable: the samples of an evaluation stay in their order.
    for sample in sorted(run.samples, key=lambda sample: -int(sample["update"])):
        if sample["update"] in chosen:
            continuation = sample["text"].removeprefix(sample["prompt"])
            found.append((sample["update"], sample["prompt"], continuation))
    return found


def machine(run: RunRecords) -> dict[str, Any]:
    """The machine and the versions of a run's last start."""
    if not run.starts:
        return {}
    return {**run.starts[-1]["machine"], **run.starts[-1]["versions"]}


def summary(run: RunRecords) -> str:
    """A line on a run: its model, its data, its start."""
    if not run.starts:
        return f"from {run.path.name}"
    started = run.starts[0]["started"]
    model = run.starts[-1]["model"]
    data = run.starts[-1]["data"]
    if not all(map(is_number, (model.get("parameters"), data.get("documents"), data.get("fill")))):
        return f"from {run.path.name}; started {started}"
    resumed = f", resumed {counted(len(run.starts) - 1, 'time')}" if len(run.starts) > 1 else ""
    return (
        f"{model['parameters'] / 1e6:,.2f} M parameters, {counted(data['documents'], 'document')} in rows that are {data['fill']:.1%} "
        f"full; started {started}{resumed}"
    )


def go_on(run: RunRecords) -> list[tuple[str, str]]:
    """Commands for what comes next: [(what for, command)]. They work in the folder in which the run was started."""
    if not run.starts:
        return []
    start = run.starts[-1]
    started = start["command"]
    stem = run.path.with_name(run.name)
    # The path of the repository, where the run was started elsewhere.
    found = re.search(r"(\S*?)trainer/train_\w+\.py", started)
    places = {"{top}": found[1] if found else "", "{stem}": str(stem), "{folder}": str(stem.parent)}
    commands = []
    if started:
        command = re.sub(r" --from_resume(=\S+|( (?!-)\S+))?(?= |$)", "", started)
        commands.append(("train on, after a stop or with more epochs", f"{command} --from_resume 1"))
    for purpose, command in recorded_commands(start.get("next_commands")):
        for name, value in places.items():
            command = command.replace(name, value)
        commands.append((purpose, command))
    return commands

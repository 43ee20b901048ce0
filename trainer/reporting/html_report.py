"""One self-contained HTML page about one or several runs, made from their metrics files: curves, samples, settings."""

import io
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import matplotlib
import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator

from common.errors import UserError
from common.files import atomic_file
from common.wording import counted, printable
from trainer.reporting.charts import LOSS, METRICS, charts_of_runs, fields_of
from trainer.reporting.curves import LABELS, is_noisy, smooth, thin
from trainer.reporting.next_commands import commands_of_record
from trainer.reporting.quality import Bar, quality, remarks
from trainer.reporting.records import FIGURES, RunRecords, Write, is_number, trains_answers

# Evaluations with samples.
EARLIER = 20
# A metrics file may have been written by anybody: no longer command is read, and no longer path is one of Linux.
LONGEST_COMMAND = 100_000
LONGEST_PATH = 4096
COLOURS = ("#2f6fde", "#d9542b", "#2a9d63", "#8a4fd3", "#b8860b", "#c23b80", "#5a7d8c", "#7a5c3e")
# Stand for the page's own colours in a drawing.
INK, GRID = "#010203", "#040506"

Value = TypeVar("Value")


class Section(NamedTuple):
    """What the page says of one run by itself. commands: [(what for, command)]."""

    name: str
    summary: str
    samples: list[tuple[int, str, str]]
    commands: list[tuple[str, str]]
    quality: list[Bar]
    remarks: list[str]
    trained: list[tuple[str, str, str, str]]


# Of the page's tables: label, the text of each run, whether they differ.
Row = tuple[str, list[str], bool]


def write_report(metrics_paths: Iterable[str | Path], page: str | Path, png: str | Path | None = None) -> None:
    """Write the HTML page (and the loss curves as a picture) about the runs of `metrics_paths`.

    Errors: UserError for a file without metrics.
    """
    runs = [RunRecords(path) for path in metrics_paths]
    names = distinct_names(runs)
    write_page(html_page(runs, names), page)
    if png:
        picture = loss_picture(runs, names)
        with atomic_file(png) as file:
            file.write(picture)


def write_page(content: str, path: str | Path) -> None:
    """Errors: OSError."""
    with atomic_file(path) as file:
        # A file name that is not UTF-8 holds lone surrogates, which are shown as \udcff.
        file.write(content.encode(errors="backslashreplace"))


def write_page_of_flag(flag: str, template: str, path: str, folder: Path, **content: object) -> None:
    """Write the page of a script. template: in `folder`, where the script lies. Errors: UserError that begins with the flag."""
    page = page_environment(folder).get_template(template).render(content)
    try:
        write_page(page, path)
    except OSError as error:
        raise UserError(f"{flag}: {path} cannot be written ({error.strerror})") from error


def loss_picture(runs: Sequence[RunRecords], names: Sequence[str]) -> bytes:
    """The loss curves of the runs over the tokens trained, as a PNG."""
    figure = draw(runs, names, LOSS.fields, LOSS.logarithmic, ink="#222222", grid="#dddddd", size=(8, 4.5))
    # A title of the figure would be drawn over the legend of several runs.
    figure.axes[0].set_title(LOSS.title, loc="left", fontsize=12)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, facecolor="white", metadata={"Software": None})
    return picture.getvalue()


def distinct_names(runs: Sequence[RunRecords]) -> list[str]:
    """A name for each run: its file's, with as many folders before it as tell it from the others."""
    paths = [run.path.resolve().with_name(run.name) for run in runs]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return [drawable(name) for name in names]


def drawable(text: str) -> str:
    """The text as matplotlib can draw it: without the lone surrogates that a name has which is not UTF-8."""
    return printable(text).encode(errors="backslashreplace").decode()


# ------------------------------------------------------------------------------------------------ curves


def draw(
    runs: Sequence[RunRecords],
    names: Sequence[str],
    fields: Sequence[str],
    logarithmic: bool,
    ink: str = INK,
    grid: str = GRID,
    size: tuple[float, float] = (4.6, 2.9),
) -> Figure:
    """A matplotlib Figure with a curve for each run and field; x: tokens trained. size: in inches."""
    # Not by pyplot, which keeps every figure until it is closed and looks for a screen.
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    lowest = math.inf
    highest = 0.0
    handles: list[Line2D] = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        for j, field in enumerate(fields):
            if field not in run.curves:
                continue
            x, y = run.curves[field]
            # Of all curves, before any is thinned: they decide the scale.
            lowest = min(lowest, y.min())
            highest = max(highest, y.max())
            # A colour is a run's where there are several, and a field's otherwise.
            colour = COLOURS[(i if len(runs) > 1 else j) % len(COLOURS)]
            label_parts = []
            if len(runs) > 1:
                label_parts.append(name)
            if len(fields) > 1:
                label_parts.append(LABELS.get(field, drawable(field.split("/")[-1])))
            handles += draw_curve(axes, field, x, y, colour, " ".join(label_parts))
    scale(axes, lowest, highest, logarithmic)
    dress(figure, axes, ink, grid)
    if len(handles) > 1:
        add_legend(figure, handles, ink, size[0])
    return figure


def draw_curve(axes: Axes, field: str, x: np.ndarray, y: np.ndarray, colour: str, label: str) -> list[Line2D]:
    """Add the curve of a field; returns what a legend points to."""
    style: dict[str, Any] = {}
    # Evaluations are few points, far from each other.
    if field == "val_loss":
        style = {"linestyle": "--", "marker": "o", "markersize": 3}
    if field == "expected_loss":
        style = {"linestyle": ":"}
    # A line through one point would not show.
    if len(x) == 1:
        style["marker"] = "o"
    if is_noisy(field, x):
        axes.plot(*thin(x, y), color=colour, alpha=0.3, linewidth=0.8)
        x, y = smooth(x, y)
    return axes.plot(*thin(x, y), color=colour, linewidth=1.6, label=label, **style)


def scale(axes: Axes, lowest: float, highest: float, logarithmic: bool) -> None:
    """Choose the scale of the values and how they are written; the curves are drawn already."""
    if logarithmic and lowest > 0 and highest / lowest > 3:
        axes.set_yscale("log")
        # Hardly a power of ten to mark.
        if highest / lowest < 30:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if highest >= 1000 else four_digits)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6))


def four_digits(value: float, position: float) -> str:
    """How a tick of small values is written; matplotlib asks with its position too."""
    return f"{value:.4g}"


def dress(figure: Figure, axes: Axes, ink: str, grid: str) -> None:
    """Colours, grid and label; the page's own background shows through."""
    axes.set_xlabel("tokens trained", color=ink, fontsize=10)
    axes.tick_params(colors=ink, labelsize=10, length=0)
    axes.grid(color=grid, linewidth=0.6)
    axes.spines[:].set_visible(False)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)


def add_legend(figure: Figure, handles: Sequence[Line2D], ink: str, width: float) -> None:
    """Above the axes, in as many columns as a width in inches holds: about 11 characters to the inch."""
    longest = max(len(str(handle.get_label())) + 4 for handle in handles)
    legend = figure.legend(
        handles=handles,
        fontsize=10,
        labelcolor=ink,
        loc="outside upper left",
        ncols=max(1, int(11 * width // longest)),
        frameon=False,
    )
    # A name with two $ is no formula.
    for text in legend.get_texts():
        text.set_parse_math(False)


def svg(figure: Figure, salt: str) -> Markup:
    """A figure as inline SVG in the page's own colours. salt: makes its ids its own among the drawings of the page."""
    drawing = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    text = drawing.getvalue()
    # A browser takes no XML declaration within a page, and the page alone knows whether it is dark or light.
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace(GRID, "var(--grid)")
    return Markup(text)


# ------------------------------------------------------------------------------------------------ page


def html_page(runs: Sequence[RunRecords], names: Sequence[str]) -> str:
    """The page as text, from report.html."""
    environment = page_environment()
    sections = []
    for name, run in zip(names, runs, strict=True):
        sections.append(
            Section(
                name=name,
                summary=summary(run),
                samples=samples(run),
                commands=go_on(run),
                quality=quality(run),
                remarks=remarks(run),
                trained=trained(run),
            )
        )
    return environment.get_template("report.html").render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        runs=sections,
        names=names,
        differ=read_different_data(runs),
        figures=table(figures_of(runs)),
        charts=draw_charts(runs, names),
        settings=table(gathered([run.settings for run in runs])),
        machine=table(gathered([machine(run) for run in runs])),
    )


def read_different_data(runs: Sequence[RunRecords]) -> bool:
    """Whether the runs say that they trained different texts, or the same ones by different tokenizers."""
    fingerprints = {run.starts[-1]["data"].get("fingerprint") for run in runs if run.starts}
    return len(fingerprints - {None}) > 1


def page_environment(*folders: Path) -> Environment:
    """What makes pages of templates in this folder, and in those given."""
    # Texts are escaped: a sample that holds markup is shown as it was written.
    loader = FileSystemLoader([Path(__file__).parent, *folders])
    return Environment(loader=loader, autoescape=True, trim_blocks=True, finalize=for_browser)


def for_browser(value: object) -> object:
    """What the template writes: text that a browser shows and does not obey; drawings are markup already."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def draw_charts(runs: Sequence[RunRecords], names: Sequence[str]) -> list[tuple[str, Markup]]:
    """[(caption, SVG)] of the charts that the runs' jobs have declared and that there is something to draw of."""
    drawn = []
    # The number is that among all charts, drawn or not: a chart's ids are then the same on every page of a job.
    for number, chart in enumerate(charts_of_runs([run.charts for run in runs])):
        if chart.of_one_run and len(runs) > 1:
            continue
        fields = fields_of(chart, runs[0].curves)
        values = [run.curves[field][1] for run in runs for field in fields if field in run.curves]
        is_zero = not any(of_run.any() for of_run in values)
        if not values or (chart.unless_zero and is_zero):
            continue
        figure = draw(runs, names, fields, chart.logarithmic)
        drawn.append((chart.title, svg(figure, f"chart{number}")))
    return drawn


def figures_of(runs: Sequence[RunRecords]) -> list[tuple[str, list[float | None], Write]]:
    """(label, value of each run, how a value is written) of the last figures that the runs have logged."""
    figures: list[tuple[str, list[float | None], Write]] = []
    for label, field, write in FIGURES:
        figures.append((label, [run.last(field) for run in runs], write))
    # Runs of several tasks may have a metric in common. A dict without values is a set that keeps its order.
    metrics: dict[str, None] = {}
    for run in runs:
        for chart in run.charts:
            if chart.title == METRICS:
                metrics |= dict.fromkeys(chart.fields)
    for name in metrics:
        figures.append((LABELS.get(name, name), [run.last(name) for run in runs], "{:.4f}".format))
    return figures


def table(rows: Iterable[tuple[str, Sequence[Value | None], Callable[[Value], str]]]) -> list[Row]:
    """The rows (label, value of each run, how a value is written) that any run has a value of, as texts."""
    texts: list[Row] = []
    for label, values, write in rows:
        if all(value is None for value in values):
            continue
        written = ["–" if value is None else write(value) for value in values]
        differ = any(value != values[0] for value in values)
        texts.append((label, written, differ))
    return texts


def samples(run: RunRecords) -> list[tuple[int, str, str]]:
    """[(update, prompt, continuation)], latest first: of the last evaluation and of EARLIER before it, evenly chosen."""
    updates = sorted({sample["update"] for sample in run.samples})
    # The last one is always among them, since the ends of the range are.
    places = np.linspace(0, len(updates) - 1, min(len(updates), EARLIER + 1)).astype(int)
    chosen = {updates[place] for place in places}
    found = []
    for sample in sorted(run.samples, key=update_of_sample, reverse=True):
        if sample["update"] in chosen:
            found.append((sample["update"], sample["prompt"], sample["text"].removeprefix(sample["prompt"])))
    return found


def update_of_sample(sample: Mapping[str, Any]) -> int:
    return sample["update"]


def gathered(dicts: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str | None], Callable[[str], str]]]:
    """Rows for `table`: each name, in order of appearance, with its value in each dict; None where one lacks it."""
    # A dict without values is a set that keeps its order.
    names: dict[str, None] = {}
    for of_run in dicts:
        names |= dict.fromkeys(of_run)
    rows: list[tuple[str, list[str | None], Callable[[str], str]]] = []
    for name in names:
        values = [str(of_run[name]) if name in of_run else None for of_run in dicts]
        rows.append((name, values, str))
    return rows


def machine(run: RunRecords) -> dict[str, Any]:
    """What the last start notes of machine and versions."""
    if not run.starts:
        return {}
    last = run.starts[-1]
    return {**last["machine"], **last["versions"]}


def summary(run: RunRecords) -> str:
    """The line below the title: model, data and starts."""
    if not run.starts:
        return f"from {run.path.name}"
    first, last = run.starts[0], run.starts[-1]
    model = last["model"]
    data = last["data"]
    sizes = (model.get("parameters"), data.get("documents"), data.get("fill"))
    # The line may have been written by anything.
    if not all(map(is_number, sizes)):
        return f"from {run.path.name}; started {first['started']}"
    resumed = f", resumed {counted(len(run.starts) - 1, 'time')}" if len(run.starts) > 1 else ""
    documents = counted(data["documents"], "conversation" if trains_answers(run) else "document")
    return (
        f"{model['parameters'] / 1e6:,.2f} M parameters, {documents} in rows that are {data['fill']:.1%} "
        f"full; started {first['started']}{resumed}"
    )


def trained(run: RunRecords) -> list[tuple[str, str, str, str]]:
    """[(source, tokens, share, passes)] of the data that the run has trained, as texts."""
    rows = []
    for source in run.trained:
        rows.append((source["source"], f"{source['tokens']:,}", f"{source['share']:.1%}", f"{source['passes']:.2f}"))
    return rows


def repository_of(started: str) -> str:
    """The path of the repository, as a prefix, of the command of a run; empty where it was started in there."""
    try:
        words = shlex.split(started)
    except ValueError:
        # A quotation without its end: no run wrote that.
        return ""
    for word in words:
        found = re.fullmatch(r"(.*)trainer/train_\w+\.py", word, re.DOTALL)
        if found:
            return found[1] if len(word) <= LONGEST_PATH else ""
    return ""


def go_on(run: RunRecords) -> list[tuple[str, str]]:
    """Commands for what comes next: [(what for, command)]. They work in the folder in which the run was started."""
    if not run.starts:
        return []
    start = run.starts[-1]
    started = start["command"] if len(start["command"]) <= LONGEST_COMMAND else ""
    stem = run.path.with_name(run.name)
    places = {"top": repository_of(started), "stem": str(stem), "folder": str(stem.parent)}
    commands = []
    if started:
        # The flag may stand there with a value, with `=`, or alone.
        command = re.sub(r" --from_resume(=\S+|( (?!-)\S+))?(?= |$)", "", started)
        commands.append(("train on, after a stop or for longer", f"{command} --from_resume 1"))
    for next_command in commands_of_record(start.get("next_commands")):
        commands.append((next_command.purpose, next_command.filled(places)))
    return commands

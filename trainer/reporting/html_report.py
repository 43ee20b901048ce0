"""One self-contained HTML page about one or several runs, made from their metrics files: curves, samples, settings."""

import io
import math
import re
import shlex
from pathlib import Path

import matplotlib
import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator

from common.files import atomic_file
from common.wording import counted, printable
from trainer.reporting.records import FIGURES, RunRecords, is_number

# Evaluations with samples.
EARLIER = 20
# Of a thinned curve: two points each.
BUCKETS = 300
COLOURS = ("#2f6fde", "#d9542b", "#2a9d63", "#8a4fd3", "#b8860b", "#c23b80", "#5a7d8c", "#7a5c3e")
# Stand for the page's own colours in a drawing.
INK, GRID = "#010203", "#040506"
# Title, fields, logarithmic scale, draw only where it is not 0.
CHARTS = (
    ("Loss", ("loss", "val_loss"), True, False),
    ("Losses of generator (nats per token) and discriminator", ("mlm_loss", "disc_loss"), True, False),
    ("Accuracy of generator and discriminator", ("gen_acc", "disc_acc"), False, False),
    ("Discriminator: precision, recall, AUC", ("disc_precision", "disc_recall", "disc_auc"), False, False),
    ("Validation: bits per byte", ("bits_per_byte",), False, False),
    ("Learning rate", ("lr",), False, False),
    ("Gradient norm, before clipping", ("grad_norm",), True, False),
    ("Tokens per second", ("tokens_per_second",), False, False),
    ("Share of the best matrix-product rate", ("flops_utilisation",), False, False),
    ("Auxiliary loss", ("aux_loss",), False, True),
    ("Expert load: largest share in a layer", ("expert_load_max",), False, False),
    ("Updates not applied", ("skipped_updates",), False, True),
)


def write_report(metrics_paths, page, png=None) -> None:
    """Write the HTML page (and the loss curves as a picture) about the runs of `metrics_paths`.

    Errors: UserError for a file without metrics.
    """
    runs = [RunRecords(path) for path in metrics_paths]
    names = distinct_names(runs)
    with atomic_file(page) as file:
        # a file name that is not UTF-8 holds lone surrogates, which are shown as \\udcff
        file.write(html_page(runs, names).encode(errors="backslashreplace"))
    if png:
        figure = draw(runs, names, *CHARTS[0][1:3], ink="#222222", grid="#dddddd", size=(8, 4.5))
        # A title of the figure would be drawn over the legend of several runs.
        figure.axes[0].set_title(CHARTS[0][0], loc="left", fontsize=12)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120, facecolor="white", metadata={"Software": None})
        with atomic_file(png) as file:
            file.write(picture.getvalue())


def distinct_names(runs):
    """A name for each run: its file's, with as many folders before it as tell it from the others."""
    paths = [run.path.resolve().with_name(run.name) for run in runs]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    # matplotlib draws no lone surrogates, of which a name that is not UTF-8 has some
    return [printable(name).encode(errors="backslashreplace").decode() for name in names]


# ------------------------------------------------------------------------------------------------ curves


def thin(x, y, buckets=BUCKETS):
    """At most 2 * buckets + 2 points of a curve: the smallest and largest of each bucket, the first and the last."""
    if len(x) <= 2 * buckets + 2:
        return x, y
    edges = np.linspace(0, len(x), buckets + 1).astype(int)
    kept = {0, len(x) - 1}
    for lo, hi in zip(edges[:-1], edges[1:], strict=True):
        kept |= {lo + int(np.argmin(y[lo:hi])), lo + int(np.argmax(y[lo:hi]))}
    kept = np.array(sorted(kept))
    return x[kept], y[kept]


def smooth(x, y, buckets=BUCKETS // 3):
    """Means over buckets of equal numbers of points."""
    edges = np.linspace(0, len(x), min(buckets, len(x)) + 1).astype(int)
    sizes = np.diff(edges)
    return np.add.reduceat(x, edges[:-1]) / sizes, np.add.reduceat(y, edges[:-1]) / sizes


def draw(runs, names, fields, logarithmic, ink=INK, grid=GRID, size=(4.6, 2.9)):
    """A matplotlib Figure with a curve for each run and field; x: tokens trained."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    lowest, highest, handles = math.inf, 0.0, []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        for j, field in enumerate(fields):
            colour = COLOURS[(i if len(runs) > 1 else j) % len(COLOURS)]
            if field not in run.curves:
                continue
            x, y = run.curves[field]
            lowest, highest = min(lowest, y.min()), max(highest, y.max())
            label = " ".join([name] * (len(runs) > 1) + [LABELS.get(field, field.split("/")[-1])] * (len(fields) > 1))
            style = {"linestyle": "--", "marker": "o", "markersize": 3} if field == "val_loss" else {}
            if len(x) == 1:
                style["marker"] = "o"
            noisy = field in ("loss", "grad_norm", "tokens_per_second") and len(x) > 100
            if noisy:
                axes.plot(*thin(x, y), color=colour, alpha=0.3, linewidth=0.8)
                x, y = smooth(x, y)
            handles += axes.plot(*thin(x, y), color=colour, linewidth=1.6, label=label, **style)
    if logarithmic and lowest > 0 and highest / lowest > 3:
        axes.set_yscale("log")
        # Hardly a power of ten to mark.
        if highest / lowest < 30:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(sep="") if highest >= 1000 else (lambda value, _: f"{value:.4g}"))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("tokens trained", color=ink, fontsize=10)
    axes.tick_params(colors=ink, labelsize=10, length=0)
    axes.grid(color=grid, linewidth=0.6)
    axes.spines[:].set_visible(False)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    if len(handles) > 1:
        columns = max(1, int(11 * size[0] // max(len(handle.get_label()) + 4 for handle in handles)))
        place = {"loc": "outside upper left", "ncols": columns, "frameon": False}
        legend = figure.legend(handles=handles, fontsize=10, labelcolor=ink, **place)
        # A name with two $ is no formula.
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


LABELS = {"loss": "training", "val_loss": "validation"}


def svg(figure, salt):
    """A figure as inline SVG in the page's own colours."""
    drawing = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    text = drawing.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace(GRID, "var(--grid)")
    return Markup(text)


# ------------------------------------------------------------------------------------------------ page


def html_page(runs, names):
    """The page as text, from report.html."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, finalize=shown)
    return environment.get_template("report.html").render(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
        runs=[(name, summary(run), samples(run), go_on(run)) for name, run in zip(names, runs, strict=True)],
        names=names,
        figures=table((label, [run.last(field) for run in runs], write) for label, field, write in FIGURES),
        charts=charts(runs, names),
        settings=table((flag, values, str) for flag, values in gathered(run.settings for run in runs)),
        machine=table((what, values, str) for what, values in gathered(map(machine, runs))),
    )


def shown(value: object) -> object:
    """What the template writes: text that a browser shows and does not obey; drawings are markup already."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def charts(runs, names):
    """[(caption, SVG)]"""
    specs = [*CHARTS]
    experts = [field for field in runs[0].curves if field.startswith("expert_load/")]
    if len(runs) == 1 and experts:
        specs.append(("Expert load: mean over the layers", experts, False, False))
    drawn = []
    for number, (caption, fields, logarithmic, unless_zero) in enumerate(specs):
        values = [run.curves[field][1] for run in runs for field in fields if field in run.curves]
        if values and not (unless_zero and not any(of_run.any() for of_run in values)):
            drawn.append((caption, svg(draw(runs, names, fields, logarithmic), f"chart{number}")))
    return drawn


def table(rows):
    """[(label, texts, whether they differ)] of the rows (label, values, how they are written) that any run has."""
    return [
        (label, ["–" if value is None else write(value) for value in values], any(v != values[0] for v in values))
        for label, values, write in rows
        if any(value is not None for value in values)
    ]


def samples(run):
    """[(update, prompt, continuation)], latest first: of the last evaluation and of EARLIER before it, evenly chosen."""
    updates = sorted({sample["update"] for sample in run.samples})
    chosen = {updates[i] for i in np.linspace(0, len(updates) - 1, min(len(updates), EARLIER + 1)).astype(int)}
    return [
        (sample["update"], sample["prompt"], sample["text"].removeprefix(sample["prompt"]))
        for sample in sorted(run.samples, key=lambda sample: -sample["update"])
        if sample["update"] in chosen
    ]


def gathered(dicts):
    """[(name, its value in each dict, as text)], in order of appearance; None where one does not have it."""
    dicts = list(dicts)
    names = dict.fromkeys(name for of_run in dicts for name in of_run)
    return [(name, [str(of_run[name]) if name in of_run else None for of_run in dicts]) for name in names]


def machine(run):
    return {**run.starts[-1]["machine"], **run.starts[-1]["versions"]} if run.starts else {}


def summary(run):
    if not run.starts:
        return f"from {run.path.name}"
    first, last = run.starts[0], run.starts[-1]
    model = last["model"]
    data = last["data"]
    if not all(map(is_number, (model.get("parameters"), data.get("documents"), data.get("fill")))):
        return f"from {run.path.name}; started {first['started']}"
    resumed = f", resumed {counted(len(run.starts) - 1, 'time')}" if len(run.starts) > 1 else ""
    return (
        f"{model['parameters'] / 1e6:,.2f} M parameters, {counted(data['documents'], 'document')} in rows that are {data['fill']:.1%} "
        f"full; started {first['started']}{resumed}"
    )


def go_on(run: RunRecords) -> list[tuple[str, str]]:
    """Commands for what comes next: [(what for, command)]. They work in the folder in which the run was started."""
    stem = run.path.with_name(run.name)
    started = run.starts[-1]["command"] if run.starts else ""
    # The path of the repository, where the run was started elsewhere
    found = re.search(r"(\S*?)trainer/train_\w+\.py", started)
    top = found[1] if found else ""
    if "train_electra.py" in started:
        network = stem.parent / "discriminator"
        fine_tune = f"python {top}trainer/train_glue.py --task all --data_dir glue_data --model_path {network}"
        commands = [("fine-tune the discriminator", fine_tune)]
    elif "train_glue.py" in started:
        commands = []
    else:
        tokenizer = ""
        if "--tokenizer_path" in started and "tokenizer_path" in run.settings:
            tokenizer = f" --tokenizer_path {shlex.quote(str(run.settings['tokenizer_path']))}"
        commands = [
            ("continue texts, chat", f"python {top}scripts/generate.py --weight {stem}.pth{tokenizer}"),
            (
                "measure",
                f"python {top}scripts/evaluate.py perplexity --weight {stem}.pth{tokenizer} --data_path my.txt",
            ),
            (
                "export to Hugging Face",
                f"python {top}scripts/export_hf.py --weight {stem}.pth{tokenizer} --out_dir {stem}_hf",
            ),
        ]
    if started:
        command = re.sub(r" --from_resume(=\S+|( (?!-)\S+))?(?= |$)", "", started)
        commands.insert(0, ("train on, after a stop or with more epochs", f"{command} --from_resume 1"))
    return commands

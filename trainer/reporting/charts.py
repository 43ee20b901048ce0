"""What a report draws and recommends. Each job says it of itself; a run writes it into its metrics file."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# Of a file that anybody may have written: more would be no page for a reader.
MOST = 100


class Chart(NamedTuple):
    """One chart: a curve for each run and field, over the tokens trained.

    fields: names in the metrics file. "name/*" stands for all of name/0, name/1 ...; a page about several runs leaves
    such a chart out. unless_zero: drawn only where some value is not 0.
    """

    caption: str
    fields: tuple[str, ...]
    logarithmic: bool = False
    unless_zero: bool = False


LOSS = Chart("Loss", ("loss", "val_loss"), logarithmic=True)
OF_EVERY_RUN = (
    Chart("Learning rate", ("lr",)),
    Chart("Gradient norm, before clipping", ("grad_norm",), logarithmic=True),
    Chart("Tokens per second", ("tokens_per_second",)),
    Chart("Share of the best matrix-product rate", ("flops_utilisation",)),
)
SKIPPED = Chart("Updates not applied", ("skipped_updates",), unless_zero=True)

# Of a job that says nothing else, and of a metrics file that an earlier version wrote.
DEFAULT_CHARTS = (LOSS, *OF_EVERY_RUN, SKIPPED)


class NextCommand(NamedTuple):
    """What a user may want to do with a finished run, and the command for it.

    In the command {top} stands for the folder of the repository as a prefix, empty where it is the current one, {stem}
    for the path of the run's files without their endings, and {folder} for the folder that they are in.
    """

    purpose: str
    command: str


def charts_to_record(charts: Iterable[Chart]) -> list[list[Any]]:
    """Charts as JSON can hold them."""
    return [[chart.caption, list(chart.fields), chart.logarithmic, chart.unless_zero] for chart in charts]


def recorded_charts(found: object) -> Sequence[Chart]:
    """The charts of a start's record; DEFAULT_CHARTS where it has none, or something else in their place."""
    if not isinstance(found, list) or len(found) > MOST:
        return DEFAULT_CHARTS
    charts = []
    for entry in found:
        if not (isinstance(entry, list) and len(entry) == len(Chart._fields)):
            return DEFAULT_CHARTS
        caption, fields, logarithmic, unless_zero = entry
        if not isinstance(caption, str) or not _are_texts(fields):
            return DEFAULT_CHARTS
        charts.append(Chart(caption, tuple(fields), logarithmic is True, unless_zero is True))
    return charts


def recorded_commands(found: object) -> list[NextCommand]:
    """The commands of a start's record; none where something else is in their place."""
    if not isinstance(found, list) or len(found) > MOST:
        return []
    commands = []
    for entry in found:
        if _are_texts(entry) and len(entry) == len(NextCommand._fields):
            commands.append(NextCommand(*entry))
    return commands


def _are_texts(found: Any) -> bool:
    return isinstance(found, list) and len(found) <= MOST and all(isinstance(text, str) for text in found)

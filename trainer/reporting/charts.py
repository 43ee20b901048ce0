"""What a report draws of a run. Each job declares its charts; the start record of its metrics file carries them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

# Behind the name of a list in the metrics: each of its numbers, as a curve of its own.
EACH = "/*"
# A metrics file may have been written by anybody: more than this is not drawn.
MOST_CHARTS = 100
MOST_CURVES = 256


@dataclass(frozen=True)
class Chart:
    """Some fields of the metrics over the tokens trained. A field `name/*` is each number of the list `name`.

    unless_zero: drawn only where some value is not 0.
    """

    title: str
    fields: tuple[str, ...]
    logarithmic: bool = False
    unless_zero: bool = False

    @property
    def of_one_run(self) -> bool:
        """Whether it shows a list: with several runs nobody could tell the curves apart."""
        return any(field.endswith(EACH) for field in self.fields)

    def as_record(self) -> dict[str, object]:
        """As it stands in the start record of a metrics file."""
        return {**asdict(self), "fields": list(self.fields)}


# The Trainer itself logs what these show, whatever the job.
LOSS = Chart("Loss", ("loss", "val_loss", "expected_loss"), logarithmic=True)
SPEED = (
    Chart("Learning rate", ("lr",)),
    Chart("Gradient norm, before clipping", ("grad_norm",), logarithmic=True),
    Chart("Tokens per second", ("tokens_per_second",)),
    Chart("Share of the best matrix-product rate", ("flops_utilisation",)),
)
# Of a chart whose fields tell how good a model is at its task. The page's table has them too.
METRICS = "Metrics on the development data"
SKIPPED = Chart("Updates not applied", ("skipped_updates",), unless_zero=True)
# Of a job that declares none of its own.
COMMON = (LOSS, *SPEED, SKIPPED)


def charts_of_record(record: object) -> tuple[Chart, ...] | None:
    """The Charts of the entry `charts` of a start record; None where there is none, or one that no run wrote."""
    if not isinstance(record, list) or not record:
        return None
    # One entry that cannot be read makes all of them doubtful: then the page shows what it always has.
    charts = []
    for entry in record[:MOST_CHARTS]:
        chart = chart_of_record(entry)
        if chart is None:
            return None
        charts.append(chart)
    return tuple(charts)


def chart_of_record(entry: object) -> Chart | None:
    """What `Chart.as_record` wrote, as a Chart; None for anything else."""
    if not isinstance(entry, dict):
        return None
    title = entry.get("title")
    fields = entry.get("fields")
    logarithmic = entry.get("logarithmic")
    unless_zero = entry.get("unless_zero")
    if not isinstance(title, str) or not isinstance(fields, list):
        return None
    if not isinstance(logarithmic, bool) or not isinstance(unless_zero, bool):
        return None
    if not all(isinstance(field, str) for field in fields):
        return None
    return Chart(title, tuple(fields[:MOST_CURVES]), logarithmic, unless_zero)


def charts_of_runs(charts_of_each: Sequence[Sequence[Chart]]) -> list[Chart]:
    """The charts of several runs, each once: what a run adds comes behind the chart before it in that run's own order."""
    # Nearly always all runs are of one job, and the first one's charts are the result.
    merged: list[Chart] = []
    for charts in charts_of_each:
        place = 0
        for chart in charts:
            if chart in merged:
                place = merged.index(chart) + 1
            else:
                merged.insert(place, chart)
                place += 1
    return merged


def fields_of(chart: Chart, known: Iterable[str]) -> list[str]:
    """The fields of a chart, with the numbers of a list for its name. known: all fields of a run."""
    fields: list[str] = []
    for field in chart.fields:
        if field.endswith(EACH):
            of_list = field.removesuffix("*")
            fields += [name for name in known if name.startswith(of_list)]
        else:
            fields.append(field)
    return fields[:MOST_CURVES]

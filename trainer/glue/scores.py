"""What a model gives on GLUE: its outputs for a file, the metrics, their statistics over seeds, and the files of them."""

import json
import math
import statistics

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from common.files import atomic_file
from dataset.glue.glue_tasks import TASKS
from trainer.glue.model import forward, loss_sum
from trainer.machine.ranks import on_main
from trainer.reporting.reporter import finite


def correlation(measure):
    def score(labels, scores):
        # Undefined where one side is constant (or not finite).
        if np.ptp(labels) == 0 or not np.ptp(scores) > 0:
            return math.nan
        return measure(labels, scores).statistic

    return score


# (labels, classes or scores) -> number.
METRICS = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "matthews": matthews_corrcoef,
    "pearson": correlation(pearsonr),
    "spearman": correlation(spearmanr),
}


class Evaluation:
    """evaluation(update) -> ({metric: value} over the development files, with their first's val_loss; number of a stop
    signal that came meanwhile or 0). It is remembered: asked again for the same update, nothing is computed."""

    def __init__(self, engine, task, dev, batch_size, signals) -> None:
        self.engine, self.task, self.dev, self.batch_size, self.signals = engine, task, dev, batch_size, signals
        self._latest = (None, {})

    def __call__(self, update, anew=False):
        if self._latest[0] == update and not anew:
            return self._latest[1], 0
        found = {}
        for suffix, assembler in self.dev.items():
            logits, stop_signal = self.outputs(assembler)
            if stop_signal:
                return {}, stop_signal
            labels = assembler.features.labels
            loss = float(loss_sum(self.task, logits, torch.from_numpy(labels))) / len(labels)
            found |= {"val_loss": found.get("val_loss", loss)}
            found |= {name + suffix: value for name, value in scores(self.task, logits, labels).items()}
        self._latest = (update, found)
        return found, 0

    @torch.no_grad()
    def outputs(self, assembler):
        """(logits of all examples of an assembler, float32 [N, outputs] on the CPU; number of a stop signal or 0).

        The batches hold examples of like length and are the same on every world size. Batch i is computed by rank i mod
        world size; the sum over ranks adds zeros to it, so that all get the same.
        """
        model, ranks, n = self.engine.model, self.engine.ranks, self.task.outputs
        order = np.argsort(assembler.features.lengths, kind="stable")
        # A last row for stop requests: signal numbers, how many.
        logits = torch.zeros(len(order) + 1, max(n, 2))
        model.eval()
        for lo in range(ranks.rank * self.batch_size, len(order), ranks.world_size * self.batch_size):
            if self.signals.signum:
                logits[-1, :2] = torch.tensor([self.signals.signum, 1])
                break
            numbers = order[lo : lo + self.batch_size]
            with self.engine.autocast():
                logits[numbers, :n] = forward(model, assembler[numbers].to(self.engine.device)).cpu()
        model.train()
        if ranks.world_size > 1:
            logits = logits.to(self.engine.device)
            dist.all_reduce(logits)
            logits = logits.cpu()
        signums, stopping = logits[-1, :2].tolist()
        return logits[:-1, :n], int(signums / max(stopping, 1))


def answers(task, logits):
    """Class numbers, or scores from 0 to 5, of logits [N, outputs]: a numpy array."""
    return logits.argmax(-1).numpy() if task.labels else logits[:, 0].numpy()


def scores(task, logits, labels):
    """{metric: value} of logits [N, outputs] and the labels of an assembler's features."""
    found = answers(task, logits)
    return {name: float(METRICS[name](labels, found)) for name in task.metrics}


def write_predictions(path, task, logits) -> None:
    """A file as the leaderboard wants it: the words of two- and three-way entailment, numbers elsewhere."""
    found = answers(task, logits)
    words = [task.labels[i] for i in found] if task.labels else [f"{score:.3f}" for score in found.clip(0, 5)]
    path.parent.mkdir(exist_ok=True)
    with atomic_file(path) as file:
        file.write("".join(f"{i}\t{word}\n" for i, word in [("index", "prediction"), *enumerate(words)]).encode())


def summary(results):
    """{metric: mean, median and deviation (of a sample; None of one run)} over the {metric: value} of several runs."""
    found = {}
    for name in results[0]:
        # None: read from JSON.
        values = [math.nan if result[name] is None else result[name] for result in results]
        measures = statistics.fmean, statistics.median, statistics.stdev if len(values) > 1 else lambda _: None
        if any(map(math.isnan, values)):
            measures = (lambda _: math.nan,) * 3
        found[name] = {what: f(values) for what, f in zip(("mean", "median", "deviation"), measures, strict=True)}
    return found


def table(found):
    """Lines of a markdown table. found: {task: {"metrics": summary, "seeds": {seed: values}}}; figures times 100."""
    lines = ["| task | metric | mean | median | deviation | runs |", "|---|---|---:|---:|---:|---:|"]
    for name, of_task in found.items():
        for metric, values in of_task["metrics"].items():
            figures = [values["mean"], values["median"], values["deviation"]]
            figures = ["-" if v is None or math.isnan(v) else f"{100 * v:.2f}" for v in figures]
            lines.append(f"| {name} | {metric} | {' | '.join(figures)} | {len(of_task['seeds'])} |")
    return lines


def write_json(path, content) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(finite(content), indent=2).encode() + b"\n")


def read_json(path, *parts):
    """The dict that write_json wrote, with a dict under each of `parts`; None where it is absent, damaged or foreign."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and all(isinstance(found.get(part), dict) for part in parts) else None


def look_back(settings, data, folder, evaluation, result, say):
    """Evaluate and predict at the end of a run, into `result` and files; the number of a stop signal that came, or 0."""
    task, model, ranks, where = (
        data.task,
        evaluation.engine.model,
        evaluation.engine.ranks,
        f"{data.name}, seed {result['seed']}",
    )
    if settings.do_eval:
        values, stop_signal = evaluation(result["updates"])
        if stop_signal:
            return stop_signal
        result["results"] = without_loss(values)
        say(f"{where}: {line_of(result['results'])}")
    for name, assembler in data.test.items():
        logits, stop_signal = evaluation.outputs(assembler)
        if stop_signal:
            return stop_signal
        target = folder / "predictions" / f"{name}.tsv"
        on_main(ranks, lambda target=target, logits=logits: write_predictions(target, task, logits))
        say(f"predictions: {target}")
    if settings.eval_all_checkpoints and settings.do_eval:
        result["checkpoints"] = {}
        for update, path in sorted(
            (int(path.name.rpartition("-")[2]), path) for path in folder.glob("checkpoint-*[0-9]")
        ):
            model.load_state_dict(load_file(path / "model.safetensors"))
            values, stop_signal = evaluation(update, anew=True)
            if stop_signal:
                return stop_signal
            result["checkpoints"][str(update)] = without_loss(values)
            say(f"{where}, update {update}: {line_of(result['checkpoints'][str(update)])}")
    return 0


def without_loss(values):
    return {name: value for name, value in values.items() if name != "val_loss"}


def line_of(results):
    return ", ".join(f"{name} {'-' if value is None else f'{100 * value:.2f}'}" for name, value in results.items())


def show_table(out, say) -> None:
    """Write {out}/eval_results.json from all tasks that are in there, and print their table."""
    found = {name: read_json(out / name / "eval_results.json", "metrics", "seeds") for name in TASKS}
    found = {name: of_task for name, of_task in found.items() if of_task}
    write_json(out / "eval_results.json", found)
    for line in ("", *table(found), "", f"written: {out / 'eval_results.json'}"):
        say(line)

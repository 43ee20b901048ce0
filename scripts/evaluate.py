"""Judge a model: perplexity of any text, minimal pairs, last words, multiple choice.

    python scripts/evaluate.py perplexity --weight out/pretrain_512.pth --data_path valid.jsonl
    python scripts/evaluate.py perplexity --data_path wiki.test.raw.txt --max_length 1024 --stride 512
    python scripts/evaluate.py pairs      --weight out/pretrain_512_hf --data_path blimp/*.jsonl --group_by UID
    python scripts/evaluate.py last_word  --data_path lambada.jsonl
    python scripts/evaluate.py choice     --data_path questions.jsonl

Prints a table and writes {out}.json with the figures and {out}.items.jsonl with the scores of each item. The second file
grows as the work proceeds: the same command goes on where an earlier one was stopped.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin()
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from scripts.arguments import evaluate_parser

    evaluate_parser().parse_args()

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import torch
from transformers import PreTrainedModel

from common.errors import UserError, user_errors
from common.files import atomic_file
from common.notices import announce
from common.wording import counted, one_line, printable
from dataset.reading.documents import BadLines
from scripts.arguments import FLAGS_OF_TASKS, evaluate_parser
from scripts.common import ModelChoice, dtype_of_flag, load
from scripts.foreign_config import most_positions
from scripts.scoring import Score, batches, score_groups
from scripts.tasks import TASKS, Item, Limits, Metric, n_scored
from trainer.machine.command_line import run_cli

# Between two lines of progress in a log
LOG_SECONDS = 30
# Characters of a line of progress
WIDEST_LINE = 70
# Of a group: the number of its item, and its own number in there.
Key = tuple[int, int]


@dataclass(frozen=True)
class EvaluateSettings:
    """What is measured and how: the flags of these names, with what stands in for those that were not given."""

    task: str
    weight: str
    data_path: list[str]
    max_length: int
    # None: the windows of this task do not overlap.
    stride: int | None
    delimiter: str
    group_by: str | None
    batch_tokens: int
    dtype: str

    @classmethod
    def of(cls, args: argparse.Namespace, stride: int | None, device: torch.device) -> "EvaluateSettings":
        """args: of `evaluate_parser`; stride: as `stride_of` gives it; device: where the model computes."""
        # Measured: more positions than the caches of a CPU hold make it slower.
        batch_tokens = args.batch_tokens or (1024 if device.type == "cpu" else 16384)
        dtype = str(dtype_of_flag(args.dtype, device)).removeprefix("torch.")
        delimiter = " " if args.delimiter is None else args.delimiter
        return cls(
            task=args.task,
            weight=args.weight,
            data_path=args.data_path,
            max_length=args.max_length,
            stride=stride,
            delimiter=delimiter,
            group_by=args.group_by,
            batch_tokens=batch_tokens,
            dtype=dtype,
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = evaluate_parser().parse_args(argv)
    check_flags_of_task(args)
    stride = stride_of(args)
    model, _, encoder = load(ModelChoice.of(args))
    settings = EvaluateSettings.of(args, stride, model.device)
    positions = most_positions(model.config)
    if settings.max_length > positions:
        raise UserError(f"--max_length {settings.max_length}: the model has {positions} positions")
    bad_lines = BadLines() if args.skip_bad_lines else None
    task = TASKS[settings.task]
    limits = Limits(
        settings.max_length, stride or settings.max_length, settings.delimiter, settings.group_by, bad_lines
    )
    with user_errors():
        items = task.items(settings.data_path, encoder, limits)
        for line in bad_lines.report() if bad_lines else ():
            announce(line, to_stderr=True)
        if not items:
            raise UserError(f"--data_path {' '.join(settings.data_path)}: nothing to evaluate there")
        # Before the hours of scoring: a place that cannot be written to is found out at once.
        out = Path(args.out or default_out(settings))
        out.parent.mkdir(parents=True, exist_ok=True)
        journal = Journal(f"{out}.items.jsonl", fingerprint(settings, items))
    try:
        scores, speed = score_items(model, items, settings, journal)
        figures, counts = task.metrics(items, scores)
        report(settings, figures, counts, speed, out)
    # Nobody reads the table any more. That is an OSError too, and says nothing of the files.
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"{out}.*: {error.strerror}; write elsewhere with --out") from error
    return 0


def check_flags_of_task(args: argparse.Namespace) -> None:
    """A flag that this task does not read ends the command: its figures would not be those that were asked for."""
    for flag, tasks in FLAGS_OF_TASKS.items():
        if getattr(args, flag) is not None and args.task not in tasks:
            raise UserError(f"--{flag} has no effect on {args.task}: it is for {', '.join(tasks)}; leave it out")


def stride_of(args: argparse.Namespace) -> int | None:
    """How many new tokens a window has that overlaps the one before; None for a task without such. Errors: UserError."""
    stride: int | None = args.stride
    if args.task == "perplexity" and stride is None:
        # Half a window: each token has at least that much context, at twice the work.
        stride = max(args.max_length // 2, 1)
    if stride is not None and stride > args.max_length:
        raise UserError(f"--stride {stride} exceeds --max_length {args.max_length}: tokens would be left out")
    return stride


def default_out(settings: EvaluateSettings) -> Path:
    """Beside the weight, named after weight, task and data; the digest tells data of the same name apart."""
    weight = Path(settings.weight).resolve()
    paths = [Path(path) for path in settings.data_path]
    names = "+".join(re.sub(r"(\.(jsonl|txt|parquet|gz|zst))+$", "", path.name) for path in paths)
    names = re.sub(r"[^\w.+-]", "_", names)[:60]
    resolved = "\n".join(str(path.resolve()) for path in paths)
    # The name of a file need not be UTF-8.
    digest = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:6]
    stem = weight.name.removesuffix(".pth")
    return weight.with_name(f"{stem}.{settings.task}.{names}-{digest}")


class Speed(NamedTuple):
    """How quick the scoring was. tokens_per_second: of the tokens that were scored, without those that are only read."""

    items_per_second: float
    tokens_per_second: float


def score_items(
    model: PreTrainedModel, items: Sequence[Item], settings: EvaluateSettings, journal: "Journal"
) -> tuple[list[list[list[Score]]], Speed | None]:
    """([[Scores of each group] of each item], the speed of what was computed now); what `journal` has is not repeated.

    The speed is None where nothing was left to compute.
    """
    todo: list[Key] = []
    for i, item in enumerate(items):
        for j in range(len(item.groups)):
            if (i, j) not in journal.done:
                todo.append((i, j))
    groups = [items[i].groups[j] for i, j in todo]
    total = sum(map(n_scored, groups))
    progress = Progress(total)
    with journal, precision(model, settings.dtype):
        for batch in batches(groups, settings.batch_tokens):
            scores = score_groups(model, [groups[b] for b in batch])
            journal.add([todo[b] for b in batch], scores)
            progress.add(sum(n_scored(groups[b]) for b in batch))
    seconds = progress.end()
    speed = None
    if todo:
        speed = Speed(len({i for i, _ in todo}) / seconds, total / seconds)
    of_items = []
    for i, item in enumerate(items):
        of_items.append([journal.done[i, j] for j in range(len(item.groups))])
    return of_items, speed


class Progress:
    """Tells on stderr how far the scoring is: on one line each second in a terminal, in a log a line each half minute."""

    def __init__(self, total: int) -> None:
        """total: tokens to score."""
        self.total = total
        self.done = 0
        self.in_terminal = sys.stderr.isatty()
        self.start = self.shown = time.perf_counter()

    def add(self, tokens: int) -> None:
        self.done += tokens
        now = time.perf_counter()
        if now - self.shown < (1 if self.in_terminal else LOG_SECONDS) or self.done == self.total:
            return
        self.shown = now
        speed = self.done / (now - self.start)
        line = f"{self.done / self.total:.0%} of {self.total:,} tokens, {speed:,.0f} tokens/s, "
        line += f"{(self.total - self.done) / speed:,.0f} s left"
        # The next line, which may be shorter, goes over this one.
        end = " \r" if self.in_terminal else "\n"
        print(f"{line:{WIDEST_LINE if self.in_terminal else 0}}", end=end, file=sys.stderr, flush=True)

    def end(self) -> float:
        """Take the line away; returns the seconds."""
        if self.in_terminal and self.shown > self.start:
            print(" " * WIDEST_LINE, end="\r", file=sys.stderr, flush=True)
        return time.perf_counter() - self.start


def precision(model: PreTrainedModel, name: str) -> contextlib.AbstractContextManager[object]:
    """Autocast in the dtype of that name, as in training; nothing for float32."""
    if name == "float32":
        return contextlib.nullcontext()
    return torch.autocast(model.device.type, dtype=getattr(torch, name))


class Journal:
    """The scores so far, in a file: a first line that says of what, then a line per group. A context manager.

    A process that is killed leaves whole lines and at most one that is cut off. The next one reads the whole ones, and
    writes the file anew before it appends: what was cut off would otherwise run into the first line that follows.
    """

    def __init__(self, path: str | Path, fingerprint: str) -> None:
        self.path = Path(path)
        self.header = {"fingerprint": fingerprint}
        self.done: dict[Key, list[Score]] = {}
        self._read()

    def _read(self) -> None:
        """Take over the scores in the file, if they are of the same weights, tokens and precision."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        if not lines:
            return
        if parsed(lines[0]) != self.header:
            announce(f"{self.path}: scores of another model, data or setting; starting anew", to_stderr=True)
            return
        for line in lines[1:]:
            record = parsed(line)
            if record:
                scores = [Score(*pair) for pair in zip(record["logprob"], record["greedy"], strict=True)]
                self.done[record["item"], record["part"]] = scores

    def __enter__(self) -> "Journal":
        with atomic_file(self.path) as file:
            file.write(json.dumps(self.header).encode() + b"\n")
            for key, scores in self.done.items():
                file.write(line_of(key, scores))
        self.file: BinaryIO = open(self.path, "ab")  # noqa: SIM115 - __exit__ closes it
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def add(self, keys: Sequence[Key], scores: Sequence[list[Score]]) -> None:
        """Note the scores of some groups, and hand them to the system before the next ones are computed."""
        for key, of_group in zip(keys, scores, strict=True):
            self.done[key] = of_group
            self.file.write(line_of(key, of_group))
        self.file.flush()


def line_of(key: Key, scores: Sequence[Score]) -> bytes:
    """A group's line in the journal."""
    item, part = key
    record = {
        "item": item,
        "part": part,
        "logprob": [score.logprob for score in scores],
        "greedy": [score.greedy for score in scores],
    }
    return json.dumps(record).encode() + b"\n"


def parsed(line: str) -> dict[str, Any] | None:
    """What a line of the journal holds; None for one that a kill cut off."""
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def fingerprint(settings: EvaluateSettings, items: Sequence[Item]) -> str:
    """SHA-256 of the weights, the tokens to score and the precision: all that scores depend on."""
    digest = hashlib.sha256(json.dumps([settings.task, settings.dtype]).encode())
    weight = Path(settings.weight)
    files = [weight]
    if weight.is_dir():
        # A folder of save_pretrained: weights and settings, not the card or the tokenizer's pictures.
        files = sorted(path for path in weight.iterdir() if path.suffix in (".safetensors", ".bin", ".json"))
    for file in files:
        with open(file, "rb") as opened:
            while chunk := opened.read(1 << 22):
                digest.update(chunk)
    for item in items:
        tokens = []
        for group in item.groups:
            tokens.append([list(group.prefix), [list(branch) for branch in group.branches], group.starts])
        digest.update(json.dumps(tokens).encode())
    return digest.hexdigest()


def report(
    settings: EvaluateSettings, figures: dict[str, Metric], counts: dict[str, int], speed: Speed | None, out: Path
) -> None:
    """{out}.json first, so that a reader who leaves does not cost the figures; then the table on stdout."""
    of_scores = ("dtype", "max_length", "stride", "delimiter", "group_by")
    result = {
        "task": settings.task,
        "weight": str(settings.weight),
        "data_path": settings.data_path,
        "settings": {name: getattr(settings, name) for name in of_scores},
        "counts": counts,
        "metrics": {name: json_fields(metric) for name, metric in figures.items()},
        "items_per_second": speed and speed.items_per_second,
        "tokens_per_second": speed and speed.tokens_per_second,
        "torch": torch.__version__,
    }
    with atomic_file(f"{out}.json") as file:
        file.write(json.dumps(result, indent=2).encode() + b"\n")
    sizes = ", ".join(counted(number, unit.removesuffix("s"), unit) for unit, number in counts.items())
    print(f"{settings.task}: {printable(Path(settings.weight).name)} on {sizes}, {settings.dtype}")
    width = max(map(len, figures))
    for name, metric in figures.items():
        interval = ""
        if not math.isnan(metric.low):
            interval = f"   [{metric.low:.6g}, {metric.high:.6g}] 95 %, {metric.interval}"
        print(f"  {one_line(name):{width}} {metric.value:12.6g}{interval}")
    said = ", every score was there already"
    if speed is not None:
        said = f", {speed.items_per_second:,.1f} items/s, {speed.tokens_per_second:,.0f} tokens/s"
    print(printable(f"{out}.json") + said)


def json_fields(metric: Metric) -> dict[str, float | str | None]:
    """The fields of a figure; JSON has no NaN, so that becomes null."""
    fields: dict[str, float | str | None] = {}
    for name, value in metric._asdict().items():
        is_nan = isinstance(value, float) and math.isnan(value)
        fields[name] = None if is_nan else value
    return fields


if __name__ == "__main__":
    run_cli(main)

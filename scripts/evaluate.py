"""Judge a model: perplexity of any text, minimal pairs, last words, multiple choice.

    python scripts/evaluate.py perplexity --weight out/pretrain_512.pth --data_path valid.jsonl
    python scripts/evaluate.py perplexity --data_path wiki.test.raw.txt --max_length 1024 --stride 512
    python scripts/evaluate.py pairs      --weight out/pretrain_512_hf --data_path blimp/*.jsonl --group_by UID
    python scripts/evaluate.py last_word  --data_path lambada.jsonl
    python scripts/evaluate.py choice     --data_path questions.jsonl

Prints a table and writes {out}.json with the figures and {out}.items.jsonl with the scores of each item. The second file
grows as the work proceeds: the same command goes on where an earlier one was stopped.
"""

import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    # Ctrl-C during the imports ends the process at once; `run_cli` takes it from there.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from scripts.arguments import FLAGS_OF_TASKS, evaluate_parser

    evaluate_parser().parse_args()

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import time

import torch

from common.errors import UserError, user_errors
from common.files import atomic_file
from common.notices import announce
from common.wording import counted, one_line, printable
from dataset.reading.documents import BadLines
from scripts.arguments import FLAGS_OF_TASKS, evaluate_parser
from scripts.common import compute_dtype, load
from scripts.scoring import Score, batches, score_groups
from scripts.tasks import TASKS, Limits
from trainer.machine.command_line import run_cli


def main(argv=None):
    args = evaluate_parser().parse_args(argv)
    check_flags_of_task(args)
    model, tokenizer, encoder = load(args)
    stride = args.stride or max(args.max_length // 2, 1)
    if stride > args.max_length:
        raise UserError(f"--stride {stride} exceeds --max_length {args.max_length}: tokens would be left out")
    args.batch_tokens = args.batch_tokens or (1024 if model.device.type == "cpu" else 16384)
    args.dtype = str(compute_dtype(args.dtype, model.device)).removeprefix("torch.")
    if args.max_length > model.config.max_position_embeddings:
        raise UserError(
            f"--max_length {args.max_length}: the model has {model.config.max_position_embeddings} positions"
        )
    bad_lines = BadLines() if args.skip_bad_lines else None
    task, limits = TASKS[args.task], Limits(args.max_length, stride, args.delimiter, args.group_by, bad_lines)
    with user_errors():
        items = task.items(args.data_path, encoder, limits)
        for line in bad_lines.report() if bad_lines else ():
            announce(line, to_stderr=True)
        if not items:
            raise UserError(f"--data_path {' '.join(args.data_path)}: nothing to evaluate there")
        out = Path(args.out or default_out(args))
        out.parent.mkdir(parents=True, exist_ok=True)
        journal = Journal(f"{out}.items.jsonl", fingerprint(args, items))
    try:
        scores, speed = score_items(model, items, args, journal)
        figures, counts = task.metrics(items, scores)
        report(args, figures, counts, speed, out)
    except BrokenPipeError:
        # Nobody reads the table any more; that says nothing of the files.
        raise
    except OSError as error:
        raise UserError(f"{out}.*: {error.strerror}; write elsewhere with --out") from error
    return 0


def check_flags_of_task(args: argparse.Namespace) -> None:
    """A flag that this task does not read ends the command: its figures would not be those that were asked for."""
    for flag, tasks in FLAGS_OF_TASKS.items():
        if getattr(args, flag) is not None and args.task not in tasks:
            raise UserError(f"--{flag} has no effect on {args.task}: it is for {', '.join(tasks)}; leave it out")
    if args.delimiter is None:
        args.delimiter = " "


def default_out(args):
    """Beside the weight, named after weight, task and data; the digest tells data of the same name apart."""
    weight, paths = Path(args.weight).resolve(), [Path(path) for path in args.data_path]
    names = "+".join(re.sub(r"(\.(jsonl|txt|parquet|gz|zst))+$", "", path.name) for path in paths)
    names = re.sub(r"[^\w.+-]", "_", names)[:60]
    resolved = "\n".join(str(path.resolve()) for path in paths)
    # The name of a file need not be UTF-8.
    digest = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:6]
    stem = weight.name.removesuffix(".pth")
    return weight.with_name(f"{stem}.{args.task}.{names}-{digest}")


def score_items(model, items, args, journal):
    """([[Scores of each group] of each item], items/s of what was computed now); what `journal` has is not repeated."""
    groups = [(i, j) for i, item in enumerate(items) for j in range(len(item.groups))]
    todo = [(i, j) for i, j in groups if (i, j) not in journal.done]
    start, shown = time.perf_counter(), time.perf_counter()
    done = 0
    with journal, precision(model, args.dtype):
        rows = [items[i].groups[j] for i, j in todo]
        for batch in batches(rows, args.batch_tokens):
            journal.add([todo[b] for b in batch], score_groups(model, [rows[b] for b in batch]))
            done += len(batch)
            if sys.stderr.isatty() and time.perf_counter() - shown > 1:
                shown = time.perf_counter()
                rest = (shown - start) / done * (len(todo) - done)
                print(f"\r{done:,}/{len(todo):,}, {rest:.0f} s left ", end="", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    speed = len({i for i, _ in todo}) / seconds if todo else None
    return [[journal.done[i, j] for j in range(len(item.groups))] for i, item in enumerate(items)], speed


def precision(model, name):
    """Autocast in the dtype of that name, as in training; nothing for float32."""
    if name == "float32":
        return contextlib.nullcontext()
    return torch.autocast(model.device.type, dtype=getattr(torch, name))


class Journal:
    """The scores so far, in a file: a first line that says of what, then a line per group. A context manager."""

    def __init__(self, path, fingerprint) -> None:
        self.path, self.done, self.file = Path(path), {}, None
        self.header = {"fingerprint": fingerprint}
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        if lines and parsed(lines[0]) == self.header:
            for line in lines[1:]:
                record = parsed(line)
                # A kill can cut the last line off.
                if record:
                    scores = [Score(*pair) for pair in zip(record["logprob"], record["greedy"], strict=True)]
                    self.done[record["item"], record["part"]] = scores
        elif lines:
            announce(f"{self.path}: scores of another model, data or setting; starting anew", to_stderr=True)

    def __enter__(self):
        with atomic_file(self.path) as file:
            file.write(json.dumps(self.header).encode() + b"\n")
            for key, scores in self.done.items():
                file.write(line(key, scores))
        self.file = open(self.path, "ab")  # noqa: SIM115 - __exit__ closes it
        return self

    def __exit__(self, *exception) -> None:
        self.file.close()

    def add(self, keys, scores) -> None:
        self.done.update(zip(keys, scores, strict=True))
        self.file.write(b"".join(line(key, of_key) for key, of_key in zip(keys, scores, strict=True)))
        self.file.flush()


def line(key, scores):
    record = {
        "item": key[0],
        "part": key[1],
        "logprob": [s.logprob for s in scores],
        "greedy": [s.greedy for s in scores],
    }
    return json.dumps(record).encode() + b"\n"


def parsed(line):
    try:
        return json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None


def fingerprint(args, items):
    """SHA-256 of the weights, the tokens to score and the precision: all that scores depend on."""
    digest = hashlib.sha256(json.dumps([args.task, args.dtype]).encode())
    weight = Path(args.weight)
    files = (
        sorted(p for p in weight.iterdir() if p.suffix in (".safetensors", ".bin", ".json"))
        if weight.is_dir()
        else [weight]
    )
    for file in files:
        with open(file, "rb") as opened:
            while chunk := opened.read(1 << 22):
                digest.update(chunk)
    for item in items:
        digest.update(json.dumps([[g.prefix, g.branches, g.starts] for g in item.groups]).encode())
    return digest.hexdigest()


def report(args, figures, counts, speed, out) -> None:
    """{out}.json first, so that a reader who leaves does not cost the figures; then the table on stdout."""
    result = {
        "task": args.task,
        "weight": str(args.weight),
        "data_path": args.data_path,
        "settings": {name: getattr(args, name) for name in ("dtype", "max_length", "stride", "delimiter", "group_by")},
        "counts": counts,
        "metrics": {name: {k: None if v != v else v for k, v in m._asdict().items()} for name, m in figures.items()},
        "items_per_second": speed,
        "torch": torch.__version__,
    }
    with atomic_file(f"{out}.json") as file:
        file.write(json.dumps(result, indent=2).encode() + b"\n")
    sizes = ", ".join(counted(number, unit.removesuffix("s"), unit) for unit, number in counts.items())
    print(f"{args.task}: {printable(Path(args.weight).name)} on {sizes}, {args.dtype}")
    width = max(map(len, figures))
    for name, metric in figures.items():
        inside = "" if math.isnan(metric.low) else f"   [{metric.low:.6g}, {metric.high:.6g}] 95 %, {metric.interval}"
        print(f"  {one_line(name):{width}} {metric.value:12.6g}{inside}")
    print(printable(f"{out}.json") + (f", {speed:,.1f} items/s" if speed else ", every score was there already"))


if __name__ == "__main__":
    run_cli(main)

"""Runs of the trainer that a benchmark compares: each is trained once, with the result in its metrics."""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.flags import Parser
from common.start import ROOT

TRAINER = ROOT / "trainer" / "train_pretrain.py"
METRICS = "pretrain_*.metrics.jsonl"


def runs_parser(name: str, description: str) -> Parser:
    """The flags of a benchmark that compares runs of the trainer."""
    p = Parser(prog=name, description=description)
    p.add_argument("--data_path", nargs="+", required=True, help="as for the trainer")
    p.add_argument("--val_path", nargs="+", required=True, help="as for the trainer")
    work = ROOT / "out" / name.removesuffix(".py")
    p.add_argument("--work", default=str(work), help=f"folder of the runs (default: out/{work.name})")
    return p


@dataclass(frozen=True)
class Outcome:
    """The result of a run. parameters: of its model. bits_per_byte, val_loss (nats per token): of its last evaluation.
    updates, tokens: totals. update_seconds: mean over the updates before its last log line."""

    parameters: int
    bits_per_byte: float
    val_loss: float
    updates: int
    tokens: int
    update_seconds: float = 0.0


def folder_of(work: Path, name: str, flags: Sequence[str]) -> Path:
    """The folder of a run, with a digest of its flags, so that none is taken for another."""
    return work / f"{name}_{hashlib.sha256(json.dumps(flags).encode()).hexdigest()[:8]}"


def trained(work: Path, name: str, flags: Sequence[str]) -> Outcome:
    """The result of a run of train_pretrain.py.

    A run that an earlier start has finished is not trained again, and one that was stopped is resumed.
    Errors: UserError that names the log of a failed run.
    """
    folder = folder_of(work, name, flags)
    done = folder / "done"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "log.txt"
        command = [sys.executable, str(TRAINER), *flags, "--out_dir", str(folder), "--from_resume", "1"]
        with open(path, "a", encoding="utf-8") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            raise UserError(f"{TRAINER.name} ended with exit code {code}; its log: {path}")
        done.touch()
    return outcome(folder)


def outcome(folder: Path) -> Outcome:
    """Read the result of a run from its metrics."""
    (metrics,) = folder.glob(METRICS)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    parameters = lines[0]["model"]["parameters"]
    last = [line for line in lines if "val_loss" in line][-1]
    updates = max(line["update"] for line in lines if "update" in line)
    tokens = max(line["tokens"] for line in lines if "tokens" in line)
    (*_, rate) = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return Outcome(parameters, last["bits_per_byte"], last["val_loss"], updates, tokens, tokens / updates / rate)


def data_args(args: argparse.Namespace) -> list[str]:
    """The trainer's data flags, from a benchmark's command line. The token cache is in --work, for all runs."""
    cache = Path(args.work) / "cache"
    return ["--data_path", *args.data_path, "--val_path", *args.val_path, "--cache_dir", str(cache)]


def flag_args(changes: Mapping[str, object]) -> list[str]:
    """{flag: value} as the words of a command line."""
    return [word for flag, value in changes.items() for word in (f"--{flag}", str(value))]

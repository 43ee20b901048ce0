"""Runs of the trainer that a benchmark compares: each is trained once, and its metrics tell how it ended."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.files import atomic_file
from common.paths import ROOT
from trainer.pretrain.settings import PROG

TRAINER = ROOT / "trainer" / PROG
METRICS = "pretrain_*.metrics.jsonl"
# They only say where something is kept, which --work decides.
PLACES = ("--cache_dir", "--out_dir")


@dataclass(frozen=True)
class Outcome:
    """The end of a run. parameters: of its model. bits_per_byte, val_loss (nats per token): of its last evaluation.
    updates, tokens: that it trained."""

    parameters: int
    bits_per_byte: float
    val_loss: float
    updates: int
    tokens: int


def trained(folder: Path, flags: Sequence[str]) -> Outcome:
    """What a run of train_pretrain.py in this folder leads to.

    A run that an earlier start of a benchmark has finished is not trained again, and one that was stopped goes on.
    Errors: UserError that names the log of a run that ended with an error, or a folder whose run has other flags.
    """
    done = folder / "done"
    is_begun = done.exists() or any(folder.glob(METRICS))
    keep_flags(folder / "flags.json", flags, is_begun)
    if not done.exists():
        path = folder / "log.txt"
        command = [sys.executable, str(TRAINER), *flags, "--out_dir", str(folder), "--from_resume", "1"]
        with open(path, "a", encoding="utf-8") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            raise UserError(f"{PROG} ended with exit code {code}; its log: {path}")
        done.touch()
    return outcome(folder)


def keep_flags(path: Path, flags: Sequence[str], is_begun: bool) -> None:
    """Write the flags of something that begins now into a file of its folder, so that a later command with others is refused.

    is_begun: an earlier command has made it, or a part of it. Where that was an earlier version, there is no such file, and
    nothing is compared. Errors: UserError that names the folder and the flags.
    """
    now = values_of(flags)
    if not is_begun:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(json.dumps(now, indent=1).encode())
        return
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    different = sorted(flag for flag in {*before, *now} if before.get(flag) != now.get(flag))
    if different:
        raise UserError(
            f"{path.parent} was made with another {', '.join(different)}: name another --work, or remove that folder"
        )


def values_of(flags: Sequence[str]) -> dict[str, list[str]]:
    """{flag: its values} of a command line, without those that only name places. Of a flag that stands there twice the last
    one counts, as for the trainer."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in flags:
        if word.startswith("--"):
            values = []
            found[word] = values
        else:
            values.append(word)
    return {flag: values for flag, values in found.items() if flag not in PLACES}


def outcome(folder: Path) -> Outcome:
    """What the metrics of a run say of its end."""
    (metrics,) = folder.glob(METRICS)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    parameters = lines[0]["model"]["parameters"]
    last = [line for line in lines if "val_loss" in line][-1]
    updates = max(line["update"] for line in lines if "update" in line)
    tokens = max(line["tokens"] for line in lines if "tokens" in line)
    return Outcome(parameters, last["bits_per_byte"], last["val_loss"], updates, tokens)


def text_words(args: argparse.Namespace) -> list[str]:
    """The text of a benchmark's command line, as the trainer takes it. Its tokens are kept in --work, for all runs."""
    cache = Path(args.work) / "cache"
    return ["--data_path", *args.data_path, "--val_path", args.val_path, "--cache_dir", str(cache)]


def flag_words(changes: Mapping[str, object]) -> list[str]:
    """{name: value} of flags as a command line has them."""
    return [word for flag, value in changes.items() for word in (f"--{flag}", str(value))]

"""Does an upgrade of packages, or a change of the code, change my results? Small runs on two sides, compared.

    python benchmarks/loss_compare.py --commit HEAD~20                    # a commit's files against this tree's
    python benchmarks/loss_compare.py --python ../newer/.venv/bin/python  # another Python's packages against this one's
    python benchmarks/loss_compare.py --save before.json                  # this side, twice; after the upgrade:
    python benchmarks/loss_compare.py --against before.json

"equal": every bit. Else, as for a run that fails, the exit code is 1, and the largest difference is told, relative to the largest
value: of the losses, and the micro-batch of the first (an update is one in the built-in runs); of 500 of the last weights.
The built-in runs take two minutes a side, on one core.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks.ledger import check_out, run_logged
from common.errors import UserError, user_errors
from common.files import atomic_file, read_object
from common.flags import Parser
from common.start import ROOT
from common.wording import announce
from trainer.machine.command_line import run_cli
from trainer.reporting.records import RunRecords
from trainer.saving.checkpoint import load_checkpoint

SIZES = "--device cpu --cpu_processes 1 --num_workers 1 --hidden_size 64 --num_hidden_layers 2 --max_seq_len 64 --batch_size 8"
PRETRAIN = f"train_pretrain.py {SIZES} --accumulation_steps 1 --max_updates 30"
# {run: a script of trainer/ and flags}
RUNS = {
    "float32": f"{PRETRAIN} --use_compile 0 --dtype float32",
    "experts, Muon, bfloat16": f"{PRETRAIN} --use_compile 0 --dtype bfloat16 --use_moe 1 --optimizer muon",
    "compiled": f"{PRETRAIN} --use_compile 1 --dtype float32",
    "ELECTRA": f"train_electra.py {SIZES} --use_compile 0 --dtype float32 --embedding_size 64 --max_steps 30 --warmup_steps 5",
}


def trace(tree: Path, python: str, flags: str, folder: Path) -> dict[str, Any]:
    """A run with the files of `tree`, as JSON: its losses, weights ... folder: a new one. Errors: UserError if it fails."""
    folder.mkdir(parents=True)
    letters = random.Random(0)
    texts = ("".join(letters.choices("etaoin shrdlu ", k=500)) for _ in range(100))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    script, *words = shlex.split(flags)
    own = ["--data_path", str(folder / "text.jsonl"), "--out_dir", str(folder), "--cache_dir", str(folder)]
    command = [str(tree / "trainer" / script), *own, *words, "--log_interval", "1", "--report", "0"]
    code, last = run_logged(python, command, folder / "log")
    newest = max(folder.rglob("update_*.pt"), key=lambda path: path.name, default=None)
    if code or newest is None:
        reason = f"exit code {code}: {last}" if code else "no checkpoint in its --out_dir"
        raise UserError(f"{python} {tree / 'trainer' / script}: {reason}")
    run = RunRecords.read(next(folder.rglob("*.metrics.jsonl")))
    weights = torch.cat([tensor.flatten() for _, tensor in sorted(load_checkpoint(newest)["model"].items())])
    return {
        "versions": {**run.start_record("versions"), "processor": run.start_record("machine").get("processor")},
        "losses": list(run.columns["loss"][1]),
        "weights": weights[:: len(weights) // 500 + 1].tolist(),
        "digest": sha256(weights.numpy().data).hexdigest(),
    }


def difference(old: Sequence[float], new: Sequence[float]) -> str:
    """The largest, relative to the largest value, and the number of the first, from 1."""
    apart = [abs(after - before) for before, after in zip(old, new, strict=False)]
    first = next((number for number, value in enumerate(apart, 1) if value), 0)
    return f"{max(apart) / max(map(abs, old)):.1e}, from {first} of {len(apart)}" if first else "equal"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code. Errors: UserError."""
    p = Parser(prog="loss_compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--commit", help="compare with this commit's files")
    p.add_argument("--python", default=sys.executable, help="compare with this Python")
    p.add_argument("--against", help="compare with this file of --save")
    p.add_argument("--save", help="write this side to a file")
    p.add_argument("--flags", help="of train_pretrain.py: one run, in place of the built-in ones")
    args = p.parse_args(argv)
    if args.against and (args.commit or args.python != sys.executable):
        p.error("--against has the other side already: leave out --commit and --python")
    runs = {"yours": f"train_pretrain.py {args.flags}"} if args.flags else RUNS
    with user_errors(), tempfile.TemporaryDirectory() as folder:
        stored: dict[str, Any] = read_object(args.against) if args.against else {}
        tree = check_out(args.commit, Path(folder, "tree"), "--commit") if args.commit else ROOT
        announce("| run | losses, from micro-batch | weights |\n|---|---|---|")
        traces, cells = {}, []
        for name, flags in runs.items():
            if args.against and flags not in stored:
                raise UserError(f"{args.against}: has no run of these flags: {flags}")
            try:
                old = stored[flags] if stored else trace(tree, args.python, flags, Path(folder, name, "before"))
                new = traces[flags] = trace(ROOT, sys.executable, flags, Path(folder, name, "now"))
            except UserError as error:
                announce(f"| {name} | failed: {error} | |")
                cells.append("failed")
                continue
            weights = "equal"
            if old["digest"] != new["digest"]:
                weights = f"differ; the sample: {difference(old['weights'], new['weights'])}"
            cells += [difference(old["losses"], new["losses"]), weights]
            announce(f"| {name} | {cells[-2]} | {weights} |")
        if traces:
            announce(f"before: {old['versions']}\nnow: {new['versions']}")
        if args.save:
            with atomic_file(args.save) as file:
                file.write(json.dumps(traces).encode())
    return int(set(cells) != {"equal"})


if __name__ == "__main__":
    run_cli(main)

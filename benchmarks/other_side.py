"""check.py --against: does a change of the code, or an upgrade of packages, change results? Small runs on two sides, compared.

The built-in runs take two minutes a side, on one core.
"""

import json
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks.ledger import check_out, run_logged
from benchmarks.measures import Result, figure
from common.errors import UserError
from common.start import ROOT
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


def compare(commit: str | None, python: str, flags: str | None) -> Iterator[Result]:
    """Whether each run has the same losses and weights, to the bit, with the files of a commit and with that Python as here.

    flags: of train_pretrain.py, in place of the built-in runs. Errors: UserError for an unknown commit.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = check_out(commit, Path(folder, "tree"), "--against") if commit else ROOT
        for name, words in {"yours": f"train_pretrain.py {flags}"}.items() if flags else RUNS.items():
            try:
                old = trace(tree, python, words, Path(folder, name, "before"))
                new = trace(ROOT, sys.executable, words, Path(folder, name, "now"))
            except UserError as error:
                yield {"what": name, "value": str(error), "ok": False}
                continue
            losses, weights = difference(old["losses"], new["losses"]), "equal"
            if old["digest"] != new["digest"]:
                weights = f"differ, of a sample {difference(old['weights'], new['weights'])}"
            yield {"what": name, "value": f"losses {losses}; weights {weights}", "ok": losses == weights == "equal"}
            yield figure("before, now", f"{old['versions']}, {new['versions']}")


def trace(tree: Path, python: str, flags: str, folder: Path) -> dict[str, Any]:
    """A run with the files of `tree`: its losses, 500 of its weights, a digest of all. folder: a new one. Errors: UserError if it fails."""
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
        raise UserError(f"{script} of {folder.name}: {reason}")
    run = RunRecords.read(next(folder.rglob("*.metrics.jsonl")))
    weights = torch.cat([tensor.flatten() for _, tensor in sorted(load_checkpoint(newest)["model"].items())])
    return {
        "versions": run.start_record("versions"),
        "losses": list(run.columns["loss"][1]),
        "weights": weights[:: len(weights) // 500 + 1].tolist(),
        "digest": sha256(weights.numpy().data).hexdigest(),
    }


def difference(old: Sequence[float], new: Sequence[float]) -> str:
    """The largest, relative to the largest value, and the number of the first, from 1 (an update is one micro-batch in RUNS)."""
    apart = [abs(after - before) for before, after in zip(old, new, strict=False)]
    first = next((number for number, value in enumerate(apart, 1) if value), 0)
    return f"by {max(apart) / max(map(abs, old)):.1e}, from {first} of {len(apart)}" if first else "equal"

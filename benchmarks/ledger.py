"""Which of these settings is best for my text? Trains variants of a run one after the other, and decides.

    python benchmarks/ledger.py --common "--data_path my.jsonl --budget_flops 3e13" --variant "base" --variant "old: @26fe859e"

A variant is a name and flags added to --common, which says how much work a run is (--budget_flops, --budget, --max_updates);
@COMMIT trains with that commit's files. The same command continues after a stop, and retries failures: change no code meanwhile.

The rule: the first variant is the reference; runs with the same seed, so with the same order of documents, are a pair. A variant that
fails, or is over --drop percent worse with its first seed, gets no other; the rest get --seeds. What counts are bits per byte of the
validation text at the end: "better" or "worse" if the 95 % interval of the mean difference (Student's t) excludes zero.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from scipy.stats import t

from common.errors import UserError, user_errors
from common.files import atomic_file, atomic_folder
from common.flags import Parser, positive
from common.processes import die_with_parent, text_of_file
from common.start import ROOT, script_path, shell_line
from common.wording import announce, without_passwords
from trainer.machine.command_line import run_cli
from trainer.pretrain.settings import PretrainSettings
from trainer.reporting.records import RunRecords
from trainer.saving.run_folder import take_lock

# {variant: {seed: (bits per byte, tokens, FLOP of matrix products or 0, seconds of its updates)}} of the finished runs
Runs = dict[str, dict[int, tuple[float, ...]]]
HEAD = "| variant | seeds | bits per byte | difference in % | verdict | tokens | FLOP | seconds |\n|---|---|---|---|---|---|---|---|"


def read_variants(texts: Sequence[str], common: str, out: Path) -> dict[str, list[str]]:
    """{name: script and flags}; makes the folders of commits. Errors: UserError, and SystemExit for a wrong flag."""
    variants: dict[str, list[str]] = {}
    judges: list[object] = []
    for text in texts:
        name, *words = shlex.split(text.replace(":", " ", 1))
        if not name.isidentifier() or name in variants:
            raise UserError(f"--variant {text!r}: expected a new name (letters, digits, _): 'wide: --hidden_size 192'")
        commit = words.pop(0) if words and words[0].startswith("@") else ""
        script = str(out / commit / "trainer/train_pretrain.py") if commit else script_path("trainer/train_pretrain.py")
        variants[name] = [script, *shlex.split(common), *words, "--report", "0"]
        if commit:
            check_out(commit[1:], out / commit, f"--variant {name}")
            if not {"--data_path", "--mixture"} & {*variants[name]}:
                raise UserError(f"--variant {name}: the default text may be another there: add --data_path to --common")
        else:
            settings = PretrainSettings.parse(variants[name][1:])
            judges.append(settings.val_path or [settings.val_fraction, settings.data_path, settings.mixture])
            if judges[-1] != judges[0] or not (settings.val_path or settings.val_fraction or settings.has_budget):
                raise UserError(f"--variant {name}: all need the same validation text: add --val_path to --common")
    return variants


def check_out(commit: str, folder: Path, flag: str) -> Path:
    """Fill `folder` with a commit's files, unless it exists; returns it. flag: where the user named it. Errors: UserError."""
    archive = folder.with_name(f"{folder.name}.zip")
    git = ["git", "-C", str(ROOT), "archive", "--output", str(archive), commit]
    if not folder.exists():
        if subprocess.run(git, capture_output=True).returncode:
            raise UserError(f"{flag}: git finds no commit {commit} here")
        with atomic_folder(folder, folder.with_name(f"{folder.name}.tmp")) as unpacked:
            shutil.unpack_archive(archive, unpacked)
        archive.unlink()
    return folder


def run_logged(python: str, command: Sequence[str], log_path: Path) -> tuple[int, str]:
    """Run it, and append what it prints to a file. Returns its exit code and last line. Errors: OSError."""
    # On Linux a run is killed with this process, whose successor needs its files.
    with_parent = partial(die_with_parent, os.getpid()) if os.name == "posix" else None
    with open(log_path, "ab") as log:
        done = subprocess.run([python, *command], stdout=log, stderr=log, preexec_fn=with_parent)
    return done.returncode, text_of_file(log_path).rstrip().rpartition("\n")[2]


def figures(folder: Path, command: Sequence[str]) -> tuple[float, ...]:
    """The figures of a run, see Runs; none if it has not come to its end. Errors: UserError if it is of another command."""
    # A plan made again after a kill may have another width, and so another name.
    run = RunRecords(max(folder.glob("*.metrics.jsonl"), key=os.path.getmtime, default=Path(os.devnull)))
    run.read_new_lines()
    if run.starts and run.starts[-1]["command"] != without_passwords(shell_line(["python", *command])):
        raise UserError(f"{folder} has the run of {run.starts[-1]['command']}: name the variant or --out_dir otherwise")
    tokens, rates = run.columns.get("tokens_per_second", ([], []))
    ends, bits = run.columns.get("bits_per_byte", ([], []))
    # What is not finite is not recorded: the last value may be of an earlier evaluation.
    if run.last("eta") != 0 or ends[-1:] != tokens[-1:]:
        return ()
    seconds = sum((end - begin) / rate for begin, end, rate in zip([0.0, *tokens], tokens, rates, strict=False))
    return bits[-1], tokens[-1], tokens[-1] * run.start_record("model").get("flops_per_token", 0), seconds


def judge(runs: Runs, name: str, drop: float) -> tuple[list[float], str, str]:
    """Differences to the reference in percent, one for each pair; their mean with its interval and spread; the verdict."""
    reference = next(iter(runs.values()))
    values = [100 * (runs[name][seed][0] / reference[seed][0] - 1) for seed in sorted({*runs[name]} & {*reference})]
    if len(values) < 2:
        return values, "".join(f"{value:+.2f}" for value in values), "dropped" if values > [drop] else "one seed"
    mean, spread = fmean(values), stdev(values)
    half = t.ppf(0.975, len(values) - 1) * spread / len(values) ** 0.5
    verdict = "better" if mean + half < 0 else "worse" if mean - half > 0 else "no difference"
    return values, f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f}), spread {spread:.2f}", verdict


def show(runs: Runs, drop: float, failures: Sequence[str], path: Path) -> None:
    """Print the table, with a row for each variant that has a finished run, and write it as Markdown. Errors: UserError."""
    lines = [HEAD]
    for name in filter(runs.get, runs):
        bits, *others = zip(*runs[name].values(), strict=True)
        cells = [name, str(len(bits)), f"{fmean(bits):.4f} ({min(bits):.4f} to {max(bits):.4f})"]
        cells += [*judge(runs, name, drop)[1:], *(f"{fmean(values):.4g}" if any(values) else "?" for values in others)]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join([*lines, "", *failures, ""])
    announce(text)
    with user_errors(), atomic_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a run failed. Errors: UserError."""
    p = Parser(prog="ledger.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--common", required=True, help="flags of all variants, without --seed and --out_dir")
    p.add_argument("--variant", action="append", required=True, help="NAME or 'NAME: [@COMMIT] FLAGS'; one for each")
    p.add_argument("--seeds", type=positive(int), default=3, help="most of a variant (default 3), may be raised later")
    p.add_argument("--drop", type=positive(float), default=1.0, help="percent of bits per byte (default 1)")
    p.add_argument("--out_dir", default=str(ROOT / "out" / "ledger"), help="folder of the runs (default out/ledger)")
    args = p.parse_args(argv)
    out = Path(args.out_dir).resolve()
    with user_errors():
        out.mkdir(parents=True, exist_ok=True)
        take_lock(out / "ledger")
        variants = read_variants(args.variant, args.common, out)
    runs: Runs = {name: {} for name in variants}
    failures: list[str] = []
    for seed in range(1, args.seeds + 1):
        going = [n for n in runs if len(pairs := judge(runs, n, args.drop)[0]) >= seed - 1 and pairs[:1] <= [args.drop]]
        # The reference alone would be compared with nothing.
        for name in going if len(going) > 1 or len(runs) == 1 else []:
            folder, log_path = out / f"{name}-{seed}", out / f"{name}-{seed}.log"
            command = [*variants[name], "--seed", str(seed), "--out_dir", str(folder), "--from_resume", "1"]
            if not (finished := figures(folder, command)):
                show(runs, args.drop, failures, out / "ledger.md")
                announce(f"{name}, seed {seed}: {log_path}")
                code, last = run_logged(sys.executable, command, log_path)
                if not (finished := figures(folder, command)):
                    failures.append(f"- {name}, seed {seed}: exit code {code}: {last}")
                    continue
            runs[name][seed] = finished
    show(runs, args.drop, failures, out / "ledger.md")
    return 1 if failures else 0


if __name__ == "__main__":
    run_cli(main)

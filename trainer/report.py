"""What the user sees: log lines, the metrics file and Weights & Biases. Only global rank 0 reports."""

import json
import math
import os
import sys
import time
from pathlib import Path

from dataset.loader import UpdateSchedule
from trainer.checkpoint import atomic_file
from trainer.runtime import UserError


class Reporter:
    """Prints and records. On the other ranks every method does nothing."""

    def __init__(self, is_main):
        self.is_main, self.run, self.file = is_main, None, None
        self._unwritten = b""  # lines that a full disk did not take; they are tried again with the next one

    def open(self, metrics_path, is_past=None):
        """Begin the metrics file: JSON lines, one object per log line or evaluation.

        is_past: tells of a line (as a dict) that is there already whether to keep it; default: of none.
        """
        if not self.is_main:
            return
        path = Path(metrics_path)
        lines = path.read_bytes().splitlines(keepends=True) if is_past and path.exists() else []
        with atomic_file(path) as file:
            file.writelines(line for line in lines if is_past(_record(line)))
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - close() does it

    def say(self, text):
        if self.is_main:
            try:
                print(text, flush=True)
            except OSError:  # the terminal was closed or the reader of the pipe has gone: training goes on
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def start_wandb(self, project, name, settings, run_id=None):
        """Begin or continue a W&B run (WANDB_MODE=offline needs no network); returns its id for the checkpoint.

        Errors: UserError where W&B is not installed or refuses.
        """
        if not self.is_main:
            return run_id
        try:
            import wandb  # not needed by anybody who does not ask for it
        except ImportError as error:
            raise UserError("--use_wandb needs a package that is not here: pip install wandb") from error
        try:
            self.run = wandb.init(project=project, name=name, id=run_id, resume="allow", config=settings)
        except wandb.Error as error:
            raise UserError(f"--use_wandb: {error} (WANDB_MODE=offline needs neither account nor network)") from error
        return self.run.id

    def log(self, record, text=None):
        """Record one dict of numbers (`step` and `update` are its axis); print `text`."""
        if not self.is_main:
            return
        if text:
            self.say(text)
        if self.file:
            # JSON has no NaN or infinity; after a skipped update the gradient norm is one.
            finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
            self._write(json.dumps(finite).encode() + b"\n")
        if self.run:
            self.run.log(record, step=record["step"])

    def _write(self, line):
        first = not self._unwritten
        self._unwritten += line
        try:
            self._unwritten = self._unwritten[self.file.write(self._unwritten) :]
        except OSError as error:
            if first:
                self.say(f"warning: {self.file.name}: {error.strerror}; the line is kept and tried again")

    def close(self):
        if self.file:
            self.file.close()
        if self.run:
            self.run.finish()


def _record(line):
    """The dict of a metrics line; for one that a crash left damaged a dict that is never of the past."""
    try:
        return {"step": math.inf, **json.loads(line)}
    except (ValueError, TypeError):
        return {"step": math.inf}


class Stopwatch:
    """Seconds since the last log line, and an estimate of what is left of an epoch."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self.first_step = None

    def lap(self):
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        return elapsed

    def remaining_minutes(self, step, steps):
        """Time left in an epoch of `steps` micro-batches when `step` (0-based) is done."""
        if self.first_step is None:
            self.first_step = step
        done = step - self.first_step + 1
        return (time.perf_counter() - self.start) / done * (steps - step - 1) / 60


def log_line(record, head):
    """MiniMind's log line and further fields, from a record of metrics."""
    line = f"{head} loss:{record['loss']:.3f} lr:{record['lr']:.12f} epoch_Time:{record['epoch_Time']:.1f}min:"
    more = {name: f"{record[name]:.4g}" for name in ("aux_loss", "grad_norm") if record.get(name)}
    more["tokens/s"] = f"{record['tokens_per_second']:,.0f}"
    if record["skipped_updates"]:
        more["skipped_updates"] = str(record["skipped_updates"])
    return line + "".join(f" {name}:{value}" for name, value in more.items())


def flops_per_token(config, length):
    """Floating-point operations of one training step (forward and backward) per token.

    Counts matrix products alone: 2 per multiply-add forward and twice that backward; exact causal attention over rows
    of mean squared length / mean length = `length`; the tied head once, the embedding look-up free.
    """
    h, L, D = config.hidden_size, config.num_hidden_layers, config.head_dim
    H, KV = config.num_attention_heads, config.num_key_value_heads
    if config.use_moe:
        width = config.moe_intermediate_size
        mlp = 3 * h * width * (config.num_experts_per_tok + config.n_shared_experts) + h * config.num_experts
    else:
        mlp = 3 * h * config.intermediate_size
    weights = L * (2 * h * H * D + 2 * h * KV * D + mlp) + config.vocab_size * h
    return 6 * weights + 6 * L * length * H * D


def describe(run, corpus, dtype, precision_notice):
    """Print what the run derives from its flags, once, before it starts."""
    args, ranks, config, say = run.args, run.ranks, run.engine.model.config, run.reporter.say
    rows = run.plan(run.progress.epoch)
    schedule = UpdateSchedule(rows.n_rows, args.batch_size, args.accumulation_steps, ranks.world_size)
    parameters = sum(p.numel() for p in run.engine.model.parameters())
    for line in [
        *corpus.mixture_report(run.progress.epoch),
        *(line for bad in corpus.bad_lines for line in bad.report()),
    ]:
        say(line)
    if precision_notice:
        say(precision_notice)
    say(
        f"model: {config.generation}, {parameters / 1e6:.2f} M parameters, {config.num_hidden_layers} layers of width "
        f"{config.hidden_size}, {flops_per_token(config, args.max_seq_len) / 1e6:.1f} MFLOP per token (full rows)"
    )
    say(
        f"data: {len(corpus.store):,} documents, {rows.row_targets(0, rows.n_rows):,} tokens to train in "
        f"{rows.n_rows:,} rows of {rows.T} ({rows.fill:.1%} full)"
    )
    say(
        f"run: {schedule.n_updates * args.epochs:,} updates in {args.epochs} epochs, {schedule.rows_per_update} rows "
        f"= {schedule.rows_per_update * rows.T:,} tokens each ({args.batch_size} x {args.accumulation_steps} micro-batches "
        f"x {ranks.world_size} ranks), {run.engine.device}, {str(dtype).removeprefix('torch.')}"
    )

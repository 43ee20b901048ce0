"""What a run says to its user beside its figures: settings that cannot do what they are there for, a loss that goes wrong,
what to do with the finished run. All of it is made of values; nothing here looks into a job or a trainer.

A job calls this once when it is built (Job.outlook). Then the Trainer shows each log line to the CurveWatch that it was given.
"""

import math
import re
import shlex
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.paths import ROOT
from common.settings import Settings, default_of
from common.wording import counted
from trainer.budget import laws
from trainer.budget.plan import closest_cut, free_cuts
from trainer.machine.out_of_memory import gigabytes, plain_advice
from trainer.machine.ranks import Ranks
from trainer.machine.settings import NONE
from trainer.pretrain.settings import PretrainSettings

# A run of fewer tokens learns little whatever its settings are.
WORTH_A_NOTICE = 1e5
# How many times larger or smaller than suits a setting may be before something is said.
FAR_OFF = 4.0
# Positions of a micro-batch that keep a GPU busy while the host launches the next operations
ENOUGH_POSITIONS = 32_768

# Before the rate falls, a loss is higher than that of a run that ends there, by this part of it: by 0.02 in eight runs of three
# minutes (docs/experiments.md), and by about 0.1 in one of two hours.
PREMIUM_OF_FULL_RATE = 0.06
# The first steps of a run have no expected loss.
FEWEST_TOKENS = 3e5
# How far above the expected loss a run may be, and how many log lines in a row, before something is said. Guesses: the expected loss
# of another text may be wrong by 10 % (LOSS_ERROR_ELSEWHERE in laws.py), which is no reason for a warning.
FAR_ABOVE = 1.3
LINES_IN_A_ROW = 10
# Above the lowest loss of the lines before, what counts as a spike, and how many lines it may last: guesses.
SPIKE = 1.2
LINES_OF_A_SPIKE = 20
# Log lines that are averaged: a line of a few rows jumps up and down by itself.
SMOOTHED = 5


# ---------------------------------------------------------------------------------------- while a run goes on


@dataclass(frozen=True)
class Forecast:
    """The curve of a run that goes well. unique: as of laws.effective_tokens. T: positions of a row. text_scale: see
    trainer/budget/laws.py."""

    parameters: float
    depth: laws.Depth
    unique: float | Sequence[laws.Part]
    T: int
    text_scale: float
    muon: bool = True

    def loss(self, tokens: float, rate_factor: float) -> float | None:
        """The training loss after so many tokens, while the rate is `rate_factor` of the full one; None: not known."""
        passes = tokens / laws.different_tokens(self.unique)
        if tokens < FEWEST_TOKENS or laws.is_repeated_too_often(passes):
            return None
        scale = self.text_scale * laws.row_scale(self.T)
        at_the_end = laws.expected_loss(self.parameters, self.depth, tokens, self.unique, scale, self.muon)
        return at_the_end * (1 + PREMIUM_OF_FULL_RATE * min(rate_factor, 1.0))


class CurveWatch:
    """Says once when a run's loss leaves the expected curve, and once for each rise that does not heal."""

    def __init__(
        self, forecast: Forecast | None = None, full_rate: float = 1.0, rates: Sequence[str] = ("learning_rate",)
    ) -> None:
        """forecast: None: nothing is known of such a run. full_rate: the learning rate before its fall. rates: the settings that hold
        the learning rates of the run."""
        self.forecast = forecast
        self.full_rate = full_rate
        self.rates = ", ".join(f"--{name}" for name in rates)
        self.last: deque[float] = deque(maxlen=SMOOTHED)
        self.lowest = math.inf
        self.lines_above = 0
        self.lines_of_spike = 0
        self.has_said_above = False

    def expected_loss(self, tokens: int, rate: float) -> float | None:
        """The training loss of a run that goes well, after so many tokens and at this learning rate; None: not known."""
        return None if self.forecast is None else self.forecast.loss(tokens, rate / self.full_rate)

    def of_line(self, loss: float, expected: float | None) -> str | None:
        """What to say of the loss of a log line; None: nothing. expected: of expected_loss."""
        if not math.isfinite(loss):
            return None
        self.last.append(loss)
        if len(self.last) < SMOOTHED:
            return None
        smooth = sum(self.last) / len(self.last)
        self.lowest = min(self.lowest, smooth)

        self.lines_of_spike = self.lines_of_spike + 1 if smooth > SPIKE * self.lowest else 0
        if self.lines_of_spike == LINES_OF_A_SPIKE:
            before = self.lowest
            # From here on it is compared with what it is now: a second rise is said again.
            self.lowest = smooth
            self.lines_of_spike = 0
            return (
                f"warning: the loss rose from {before:.2f} to {smooth:.2f} and does not come down again: stop (Ctrl-C) and "
                f"start again with half of the rates ({self.rates}), or look at the data there"
            )

        is_above = expected is not None and smooth > FAR_ABOVE * expected
        self.lines_above = self.lines_above + 1 if is_above else 0
        if self.lines_above < LINES_IN_A_ROW or self.has_said_above:
            return None
        self.has_said_above = True
        return (
            f"warning: the loss is {smooth:.2f}, and runs of this size reach {expected:.2f} by now: other rates "
            f"({self.rates}) or a smaller batch may mend it; so may a look at the data (encoding, order, "
            "a tokenizer of another language)"
        )


# ------------------------------------------------------------------------------------------ before a run

# (name of the setting, whether the line is due, why the setting has no effect)
Case = tuple[str, bool, str]


def warnings_of(settings: Any, cases: Iterable[Case]) -> list[str]:
    """A line for each case that is due."""
    lines = []
    for name, is_due, why in cases:
        if is_due:
            lines.append(f"warning: --{name} {getattr(settings, name)} has no effect: {why}")
    return lines


def is_changed(settings: Settings, name: str) -> bool:
    """Whether a setting is not its default."""
    return getattr(settings, name) != default_of(type(settings), name)


def common_warnings(settings: Any, ranks: Ranks) -> list[str]:
    """The lines on the settings that all trainers share."""
    # Fine-tuning has no Muon.
    without_muon = hasattr(settings, "muon_lr") and settings.optimizer != "muon"
    optimizer = f"--optimizer is {settings.optimizer}" if without_muon else ""
    on_one_of_several = ranks.world_size > 1 and ":" in (settings.device or "")
    has_no_project = settings.tracker == "none"
    of_one = settings.shard != NONE and ranks.world_size == 1
    cases = [
        ("shard", of_one, "there is one process"),
        ("muon_lr", without_muon and is_changed(settings, "muon_lr"), optimizer),
        ("embed_lr", without_muon and is_changed(settings, "embed_lr"), optimizer),
        ("device", on_one_of_several, "each rank takes the device of its local rank"),
        ("wandb_project", has_no_project and is_changed(settings, "wandb_project"), f"--tracker is {settings.tracker}"),
    ]
    return warnings_of(settings, cases)


@dataclass(frozen=True)
class SizeOfRun:
    """What decides which settings suit a pretraining run.

    tokens: of the run. rows, row_tokens: rows of an update, tokens that each trains. micro_batches: of a rank in the whole run.
    T: positions of a row. memory, free: bytes that a micro-batch needs, about, and that are free; None: not known.
    """

    parameters: int
    tokens: float
    rows: int
    row_tokens: float
    T: int
    micro_batches: int
    ranks: Ranks
    device_type: str
    has_validation: bool = True
    memory: float = 0.0
    free: float | None = None


def pretraining_notices(settings: PretrainSettings, run: SizeOfRun) -> list[str]:
    """Lines on what a user may want to change. settings: as the user has said them."""
    from_file = settings.from_weight != "none"
    other_rank = settings.local_rank not in (-1, run.ranks.local_rank)
    # A plan has chosen some of the settings, which nobody has given.
    is_planned = settings.has_budget
    without_fall = not is_planned and settings.lr_schedule != "wsd"
    by_updates = not is_planned and settings.max_updates > 0
    by_rows = settings.rows_per_update > 0
    no_validation = not run.has_validation
    cases = [
        ("local_rank", other_rank, "torchrun's environment decides, or there is none"),
        ("init_scheme", settings.init_scheme != "default" and from_file, "the weights come from a file"),
        ("eval_interval", is_changed(settings, "eval_interval") and no_validation, "no validation data"),
        ("allow_val_overlap", settings.allow_val_overlap and not settings.val_path, "no --val_path"),
        (
            "decay_share",
            without_fall and is_changed(settings, "decay_share"),
            f"--lr_schedule is {settings.lr_schedule}",
        ),
        ("epochs", by_updates and is_changed(settings, "epochs"), "--max_updates says when the run ends"),
        ("accumulation_steps", by_rows and is_changed(settings, "accumulation_steps"), "--rows_per_update is given"),
    ]
    lines = warnings_of(settings, cases) + common_warnings(settings, run.ranks)
    if settings.warmup_iters >= run.micro_batches:
        length = counted(run.micro_batches, "micro-batch", "micro-batches")
        lines.append(f"warning: --warmup_iters {settings.warmup_iters}: the run has {length}, so its rate only rises")
    if run.free is not None and run.memory > run.free:
        shorter = plain_advice(settings, "a smaller --max_seq_len or model")
        lines.append(
            f"warning: such micro-batches need about {gigabytes(run.memory)}, and {gigabytes(run.free)} are free on "
            f"{run.device_type}: if memory runs out, {shorter}"
        )
    if run.tokens < WORTH_A_NOTICE:
        return lines
    is_small = 0 < settings.batch_size * run.T < ENOUGH_POSITIONS and settings.accumulation_steps > 1
    # A budget has been planned with its micro-batches, and a resume keeps those that it has.
    has_its_rows = is_planned or settings.from_resume or by_rows
    if run.device_type == "cuda" and is_small and not has_its_rows:
        lines.append(
            f"note: between micro-batches as small as {settings.batch_size} x {run.T} positions a GPU waits for the host: "
            "--batch_size auto trains the updates of 32 rows x --accumulation_steps in as few micro-batches as fit"
        )
    if not from_file and not settings.use_moe:
        lines += unsuitable_batch(settings, run) + unsuitable_rate(settings, run)
    return lines


def unsuitable_batch(settings: PretrainSettings, run: SizeOfRun) -> list[str]:
    """A line where the updates are far larger or smaller than suits so many tokens."""
    now = run.rows * run.row_tokens
    good = laws.batch_tokens(run.tokens)
    if 1 / FAR_OFF <= now / good <= FAR_OFF:
        return []
    ranks = run.ranks
    cut = closest_cut(good / run.row_tokens, free_cuts(ranks.world_size, ranks.sharing, run.device_type))
    if cut.rows == run.rows:
        # The largest or smallest that there is.
        return []
    updates = max(1, round(run.tokens / now))
    flags = f"--batch_size {cut.batch_size} --accumulation_steps {cut.accumulation_steps}"
    rows_of_rank = cut.batch_size * cut.accumulation_steps
    usual = settings.usual_rows()
    if run.device_type == "cuda" and rows_of_rank % usual == 0:
        # How many of them the memory holds at once is not looked up here.
        flags = f"--batch_size auto --accumulation_steps {rows_of_rank // usual}"
    if settings.rows_per_update:
        flags = f"--rows_per_update {cut.rows}"
    return [
        f"note: this run has {counted(updates, 'update')} of {now:,.0f} tokens. Runs of {run.tokens:,.0f} tokens learn most "
        f"with updates of about {good:,.0f}: {flags}; --budget 10m chooses "
        "everything for the time that you have"
    ]


def unsuitable_rate(settings: PretrainSettings, run: SizeOfRun) -> list[str]:
    """A line for each learning rate that is far from what suits."""
    suitable = {"learning_rate": laws.adamw_rate(run.parameters, run.tokens)}
    if settings.optimizer == "muon":
        suitable = {"learning_rate": laws.SIDE_RATE, "muon_lr": laws.MUON_RATE}
        if settings.embed_lr:
            suitable["embed_lr"] = laws.EMBED_RATE
    lines = []
    for name, good in suitable.items():
        rate = getattr(settings, name)
        if not 1 / FAR_OFF <= rate / good <= FAR_OFF:
            lines.append(f"note: --{name} {rate:g}: runs of this size learn most with about {good:.2g}")
    return lines


def note_on_expected(parameters: float, tokens: float) -> str:
    """What `expected` in the log lines is, said before the first of them. tokens: of the run."""
    error = laws.LOSS_ERROR_OF_SMALL if min(parameters, tokens) < laws.SMALL else laws.LOSS_ERROR_ELSEWHERE
    return (
        f"`expected` in the lines below: the training loss that runs of this size reach by then if they go well, by a formula that may be "
        f"{error:.0%} off (docs/budget.md)"
    )


# ------------------------------------------------------------------------------------- what to do with a finished run


class NextCommand(NamedTuple):
    """A command for a finished run, and what it is for.

    In the command {top} stands for the folder of the repository as a prefix, {stem} for the path of the run's files without
    their endings, and {folder} for the folder that they are in.
    """

    purpose: str
    command: str


def filled(commands: Iterable[NextCommand], started: str, stem: Path) -> list[NextCommand]:
    """The commands that work in the current folder; first the one that goes on with the run. started: the command of its start."""
    top = "" if Path.cwd() == ROOT else f"{ROOT}/"
    places = {"{top}": top, "{stem}": str(stem), "{folder}": str(stem.parent)}

    def fill(word: re.Match[str]) -> str:
        text = word[0]
        for place, value in places.items():
            text = text.replace(place, value)
        # A path may have blanks in it.
        return word[0] if text == word[0] else shlex.quote(text)

    # The flag may stand there with a value, with `=`, or alone.
    again = re.sub(r" --from_resume(=\S+|( (?!-)\S+))?(?= |$)", "", started)
    own = [NextCommand(purpose, re.sub(r"\S+", fill, command)) for purpose, command in commands]
    return [NextCommand("train on, after a stop or for longer", f"{again} --from_resume 1"), *own]

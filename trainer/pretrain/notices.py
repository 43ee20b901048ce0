"""Lines on settings of train_pretrain.py that cannot do what they are there for."""

from dataclasses import dataclass

from common.wording import counted
from dataset.corpus import Corpus
from trainer.budget import laws
from trainer.budget.plan import closest_cut, free_cuts
from trainer.machine.ranks import Ranks
from trainer.pretrain.settings import PretrainSettings
from trainer.without_effect import common_warnings, is_changed, warnings_of

# A run of fewer tokens learns little whatever its settings are.
WORTH_A_NOTICE = 1e5
# How many times larger or smaller than suits a setting may be before something is said.
FAR_OFF = 4.0


def notices(
    settings: PretrainSettings, ranks: Ranks, corpus: Corpus, micro_batches: int, run: "SizeOfRun"
) -> list[str]:
    """settings: as the user has said them. micro_batches: of a rank in the whole run, as these count them."""
    from_file = settings.from_weight != "none"
    has_no_validation = not corpus.val_store
    other_rank = settings.local_rank not in (-1, ranks.local_rank)
    # A plan has chosen some of the settings, which nobody has given.
    without_fall = not settings.has_budget and settings.lr_schedule != "wsd"
    by_updates = not settings.has_budget and settings.max_updates > 0
    by_rows = settings.rows_per_update > 0
    cases = [
        ("local_rank", other_rank, "torchrun's environment decides, or there is none"),
        ("init_scheme", settings.init_scheme != "default" and from_file, "the weights come from a file"),
        ("eval_interval", is_changed(settings, "eval_interval") and has_no_validation, "no validation data"),
        ("allow_val_overlap", settings.allow_val_overlap and not settings.val_path, "no --val_path"),
        (
            "decay_share",
            without_fall and is_changed(settings, "decay_share"),
            f"--lr_schedule is {settings.lr_schedule}",
        ),
        ("epochs", by_updates and is_changed(settings, "epochs"), "--max_updates says when the run ends"),
        ("accumulation_steps", by_rows and is_changed(settings, "accumulation_steps"), "--rows_per_update is given"),
    ]
    lines = warnings_of(settings, cases) + common_warnings(settings, ranks)
    if settings.warmup_iters >= micro_batches:
        length = counted(micro_batches, "micro-batch", "micro-batches")
        lines.append(f"warning: --warmup_iters {settings.warmup_iters}: the run has {length}, so its rate only rises")
    if run.tokens >= WORTH_A_NOTICE and settings.from_weight == "none" and not settings.use_moe:
        lines += unsuitable_batch(settings, run) + unsuitable_rate(settings, run)
    return lines


@dataclass(frozen=True)
class SizeOfRun:
    """What decides which batch and rates suit. rows: of an update; row_tokens: that each trains."""

    parameters: int
    tokens: float
    rows: int
    row_tokens: float
    ranks: Ranks
    device_type: str


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

"""From a budget to the settings of a run: what --budget, --budget_tokens and --budget_flops do.

plan_run               the settings of the run, on all ranks
  tokenizers_of_text   trained on the text (vocabulary.py)
  plan_on_main         on rank 0 alone:
    measure_machine    FLOP/s of products; what no size decides, such as the optimiser
    best_entries       the best size of tokenizer (vocabulary.py)
    count_text         the amount of text, and its difficulty (costs.py, difficulty.py)
    RunCosts           the costs of each size, estimated and measured (costs.py)
    sizes              the models to try
    with_best_rows     rows of 512 positions, or of 1,024
    with_best_head     a sampled head, or the whole one
    choose             the best of all plans, of a width that was timed here (timing.py)
      best_plan        the plan with the lowest expected loss
        plan_for       the plan of one size
    chosen_settings    the plan as settings (plan.py)
"""

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError, user_errors
from common.processes import seconds_since_start
from common.wording import announce, counted
from model.config import ModelConfig, parameter_count
from trainer.batching import Batching
from trainer.budget import laws
from trainer.budget.costs import Machine, RunCosts, Timed, count_text, head_ids_for
from trainer.budget.plan import (
    BudgetPlan,
    chosen_settings,
    duration_text,
    plan_lines,
    quantity,
    settings_to_resume,
    shape_text,
)
from trainer.budget.timing import Timing, timing_of
from trainer.budget.vocabulary import best_entries, knows_held_out, tokenizers_of_text
from trainer.job import RunContext
from trainer.machine.compiling import PRODUCT_RATE
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import describe_machine, product_rate
from trainer.machine.ranks import on_main, wait_for_all_ranks
from trainer.pretrain.data import DOCUMENTS, TextKind
from trainer.pretrain.initial_model import check_length, settings_of_folder
from trainer.pretrain.memory import MAX_MICRO_ROWS, refuse_too_large
from trainer.pretrain.settings import MODEL_FLAGS, PretrainSettings

# Maximum share of the free memory
MEMORY_SHARE = 0.8
# Budgets of so many seconds find faults of a CPU by --verify_every; one update of 100 twice is 1 % of the time. On a GPU some kernels
# do not give the same bits twice, and its cost is not measured.
SECONDS_TO_VERIFY = 3600.0
VERIFY_EVERY = 100
# Share of the budget after which no further width is timed
TIMING_SHARE = 0.03
# Longer rows are taken below this ratio of expected losses. Half of the gain is only that validation has longer rows too: with
# sliding windows for both, 1.8 % become 0.9 %.
WORTH_LONG_ROWS = 0.99
# Ratio of the loss with `--sampled_softmax` to that of the whole head after the same tokens. One pair of runs each: 1.012 for 224 x 4
# (32 M tokens), 1.004 and 1.017 for 384 x 4 (eight passes over a megabyte, 6,400 and 1,024 entries); seeds differ by 0.5 %. The law
# of the loss, fitted to runs of both kinds, does not know it.
COST_OF_SAMPLED_HEAD = 1.012
# Rows of an update of long rows, relative to the best size of updates
MAX_BATCH_RATIO = 1.7
# Minimum `mean_context`, as a share of a row of 512, to try longer ones
LONG_DOCUMENTS = 0.8
# Candidate rows of an update; even, so that two processes can share them.
ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Candidate micro-batches of an update if the user gives their rows
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# A run of fewer updates is not worth a plan.
MIN_UPDATES = 20
# Rounds of a fixed-point iteration: the tokens decide the batch size, and that decides a little how many tokens the time buys. Of
# 2,048 plans 1,922 settled within two rounds, 124 within three and one within four. One oscillated between two neighbouring batch
# sizes, either of which will do.
ROUNDS = 4


def plan_run(
    settings: PretrainSettings, run_context: RunContext, free: float | None, kind: TextKind = DOCUMENTS
) -> PretrainSettings:
    """The settings with all open ones chosen, and shown.

    free: bytes of memory for a rank; None: unknown. kind: of the text. A collective. Errors: UserError, DataError.
    """
    ranks = run_context.ranks
    refuse_contradictions(settings)
    told: Any = on_main(ranks, partial(settings_to_resume, settings, ranks)) if settings.from_resume else None
    if told is None:
        on_main(ranks, partial(announce, "planning: measuring this machine and counting the text"))
        memory = None if free is None else MEMORY_SHARE * free
        tokenizers = tokenizers_of_text(settings, ranks, kind, memory)
        planning = plan_on_main(settings, run_context, kind, memory, tokenizers)
        timed = None
        # Rank 0 plans until it wants updates to be timed, and until it has a plan.
        while isinstance(told := on_main(ranks, partial(planning.send, timed)), Timing):
            timed = told.run(ranks, run_context.device)
    with wait_for_all_ranks(ranks), user_errors():
        # Each rank keeps its own settings otherwise: paths may differ between machines.
        return dataclasses.replace(settings, **told)


def plan_on_main(
    settings: PretrainSettings, run_context: RunContext, kind: TextKind, memory: float | None, tokenizers: Path | None
) -> Generator[Timing | dict[str, Any], Any, None]:
    """Yields what all ranks are to time, and at last {name: planned value} of the settings. memory: bytes that a rank may take.

    tokenizers: of `tokenizers_of_text`. Errors: UserError, DataError.
    """
    ranks, device = run_context.ranks, run_context.device
    settings, config = settings_of_folder(settings)
    settings, machine = measure_machine(settings, run_context, memory)
    own = settings
    if tokenizers:
        entries = best_entries(tokenizers, settings, machine, lambda n: sizes(fixed_fields(settings, n)))
        own = dataclasses.replace(settings, tokenizer_path=str(tokenizers / str(entries))) if entries else settings
    text = count_text(own, kind)
    if tokenizers and own is not settings and knows_held_out(text.corpus, tokenizers):
        own, text = settings, count_text(settings, kind)
    costs = RunCosts(own, text, machine, head_ids_for(own, text, device.type))
    costs.compiled = costs.is_worth_compiling(costs.measured.least_to_compile())
    candidates = sizes(fixed_fields(own, text.vocab_size)) if config is None else [config]
    # Not the fault of the budget: rows too long for any model, and a model too large for the machine.
    check_length(text.rows.T, candidates[0])
    refuse_too_large(candidates[0], device, ranks)
    costs = with_best_head(candidates, with_best_rows(candidates, costs, kind))
    plan = yield from choose(candidates, costs)
    text = costs.text
    # One pass is the longest run of such a text, see dataset/mixture.py.
    if text.corpus.is_one_plan and plan.tokens > text.rows.n_pairs:
        times = math.ceil(plan.tokens / text.rows.n_pairs)
        raise UserError(
            f"--data_path: the plan takes {quantity(plan.tokens)} tokens, and with these shares the sources have "
            f"{quantity(text.rows.n_pairs)}: allow {times} times as many passes (x{times} after each share, repeat: {times} in a "
            "--mixture file, where there is one now), or give a smaller budget"
        )
    chosen = chosen_settings(plan, costs)
    for line in plan_lines(plan, costs, dataclasses.replace(own, **chosen), chosen):
        announce(line)
    yield chosen


def fixed_fields(settings: PretrainSettings, vocab_size: int) -> dict[str, Any]:
    """Fields of the config that the user sets, or the text."""
    shape = {name: getattr(settings, name) for name in MODEL_FLAGS if name in settings.fixed}
    return {"vocab_size": vocab_size, "dropout": settings.dropout, **shape}


def refuse_contradictions(settings: PretrainSettings) -> None:
    """Errors: UserError for a flag that contradicts a budget."""
    fixed = settings.fixed
    for name in settings.length_flags:
        raise UserError(
            f"--{name} and a budget both say when the run ends: drop one (a --config file counts too: delete its line)"
        )
    if settings.budget and "lr_schedule" in fixed and settings.lr_schedule != "wsd":
        raise UserError(
            f"--lr_schedule {settings.lr_schedule}: only wsd can be ended by a clock; drop the flag, or plan by "
            "--budget_tokens"
        )
    if settings.optimizer not in laws.MEASURED_OPTIMIZERS and "learning_rate" not in fixed:
        raise UserError(
            f"--optimizer {settings.optimizer} with a budget: add --learning_rate, since plans have rates for "
            f"{' and '.join(laws.MEASURED_OPTIMIZERS)}"
        )
    if settings.from_weight != "none" and "learning_rate" not in fixed:
        raise UserError(
            "--from_weight with a budget: add --learning_rate, since the rates of a plan are for fresh weights (2e-5 is "
            "usual for public weights)"
        )


def measure_machine(
    settings: PretrainSettings, run_context: RunContext, memory: float | None
) -> tuple[PretrainSettings, Machine]:
    """Chooses what the user leaves open and no size decides: Muon; in a long run on a CPU --verify_every."""
    ranks, device = run_context.ranks, run_context.device
    seconds = settings.budget_seconds or 0.0
    chosen: dict[str, Any] = {"optimizer": "muon"}
    if seconds >= SECONDS_TO_VERIFY and device.type == "cpu":
        chosen["verify_every"] = VERIFY_EVERY
    dtype, _ = pick_dtype(settings.dtype, device)
    # AMX multiplies faster than this, but the rest of an update takes as long as without it.
    limit = PRODUCT_RATE["cpu"] * torch.get_num_threads() if device.type == "cpu" else math.inf
    rate = min(product_rate(device, dtype), limit)
    chosen = {name: value for name, value in chosen.items() if name not in settings.fixed}
    facts = describe_machine(device, ranks.world_size)
    name = f"{facts}, {torch.backends.cpu.get_cpu_capability()}, {dtype}, torch {torch.__version__}"
    machine = Machine(rate * ranks.world_size, memory, device.type, dtype, ranks, name)
    return dataclasses.replace(settings, **chosen), machine


def sizes(fields: Mapping[str, Any]) -> list[ModelConfig]:
    """The models to try: widths, each with the numbers of layers that suit some number of tokens.

    fields: fixed fields of their configs, the vocabulary size among them. Errors: ValueError where no model has such fields.
    """
    found = []
    for width in [fields["hidden_size"]] if "hidden_size" in fields else laws.widths_for(fields["vocab_size"]):
        heads = fields.get("num_attention_heads", laws.heads_for(width))
        # From what suits the shortest runs to what suits the longest, in steps of a tenth or less
        (fewest, _), (_, most) = laws.layers_for(width, 0), laws.layers_for(width, math.inf)
        numbers_of_layers: Sequence[int] = range(fewest, most + 1, max(1, fewest // 10))
        for layers in [fields["num_hidden_layers"]] if "num_hidden_layers" in fields else numbers_of_layers:
            shape = {
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "num_key_value_heads": laws.kv_heads_for(heads),
            }
            try:
                found.append(ModelConfig(**{**shape, **fields}))
            except ValueError:
                # The fields do not fit this width, such as heads that do not divide it.
                if "hidden_size" in fields:
                    raise
    if not found:
        raise ValueError("no planned width fits these numbers of heads: give --hidden_size too")
    return found


def with_best_rows(candidates: Sequence[ModelConfig], costs: RunCosts, kind: TextKind) -> RunCosts:
    """The costs with rows of LONG_ROW positions, if the user leaves it open and WORTH_LONG_ROWS is met; else unchanged.

    In longer rows a token sees more of its document, and costs more.
    """
    settings, text = costs.settings, costs.text
    is_fixed = {"max_seq_len", "pack"} & costs.fixed or kind is not DOCUMENTS or settings.from_weight != "none"
    # Eager attention computes the scores of all pairs in a row, so runs that are not compiled keep short rows.
    is_eager = settings.use_compile == "0" or (costs.seconds is not None and not costs.compiled)
    if is_fixed or is_eager or text.context < LONG_DOCUMENTS * text.rows.T:
        return costs
    settings = dataclasses.replace(settings, max_seq_len=laws.LONG_ROW)
    long_text = count_text(settings, kind, text.difficulty)
    head_ids = head_ids_for(settings, long_text, costs.machine.device)
    longer = dataclasses.replace(costs, settings=settings, text=long_text, head_ids=head_ids)
    try:
        plan, long_plan = best_plan(candidates, costs), best_plan(candidates, longer)
    except UserError:
        # The plan itself reports what is too little.
        return costs
    # With many ranks, a row each may be too many.
    most = MAX_BATCH_RATIO * laws.batch_tokens(long_plan.tokens)
    is_worth_it = long_plan.batching.rows * long_text.rows.T <= most and long_plan.loss < WORTH_LONG_ROWS * plan.loss
    return longer if is_worth_it else costs


def with_best_head(candidates: Sequence[ModelConfig], costs: RunCosts) -> RunCosts:
    """The costs with the whole head, if a sampled one does not buy COST_OF_SAMPLED_HEAD; else unchanged.

    A sampled head buys more tokens or a larger model. Where the text ends the run before the budget does, it only costs loss. Decided
    by the estimated speed: only sizes are compared again when they have been timed.
    """
    # With a budget of tokens the whole head always wins, by time that such a budget does not count.
    if not costs.head_ids or "sampled_softmax" in costs.fixed or costs.settings.budget_tokens is not None:
        return costs
    whole = dataclasses.replace(costs, head_ids=0)
    try:
        is_better = best_plan(candidates, whole).loss <= COST_OF_SAMPLED_HEAD * best_plan(candidates, costs).loss
    except UserError:
        # Too small a budget for the whole head, or for any: `choose` tells.
        return costs
    return whole if is_better else costs


def choose(candidates: Sequence[ModelConfig], costs: RunCosts) -> Generator[Timing, Timed, BudgetPlan]:
    """Returns the best plan; with a budget of time, of a width that was timed here, as long as there is time for that.

    Widths are timed without compiling. Then the code of the run is compiled and timed, if that pays off. A plan that is only shown
    compiles nothing, and times widths only if none was timed before. Yields what to time. Errors: UserError where nothing can be trained.
    """
    if costs.seconds is None:
        return best_plan(candidates, costs)
    # Another program may have disturbed what was timed before: good enough to show a plan, not to run one.
    if costs.settings.dry_run:
        costs.recall(candidates)
    plan = best_plan(candidates, costs)
    end = 0.0 if costs.corrections else seconds_since_start() + TIMING_SHARE * costs.seconds
    while plan.config.hidden_size not in costs.corrections and (not costs.corrections or seconds_since_start() < end):
        announce(f"planning: timing {shape_text(plan)}")
        timed = yield timing_of(plan, costs, compiled=False)
        costs.learn(plan.config, plan.batching, timed, compiled=False)
        plan = best_plan(candidates, costs)
    if costs.compiled:
        to_compile = costs.compile_seconds(plan.config, plan.batching)
        costs.compiled = costs.is_worth_compiling(to_compile)
        if costs.compiled and not costs.settings.dry_run:
            announce(f"planning: compiling {shape_text(plan)}, in about {duration_text(to_compile)}")
            timed = yield timing_of(plan, costs, compiled=True)
            costs.learn(plan.config, plan.batching, timed, compiled=True)
        elif costs.settings.dry_run:
            # What was timed may have been compiled code.
            costs.corrections.clear()
            costs.recall(candidates)
        # With this code, or as plain code after all
        plan = best_plan(candidates, costs)
    return plan


def best_plan(sizes: Sequence[ModelConfig], costs: RunCosts) -> BudgetPlan:
    """The plan with the lowest expected loss, of those whose depth suits their tokens.

    Errors: UserError that says what is too little.
    """
    plans = [plan for config in sizes if (plan := plan_for(config, costs)) is not None]
    if not plans:
        raise UserError(what_is_too_little(sizes, costs))
    # The law of the loss does not cover models that are larger for their text than the measured ones: they may overfit. A budget of
    # tokens needs a limit too: by loss alone the largest model would win, and would train for weeks.
    most = laws.MAX_PARAMETERS_PER_TOKEN * costs.text.unique
    if costs.settings.budget_tokens is not None:
        most = min(most, costs.settings.budget_tokens / laws.MIN_TOKENS_PER_PARAMETER)
    small_enough = [plan for plan in plans if plan.parameters <= most]
    suitable = [plan for plan in with_suitable_depth(plans) if plan.parameters <= most]
    # A width given by the user may leave only models with fewer layers, or none.
    suitable = suitable or with_suitable_depth(small_enough) or [min(plans, key=lambda plan: plan.parameters)]
    return min(suitable, key=lambda plan: plan.loss)


def with_suitable_depth(plans: Sequence[BudgetPlan]) -> list[BudgetPlan]:
    """The plans of each width whose numbers of layers suit their tokens; if none does, those that come nearest.

    More layers leave time for fewer tokens, and fewer tokens need fewer layers: so all numbers of layers are planned.
    """

    def mismatch(plan: BudgetPlan) -> float:
        """Factor by which it has too few or too many layers; 1: neither."""
        layers = plan.config.num_hidden_layers
        fewest, most = laws.layers_for(plan.config.hidden_size, plan.tokens)
        return max(fewest / layers, layers / most, 1.0)

    least_of_width: dict[int, float] = {}
    for plan in plans:
        width = plan.config.hidden_size
        least_of_width[width] = min(mismatch(plan), least_of_width.get(width, math.inf))
    return [plan for plan in plans if mismatch(plan) == least_of_width[plan.config.hidden_size]]


def plan_for(config: ModelConfig, costs: RunCosts) -> BudgetPlan | None:
    """The plan for one size; None if the budget buys too few updates, or the memory has no room for a row."""
    text = costs.text
    choices = batchings(config, costs)
    if not choices:
        return None
    batching = choices[0]
    for _ in range(ROUNDS):
        tokens = affordable_tokens(config, batching, costs)
        best_rows = laws.batch_tokens(max(tokens, 1)) / (text.rows.T * text.rows.fill)
        # The nearest one by ratio
        batching = min(choices, key=lambda choice: abs(math.log(choice.rows / best_rows)))
    tokens = affordable_tokens(config, batching, costs)
    updates = int(tokens / text.tokens_of_update(batching.rows))
    if updates < MIN_UPDATES:
        return None
    tokens = updates * text.tokens_of_update(batching.rows)
    seconds = updates * costs.update_seconds(config, batching.rows)
    return BudgetPlan(
        config=config,
        parameters=parameter_count(config),
        batching=batching,
        updates=updates,
        tokens=tokens,
        passes=tokens / text.unique,
        seconds=seconds,
        other_seconds=costs.other_seconds(config, batching, seconds),
        flops=tokens * costs.token_flops(config),
        memory=costs.memory(config, batching),
        loss=laws.expected_loss(
            config,
            tokens,
            text.parts,
            text.difficulty,
            costs.settings.optimizer,
            costs.init_scheme(config),
            text.context,
        ),
    )


def batchings(config: ModelConfig, costs: RunCosts) -> list[Batching]:
    """Candidates of how to cut an update, with what the user gives kept, in the largest micro-batches that fit the memory."""
    settings, machine = costs.settings, costs.machine
    ranks = machine.ranks
    steps = (settings.accumulation_steps,) if "accumulation_steps" in costs.fixed else STEPS
    # fewer rows if they are longer, for as many positions
    times_as_long = math.ceil(costs.text.rows.T / laws.USUAL_ROW)
    most = max(1, MAX_MICRO_ROWS[machine.device] // times_as_long)
    # (rows of a micro-batch on one rank, micro-batches)
    if "batch_size" in costs.fixed:
        candidates = [(math.ceil(settings.batch_size * ranks.batches_at_once / ranks.world_size), n) for n in steps]
    elif "accumulation_steps" in costs.fixed:
        candidates = [(rows, settings.accumulation_steps) for rows in (1, *ROWS) if rows <= most]
    else:
        # rows of the whole update if the ranks can share them, else of each rank
        of_ranks = [rows // ranks.world_size for rows in ROWS if rows % ranks.world_size == 0] or [1, *ROWS]
        candidates = [
            (micro_rows, rows // micro_rows)
            for rows in of_ranks
            for micro_rows in range(min(rows, most), 0, -1)
            if rows % micro_rows == 0
        ]
    largest: dict[int, Batching] = {}
    for micro_rows, n in candidates:
        rows_at_once = micro_rows * ranks.world_size
        batching = Batching(ranks, n * rows_at_once, micro_rows, flag_rows=rows_at_once // ranks.batches_at_once)
        # Larger micro-batches come first.
        if batching.rows in largest:
            continue
        fits = machine.memory is None or costs.memory(config, batching) <= machine.memory
        # Nothing is compiled twice.
        is_compiled = not costs.compiled_key or costs.compile_key(config, batching) == costs.compiled_key
        if fits and is_compiled:
            largest[batching.rows] = batching
    return list(largest.values())


def affordable_tokens(config: ModelConfig, batching: Batching, costs: RunCosts) -> float:
    """Tokens that the budget buys with such updates, those of time or FLOP up to the maximum number of passes."""
    settings = costs.settings
    if settings.budget_tokens is not None:
        return settings.budget_tokens
    most = costs.max_passes * costs.text.unique
    if settings.budget_flops is not None:
        return min(settings.budget_flops / costs.token_flops(config), most)
    seconds = costs.seconds_left
    assert seconds is not None
    without_updates = costs.other_seconds(config, batching, 0.0)
    if seconds <= without_updates:
        return 0.0
    # Overhead grows with the updates, since evaluations come between them: assumed in proportion.
    growth = (costs.other_seconds(config, batching, seconds) - without_updates) / seconds
    updates = (seconds - without_updates) / (1 + growth) / costs.update_seconds(config, batching.rows)
    return min(updates * costs.text.tokens_of_update(batching.rows), most)


def what_is_too_little(sizes: Sequence[ModelConfig], costs: RunCosts) -> str:
    """The message if no model can be trained."""
    text = costs.text
    rows = min((batching.rows for config in sizes for batching in batchings(config, costs)), default=None)
    if rows is None:
        return "the memory is too small to train any model: drop flags that fix the size or the batch, or give smaller ones"
    # A budget of tokens has no maximum number of passes.
    has_max_passes = costs.settings.budget_tokens is None
    if has_max_passes and costs.max_passes * text.unique < MIN_UPDATES * text.tokens_of_update(rows):
        return (
            f"the text is too small: it has {round(text.unique):,} tokens to train, and a plan needs {MIN_UPDATES} updates of "
            f"{counted(rows, 'row')} of {text.rows.T} in {costs.max_passes} passes: give more text by --data_path, or train it "
            "without a budget, by --epochs"
        )
    passed = ""
    if costs.seconds_left is not None:
        passed = f" ({seconds_since_start():.0f} s had passed before planning; less the next time if the text was new)"
    return (
        f"this budget is too small to train any model{passed}: raise it, or drop flags that fix the size, "
        "the batch or the evaluations"
    )

"""What the laws say about a run with any settings: updates that do not suit it, and the loss to expect."""

from dataset.packing import RowPlan
from model.config import parameter_count
from trainer.budget import laws
from trainer.budget.difficulty import difficulty_of
from trainer.job import SHORT_RUN_FLOPS, Forecast, RunOverview
from trainer.pretrain.memory import mean_context
from trainer.pretrain.parts import Parts

# factor by which the size of an update may be off before a note
FAR_OFF = 4.0
# Excess of the loss before the decay over that of a run that ends there, as a fraction of the latter: 0.02 in eight runs of
# three minutes, about 0.1 in one of two hours.
EXCESS_BEFORE_DECAY = 0.06
# tokens before there is an expected loss
MIN_TOKENS_FOR_FORECAST = 3e5


def advise(parts: Parts, first_plan: RowPlan, overview: RunOverview) -> tuple[list[str], Forecast | None]:
    """Returns (lines for the user, the expected loss; None: unknown). first_plan: of epoch 0."""
    settings, tokens, lines = parts.settings, overview.tokens, []
    update_tokens, good = parts.batching.rows * first_plan.T * first_plan.fill, laws.batch_tokens(tokens)
    is_fresh = settings.from_weight == "none" and not settings.use_moe
    if is_fresh and tokens >= laws.MIN_TOKENS and not 1 / FAR_OFF <= update_tokens / good <= FAR_OFF:
        lines.append(
            f"note: runs of {tokens:,.0f} tokens learn best with updates of about {good:,.0f} tokens; yours have "
            f"{update_tokens:,.0f} (--batch_size, --accumulation_steps). --budget 10m chooses all settings for ten minutes"
        )
    forecast = forecast_of(parts, first_plan, overview)
    if forecast is not None:
        error = laws.loss_error(parameter_count(parts.model.config), tokens)
        lines.append(
            "`expected` in the lines below: the training loss that runs of this size reach by then if they go well, by a formula that "
            f"may be {error:.0%} off (docs/budget.md). If the loss stays far above it, or rises, try other learning rates and look at the "
            "data (encoding, order, a tokenizer for another language)"
        )
    return lines, forecast


def forecast_of(parts: Parts, first_plan: RowPlan, overview: RunOverview) -> Forecast | None:
    """The expected loss of a run, on rank 0; None: unknown. first_plan: of epoch 0."""
    settings, config = parts.settings, parts.model.config
    # The law covers fresh dense models on documents, with AdamW or Muon.
    has_law = settings.optimizer in laws.MEASURED_OPTIMIZERS and settings.from_weight == "none"
    is_known = has_law and not config.use_moe and not parts.corpus.trains_answers
    # A run of seconds needs no curve.
    if not is_known or not parts.ranks.is_main or overview.flops < SHORT_RUN_FLOPS:
        return None
    difficulty = difficulty_of(parts.corpus.assembler(), first_plan, None)
    # No forecast for text that is much easier than any that was measured.
    if difficulty < laws.MIN_DIFFICULTY:
        return None
    sources = laws.parts_of(parts.corpus, first_plan.row_targets(0, first_plan.n_rows))
    unique_tokens = laws.unique_tokens(sources)
    context = mean_context(first_plan)
    # The gain of induction heads was measured with Muon.
    scheme = settings.init_scheme if settings.optimizer == "muon" else "default"

    def expected_training_loss(tokens: float, rate: float) -> float | None:
        """After this many tokens, at this learning rate; None: unknown."""
        if tokens < MIN_TOKENS_FOR_FORECAST or laws.is_repeated_too_often(tokens / unique_tokens):
            return None
        # of a run that ends here
        loss = laws.expected_loss(config, tokens, sources, difficulty, settings.optimizer, scheme, context)
        return loss * (1 + EXCESS_BEFORE_DECAY * min(rate / settings.learning_rate, 1.0))

    return expected_training_loss

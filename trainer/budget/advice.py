"""What the laws say about a run with any settings: updates that do not suit it, and the loss to expect at its end."""

from dataset.packing import RowPlan
from model.config import parameter_count
from trainer.budget import laws
from trainer.budget.costs import text_of
from trainer.forecast import Expectation, Forecast
from trainer.job import SHORT_RUN_FLOPS, UNLIMITED, RunOverview
from trainer.pretrain.parts import Parts

# factor by which the size of an update may be off before a note
FAR_OFF = 4.0


def advise(parts: Parts, first_plan: RowPlan, overview: RunOverview) -> tuple[list[str], Forecast | None]:
    """Returns (lines for the user, the forecast; None: unknown). first_plan: of epoch 0."""
    settings, tokens, lines = parts.settings, overview.tokens, []
    update_tokens, good = parts.batching.rows * first_plan.T * first_plan.fill, laws.batch_tokens(tokens)
    is_fresh = settings.from_weight == "none" and not settings.use_moe
    if is_fresh and tokens >= laws.MIN_TOKENS and not 1 / FAR_OFF <= update_tokens / good <= FAR_OFF:
        lines.append(
            f"note: runs of {tokens:,.0f} tokens learn best with updates of about {good:,.0f} tokens; yours have "
            f"{update_tokens:,.0f} (--batch_size, --accumulation_steps). --budget 10m chooses all settings for ten minutes"
        )
    forecast = forecast_of(parts, overview)
    # A plan has told it.
    if forecast is not None and not settings.has_budget and (expected := forecast(UNLIMITED)):
        lines.append(f"the end is expected at a validation loss of {expected}, by a formula (docs/budget.md)")
    return lines, forecast


def forecast_of(parts: Parts, overview: RunOverview) -> Forecast | None:
    """What a run may reach, on rank 0; None: unknown."""
    settings, config, rows = parts.settings, parts.model.config, parts.batching.rows
    # Nobody asks what a run of seconds reaches, unless it is a plan.
    is_asked = parts.ranks.is_main and (settings.has_budget or overview.flops >= SHORT_RUN_FLOPS)
    if not is_asked or parts.validation is None or not laws.has_law(settings, parts.corpus.trains_answers):
        return None
    text = text_of(parts.corpus, parts.encoder)
    # The gain of induction heads was measured with Muon.
    scheme = settings.init_scheme if settings.optimizer == "muon" else "default"

    def expected_after(updates: float) -> Expectation | None:
        """UNLIMITED: only epochs limit the run."""
        tokens = overview.tokens if updates == UNLIMITED else updates * text.tokens_of_update(rows)
        error = laws.loss_error(parameter_count(config), tokens, text.unique, text.difficulty)
        if error is None:
            return None
        about_text = text.parts, text.difficulty
        loss = laws.expected_loss(config, tokens, *about_text, settings.optimizer, scheme, text.context)
        return Expectation(tokens, loss, error)

    return expected_after

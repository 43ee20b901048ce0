"""--objective: which networks are trained and by which loss, what is logged of it, and what is fine-tuned afterwards.

electra   replaced-token detection: a small generator fills in masked tokens, a discriminator tells which are not the original
mlm       masked language modelling: one encoder of the discriminator's size fills in masked tokens, as BERT does

Both read the same examples with the same masked positions, so they can be compared. The job (job.py) has what they share.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from dataset.electra.electra_dataset import Batch, Totals
from model.electra import masked_lm, model_electra
from model.electra.detection import THRESHOLD, Draws, tell_detector, tell_draws
from model.electra.masked_lm import MaskedLanguageModel
from model.electra.model_electra import ElectraPretrainer
from model.electra.pretrainer import Pretrainer
from model.electra.sizes import MLM
from trainer.electra import masked_loss
from trainer.electra.auc_alarm import AucAlarm
from trainer.electra.example import look_at
from trainer.electra.loss import N_SUMS, LossWeights, best_threshold, electra_loss, metrics, sums_of
from trainer.electra.networks import init_masked_lm, init_model
from trainer.electra.settings import ElectraSettings
from trainer.engine import Engine
from trainer.reporting.charts import LOSS, SKIPPED, SPEED, Chart


class Objective(ABC):
    """The networks of a run and their loss.

    title, remark: of the networks, for the lines at the start. n_sums: how many `sums` there are. shown, figures: of
    `metrics`, what is in a log line, and what is told of an evaluation. tells_replaced: a discriminator is trained.
    """

    title: ClassVar[str]
    n_sums: ClassVar[int]
    shown: ClassVar[tuple[str, ...]]
    figures: ClassVar[tuple[str, ...]]
    charts: ClassVar[tuple[Chart, ...]]

    model: Pretrainer
    remark: str = ""
    tells_replaced: bool = False

    @abstractmethod
    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        """(a micro-batch's share of the update's loss, 0-d; its `sums`)."""

    @abstractmethod
    def sums(self, batch: Batch) -> torch.Tensor:
        """What is added up of a batch for `metrics`, float32 [n_sums]."""

    @abstractmethod
    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        """(what to log, positions without padding)."""

    @abstractmethod
    def flops_per_position(self, length: int, masked_share: float) -> float:
        """Of a training step with rows of `length` positions."""

    def alarm(self, values: Mapping[str, float], update: int, end: int) -> str | None:
        """What to say of the figures of an evaluation; None: nothing. end: the updates of the whole run, as far as it is
        known."""
        return None

    def learn_from(self, sums: Sequence[float]) -> None:  # noqa: B027 - some learn nothing of it
        """Take note of the `sums` of all held-out examples."""

    def note_in_configs(self, is_last: bool) -> None:  # noqa: B027 - some note nothing
        """Write into the networks' configs what a reader of them needs, before they are saved. is_last: no update comes after."""

    def state_dict(self) -> dict[str, float | None]:
        """What a resume needs of it beside the model, see HasState."""
        return {}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:  # noqa: B027 - some keep nothing
        """Take over what `state_dict` gave in the run before."""

    def look(
        self, engine: Engine[Batch, Totals], tokenizer: PreTrainedTokenizerBase, batch: Batch
    ) -> list[tuple[str, str]]:
        """[(text of the batch's only example, the same and what the networks make of it)], if there is something to show."""
        return []


class ReplacedTokenDetection(Objective):
    """ELECTRA."""

    title = "ELECTRA"
    n_sums = N_SUMS
    shown = ("mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_auc")
    figures = ("loss", "mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_auc")
    charts = (
        LOSS,
        Chart(
            "Losses of generator (nats per token) and discriminator",
            ("mlm_loss", "disc_loss", "val_mlm_loss", "val_disc_loss"),
            logarithmic=True,
        ),
        Chart("Accuracy of generator and discriminator", ("gen_acc", "disc_acc", "val_gen_acc", "val_disc_acc")),
        Chart("Discriminator: precision, recall, AUC", ("disc_precision", "disc_recall", "disc_auc", "val_disc_auc")),
        *SPEED,
        SKIPPED,
    )

    model: ElectraPretrainer

    def __init__(
        self, settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase, device: torch.device, group_size: int
    ) -> None:
        """Errors: UserError, ValueError where the flags do not fit."""
        self.model = init_model(settings, tokenizer, device, group_size)
        self.weights = LossWeights(settings.gen_weight, settings.disc_weight)
        self.auc_alarm = AucAlarm(settings)
        self.tells_replaced = settings.disc_weight > 0
        self.length = settings.max_seq_len
        self.draws = Draws(settings.mask_style, settings.sampling, settings.temperature, settings.disallow_correct)
        # From which probability on a token is best called replaced, by the last evaluation; None: not known.
        self.threshold: float | None = None
        self.remark = f" (generator {self.model.generator.config.hidden_size})"

    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        return electra_loss(self.model, batch, totals, self.weights)

    def sums(self, batch: Batch) -> torch.Tensor:
        return sums_of(self.model(*batch), batch)

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        return metrics(sums, self.weights)

    def flops_per_position(self, length: int, masked_share: float) -> float:
        generator = self.model.generator.config
        discriminator = self.model.discriminator.config
        return model_electra.flops_per_token(generator, discriminator, length, masked_share)

    def alarm(self, values: Mapping[str, float], update: int, end: int) -> str | None:
        # A discriminator that is not trained has nothing to learn.
        if not self.tells_replaced:
            return None
        return self.auc_alarm.line(update, end, values["val_disc_auc"], values["val_mlm_loss"])

    def learn_from(self, sums: Sequence[float]) -> None:
        self.threshold = best_threshold(sums)

    def note_in_configs(self, is_last: bool) -> None:
        # Networks are written while the training goes on, and may be evaluated anew meanwhile. Only the last ones are sure to
        # have the threshold of their own evaluation.
        tell_detector(self.model.discriminator.config, self.length, self.threshold if is_last else None)
        tell_draws(self.model.generator.config, self.draws)

    def state_dict(self) -> dict[str, float | None]:
        return {**self.auc_alarm.kept(), THRESHOLD: self.threshold}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.auc_alarm.take_kept(state)
        self.threshold = state[THRESHOLD]

    def look(
        self, engine: Engine[Batch, Totals], tokenizer: PreTrainedTokenizerBase, batch: Batch
    ) -> list[tuple[str, str]]:
        return [look_at(engine, self.model, tokenizer, batch, self.threshold)]


class MaskedTokens(Objective):
    """Masked language modelling."""

    title = "masked language model"
    n_sums = masked_loss.N_SUMS
    shown = ("mlm_acc",)
    figures = ("loss", "mlm_acc")
    charts = (LOSS, Chart("Accuracy at the masked positions", ("mlm_acc", "val_mlm_acc")), *SPEED, SKIPPED)

    model: MaskedLanguageModel

    def __init__(
        self, settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase, device: torch.device, group_size: int
    ) -> None:
        """Errors: UserError, ValueError where the flags do not fit."""
        self.model = init_masked_lm(settings, tokenizer, device, group_size)

    def loss(self, batch: Batch, totals: Totals) -> tuple[torch.Tensor, torch.Tensor]:
        return masked_loss.masked_loss(self.model, batch, totals)

    def sums(self, batch: Batch) -> torch.Tensor:
        return masked_loss.sums_of(self.model(*batch), batch)

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        return masked_loss.metrics(sums)

    def flops_per_position(self, length: int, masked_share: float) -> float:
        return masked_lm.flops_per_token(self.model.encoder.config, length, masked_share)


def objective_of(
    settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase, device: torch.device, group_size: int
) -> Objective:
    """That of --objective, with its networks on the CPU. group_size: of the ranks that will shard them. Errors: UserError,
    ValueError where the flags do not fit."""
    if settings.objective == MLM:
        return MaskedTokens(settings, tokenizer, device, group_size)
    return ReplacedTokenDetection(settings, tokenizer, device, group_size)

"""Held-out examples of train_electra.py: losses, accuracy and AUC on fixed masks and draws."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from common.arithmetic import ceil_div
from common.wording import counted
from dataset.electra.electra_dataset import Batch, ElectraAssembler, ElectraPlan, Examples, Totals
from dataset.held_out import HeldOut
from dataset.sources import sum_of_targets
from dataset.store.interface import Documents, Ints
from trainer.electra.settings import ElectraSettings
from trainer.engine import Engine
from trainer.evaluation import sums_over_batches, undisturbed
from trainer.machine.signals import StopSignals

# Of examples, masks and draws: the same in every run with one --eval_batch_size, so that figures of two runs can be compared.
SEED = 0


def has_text(store: Documents, documents: Ints) -> bool:
    """Whether some of these documents can be cut into examples."""
    return sum_of_targets(store, documents) > 0


class Evaluated(Protocol):
    """What is evaluated; see Objective in objective.py."""

    @property
    def n_sums(self) -> int:
        """How many numbers `sums` gives."""

    @property
    def figures(self) -> Sequence[str]:
        """The metrics that are told."""

    def sums(self, batch: Batch) -> torch.Tensor:
        """What is added up of a batch."""

    def metrics(self, sums: Sequence[float]) -> tuple[dict[str, Any], float]:
        """({metric: value}, positions) of such sums."""

    def learn_from(self, sums: Sequence[float]) -> None:
        """Take note of the sums of all held-out examples."""


class Validation:
    """The examples of held-out documents in the order of the data, and their figures."""

    def __init__(
        self,
        held_out: HeldOut,
        settings: ElectraSettings,
        tokenizer: PreTrainedTokenizerBase,
        cap: int | None,
        unknown: int | None,
        evaluated: Evaluated,
    ) -> None:
        """cap: see `mask_cap`. unknown: the token that is never masked, as `unk_id` of Examples. Errors: ValueError, DataError, as
        Examples has them."""
        store = held_out.val_store
        T = settings.max_seq_len
        examples = Examples(store, T, tokenizer.sep_token_id, SEED, unknown, held_out.val_documents)
        self.plan = ElectraPlan(examples, settings.mask_share, SEED, 0, cap, shuffle=False)
        self.assembler = ElectraAssembler(
            store,
            tokenizer,
            max_seq_len=T,
            share=settings.mask_share,
            style=settings.mask_style,
            seed=SEED,
            cap=cap,
        )
        self.batch_size = settings.eval_batch_size
        self.evaluated = evaluated
        self.n_documents = len(held_out.val_documents)

    def __len__(self) -> int:
        return ceil_div(self.plan.n_rows, self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        first = number * self.batch_size
        rows = range(first, min(first + self.batch_size, self.plan.n_rows))
        return self.assembler[self.plan.recipe(rows)]

    @property
    def described(self) -> str:
        """For the lines at the start of a run."""
        return f"validation: {counted(self.n_documents, 'document')}, {counted(self.plan.n_rows, 'example')}"

    @torch.no_grad()
    def __call__(self, engine: Engine[Batch, Totals], signals: StopSignals) -> tuple[dict[str, float], int]:
        """({val_{figure}: value}, number of a stop signal that came meanwhile, or 0), the same on every world size."""

        evaluated = self.evaluated

        def figures_of(number: int) -> list[float]:
            batch = self[number].to(engine.device)
            # What is drawn depends on nothing but the batch.
            torch.manual_seed(SEED + number)
            with engine.autocast():
                figures: list[float] = evaluated.sums(batch).tolist()
            return figures

        with undisturbed(engine):
            sums, stop_signal = sums_over_batches(engine, len(self), figures_of, evaluated.n_sums, signals)
        if not stop_signal:
            evaluated.learn_from(sums)
        values, _ = evaluated.metrics(sums)
        return {f"val_{name}": values.get(name, float("nan")) for name in evaluated.figures}, stop_signal

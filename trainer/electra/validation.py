"""What is looked at while train_electra.py trains: figures of held-out examples, and one example of the data."""

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from common.wording import counted
from dataset.corpus import Corpus
from dataset.electra.electra_dataset import Batch, ElectraAssembler, ElectraPlan, Examples, Totals
from model.electra.model_electra import ElectraPretrainer
from trainer.electra.loss import N_SUMS, metrics, sums_of
from trainer.electra.settings import ElectraSettings
from trainer.engine import Engine
from trainer.evaluation import sums_over_batches, undisturbed
from trainer.machine.command_line import StopSignals

# Of examples, masks and draws: the same in every run with one --eval_batch_size, so that figures of two runs can be compared.
SEED = 0
FIGURES = ("loss", "mlm_loss", "disc_loss", "gen_acc", "disc_acc", "disc_auc")
LABELS = ("original", "replaced")


class Validation:
    """The examples of held-out documents in the order of the data, and their figures on fixed masks and draws."""

    def __init__(self, corpus: Corpus, settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        store, documents = corpus.val_store, corpus.val_documents
        assert store is not None and documents is not None
        T, share, style = settings.max_seq_len, settings.mask_share, settings.mask_style
        examples = Examples(store, T, tokenizer.sep_token_id, SEED, tokenizer.unk_token_id, documents)
        self.plan = ElectraPlan(examples, share, SEED, 0, shuffle=False)
        self.assembler = ElectraAssembler(store, tokenizer, T, share, style, SEED)
        self.batch_size = settings.eval_batch_size
        self.weights = (settings.gen_weight, settings.disc_weight)
        self.described = f"validation: {counted(len(documents), 'document')}, {counted(self.plan.n_rows, 'example')}"

    @torch.no_grad()
    def __call__(
        self, engine: Engine[Batch, Totals], model: ElectraPretrainer, signals: StopSignals
    ) -> tuple[dict[str, float], int]:
        """({val_{figure}: value}, number of a stop signal that came meanwhile, or 0), the same on every world size."""
        n_rows = self.plan.n_rows

        def figures_of(number: int) -> list[float]:
            first = number * self.batch_size
            recipe = self.plan.recipe(range(first, min(first + self.batch_size, n_rows)))
            batch = self.assembler[recipe].to(engine.device)
            # What is drawn depends on nothing but the batch.
            torch.manual_seed(SEED + number)
            with engine.autocast():
                sums: list[float] = sums_of(model(*batch), batch).tolist()
            return sums

        with undisturbed(engine):
            sums, stop_signal = sums_over_batches(
                engine, math.ceil(n_rows / self.batch_size), figures_of, N_SUMS, signals
            )
        values, _ = metrics(sums, self.weights)
        return {f"val_{name}": values.get(name, float("nan")) for name in FIGURES}, stop_signal


@torch.no_grad()
def look_at(
    engine: Engine[Batch, Totals], model: ElectraPretrainer, tokenizer: PreTrainedTokenizerBase, batch: Batch
) -> tuple[str, str]:
    """(text of the batch's only example; the same, what the generator made of it, and of each token that was masked or is
    called replaced the label and the prediction).

    All ranks compute it: where they have sharded the model they need each other.
    """
    batch = batch.to(engine.device)
    with undisturbed(engine):
        # At every look the same draws, so that what changes is the networks.
        torch.manual_seed(SEED)
        with engine.autocast():
            found = model(*batch)
    length = int(batch.lengths[0])
    ids = batch.ids[0, :length].tolist()
    corrupted = found.corrupted[0, :length].tolist()
    masked = {int(place) for place, label in zip(batch.positions[0], batch.labels[0], strict=True) if label >= 0}
    originals = tokenizer.convert_ids_to_tokens(ids)
    written = tokenizer.convert_ids_to_tokens(corrupted)
    replaced = found.replaced[0, :length].tolist()
    probabilities = found.disc_logits[0, :length].float().sigmoid().tolist()
    rows = [("position", "original", "generator", "label", "prediction", "probability")]
    right = 0
    for place, probability in enumerate(probabilities):
        is_called = probability >= 0.5
        right += is_called == replaced[place]
        if place in masked or is_called:
            draw = written[place] if place in masked else ""
            label, prediction = LABELS[replaced[place]], LABELS[is_called]
            rows.append((str(place), originals[place], draw, label, prediction, f"{probability:.2f}"))
    text = str(tokenizer.decode(ids))
    last = f"{sum(replaced)} of {length} tokens are replaced; the discriminator is right on {right}"
    return text, "\n".join([text, str(tokenizer.decode(corrupted)), *columns(rows), last])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of text, its columns as wide as their longest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]

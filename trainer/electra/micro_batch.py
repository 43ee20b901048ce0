"""What an ELECTRA run has to divide among processes, known before anything of it is opened."""

from model.electra.sizes import MLM, SIZES
from trainer.electra.settings import ElectraSettings
from trainer.machine.cpu_ranks import Divisible

# Of the published models.
VOCABULARY = 30_522


def micro_batch_of(settings: ElectraSettings) -> Divisible:
    """Its parameters are about those of the flags; --model_path counts as the published size."""
    published = SIZES[settings.size]
    rows = batch_size_of(settings, 1)
    layers = settings.num_hidden_layers or published.layers
    width = settings.hidden_size or published.width
    inner = settings.intermediate_size or published.ffn
    # The generator is narrower, and shares the embeddings.
    one_network = layers * (4 * width * width + 2 * width * inner)
    networks = 1 if settings.objective == MLM else 2
    parameters = networks * one_network + VOCABULARY * (settings.embedding_size or published.embedding)
    return Divisible(rows, settings.max_seq_len, parameters)


def batch_size_of(settings: ElectraSettings, micro_batches_at_once: int) -> int:
    """The rows of a micro-batch; where no flag says it, those which together make --rows_per_update or the published batch."""
    if settings.batch_size is not None:
        return settings.batch_size
    parts = settings.accumulation_steps * micro_batches_at_once
    rows = settings.rows_per_update or SIZES[settings.size].batch_size
    return max(1, rows // parts)

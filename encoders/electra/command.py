"""What train_electra.py does between its flags and the loop: split into processes, train."""

from collections.abc import Sequence
from functools import partial

from encoders.electra.job import ElectraJob
from encoders.electra.settings import ElectraSettings, batch_size_of
from trainer.job import RunContext
from trainer.launch import launch
from trainer.loop import Trainer
from trainer.machine.cpu_ranks import ShareableBatch


def main(argv: Sequence[str] | None = None) -> int:
    """Train with these flags. Returns the exit code. argv: as in trainer/command.py."""
    settings = ElectraSettings.parse(argv)
    return launch(train, settings, argv, partial(shareable_batch, settings))


def shareable_batch(settings: ElectraSettings) -> ShareableBatch:
    """Known before anything is opened; networks from files count as the published size."""
    size = settings.network_sizes()
    width = size["hidden_size"]
    # Layers of both networks (the generator's are narrower), and shared embeddings of 30,522 entries, as published.
    layers = 2 * size["num_hidden_layers"] * (4 * width * width + 2 * width * size["intermediate_size"])
    parameters = layers + 30_522 * size["embedding_size"]
    return ShareableBatch(batch_size_of(settings, 1), settings.max_seq_len, parameters)


def train(settings: ElectraSettings, run_context: RunContext) -> int:
    """Set up the job and train. Returns the exit code."""
    job = ElectraJob(settings, run_context)
    return Trainer(job, run_context).run()

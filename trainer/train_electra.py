"""Pretrain an ELECTRA: generator and discriminator, as two Hugging Face models that train_glue.py fine-tunes.

    python trainer/train_electra.py --data_path corpus.jsonl --vocab_path vocab.txt           # the small one
    python trainer/train_electra.py --hidden_size 128 --num_hidden_layers 4 --max_seq_len 32 --max_steps 2000  # on a laptop
    torchrun --nproc_per_node 2 trainer/train_electra.py --size base                          # data parallel

Without `--data_path` it trains on the documentation inside the installed Python, without `--vocab_path` on a WordPiece
vocabulary trained on the data. All flags count updates, as the paper does. `--help` lists the flags; docs/electra.md
explains data, masking and output.

Read on in trainer/loop.py (the loop) and encoders/electra/job.py (what is trained).
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    # Run by path: nothing in trainer/ may shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from common.start import guard_imports

    guard_imports()
    from encoders.electra.settings import ElectraSettings

    # Answers --help and wrong flags before torch is imported, which takes seconds. `main` reads the flags again.
    ElectraSettings.parse()

from encoders.electra.job import ElectraJob, open_run
from encoders.electra.settings import ElectraSettings, batch_size_of
from trainer.job import RunContext
from trainer.launch import launch
from trainer.loop import Trainer
from trainer.machine.command_line import run_cli
from trainer.machine.cpu_ranks import IS_CALL, processes_of, run_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Train with these flags. Returns the exit code. argv: as in trainer/command.py."""
    settings = ElectraSettings.parse(argv)
    # Layers of both networks (the generator's are narrower), and shared embeddings of 30,522 entries, as published; networks from
    # files count as the published size.
    size = settings.network_sizes()
    width = size["hidden_size"]
    layers = 2 * size["num_hidden_layers"] * (4 * width * width + 2 * width * size["intermediate_size"])
    parameters = layers + 30_522 * size["embedding_size"]
    obstacle = "" if argv is None else IS_CALL
    rows, positions = batch_size_of(settings, 1), settings.max_seq_len
    n_ranks, notices = processes_of(settings.cpu_processes, settings.device, rows, positions, parameters, obstacle)
    return run_ranks(n_ranks, partial(launch, train, settings, argv, notices))


def train(settings: ElectraSettings, run_context: RunContext) -> int:
    return Trainer(ElectraJob(open_run(settings, run_context)), run_context).run()


if __name__ == "__main__":
    run_cli(main)

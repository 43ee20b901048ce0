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

from encoders.electra.command import main
from trainer.machine.command_line import run_cli

# a name that other people's code imports
__all__ = ["main"]

if __name__ == "__main__":
    run_cli(main)

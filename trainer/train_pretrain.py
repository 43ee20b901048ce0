"""Pretrain a MiniMind on your own text: .jsonl, .txt, .parquet and others (dataset/README.md).

    python trainer/train_pretrain.py --epochs 1                      # one device: CUDA, MPS or CPU, whichever is there
    python trainer/train_pretrain.py --device cpu --hidden_size 256  # a small one on a CPU
    torchrun --nproc_per_node 2 trainer/train_pretrain.py            # data parallel: NCCL on GPUs, Gloo on CPUs

Without `dataset/pretrain_hq.jsonl` and without `--data_path` it trains on the documentation inside the installed
Python. `--help` lists the flags; docs/design.md explains the words (step, update, row, document).

The way from here to the weights:

    PretrainSettings.read   trainer/pretrain/settings.py   the flags
    run_command             trainer/pretrain/command.py    one process or several
        launch              trainer/launch.py              ranks, device, stop signals
          train             trainer/pretrain/command.py    the plan of a --budget, then these two:
            PretrainJob     trainer/pretrain/job.py        what is trained: data, model, loss, rate
            Trainer.run     trainer/loop.py                the loop
              Engine        trainer/engine.py              one update
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    # Run by path, trainer/ would come first on the path, and could shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from common.start import guard_imports

    # An old Python or a missing package ends in one line.
    guard_imports()
    # --help and wrong flags are answered before torch is imported, which takes seconds. `main` reads its own.
    from trainer.pretrain.settings import PretrainSettings

    SETTINGS, GIVEN = PretrainSettings.read()

from transformers import PreTrainedTokenizerBase

from common.processes import count_from_here
from common.start import ROOT
from dataset.tokenizing.encoder import load_tokenizer
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.loop import train_epoch
from trainer.machine.command_line import run_cli
from trainer.machine.devices import pick_device
from trainer.machine.ranks import init_distributed_mode
from trainer.optim.schedules import get_lr
from trainer.pretrain import first_model
from trainer.pretrain.command import run_command
from trainer.pretrain.job import PretrainJob

# Again: who imports this file has not come through the block above.
from trainer.pretrain.settings import DEFAULT_TOKENIZER, PretrainSettings

# What other people's code imports from here
__all__ = ["get_lr", "init_distributed_mode", "init_model", "main", "train_epoch"]


def main(argv: Sequence[str]) -> int:
    """The command as a function, for notebooks and other programs: train with these flags. Returns the exit code."""
    # The time of a --budget begins.
    count_from_here()
    return run_command(PretrainJob, *PretrainSettings.read(argv), argv)


def init_model(
    lm_config: MiniMindConfig,
    from_weight: str = "none",
    tokenizer_path: str = DEFAULT_TOKENIZER,
    save_dir: str | Path = ROOT / "out",
    device: str | None = None,
) -> tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]:
    """(model, tokenizer), as of the public trainer's function. from_weight: a name in save_dir or a .pth; none: a fresh
    model. device: None for the best there is. Errors: UserError.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    model = first_model.init_model(lm_config, from_weight, save_dir)
    return model.to(pick_device(device)), tokenizer  # type: ignore[arg-type]  # transformers wraps it without its types


if __name__ == "__main__":
    run_cli(partial(run_command, PretrainJob, SETTINGS, GIVEN, sys.argv[1:], is_own_command=True))

"""Pretrain a MiniMind on your own text: .jsonl, .txt, .parquet and others (dataset/README.md).

    python trainer/train_pretrain.py --epochs 1                      # one device: CUDA, MPS or CPU
    python trainer/train_pretrain.py --device cpu --hidden_size 256  # a small model on a CPU
    torchrun --nproc_per_node 2 trainer/train_pretrain.py            # data parallel: NCCL on GPUs, Gloo on CPUs

Without `dataset/pretrain_hq.jsonl` and without `--data_path` it trains on the documentation of the installed Python.
`--help` lists the flags; docs/design.md defines step, update, row and document.

From here to the weights:

    PretrainSettings        trainer/pretrain/settings.py   the flags
    run_command             trainer/command.py             one process or several
        launch              trainer/launch.py              ranks, device, stop signals
          train             trainer/command.py             plans a --budget, then calls these three:
            open_run        trainer/pretrain/parts.py      tokenizer, model, text
            PretrainJob     trainer/pretrain/job.py        loss, learning rate, what is saved
            Trainer.run     trainer/loop.py                the loop
              Engine        trainer/engine.py              one update
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    # Run by path: nothing in trainer/ may shadow a dependency.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
if __name__ == "__main__":
    from common.start import guard_imports

    # one clear line for an old Python or a missing package
    guard_imports()
    from trainer.pretrain.settings import PretrainSettings

    # Answers --help and wrong flags before torch is imported, which takes seconds. `main` reads the flags again.
    PretrainSettings.parse()

from common.start import ROOT
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.tokenizer_files import tokenizer_folder
from model.config import ModelConfig
from trainer.command import run_command
from trainer.loop import train_epoch
from trainer.machine.command_line import run_cli
from trainer.machine.devices import pick_device
from trainer.machine.ranks import init_distributed_mode
from trainer.optim.schedules import get_lr
from trainer.pretrain import initial_model
from trainer.pretrain.job import PretrainJob
from trainer.pretrain.settings import PretrainSettings, find_weight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.hf import MiniMindForCausalLM

# names that other people's code imports
__all__ = ["get_lr", "init_distributed_mode", "init_model", "main", "train_epoch"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train with these flags. Returns the exit code. argv: see `run_command`; `trainer.train` takes values."""
    return run_command(PretrainJob, PretrainSettings.parse(argv), argv)


def init_model(
    lm_config: ModelConfig,
    from_weight: str = "none",
    tokenizer_path: str | None = None,
    save_dir: str | Path = ROOT / "out",
    device: str | None = None,
) -> "tuple[MiniMindForCausalLM, PreTrainedTokenizerBase]":
    """Returns (model in train mode, tokenizer), like MiniMind's init_model. from_weight: a name in save_dir or a .pth; none: a fresh
    model. tokenizer_path: None: that of the weights. device: None: the best available. Errors: UserError."""
    from model.hf import MiniMindForCausalLM

    weight = find_weight(from_weight, save_dir, lm_config.hidden_size, lm_config.use_moe)
    tokenizer = load_tokenizer(tokenizer_path or tokenizer_folder(weight))
    model = initial_model.init_model(MiniMindForCausalLM, lm_config, from_weight, save_dir, "default")
    return model.train().to(pick_device(device)), tokenizer


if __name__ == "__main__":
    run_cli(main)

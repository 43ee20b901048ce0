"""trainer/train_pretrain.py with the hooks of the environment's FAULT_HOOKS planted, for runs that torchrun starts."""

import json
import os

from tests.faults import hooks
from trainer.machine.command_line import run_cli
from trainer.train_pretrain import main

if __name__ == "__main__":
    for name, arguments in json.loads(os.environ["FAULT_HOOKS"]).items():
        getattr(hooks, name)(**arguments)
    run_cli(main)

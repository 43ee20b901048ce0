"""trainer/train_pretrain.py with the hooks of the environment's FAULT_HOOKS planted, for runs that torchrun starts."""

import json
import os
import runpy

from tests.faults import hooks
from trainer import train_pretrain

if __name__ == "__main__":
    hooks.plant(json.loads(os.environ["FAULT_HOOKS"]))
    runpy.run_path(train_pretrain.__file__, run_name="__main__")

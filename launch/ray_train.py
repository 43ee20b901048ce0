"""Train on the machines of a Ray cluster: pip install "ray[train]", then in the repository

    python launch/ray_train.py --workers 2 --gpus 1 -- --data_path /shared/my.jsonl --out_dir /shared/out

Ray starts the processes, joins them, and starts them again where one is lost; the trainer goes on from its own checkpoints,
so --out_dir has to be a folder that all machines see, and --data_path names the same files on each. Every machine of the
cluster needs this repository under the same path, and its requirements. What follows the two dashes are flags of
trainer/train_pretrain.py. The command waits until the run is over, and ends with an error where it failed for good.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Run by path: the trainer's parser is above this folder.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)


def train(config: dict[str, Any]) -> None:
    """What each of Ray's workers does, in a thread of its own, after Ray has made the process group."""
    sys.path.insert(0, config["root"])
    from trainer.train_pretrain import main

    code = main(config["flags"])
    if code:
        raise RuntimeError(f"the trainer ended with exit code {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the machines of a Ray cluster.")
    parser.add_argument("--workers", type=int, default=2, help="processes, on all machines together")
    parser.add_argument("--gpus", type=int, default=1, help="of each process; 0: it computes on CPUs")
    parser.add_argument("--restarts", type=int, default=3, help="how often lost processes are replaced")
    parser.add_argument("flags", nargs="*", help="flags of the trainer, after --")
    arguments = parser.parse_args()

    from trainer.pretrain.settings import parse_args

    flags = ["--from_resume", "1", *arguments.flags]
    # A wrong flag ends the command here: Ray would start its workers again, to find it once more.
    parse_args(flags)
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        print(f'error: Ray is needed here ({error}): pip install "ray[train]"', file=sys.stderr)
        sys.exit(2)

    use_gpu = arguments.gpus > 0
    TorchTrainer(
        train,
        train_loop_config={"root": str(ROOT), "flags": flags},
        scaling_config=ScalingConfig(
            num_workers=arguments.workers,
            use_gpu=use_gpu,
            resources_per_worker={"GPU": arguments.gpus} if use_gpu else None,
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=arguments.restarts)),
    ).fit()


if __name__ == "__main__":
    from common.start import begin

    begin(ends_at_ctrl_c=False)
    main()

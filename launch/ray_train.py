"""Ray Train: the ranks are workers of a Ray cluster. In the repository, which all nodes have at the same path:

    WORKERS=8 python launch/ray_train.py --data_path /shared/my.jsonl --out_dir /shared/out

It needs `pip install "ray[train]>=2.60"`, and takes the cluster that `ray start` or RAY_ADDRESS names; without one this machine.

WORKERS   number of ranks; default: the GPUs of the cluster (needed without any)
CPUS      of each rank; default: 1
RESTARTS  of all ranks, after the loss of one; default: 3
"""

import os
import sys
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)

from common.errors import UserError, optional_package
from trainer.machine.command_line import run_cli
from trainer.pretrain.settings import PretrainSettings


def work(config: dict[str, Any]) -> int:
    """One rank, which Ray describes in the variables of torchrun; its process group is there. Returns the exit code."""
    os.chdir(config["folder"])
    sys.path.insert(0, config["folder"])
    from common.errors import PrintedByAnotherRank, UserError
    from trainer import train

    try:
        train(**config["flags"])
    # Raised, they would have Ray start all ranks again.
    except PrintedByAnotherRank:
        return 2
    except UserError as error:
        print(f"error: {error}", flush=True)
        return 2
    return 0


def main() -> int:
    settings = PretrainSettings.parse()
    flags = {name: value for name, value in settings.values().items() if name in settings.user_set}
    optional_package("ray.train", "for a cluster of Ray", '"ray[train]"')
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # Ray's own print shows each line twice.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    ray.init()
    gpus = int(ray.cluster_resources().get("GPU", 0))
    workers = int(os.environ.get("WORKERS", gpus))
    if not workers:
        raise UserError("WORKERS is not set, and there are no GPUs: see the first lines of launch/ray_train.py")
    resources = {"CPU": int(os.environ.get("CPUS", 1)), "GPU": int(gpus > 0)}
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": ROOT, "flags": {"from_resume": True, **flags}},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources),
        torch_config=TorchConfig(timeout_s=int(settings.dist_timeout)),
        run_config=RunConfig(
            name="ray",
            # It must be shared if there are several nodes.
            storage_path=str(Path(ROOT, settings.out_dir)),
            failure_config=FailureConfig(max_failures=int(os.environ.get("RESTARTS", 3))),
        ),
    )
    return trainer.fit().return_value


if __name__ == "__main__":
    run_cli(main)

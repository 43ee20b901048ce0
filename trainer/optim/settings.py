"""The settings of an update and of the optimiser."""

from dataclasses import dataclass

from common.flags import not_negative, positive, seed
from common.settings import Settings, setting, switch


@dataclass(kw_only=True)
class UpdateSettings(Settings):
    """training"""

    batch_size: int = setting(32, check=positive(int), help="rows per micro-batch and rank", first=True)
    accumulation_steps: int = setting(8, check=positive(int), help="micro-batches per update", first=True)
    rows_per_update: int = setting(
        0,
        check=not_negative(int),
        help="rows of an update, of all ranks, in place of --accumulation_steps: updates stay the same however many ranks there "
        "are; 0: not given",
    )
    learning_rate: float = setting(5e-4, check=positive(float), help="what the schedule multiplies", first=True)
    weight_decay: float = setting(0.01, check=not_negative(float), help="on matrices alone")
    grad_clip: float = setting(1.0, check=not_negative(float), help="largest global gradient norm; 0: off")
    max_bad_updates: int = setting(10, check=positive(int), help="stop after so many non-finite updates in a row")
    seed: int = setting(42, check=seed, help="of weights, data order and samples")
    from_resume: bool = switch(False, help="go on from the newest intact checkpoint, if there is one", first=True)


# How each is built: build_optimizer in trainer/optim/build.py
OPTIMIZERS = ("adamw", "muon")


@dataclass(kw_only=True)
class OptimizerSettings(UpdateSettings):
    """training"""

    optimizer: str = setting(
        "adamw", choices=OPTIMIZERS, help="muon: for the blocks' matrices, AdamW elsewhere", first=True
    )
    muon_lr: float = setting(0.02, check=positive(float), help="Muon's learning rate, on the same schedule")
    embed_lr: float = setting(
        0.0,
        check=not_negative(float),
        help="with muon: AdamW's rate for the matrices that Muon leaves to it: embeddings, head, routers; 0: --learning_rate",
    )

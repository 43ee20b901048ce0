"""An ensemble of the seeds of a task: the mean of what their models give.

Each run leaves its outputs beside its results, so that nothing is computed again. Classes: the mean of the probabilities.
Scores, and how well an answer begins and ends at a position: the mean of the numbers.
"""

import contextlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.files import atomic_file
from dataset.glue.glue_dataset import GlueAssembler
from dataset.glue.glue_tasks import QUESTIONS, REGRESSION, Task
from trainer.glue.files import Data
from trainer.glue.measures import measured
from trainer.glue.predictions import PREDICTIONS, suffix_of, write_predictions

# In the folder of a run
OUTPUTS = "outputs.npz"
FOLDER = "ensemble"


class Outputs(NamedTuple):
    """What a model gives for the files of a task."""

    # {suffix of the metrics' names: logits}.
    dev: dict[str, torch.Tensor]
    # {name of the predictions: logits}.
    test: dict[str, torch.Tensor]
    # See `score_divisor`.
    divisor: float


def write_outputs(path: Path, outputs: Outputs, data: Data) -> None:
    """Keep the outputs of a run for the files of `data`."""
    arrays: dict[str, Any] = {"divisor": np.array(outputs.divisor)}
    for kind, files in (("dev", outputs.dev), ("test", outputs.test)):
        for name, logits in files.items():
            arrays[f"{kind} {name}"] = logits.numpy()
            arrays[f"file of {kind} {name}"] = np.array(data.eval_keys[f"{kind} {name}"])
    with atomic_file(path) as file:
        np.savez(file, **arrays)


def read_outputs(path: Path, data: Data) -> Outputs | None:
    """The outputs of a run for the files of `data`; None where they are absent, damaged, or those of other files."""
    found = Outputs({}, {}, 1.0)
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        with np.load(path, allow_pickle=False) as arrays:
            found = found._replace(divisor=float(arrays["divisor"]))
            for kind, files, logits in (("dev", data.dev, found.dev), ("test", data.test, found.test)):
                for name, assembler in files.items():
                    array = arrays[f"{kind} {name}"]
                    if array.shape != shape_of(data.task, assembler) or array.dtype != np.float32:
                        return None
                    if str(arrays[f"file of {kind} {name}"]) != data.eval_keys[f"{kind} {name}"]:
                        return None
                    logits[name] = torch.from_numpy(array)
        return found
    return None


def shape_of(task: Task, assembler: GlueAssembler) -> tuple[int, int]:
    """Of the outputs for a file."""
    lengths = assembler.features.lengths
    return int(lengths.sum()) if task.is_of_positions else len(lengths), task.outputs


def combined(task: Task, logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """The logits of an ensemble, of those of its models, [N, outputs] each."""
    together = torch.stack(list(logits))
    if task.kind in (REGRESSION, QUESTIONS):
        return together.mean(0)
    # The logarithm of the mean of the probabilities, whose softmax is that mean.
    return together.log_softmax(-1).logsumexp(0) - np.log(len(together))


def ensemble(data: Data, folder: Path, runs: Sequence[Path]) -> dict[str, float] | None:
    """{metric: value} of the ensemble of a task's runs, whose predictions are written to {folder}/ensemble; None where the
    outputs of a run are not there. runs: their folders."""
    models = []
    for run in runs:
        outputs = read_outputs(run / OUTPUTS, data)
        if outputs is None:
            return None
        models.append(outputs)
    values = {}
    for suffix, assembler in data.dev.items():
        of_models = [model.dev[suffix] * scale(data.task, model) for model in models]
        for name, value in measured(data.task, assembler, combined(data.task, of_models)).items():
            values[name + suffix] = value
    for name, assembler in data.test.items():
        of_models = [model.test[name] * scale(data.task, model) for model in models]
        target = folder / FOLDER / PREDICTIONS / f"{name}{suffix_of(data.task)}"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_predictions(target, data.task, assembler, combined(data.task, of_models), divisor=1.0)
    return values


def scale(task: Task, outputs: Outputs) -> float:
    """What the outputs of a model are multiplied with: scores may have been divided to train it."""
    return outputs.divisor if task.kind == REGRESSION else 1.0

"""The checks of `make gpu-electra`: that they can fail, and what they start on a GPU. They run on a CPU in test_gpu.py."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_electra
from trainer.electra.settings import ElectraSettings
from trainer.glue.settings import GlueSettings

CPU = torch.device("cpu")
GPU = torch.device("cuda")
DOCUMENTS = [
    "numpy.add(a, b)\n\n    Adds up.",
    "class numpy.ndarray(object)\n\n    An array.",
    "str.join(x)\n\n    Joins.",
]


@pytest.fixture
def trainers(monkeypatch):
    """In place of the trainers: the commands are kept, and what they would leave is written."""
    commands = []

    def leaving(auc, accuracy):
        def start(command):
            commands.append(command)
            out_dir = Path(command[command.index("--out_dir") + 1])
            if command[1].endswith("train_glue.py"):
                path = out_dir / gpu_electra.TASK / "seed_42" / "eval_results.json"
                left = {"updates": 7, "results": {"accuracy": accuracy}}
            else:
                path = out_dir / "electra_small" / "electra_small.metrics.jsonl"
                left = {"update": 2, "val_disc_auc": auc}
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(left) + "\n")

        monkeypatch.setattr(gpu_electra, "start", start)
        return commands

    monkeypatch.setattr(gpu_electra, "end_of", lambda command: "")
    monkeypatch.setattr(gpu_electra, "embedded_documents", lambda: DOCUMENTS)
    return leaving


@pytest.mark.parametrize("device", [CPU, GPU])
def test_what_is_started_are_commands_that_the_trainers_take(trainers, device):
    """As nearly everybody starts them on a GPU, without --device."""
    commands = trainers(auc=0.9, accuracy=0.9)
    found = gpu_electra.learns_and_is_fine_tuned(device)
    assert found == "a held-out AUC of 0.900; fine-tuned in 7 updates: accuracy 0.900"
    pretrained, fine_tuned = commands
    settings = (ElectraSettings.parse(pretrained[2:]), GlueSettings.parse(fine_tuned[2:]))
    on_gpu = device.type == "cuda"
    assert [one.device for one in settings] == [None if on_gpu else "cpu"] * 2
    assert settings[0].max_steps == (2000 if on_gpu else 40)
    assert settings[1].model_path == str(Path(settings[0].out_dir) / "electra_small" / "discriminator")


def test_what_learns_nothing_is_found(trainers):
    trainers(auc=0.5, accuracy=0.9)
    with pytest.raises(AssertionError, match=r"AUC of 0.500: 0.6 is wanted"):
        gpu_electra.learns_and_is_fine_tuned(CPU)
    trainers(auc=0.9, accuracy=0.62)
    with pytest.raises(AssertionError, match=r"accuracy 0.620: 0.75 is wanted"):
        gpu_electra.learns_and_is_fine_tuned(CPU)

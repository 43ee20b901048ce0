"""The checks of `make gpu-electra`: that they can fail, and what they start on a GPU. They run on a CPU in test_gpu.py."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_electra
from benchmarks.gpu_checks import NotPromised, Resumed
from tests.helpers import ROOT
from trainer.electra import settings as electra_settings
from trainer.glue import settings as glue_settings

CPU = torch.device("cpu")
GPU = torch.device("cuda")
DOCUMENTS = [
    "numpy.add(a, b)\n\n    Adds up.",
    "class numpy.ndarray(object)\n\n    An array.",
    "str.join(x)\n\n    Joins.",
]


def test_the_pretraining_is_that_of_make_electra():
    makefile = (ROOT / "Makefile").read_text()
    (flags,) = re.findall(r"^ELECTRA = ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    words = flags.replace("\\\n", " ").split()

    def settings_of(words):
        return electra_settings.parse_args(words)

    assert settings_of(words) == settings_of(gpu_electra.MAKE_ELECTRA)


def metrics_file(folder, auc=0.9, loss=3.0):
    records = [{"update": 1, "loss": loss}, {"update": 2, "val_loss": 4.0, "val_disc_auc": auc, "val_mlm_loss": 3.5}]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_pretraining_that_learns_nothing_or_gives_no_number_is_found(tmp_path, device):
    assert "AUC of 0.900" in gpu_electra.judged(metrics_file(tmp_path), device)
    with pytest.raises(AssertionError, match=r"AUC of 0.500 .* is wanted"):
        gpu_electra.judged(metrics_file(tmp_path, auc=0.5), device)
    # As the trainers write what is not finite
    with pytest.raises(AssertionError, match="loss after update 1 is no number"):
        gpu_electra.judged(metrics_file(tmp_path, loss=None), device)


def test_other_bits_are_found(monkeypatch):
    monkeypatch.setattr(gpu_electra, "killed_and_resumed", lambda *_: Resumed(False, "", "killed behind update_3.pt"))
    with pytest.raises(AssertionError, match="killed behind update_3.pt: the weights differ"):
        gpu_electra.resumes_bitwise(CPU)


def test_texts_do_not_name_their_library():
    assert list(gpu_electra.labelled(DOCUMENTS)) == [
        {"text": "    Adds up.", "label": "numpy"},
        {"text": "    An array.", "label": "numpy"},
        {"text": "    Joins.", "label": "other"},
    ]


class Started:
    """In place of `start`: keeps the commands, and leaves what a fine-tuning would."""

    def __init__(self, accuracy):
        self.commands = []
        self.accuracy = accuracy

    def __call__(self, command):
        self.commands.append(command)
        if command[1].endswith("train_glue.py"):
            folder = Path(command[command.index("--out_dir") + 1]) / gpu_electra.TASK / "seed_42"
            folder.mkdir(parents=True)
            results = {"updates": 7, "results": {"accuracy": self.accuracy}}
            (folder / "eval_results.json").write_text(json.dumps(results))
        return command


@pytest.fixture
def without_trainers(monkeypatch):
    """No trainer is started; gives what makes `start` of an accuracy."""

    def in_place_of_start(accuracy):
        started = Started(accuracy)
        monkeypatch.setattr(gpu_electra, "start", started)
        return started

    monkeypatch.setattr(gpu_electra, "end_of", lambda command: "cuda:0, cpu")
    monkeypatch.setattr(gpu_electra, "judged", lambda *_: "learned")
    monkeypatch.setattr(gpu_electra, "embedded_documents", lambda: DOCUMENTS)
    return in_place_of_start


@pytest.mark.parametrize("device", [CPU, GPU])
def test_what_is_started_are_commands_that_the_trainers_take(monkeypatch, without_trainers, device):
    """As nearly everybody starts them on a GPU, without --device."""
    started = without_trainers(accuracy=0.9)

    def killed_and_resumed(command_for, folder, device):
        started(command_for(folder / "out"))
        return Resumed(True, "", "killed")

    monkeypatch.setattr(gpu_electra, "killed_and_resumed", killed_and_resumed)
    assert gpu_electra.resumes_bitwise(device) == "killed: the same weights to the last bit"
    assert gpu_electra.learns_and_is_fine_tuned(device) == "learned; fine-tuned in 7 updates: accuracy 0.900"
    resumed, pretrained, fine_tuned = (command[2:] for command in started.commands)
    on_gpu = device.type == "cuda"
    settings = [electra_settings.parse_args(resumed), electra_settings.parse_args(pretrained)]
    settings.append(glue_settings.parse_args(fine_tuned))
    assert [one.device for one in settings] == [None if on_gpu else "cpu"] * 3
    assert settings[0].deterministic and settings[0].use_compile == str(int(on_gpu))
    assert settings[1].max_steps == (2000 if on_gpu else 40)
    assert settings[2].model_path == str(Path(settings[1].out_dir) / "electra_small" / "discriminator")


def test_a_fine_tuning_that_learns_nothing_is_found(without_trainers):
    without_trainers(accuracy=0.62)
    with pytest.raises(AssertionError, match=r"accuracy 0.620: 0.75 is wanted"):
        gpu_electra.learns_and_is_fine_tuned(CPU)


def test_without_the_package_that_counts_a_score_nothing_is_fine_tuned(monkeypatch, without_trainers):
    started = without_trainers(accuracy=0.9)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotPromised, match="learned; not fine-tuned, .* pip install scikit-learn"):
        gpu_electra.learns_and_is_fine_tuned(CPU)
    assert len(started.commands) == 1


def test_the_target_asks_for_these_sections():
    # Tests that make has started would be told of the folder too.
    command = ["make", "-n", "--no-print-directory", "gpu-electra"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[1:] == ["benchmarks/gpu.py", "--sections", "0", "10", "11"]

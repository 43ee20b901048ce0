"""Checks of ELECTRA and GLUE on a device: the last section of benchmarks/gpu.py, and `pytest -m gpu`.

The text is the documentation inside Python. benchmarks/gpu_checks.py describes the form of a check.
"""

import importlib.util
import json
import random
import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.corpora import texts_of
from benchmarks.gpu_checks import Check, command_of, output_of, resumes_bitwise, start
from dataset.embedded_corpus import build_embedded_corpus

# The run that is killed, see benchmarks/gpu_checks.py. It lasts some seconds beyond its first save.
RESUMED = """--hidden_size 128 --intermediate_size 256 --num_hidden_layers 2 --embedding_size 64 --max_seq_len 64 --batch_size 8
    --max_steps 600 --save_interval 3 --log_interval 10 --deterministic 1 --use_compile 1"""
# Nearly as `make electra`
LEARNS = """--hidden_size 128 --intermediate_size 512 --num_hidden_layers 4 --embedding_size 64 --init_std 0.1 --dropout 0
    --position_init sinusoidal --optimizer muon --muon_lr 0.006 --learning_rate 7e-4 --lr_schedule separate_linear
    --max_seq_len 32 --max_steps 2000 --val_fraction 0.02 --log_interval 10"""
# Separates NumPy's documentation from the standard library's (62 % of the texts)
TASK = "numpy"
TUNED = f"--task {TASK} --kind classification --max_seq_len 64 --learning_rate 5e-4 --epochs 5"
# {flags: appended on a CPU, to try the checks in a minute}
ON_CPU = {
    RESUMED: "--max_steps 30 --use_compile 0 --cpu_processes 1",
    LEARNS: """--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --max_steps 40 --warmup_steps 10 --batch_size 32
        --use_compile 0 --cpu_processes 1""",
    TUNED: "--learning_rate 2e-3 --max_steps 60 --batch_size 16",
}
# Required of the discriminator on held-out text. A CPU reaches 0.76 in its 40 updates, and 0.83 in 2,000.
MIN_AUC = {"cuda": 0.75, "cpu": 0.6}
# The small network reaches 85 to 90 % in 60 updates on a CPU.
MIN_ACCURACY = 0.75
DEV_TEXTS = 300


def learns_and_is_fine_tuned(device: torch.device) -> str:
    """Pretraining finds replaced tokens in held-out text, and fine-tuning recognises NumPy's documentation."""
    documents = list(texts_of(build_embedded_corpus()))
    # mixes their sources
    random.Random(0).shuffle(documents)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_lines(folder / "text.jsonl", [{"text": text} for text in documents])
        output_of(start(command_of("train_electra.py", LEARNS, ON_CPU[LEARNS], device, folder, data_path=data)))
        run = folder / "electra_small"
        lines = (run / "electra_small.metrics.jsonl").read_text(encoding="utf-8").splitlines()
        auc = [line["val_disc_auc"] for line in map(json.loads, lines) if "val_disc_auc" in line][-1]
        learned = f"a held-out AUC of {auc:.3f}"
        assert auc >= MIN_AUC[device.type], f"{learned}, expected {MIN_AUC[device.type]}"
        if importlib.util.find_spec("sklearn") is None:
            return f"{learned}; not fine-tuned, which needs a package: pip install scikit-learn"

        examples = [labelled(document) for document in documents]
        files = {
            "model_path": run / "discriminator",
            "train_file": write_lines(folder / "train.jsonl", examples[DEV_TEXTS:]),
            "dev_file": write_lines(folder / "dev.jsonl", examples[:DEV_TEXTS]),
        }
        output_of(start(command_of("train_glue.py", TUNED, ON_CPU[TUNED], device, folder / "glue", **files)))
        results = json.loads((folder / "glue" / TASK / "seed_42" / "eval_results.json").read_text(encoding="utf-8"))
        accuracy = results["results"]["accuracy"]
        outcome = f"{learned}; fine-tuned in {results['updates']} updates: accuracy {accuracy:.3f}"
        assert accuracy >= MIN_ACCURACY, f"{outcome}, expected {MIN_ACCURACY}"
        return outcome


def write_lines(path: Path, objects: Sequence[dict[str, str]]) -> Path:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(fields) + "\n" for fields in objects), encoding="utf-8")
    return path


def labelled(document: str) -> dict[str, str]:
    """{"text", "label"} without the first line, which names the documented object."""
    name, _, text = document.partition("\n\n")
    is_numpy = re.match(r"(module |class )?numpy\b", name)
    return {"text": text or name, "label": "numpy" if is_numpy else "other"}


ELECTRA: dict[str, Check] = {
    # Without --deterministic 1 this is promised on a CPU only.
    "resume, ELECTRA, --deterministic 1": partial(resumes_bitwise, "train_electra.py", RESUMED, ON_CPU[RESUMED]),
    "ELECTRA learns, and is fine-tuned": learns_and_is_fine_tuned,
}

"""Whether ELECTRA and GLUE are right on a device: the last section of benchmarks/gpu.py, and `pytest -m gpu`.

The text is the documentation inside Python. The checks are of the form that gpu_checks.py tells.
"""

import importlib.util
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_checks import (
    Check,
    documents_for,
    end_of,
    killed_and_resumed,
    start,
)
from common.paths import ROOT
from dataset.embedded_corpus import build_embedded_corpus

# Of the runs that are killed, by the kind of the device: see gpu_checks.py.
UPDATES_OF_RUN = {"cuda": 600, "cpu": 30}
DOCUMENTS_OF_RUN = {"cuda": 600, "cpu": 60}
TWO_LAYERS = [
    *("--hidden_size", "128", "--intermediate_size", "256", "--num_hidden_layers", "2", "--embedding_size", "64"),
    *("--max_seq_len", "64", "--batch_size", "8", "--save_interval", "3", "--log_interval", "10"),
]

# Four layers in 40 updates or, on a GPU, in 2,000: the discriminator's AUC on held-out text that is asked for. A CPU reaches 0.7
# and 0.83.
LEARNS = [
    *("--embedding_size", "64", "--init_std", "0.1", "--dropout", "0", "--position_init", "sinusoidal"),
    *("--optimizer", "muon", "--muon_lr", "0.006", "--learning_rate", "7e-4", "--lr_schedule", "separate_linear"),
    *("--max_seq_len", "32", "--val_fraction", "0.02", "--log_interval", "10"),
]
LENGTH = {
    "cuda": ["--hidden_size", "128", "--intermediate_size", "512", "--num_hidden_layers", "4", "--max_steps", "2000"],
    "cpu": ["--hidden_size", "64", "--intermediate_size", "128", "--num_hidden_layers", "2", "--max_steps", "40"]
    + ["--warmup_steps", "10", "--batch_size", "32", "--use_compile", "0"],
}
DOCUMENTS = {"cuda": None, "cpu": 300}
LEAST_AUC = {"cuda": 0.75, "cpu": 0.6}

# Fine-tuning: is a text of NumPy's documentation, or of the standard library's? 62 % are the latter. On a CPU 60 updates of
# the small network have 85 to 90 % right.
TASK = "numpy"
LEAST_ACCURACY = 0.75
DEV_TEXTS = 300
FINE_TUNING = {
    "cuda": ["--learning_rate", "5e-4", "--epochs", "5"],
    "cpu": ["--learning_rate", "2e-3", "--max_steps", "60", "--batch_size", "16"],
}


def command_of(script: str, device: torch.device) -> list[str]:
    """Without --device where that is the machine's own choice."""
    command = [sys.executable, str(ROOT / "trainer" / script)]
    return command if device.type == "cuda" else [*command, "--device", "cpu"]


def electra_command(data: Path, out_dir: Path, device: torch.device, flags: Sequence[str]) -> list[str]:
    """What starts a pretraining that has its tokens to itself."""
    command = [*command_of("train_electra.py", device), "--data_path", str(data), "--out_dir", str(out_dir)]
    command += ["--cache_dir", str(out_dir / "tokens"), *flags]
    # The machine's other cores have other checks to run.
    return command if device.type == "cuda" else [*command, "--cpu_processes", "1"]


def resumes_bitwise(device: torch.device) -> str:
    """A deterministic pretraining that is killed and resumed ends with the bytes of one that went through.

    Without --deterministic 1 that is promised on a CPU alone.
    """
    # Compiled where that takes seconds, and not longer than all else here.
    compiled = str(int(device.type == "cuda"))
    flags = [*TWO_LAYERS, "--max_steps", str(UPDATES_OF_RUN[device.type])]
    flags += ["--deterministic", "1", "--use_compile", compiled]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = documents_for(folder, DOCUMENTS_OF_RUN[device.type])
        return killed_and_resumed(lambda out_dir: electra_command(data, out_dir, device, flags), folder, device)


def learns_and_is_fine_tuned(device: torch.device) -> str:
    """A pretraining finds replaced tokens of held-out text, and its discriminator tells NumPy's documentation."""
    documents = embedded_documents()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = ({"text": text} for text in documents[: DOCUMENTS[device.type]])
        data = write_lines(folder / "text.jsonl", text)
        end_of(start(electra_command(data, folder, device, [*LEARNS, *LENGTH[device.type]])))
        metrics = folder / "electra_small" / "electra_small.metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        auc = [record["val_disc_auc"] for record in records if "val_disc_auc" in record][-1]
        learned = f"a held-out AUC of {auc:.3f}"
        assert auc >= LEAST_AUC[device.type], f"{learned}: {LEAST_AUC[device.type]} is wanted"
        if importlib.util.find_spec("sklearn") is None:
            return f"{learned}; not fine-tuned, for want of a package: pip install scikit-learn"

        examples = [labelled(document) for document in documents]
        command = [*command_of("train_glue.py", device), "--task", TASK, "--kind", "classification"]
        for flag, part in (("--train_file", examples[DEV_TEXTS:]), ("--dev_file", examples[:DEV_TEXTS])):
            command += [flag, str(write_lines(folder / f"{flag[2:]}.jsonl", part))]
        command += ["--model_path", str(folder / "electra_small" / "discriminator"), "--out_dir", str(folder / "glue")]
        command += ["--cache_dir", str(folder / "features"), "--max_seq_len", "64", *FINE_TUNING[device.type]]
        end_of(start(command))
        results = json.loads((folder / "glue" / TASK / "seed_42" / "eval_results.json").read_text(encoding="utf-8"))
        accuracy = results["results"]["accuracy"]
        found = f"{learned}; fine-tuned in {results['updates']} updates: accuracy {accuracy:.3f}"
        assert accuracy >= LEAST_ACCURACY, f"{found}: {LEAST_ACCURACY} is wanted"
        return found


def embedded_documents() -> list[str]:
    """In an order that mixes their sources."""
    path = build_embedded_corpus(ROOT / "dataset" / "python_docs.jsonl")
    with open(path, encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    random.Random(0).shuffle(documents)
    return documents


def write_lines(path: Path, records: Iterable[dict[str, str]]) -> Path:
    """A file of one JSON object in a line."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def labelled(document: str) -> dict[str, str]:
    """{"text", "label"} without the first line, which names what is documented."""
    name, _, text = document.partition("\n\n")
    is_numpy = re.match(r"(module |class )?numpy\b", name)
    return {"text": text or name, "label": "numpy" if is_numpy else "other"}


ELECTRA: dict[str, Check] = {
    "resume, ELECTRA, --deterministic 1": resumes_bitwise,
    "ELECTRA learns, and is fine-tuned": learns_and_is_fine_tuned,
}

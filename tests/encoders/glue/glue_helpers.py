"""Made-up GLUE tasks, a tiny model, and commands on them in this process."""

import json
import random

import torch
from transformers import BertTokenizer, ElectraConfig, ElectraForPreTraining

from encoders.glue.tasks import TASKS
from tests import helpers
from tests.encoders.glue.test_examples import WORDS
from trainer import train_glue

HEADERS = {name: f"index\tsentence1\tsentence2\t{TASKS[name].label}" for name in ("rte", "stsb", "mnli")}
HEADERS["cola"] = "source\tlabel\tstar\tsentence"


def write_task(top, folder, sizes, seed=0):
    """A made-up task: {file: number of lines} in top/folder; a word of its own in the sentence tells the label."""
    generator, (name, task) = random.Random(seed), next((n, t) for n, t in TASKS.items() if t.folder == folder)
    columns = HEADERS[name].split("\t")
    (top / folder).mkdir(parents=True)
    for file, n in sizes.items():
        own = [c for c in columns if c != task.label] if file.startswith("test") else columns
        lines = ["index\tsentence"] if file == "test.tsv" and task.names else [] if task.names else ["\t".join(own)]
        own = ["index", "sentence"] if file == "test.tsv" and task.names else own
        for i in range(n):
            kind, label = generator.choice(list(enumerate(task.labels or ("0.0", "2.5", "5.0"))))
            text = " ".join(("hij"[kind], *generator.choices("abcdefg", k=generator.randint(0, 9))))
            values = {task.label: label, **dict.fromkeys(task.text, text), "index": str(i)}
            lines.append("\t".join(values.get(column, "") for column in own))
        (top / folder / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return name


def make_place(top):
    """Fill a folder with tiny/, an untrained discriminator, and glue/ with three tasks."""
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 32, "vocab_size": len(WORDS)}
    ElectraForPreTraining(ElectraConfig(**sizes, initializer_range=0.2)).save_pretrained(top / "tiny")
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(top / "tiny")
    write_task(top / "glue", "CoLA", {"train.tsv": 20, "dev.tsv": 9, "test.tsv": 5})
    write_task(top / "glue", "STS-B", {"train.tsv": 20, "dev.tsv": 9, "test.tsv": 5})
    dev = {"dev_matched.tsv": 9, "dev_mismatched.tsv": 7}
    write_task(top / "glue", "MNLI", {"train.tsv": 21, **dev, "test_matched.tsv": 4, "test_mismatched.tsv": 3})
    return top


def arguments(place, out, **changes):
    return helpers.argument_list({
        "task": "cola", "data_dir": place / "glue", "model_path": place / "tiny", "out_dir": out, "max_seq_len": 16,
        "batch_size": 4, "epochs": 2, "learning_rate": 3e-3, "log_interval": 2, "device": "cpu", "dtype": "float32",
        "use_compile": 0, "report": 0, **changes,
    })  # fmt: skip


def fine_tune(place, out, **changes):
    """Run in this process; {out}/eval_results.json."""
    assert train_glue.main(arguments(place, out, **changes)) == 0
    return json.loads((out / "eval_results.json").read_text())


def complaint(capsys, place, out, **changes):
    return helpers.complaint(capsys, train_glue.main, arguments(place, out, **changes))

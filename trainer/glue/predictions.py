"""Files of predictions: the leaderboard's for its tasks, and for one's own what fits their kind."""

import json
from pathlib import Path

import torch

from common.files import atomic_file
from dataset.glue.glue_dataset import GlueAssembler
from dataset.glue.glue_tasks import QUESTIONS, REGRESSION, TAGS, Task
from trainer.glue.measures import found_classes, predicted, tags_of_sentences
from trainer.glue.squad import found_answers

# Their folder, in that of a run and of an ensemble.
PREDICTIONS = "predictions"


def suffix_of(task: Task) -> str:
    """What the name of a file of predictions ends with."""
    return {TAGS: ".jsonl", QUESTIONS: ".json"}.get(task.kind, ".tsv")


def write_predictions(path: Path, task: Task, assembler: GlueAssembler, logits: torch.Tensor, divisor: float) -> None:
    """Write what a model gives for a file: a TSV of words or numbers, as the leaderboard wants it; the tags of each sentence
    on a line; or a JSON file of answers, as SQuAD's own script reads it."""
    if task.kind == TAGS:
        content = tag_lines(task, assembler, logits)
    elif task.kind == QUESTIONS:
        found = found_answers(
            assembler.questions, assembler.features, logits.numpy(), task.windows, assembler.max_seq_len
        )
        content = json.dumps(found, ensure_ascii=False, indent=1).encode() + b"\n"
    else:
        content = table_of_predicted(task, logits, divisor)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(content)


def table_of_predicted(task: Task, logits: torch.Tensor, divisor: float) -> bytes:
    """The words of the classes, or the scores."""
    found = predicted(task, logits, divisor)
    if task.kind == REGRESSION:
        # The leaderboard's scores have bounds.
        words = [f"{score:.3f}" for score in found.clip(*task.bounds)]
    else:
        words = [task.labels[i] for i in found]
    lines = ["index\tprediction\n"]
    for i, word in enumerate(words):
        lines.append(f"{i}\t{word}\n")
    return "".join(lines).encode()


def tag_lines(task: Task, assembler: GlueAssembler, logits: torch.Tensor) -> bytes:
    """{"tags": [...]} for each sentence of the file, in its order."""
    features = assembler.features
    lines = []
    for tags in tags_of_sentences(task, features, found_classes(features, logits)):
        lines.append(json.dumps({"tags": tags}, ensure_ascii=False) + "\n")
    return "".join(lines).encode()

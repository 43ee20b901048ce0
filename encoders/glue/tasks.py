"""Tasks, and those of the GLUE benchmark: one table for files, metrics and flags."""

from typing import NamedTuple

Words = tuple[str, ...]
# ((name, file), ...)
Files = tuple[tuple[str, str], ...]

# metrics of a custom task, by --kind: examples have a class or a score
METRICS = {"classification": ("accuracy", "macro_f1"), "regression": ("pearson", "spearman")}
# Scores are float32, and the loss sums their squares in it.
MAX_SCORE = 1e16


class Task(NamedTuple):
    """A task. dev: (suffix of the metrics' names, file), test: (name of the predictions, file); if there is none, (folder, "test.tsv")."""

    folder: str  # the benchmark's, or the name of a custom task
    text: Words  # columns of the sentences
    label: str  # column of the label
    labels: Words  # label words in class order; empty: the label is a score
    metrics: Words
    epochs: int = 3
    names: Words = ()  # columns of train and dev files without a header
    dev: Files = (("", "dev.tsv"),)
    test: Files = ()
    skip_short_lines: bool = False  # the public file has lines with too few fields
    train: str = "train.tsv"
    bounds: tuple[float, float] = (0.0, 5.0)  # least and largest score

    @property
    def is_regression(self) -> bool:
        return not self.labels


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")
ACCURACY = ("accuracy",)
AND_F1 = ("accuracy", "f1")
QUESTIONS = ("question1", "question2")
SPLITS = (("", "dev_matched.tsv"), ("-mm", "dev_mismatched.tsv"))
# Diagnostic sentences, a test for models of MNLI. Their folder depends on the archive.
AX = (("AX", "../diagnostic/diagnostic.tsv"), ("AX", "../AX/test.tsv"), ("AX", "../AX/AX.tsv"))
TESTS = (("MNLI-m", "test_matched.tsv"), ("MNLI-mm", "test_mismatched.tsv"), *AX)
NLI = ("contradiction", "entailment", "neutral")
COLA = ("source", "label", "star", "sentence")
TASKS = {
    "cola": Task("CoLA", ("sentence",), "label", BINARY, ("matthews",), names=COLA),
    "sst2": Task("SST-2", ("sentence",), "label", BINARY, ACCURACY),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), "Quality", BINARY, AND_F1),
    "stsb": Task("STS-B", PAIR, "score", (), ("pearson", "spearman"), 10),
    "qqp": Task("QQP", QUESTIONS, "is_duplicate", BINARY, AND_F1, skip_short_lines=True),
    "mnli": Task("MNLI", PAIR, "gold_label", NLI, ACCURACY, dev=SPLITS, test=TESTS),
    "qnli": Task("QNLI", ("question", "sentence"), "label", ENTAILMENT, ACCURACY),
    "rte": Task("RTE", PAIR, "label", ENTAILMENT, ACCURACY, 10),
    "wnli": Task("WNLI", PAIR, "label", BINARY, ACCURACY),
}
# Names in other trainers, beside the benchmark's own spellings
OTHER_NAMES = {"sts": "stsb", "sst": "sst2"}


def task_name(text: str) -> str:
    """The key in TASKS of a name from the benchmark or another trainer: `sst2` for SST-2. Other names are unchanged."""
    name = text.strip().lower().replace("-", "").replace("_", "")
    name = OTHER_NAMES.get(name, name)
    return name if name in (*TASKS, "all") else text.strip()


def task_list(text: str) -> str:
    """A comma-separated list of tasks by their keys in TASKS, deduplicated: `sst2,mrpc` for `SST-2, MRPC`; `all` if it has that."""
    names = dict.fromkeys(task_name(part) for part in text.split(","))
    return "all" if "all" in names else ",".join(names)

"""What a task is, and the tasks of the GLUE benchmark: one table that files, metrics and flags are read from."""

from typing import NamedTuple

Words = tuple[str, ...]
# ((name, file), ...)
Files = tuple[tuple[str, str], ...]

# What an example is given: a class; a score; a class for each of its words; the place of an answer in its text.
CLASSIFICATION = "classification"
REGRESSION = "regression"
TAGS = "tags"
QUESTIONS = "questions"
KINDS = (CLASSIFICATION, REGRESSION, TAGS, QUESTIONS)
# In the order in which they are shown. The first ones are the default, as many as N_USUAL says.
METRICS = {
    CLASSIFICATION: ("accuracy", "macro_f1", "f1", "matthews"),
    REGRESSION: ("pearson", "spearman", "r2"),
    TAGS: ("entity_f1", "entity_precision", "entity_recall", "accuracy"),
    QUESTIONS: ("exact_match", "f1"),
}
N_USUAL = {CLASSIFICATION: 1, REGRESSION: 2, TAGS: 4, QUESTIONS: 2}


class Windows(NamedTuple):
    """How a text that is longer than an example is cut for questions on it, in tokens."""

    # From one window's beginning to the next one's.
    stride: int = 128
    longest_question: int = 64
    longest_answer: int = 30


class Task(NamedTuple):
    """A task. `dev` and `test` are (suffix of the metrics' names, file), (name of the predictions, file)."""

    # Of the benchmark, or the name of somebody's own task.
    folder: str
    # Columns of the sentences.
    text: Words
    # Column of the label.
    label: str
    # Its words, in the order of the classes; empty: a score, or answers.
    labels: Words
    metrics: Words
    epochs: int = 3
    # Columns of train and dev files, where these have no header.
    names: Words = ()
    dev: Files = (("", "dev.tsv"),)
    test: Files = ()
    # The public file has lines with too few fields.
    skip_short_lines: bool = False
    kind: str = CLASSIFICATION
    train: str = "train.tsv"
    # Of the scores of a regression.
    bounds: tuple[float, float] = (0.0, 5.0)
    windows: Windows = Windows()

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for an example, or for each of its positions."""
        if self.kind == QUESTIONS:
            # How well an answer begins here, and ends here.
            return 2
        return len(self.labels) or 1

    @property
    def is_of_positions(self) -> bool:
        """Whether every position of an example has outputs of its own."""
        return self.kind in (TAGS, QUESTIONS)


def _test(name: str) -> Files:
    return ((name, "test.tsv"),)


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")
ACCURACY = ("accuracy",)
SPLITS = (("", "dev_matched.tsv"), ("-mm", "dev_mismatched.tsv"))
# The diagnostic sentences are a test for models of MNLI. The benchmark's own script saves them in the second place.
TESTS = (("MNLI-m", "test_matched.tsv"), ("MNLI-mm", "test_mismatched.tsv"), ("AX", "../AX/AX.tsv"))
DIAGNOSTICS = ("../AX/AX.tsv", "../diagnostic/diagnostic.tsv", "../AX/test.tsv")
COLA = ("source", "label", "star", "sentence")
TASKS = {
    "cola": Task("CoLA", ("sentence",), "label", BINARY, ("matthews",), names=COLA, test=_test("CoLA")),
    "sst2": Task("SST-2", ("sentence",), "label", BINARY, ACCURACY, test=_test("SST-2")),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), "Quality", BINARY, ("accuracy", "f1"), test=_test("MRPC")),
    "stsb": Task("STS-B", PAIR, "score", (), ("pearson", "spearman"), 10, test=_test("STS-B"), kind=REGRESSION),
    "qqp": Task(
        "QQP",
        ("question1", "question2"),
        "is_duplicate",
        BINARY,
        ("accuracy", "f1"),
        test=_test("QQP"),
        skip_short_lines=True,
    ),
    "mnli": Task(
        "MNLI", PAIR, "gold_label", ("contradiction", "entailment", "neutral"), ACCURACY, dev=SPLITS, test=TESTS
    ),
    "qnli": Task("QNLI", ("question", "sentence"), "label", ENTAILMENT, ACCURACY, test=_test("QNLI")),
    "rte": Task("RTE", PAIR, "label", ENTAILMENT, ACCURACY, 10, test=_test("RTE")),
    "wnli": Task("WNLI", PAIR, "label", BINARY, ACCURACY, test=_test("WNLI")),
}
# Those in which the order of the two sentences means nothing, and which the original code trains on both orders.
UNORDERED = frozenset({"mrpc", "stsb"})
# Those with a score in the place of classes.
REGRESSIONS = frozenset(name for name, task in TASKS.items() if task.kind == REGRESSION)
# What other trainers call them, beside the benchmark's own spellings.
OTHER_NAMES = {"sts": "stsb", "sst": "sst2"}


def task_name(text: str) -> str:
    """The key in TASKS of a task as the benchmark, or another trainer, spells it: `sst2` of SST-2. Another text as it is."""
    name = text.strip().lower().replace("-", "").replace("_", "")
    name = OTHER_NAMES.get(name, name)
    return name if name in TASKS else text.strip()


def task_list(text: str) -> str:
    """A list of tasks between commas, each once and by its key in TASKS: `sst2,mrpc` of `SST-2, MRPC`."""
    return ",".join(dict.fromkeys(task_name(part) for part in text.split(",")))

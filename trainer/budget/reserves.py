"""Seconds of a run that are no updates: evaluations, samples and what comes behind the last update."""

from trainer.machine.compiling import COMPILED_TIME, PLAIN_TIME

# Times that an eager micro-batch takes, of a compiled one.
EAGER_TIMES = PLAIN_TIME / COMPILED_TIME
# Of a compiled training step, what an evaluation takes for as many positions: a forward pass that is not compiled.
EVALUATION_SHARE = 0.75
# Seconds behind the last update, for the files and for the report; of a sample, for each layer.
FILES_S = 2.0
REPORT_S = 2.0
SAMPLE_S_OF_LAYER = 0.25


def sample_seconds(layers: int, prompts: int) -> float:
    """Of one sample for each prompt."""
    return SAMPLE_S_OF_LAYER * layers * prompts


def evaluation_share(compiled: bool) -> float:
    """Of a training step, what an evaluation takes for as many positions. compiled: whether the training is; the evaluation
    never is."""
    return EVALUATION_SHARE if compiled else EVALUATION_SHARE / EAGER_TIMES


def seconds_at_end(report: bool) -> float:
    """Of what comes behind the last update and its evaluation. report: whether the run writes one."""
    return FILES_S + (REPORT_S if report else 0.0)

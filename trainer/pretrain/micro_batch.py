"""What a pretraining run has to divide among processes, known before anything of it is opened."""

from collections.abc import Collection

from model.config import MiniMindConfig, parameter_count
from model.hf_folder import read_config
from trainer.budget.kept_plan import kept_plan
from trainer.budget.plan import MOST_ROWS_OF_MICRO_BATCH
from trainer.machine.cpu_ranks import Divisible
from trainer.pretrain.auto_batch import why_whole
from trainer.pretrain.settings import AUTO_ROWS, DEFAULT_TOKENIZER, MODEL_FLAGS, PretrainSettings

# Of a tokenizer that is not opened yet: more than most have, since too much memory is counted rather than too little.
LARGE_VOCABULARY = 64_000


def micro_batch_of(settings: PretrainSettings, given: Collection[str] = ()) -> Divisible | None:
    """given: names of the settings that the user has said. None where flags or a folder of weights are wrong: the job says why."""
    folder = settings.weight_folder()
    try:
        if folder is not None:
            config = read_config(folder)
        else:
            asked = {name: getattr(settings, name) for name in MODEL_FLAGS}
            config = MiniMindConfig(**asked)
            if settings.tokenizer_path != DEFAULT_TOKENIZER:
                config.vocab_size = LARGE_VOCABULARY
    except (ValueError, OSError):
        return None
    whole = why_whole(config)
    is_planned = settings.has_budget and "batch_size" not in given
    plan = kept_plan(settings, given) if is_planned and settings.from_resume else None
    if plan is not None:
        before = plan.settings
        # A run that goes on: its first start has chosen the batch, and the processes that share it.
        shape = (before.batch_size, before.max_seq_len)
        processes = int(before.cpu_processes) if before.cpu_processes.isdecimal() else None
        return Divisible(*shape, parameter_count(config), whole, processes=processes)
    # The plan, or the job, will take a batch that the processes can share.
    is_free = is_planned or settings.batch_size == AUTO_ROWS
    rows = MOST_ROWS_OF_MICRO_BATCH["cpu"] if is_free else settings.batch_size
    return Divisible(rows, settings.max_seq_len, parameter_count(config), whole, is_planned=is_free)

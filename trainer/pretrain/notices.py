"""Lines on settings of train_pretrain.py that cannot do what they are there for."""

from common.wording import counted
from dataset.corpus import Corpus
from trainer.machine.ranks import Ranks
from trainer.pretrain.settings import PretrainSettings
from trainer.without_effect import common_warnings, is_changed, warnings_of


def notices(settings: PretrainSettings, ranks: Ranks, corpus: Corpus, micro_batches: int) -> list[str]:
    """micro_batches: of a rank in the whole run."""
    from_file = settings.from_weight != "none"
    has_no_validation = not corpus.val_store
    other_rank = settings.local_rank not in (-1, ranks.local_rank)
    cases = [
        ("local_rank", other_rank, "torchrun's environment decides, or there is none"),
        ("init_scheme", settings.init_scheme != "default" and from_file, "the weights come from a file"),
        ("eval_interval", is_changed(settings, "eval_interval") and has_no_validation, "no validation data"),
        ("allow_val_overlap", settings.allow_val_overlap and not settings.val_path, "no --val_path"),
    ]
    lines = warnings_of(settings, cases) + common_warnings(settings, ranks)
    if settings.warmup_iters >= micro_batches:
        length = counted(micro_batches, "micro-batch", "micro-batches")
        lines.append(f"warning: --warmup_iters {settings.warmup_iters}: the run has {length}, so its rate only rises")
    return lines

"""The lines that a pretraining or fine-tuning run prints before its first update, and the fields of its report."""

import gzip
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from common.start import next_command
from common.wording import counted
from dataset.arrays import Ints
from dataset.corpus import Corpus
from dataset.packing import RowPlan
from dataset.store.token_store import Documents
from model.config import IGNORE, parameter_count, record_of
from model.weight_record import tokenizer_beside
from trainer.advice import common_warnings, warnings_of
from trainer.job import RunOverview
from trainer.machine.ranks import Ranks
from trainer.pretrain.memory import flops_per_token, mean_context
from trainer.pretrain.parts import Parts
from trainer.pretrain.sampled_head import rows_targets
from trainer.pretrain.settings import DEFAULT_TOKENIZER, PretrainSettings
from trainer.reporting.records import ANSWERS


def pretraining_overview(parts: Parts, first_plan: RowPlan, epoch: int, epochs: int) -> RunOverview:
    """first_plan: of epoch 0. epoch: the next one of `epochs`."""
    settings, ranks, corpus, batching = parts.settings, parts.ranks, parts.corpus, parts.batching
    config = parts.model.config
    answers = corpus.trains_answers
    plan = corpus.plan(epoch)
    n_rows = first_plan.n_rows * epochs
    if settings.max_updates:
        # The last update of an epoch may have fewer rows.
        passes = math.ceil(settings.max_updates / batching.schedule(first_plan.n_rows).n_updates)
        n_rows = min(first_plan.n_rows * passes, settings.max_updates * batching.rows)
    # Upper bound, as if each row were one document: this decides on compiling.
    head_ids = settings.sampled_softmax
    flops = flops_per_token(config, first_plan.T, head_ids) * n_rows * first_plan.T / ranks.world_size
    trained = first_plan.row_targets(0, first_plan.n_rows)
    # What a trained token of this corpus really needs
    token_flops = flops_per_token(config, mean_context(first_plan), head_ids) * (first_plan.n_pairs / trained)
    parameters = parameter_count(config)

    lines = [*corpus.notices, *corpus.mixture_report(epoch), *corpus.truncation_report(plan)]
    lines += [
        f"model: {config.generation}, {parameters / 1e6:.2f} M parameters, "
        f"{counted(config.num_hidden_layers, 'layer')} of width {config.hidden_size}, "
        f"{flops_per_token(config, settings.max_seq_len, head_ids) / 1e6:.1f} MFLOP per token (full rows)",
        f"data: {counted(len(corpus.documents), 'conversation' if answers else 'document')}, "
        f"{counted(plan.row_targets(0, plan.n_rows), 'token')} to train in {counted(plan.n_rows, 'row')} of {plan.T} "
        f"({plan.fill:.1%} full)",
    ]

    notices = []
    # Not if the user gave --parse_special_tokens 0 (with --from_weight a 0 may come from the weights, so it does not count).
    if ranks.is_main and not answers and (settings.parse_special_tokens is not False or settings.from_weight != "none"):
        notices += note_on_spelt_tokens(corpus, parts.tokenizer)
    if parts.encoder.eos_id is None:
        notices.append("warning: the tokenizer has no EOS, so no document tells the model where it ends")
    micro_batches = math.ceil(n_rows / batching.flag_rows)
    notices += warnings_on_settings(settings, ranks, micro_batches, corpus.val_store is not None)

    data_fields: dict[str, object] = {"sources": corpus.sources_of_epoch(epoch)} if ranks.is_main else {}
    if answers:
        # A sample of the run needs prompts like those trained on.
        data_fields["trained"] = ANSWERS
    elif ranks.is_main and corpus.val_store is not None:
        assert corpus.val_documents is not None
        data_fields["gzip"] = bits_of_gzip(corpus.val_store, corpus.val_documents, parts.tokenizer)

    return RunOverview(
        plan=plan,
        lines=lines,
        notices=notices,
        model_fields={**record_of(config), "parameters": parameters, "flops_per_token": token_flops},
        n_documents=len(corpus.documents),
        data_fields=data_fields,
        # for the utilisation in the log
        flops_per_token=token_flops,
        flops=flops,
        tokens=n_rows * first_plan.T * first_plan.fill,
        guesses=(math.log(config.vocab_size), entropy_of(rows_targets(corpus))),
        # A dense model has no auxiliary loss: its record says 0, its line leaves it out.
        shown=("aux_loss", "grad_norm") if config.use_moe else ("grad_norm",),
        next_commands=next_commands(settings, parts.stem, answers),
    )


def entropy_of(targets: Ints) -> float:
    """Nats per token of a model that knows only how frequent each token is."""
    counts = np.bincount(targets[targets != IGNORE])
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return -float((shares * np.log(shares)).sum())


def warnings_on_settings(
    settings: PretrainSettings, ranks: Ranks, micro_batches: int, has_validation: bool
) -> list[str]:
    """Warnings about settings without effect, and about a warm-up that never ends. micro_batches: of a rank in the whole run."""
    has_other_rows = settings.rows_per_update not in (0, settings.batch_size * settings.accumulation_steps)
    reasons = {
        "init_scheme": "the weights come from a file" if settings.from_weight != "none" else "",
        "eval_interval": "" if has_validation else "no validation data",
        "allow_val_overlap": "" if settings.val_path else "there is no --val_path",
        "decay_share": f"--lr_schedule is {settings.lr_schedule}" if settings.lr_schedule != "wsd" else "",
        "epochs": "--max_updates says when the run ends" if settings.max_updates else "",
        "accumulation_steps": "--rows_per_update is given" if has_other_rows else "",
    }
    lines = warnings_of(settings, reasons) + common_warnings(settings, ranks)
    if settings.warmup_iters >= micro_batches:
        length = counted(micro_batches, "micro-batch", "micro-batches")
        lines.append(f"warning: --warmup_iters {settings.warmup_iters}: the run has {length}, so its rate only rises")
    return lines


def note_on_spelt_tokens(corpus: Corpus, tokenizer: Any) -> list[str]:
    """A line if more than a tenth of a source's first documents spell a special token: a few may only mention it."""
    # Padding would end no document.
    tokens = [token for token in tokenizer.all_special_tokens if token.strip() and token != tokenizer.pad_token]
    for store in corpus.stores:
        spans = pairwise(store.offsets[:201].tolist())
        ids = [store.tokens[begin : min(end, begin + 2000)] for begin, end in spans]
        texts = [str(tokenizer.decode(piece, skip_special_tokens=True)) for piece in ids]
        for token in tokens:
            if (count := sum(token in text for text in texts)) > len(texts) / 10:
                note = f"note: {count} of the first {counted(len(texts), 'document')} spell {token}, which is read as plain text"
                return [f"{note}: --parse_special_tokens 1 reads it as the token itself, as MiniMind does"]
    return []


def next_commands(settings: PretrainSettings, stem: Path, answers: bool) -> list[tuple[str, str]]:
    """Suggested commands for the finished run. stem: path of its files. answers: the run trains the answers of conversations."""
    weight = ["--weight", f"{stem}.pth"]
    # What lies beside the weights, or in model/, is found without a flag.
    if settings.tokenizer_path != DEFAULT_TOKENIZER and not tokenizer_beside(Path(f"{stem}.pth")).is_dir():
        weight += ["--tokenizer_path", str(settings.tokenizer_path)]
    generate, evaluate = "scripts/generate.py", "scripts/evaluate.py"
    play = next_command("the same on a page in your browser", "scripts/play.py", *weight)
    export = next_command("export to Hugging Face", "scripts/export_hf.py", *weight, "--out_dir", f"{stem}_hf")
    if answers:
        return [next_command("chat", generate, *weight, "--chat"), play, export]
    windows = ["--max_length", str(settings.max_seq_len)]
    measure = next_command("measure", evaluate, "perplexity", *weight, "--data_path", "my.txt", *windows)
    return [next_command("continue texts, chat", generate, *weight), play, measure, export]


# maximum bytes of text to compress, which takes a second
SAMPLE_BYTES = 1 << 20


def bits_of_gzip(store: Documents, documents: Ints, tokenizer: Any) -> float:
    """Bits per byte of gzip, to compare the model with. documents: their numbers; of much text every n-th is taken."""
    chosen = documents[:: math.ceil(int(store.text_bytes[documents].sum(dtype=np.int64)) / SAMPLE_BYTES) or 1]
    begins, ends = store.offsets[chosen], store.offsets[chosen + 1]
    # A document may be longer than the whole sample; a token hardly ever has less than a byte.
    spans = zip(begins.tolist(), np.minimum(ends, begins + SAMPLE_BYTES).tolist(), strict=True)
    texts = [tokenizer.decode(store.tokens[begin:end].tolist(), skip_special_tokens=True) for begin, end in spans]
    raw = "\n".join(texts).encode(errors="replace")
    return 8 * len(gzip.compress(raw, 9, mtime=0)) / max(len(raw), 1)

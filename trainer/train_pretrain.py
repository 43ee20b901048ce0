"""Pretrain a MiniMind on a jsonl corpus.

    python trainer/train_pretrain.py --epochs 1                      # one device: CUDA, MPS or CPU, whichever is there
    python trainer/train_pretrain.py --device cpu --hidden_size 256  # a small one on a CPU
    torchrun --nproc_per_node 2 trainer/train_pretrain.py            # data parallel: NCCL on GPUs, Gloo on CPUs

Without `dataset/pretrain_hq.jsonl` and without `--data_path` it trains on the documentation inside the installed
Python. `--help` lists the flags; docs/design.md explains the words (step, update, row, document).
"""

import math
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports; main() sets its own
if __package__ in (None, ""):  # run by path: trainer/ would come first and could shadow a dependency
    sys.path[0] = str(ROOT)
if __name__ == "__main__":  # --help and wrong flags are answered before torch is imported, which takes seconds
    from trainer.arguments import parse_args

    parse_args()

import torch

from common.errors import UserError, user_errors
from common.notices import announce
from common.wording import counted
from dataset.corpus import Corpus
from dataset.embedded_corpus import build_embedded_corpus
from dataset.loader import Assembler
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.vocabulary import check_known, check_size
from model.checkpointing import recompute_layers
from model.config import parameter_count
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.arguments import ignored_settings, parse_args
from trainer.engine import Engine
from trainer.evaluation import evaluate, read_prompts, samples
from trainer.loop import train_epoch
from trainer.machine.command_line import run_cli
from trainer.machine.compiling import compile_blocks
from trainer.machine.devices import pick_dtype
from trainer.machine.measure import product_rate, total_memory
from trainer.machine.random_state import seed_everything
from trainer.machine.ranks import init_distributed_mode, on_main
from trainer.optim.build import build_optimizer
from trainer.optim.schedules import get_lr, learning_rate
from trainer.reporting.reporter import describe, flops_per_token, mean_context
from trainer.saving.places import check_kinds
from trainer.saving.weights import save_weights
from trainer.session import carry_out, claim, launch, new_run

BYTES_PER_PARAMETER = 16  # weight, gradient and AdamW's two moments in fp32

__all__ = ["get_lr", "init_distributed_mode", "init_model", "main", "train_epoch"]


def main(argv=None):
    """Run the trainer with the given flags (default: the command line's); returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    return launch(train, "trainer/train_pretrain.py", args, argv, args.ddp)


def train(args, ranks, device, signals, command=""):
    """Set everything up, train, and show what came out."""
    dtype, precision_notice = pick_dtype(args.dtype, device)
    seed_everything(args.seed)  # the same on all ranks, so that all begin with the same weights
    with user_errors():
        prompts = read_prompts(args.sample_prompts)
        tokenizer = load_tokenizer(args.tokenizer_path)
        encoder = DocumentEncoder(tokenizer, args.parse_special_tokens)
        config = config_from_flags(args, encoder, tokenizer)
        check_memory(config, device)
        model = init_model(config, args.from_weight, args.out_dir, args.init_scheme).to(device)
        config = model.config
        stem = Path(args.out_dir) / weight_name(args.save_weight, config)
        check_length(args, config)
        claim(ranks, stem)
        outputs = {"weights": Path(f"{stem}.pth"), "config": Path(f"{stem}.json")}
        on_main(ranks, lambda: check_kinds(stem, files=outputs.values()))
        corpus = open_corpus(args, encoder, ranks)
        what = f"--tokenizer_path {args.tokenizer_path}"
        check_size(encoder.vocab_size, config.vocab_size, what)
        check_known(
            corpus.store.tokens, tokenizer.unk_token_id, f"--data_path, {what}", (encoder.bos_id, encoder.eos_id)
        )
    check_vocabulary(args, config, corpus)
    if args.gradient_checkpointing:
        recompute_layers(model)
    model.train()
    seed_everything(args.seed, ranks.rank)

    pad_id = tokenizer.pad_token_id or 0
    optimizer = build_optimizer(model, args.learning_rate, args.weight_decay, args.optimizer, args.muon_lr)
    options = {"grad_clip": args.grad_clip, "n_sums": n_sums(config)}
    engine = Engine(model, optimizer, objective(model), device=device, dtype=dtype, ranks=ranks, **options)
    batches = corpus.validation(pad_id)

    run = new_run(
        stem,
        args,
        ranks,
        signals,
        engine,
        command,
        plan=corpus.plan,
        assembler=Assembler(corpus.store, pad_id),
        learning_rate=rates(args, ranks),
        epochs=args.epochs,
        token_check=corpus.token_check() if ranks.local_rank == 0 else None,
        metrics=lambda sums: metrics(sums, config.num_experts),
        # A dense model has no auxiliary loss: its record says 0, its line leaves it out.
        shown=("aux_loss", "grad_norm") if config.use_moe else ("grad_norm",),
        save_weights=lambda weights, _: save_weights(weights, config.to_dict(), stem),
        validate=(lambda: evaluate(engine, batches, signals)) if batches else None,
        sample=(lambda: samples(engine, tokenizer, encoder, prompts, signals, args.seed)) if prompts else None,
        identity={
            "tokenizer": encoder.fingerprint[:16],
            "data": corpus.fingerprint[:16],  # as this tokenizer reads it
            "architecture": {name: getattr(config, name) for name in ARCHITECTURE},
            "row layout": corpus.layout(),
            "optimizer": args.optimizer,
        },
    )
    return carry_out(run, stem, outputs, lambda: prepare(run, corpus, dtype, precision_notice))


def prepare(run, corpus, dtype, precision_notice):
    """Say what the run will do, and make it fast. The plans that this looks at are not kept."""
    args, ranks, model, device, say = run.args, run.ranks, run.engine.model, run.engine.device, run.reporter.say
    first = corpus.plan(0)  # whatever the epoch: a resume decides as the first start did
    run.flops_per_token = flops_per_token(model.config, mean_context(first))
    flops = flops_per_token(model.config, first.T) * first.n_rows * first.T * args.epochs / ranks.world_size
    steps = -(-first.n_rows // (args.batch_size * ranks.world_size)) * args.epochs
    rows = corpus.plan(run.progress.epoch)
    parameters = sum(p.numel() for p in model.parameters())
    lines = [
        *corpus.notices,
        *corpus.mixture_report(run.progress.epoch),
        *(line for bad in corpus.bad_lines for line in bad.report()),
        f"model: {model.config.generation}, {parameters / 1e6:.2f} M parameters, {counted(model.config.num_hidden_layers, 'layer')} of "
        f"width {model.config.hidden_size}, {flops_per_token(model.config, args.max_seq_len) / 1e6:.1f} MFLOP per token "
        "(full rows)",
        f"data: {counted(len(corpus.store), 'document')}, {counted(rows.row_targets(0, rows.n_rows), 'token')} to train in "
        f"{counted(rows.n_rows, 'row')} of {rows.T} ({rows.fill:.1%} full)",
    ]
    describe(run, rows, dtype, lines, {**model.config.to_diff_dict(), "parameters": parameters}, len(corpus.store))
    for line in filter(None, (precision_notice, *ignored_settings(args, ranks, corpus, steps))):
        say(line)
    compile_blocks(model, args.use_compile, device, say, (args.batch_size, first.T), flops)
    if flops > 1e13:  # tens of seconds: a shorter run is not kept waiting for it
        run.product_rate = product_rate(device, dtype, sizes=[2048] if device.type == "cpu" else None)


# The fields of a config that decide which weights fit and what they compute
ARCHITECTURE = (
    "generation", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "rms_norm_eps", "rope_theta", "dropout", "use_moe", "num_experts", "num_experts_per_tok",
    "n_shared_experts", "moe_intermediate_size", "router_aux_loss_coef", "seq_aux", "norm_topk_prob",
)  # fmt: skip


def config_from_flags(args, encoder, tokenizer):
    return MiniMindConfig(
        generation=args.generation,
        vocab_size=encoder.vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_key_value_heads,
        use_moe=args.use_moe,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def weight_name(prefix, config):
    return f"{prefix}_{config.hidden_size}{'_moe' if config.use_moe else ''}"


def init_model(config, from_weight="none", out_dir=ROOT / "out", init_scheme="default"):
    """A fresh MiniMindForCausalLM, or one with the weights of `from_weight`: a name as in --save_weight, or a path.

    Errors: UserError in one line for a missing file and for weights of another shape than `config`.
    """
    if from_weight == "none":
        model = MiniMindForCausalLM(config)
        if init_scheme == "zero_out":  # every block begins as the identity
            for name, p in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    torch.nn.init.zeros_(p)
        return model
    path = Path(from_weight)
    if path.suffix != ".pth":
        path = Path(out_dir) / f"{weight_name(from_weight, config)}.pth"
    shape = ("generation", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "use_moe")
    try:
        return MiniMindForCausalLM.from_pth(path, **{name: getattr(config, name) for name in shape})
    except (ValueError, OSError) as error:
        raise UserError(f"--from_weight {from_weight}: {error}; the flags of the model group must fit it") from error


def open_corpus(args, encoder, ranks):
    """The Corpus of --data_path; the embedded one where neither that nor the default file is there."""
    data_path, default = args.data_path, ROOT / "dataset" / "pretrain_hq.jsonl"
    if not data_path:
        data_path = [str(default)]
        if not default.exists():
            data_path = [str(build_embedded_corpus(ROOT / "dataset" / "python_docs.jsonl"))]
            if ranks.is_main:
                announce(
                    f"{default} is not there: training on {data_path[0]}, the documentation inside the installed Python.\n"
                    "dataset/README.md tells how to get a full corpus; --data_path trains on your own."
                )
    return Corpus(
        data_path,
        encoder,
        max_seq_len=args.max_seq_len,
        seed=args.seed,
        pack=args.pack,
        long_documents=args.long_documents,
        val_path=args.val_path,
        val_fraction=args.val_fraction,
        allow_val_overlap=args.allow_val_overlap,
        cache_dir=args.cache_dir,
        text_field=args.text_field,
        text_suffixes=args.text_suffixes,
        skip_bad_lines=args.skip_bad_lines,
        progress=ranks.is_main,
    )


def check_memory(config: MiniMindConfig, device: torch.device) -> None:
    """UserError where not even the weights, gradients and two moments of AdamW fit the device; before any is made."""
    parameters = parameter_count(config)
    needed = parameters * BYTES_PER_PARAMETER
    there = total_memory(device)
    if there is not None and needed > there:
        raise UserError(
            f"--hidden_size {config.hidden_size} --num_hidden_layers {config.num_hidden_layers}: {parameters / 1e9:,.1f} "
            f"billion parameters need {needed / 1e9:,.0f} GB to train, and this machine has {there / 1e9:,.0f} GB on "
            f"{device}: choose a smaller model"
        )


def check_length(args, config):
    if args.max_seq_len > config.max_position_embeddings:
        raise UserError(
            f"--max_seq_len {args.max_seq_len} is beyond the position table of {config.max_position_embeddings}"
        )


def check_vocabulary(args, config, corpus):
    if corpus.max_token_id >= config.vocab_size:
        raise UserError(
            f"--tokenizer_path {args.tokenizer_path} gives token id {corpus.max_token_id}, beyond the model's vocabulary of "
            f"{config.vocab_size}: use the tokenizer that the weights were trained with"
        )


def rates(args, ranks):
    """The function of a Run that gives an update's learning rate; progress is counted in rows (see learning_rate)."""
    warmup_rows = args.warmup_iters * args.batch_size * ranks.world_size

    def rate(epoch, n_rows, first_row, end_row):
        progress, warmup = (epoch + first_row / n_rows) / args.epochs, (epoch * n_rows + end_row) / max(warmup_rows, 1)
        return learning_rate(progress, warmup, args.learning_rate, args.lr_schedule)

    return rate


def objective(model):
    """The loss of docs/design.md for the engine; its sums are cross-entropy, auxiliary loss, targets and documents."""

    def losses(batch, totals):
        cross_entropy, aux_loss = model.training_losses(
            batch.input_ids, batch.targets, batch.document_ids, batch.position_ids
        )
        share = batch.n_documents / max(totals.documents, 1)
        loss = cross_entropy / max(totals.targets, 1) + aux_loss * share
        targets, documents = (torch.full_like(cross_entropy, n) for n in (batch.n_targets, batch.n_documents))
        sums = torch.stack((cross_entropy, aux_loss * documents, targets, documents)).detach()
        return loss, torch.cat((sums, model.expert_slots().flatten())) if model.config.use_moe else sums

    return losses


def n_sums(config):
    return 4 + config.num_hidden_layers * config.num_experts * config.use_moe


def metrics(sums, num_experts=0):
    """(what to log, tokens) of the sums of `objective`.

    expert_load: share of the routed tokens that each expert got, mean over the layers; expert_load_max: the largest
    share in any layer (1 / num_experts where the load is even).
    """
    cross_entropy, aux_loss, targets, documents, *slots = sums
    if not targets:  # all updates since the last line were skipped
        return {"loss": math.nan, "aux_loss": math.nan}, 0
    values = {"loss": cross_entropy / targets, "aux_loss": aux_loss / documents}
    if slots:
        slots = torch.tensor(slots, dtype=torch.float64).view(-1, num_experts)
        load = slots / slots.sum(1, keepdim=True).clamp(min=1)
        values |= {"expert_load": load.mean(0).tolist(), "expert_load_max": load.max().item()}
    return values, targets


if __name__ == "__main__":
    run_cli(main)

"""Validation loss over whole documents, and samples, while training."""

import contextlib
import math
from pathlib import Path

import torch
import torch.distributed as dist

from common.errors import UserError
from trainer.machine.random_state import rng_state, set_rng_state


@torch.no_grad()
def evaluate(engine, batches, signals):
    """Validation figures, identical on every world size: (dict, number of a stop signal that came meanwhile, or 0).

    batches: a sequence of Batches with `n_bytes`, the bytes of their documents. Batch i is computed by rank
    i mod world size into a slot of its own; the sum over ranks adds zeros to it, and one order adds the slots up.
    The dict: val_loss in nats per target, perplexity, and bits_per_byte over the text's UTF-8 bytes.
    """
    model, ranks = engine.model, engine.ranks
    model.eval()
    losses = torch.zeros(2 * len(batches) + 2, dtype=torch.float64)  # loss and targets of each batch, stop requests
    for i in range(ranks.rank, len(batches), ranks.world_size):
        if signals.signum:
            losses[-2:] = torch.tensor([signals.signum, 1])
            break
        batch = batches[i].to(engine.device)
        with engine.autocast():
            loss, _ = model.training_losses(batch.input_ids, batch.targets, batch.document_ids, batch.position_ids)
        losses[2 * i : 2 * i + 2] = torch.tensor([float(loss), batch.n_targets])
    model.train()
    if ranks.world_size > 1:
        losses = losses.to(engine.device)
        dist.all_reduce(losses)
    *slots, signums, stopping = losses.tolist()
    total, targets = math.fsum(slots[0::2]), math.fsum(slots[1::2])
    mean = total / max(targets, 1)
    values = {
        "val_loss": mean,
        "perplexity": math.exp(min(mean, 700)),
        "bits_per_byte": total / math.log(2) / max(batches.n_bytes, 1),
    }
    return values, int(signums / max(stopping, 1))


def samples(engine, tokenizer, encoder, prompts, signals, seed):
    """([(prompt, text)], number of a stop signal that came meanwhile, or 0), the same on all ranks, which share the work.

    They meet after each round, so that none waits longer than for one text, and a stop ends it for all.
    """
    found, ranks = [], engine.ranks
    for first in range(0, len(prompts), ranks.world_size):
        own = [
            (prompt, sample(engine, tokenizer, encoder, prompt, seed))
            for prompt in prompts[first + ranks.rank : first + ranks.rank + 1]
            if not signals.signum
        ]
        answers = [(own, signals.signum)]
        if ranks.world_size > 1:
            answers *= ranks.world_size
            dist.all_gather_object(answers, (own, signals.signum))
        stop_signal = max(signum for _, signum in answers)
        if stop_signal:
            return [], stop_signal
        found += [pair for of_rank, _ in answers for pair in of_rank]
    return found, 0


@torch.no_grad()
def sample(engine, tokenizer, encoder, prompt, seed, max_new_tokens=120, temperature=0.7, top_p=0.9):
    """The prompt and its continuation, as text. The random state of training is left as it was."""
    model, device = engine.model, engine.device
    ids = encoder.prompt_ids(prompt)[max_new_tokens - model.config.max_position_embeddings :]
    before = rng_state(device)
    model.eval()
    try:
        torch.manual_seed(seed)
        with engine.autocast():
            output = model.generate(
                torch.tensor([ids or [encoder.eos_id or 0]], device=device),
                max_new_tokens=max_new_tokens,
                do_sample=True,
                temperature=temperature,
                top_p=top_p,
                pad_token_id=tokenizer.pad_token_id or 0,
            )
    finally:
        model.train()
        set_rng_state(before, device)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def read_prompts(arguments: list[str]) -> list[str]:
    """The prompts of --sample_prompts: the strings themselves, or the lines of a file that is named alone.

    Errors: UserError where one is not UTF-8 (a shell hands over any bytes), now and not at the first evaluation.
    """
    prompts = _prompts(arguments)
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f"--sample_prompts: {ascii(prompt)[:80]} is not UTF-8 text") from None
    return prompts


def _prompts(arguments: list[str]) -> list[str]:
    if len(arguments) != 1:
        return arguments
    path, is_file = Path(arguments[0]), False
    with contextlib.suppress(OSError):  # a text may be too long for the name of a file
        is_file = path.is_file()
    if not is_file and path.suffix != ".txt":
        return arguments
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--sample_prompts {path}: no UTF-8 text can be read from there ({reason})") from error
    if not prompts:
        raise UserError(f"--sample_prompts {path}: no prompt in there; one a line is wanted")
    return prompts

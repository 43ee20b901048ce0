"""Validation loss over whole documents, and samples, while training."""

import contextlib
import math
from pathlib import Path

import torch
import torch.distributed as dist


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


@torch.no_grad()
def sample(engine, tokenizer, prompts, seed, max_new_tokens=120, temperature=0.7, top_p=0.9):
    """One continuation of each prompt, as text. The random state of training is left as it was."""
    model, texts = engine.model, []
    devices = [engine.device] if engine.device.type == "cuda" else []
    model.eval()
    with torch.random.fork_rng(devices), engine.autocast():
        torch.manual_seed(seed)
        for prompt in prompts:
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            if tokenizer.bos_token_id is not None:
                ids = [tokenizer.bos_token_id, *ids]
            ids = ids[max_new_tokens - model.config.max_position_embeddings :] or [tokenizer.eos_token_id or 0]
            output = model.generate(
                torch.tensor([ids], device=engine.device),
                max_new_tokens=max_new_tokens,
                do_sample=True,
                temperature=temperature,
                top_p=top_p,
                pad_token_id=tokenizer.pad_token_id or 0,
            )
            texts.append(tokenizer.decode(output[0], skip_special_tokens=True))
    model.train()
    return texts


def read_prompts(arguments):
    """The prompts of --sample_prompts: the strings themselves, or the lines of a file that is named alone."""
    if len(arguments) == 1:
        with contextlib.suppress(OSError):
            if Path(arguments[0]).is_file():
                return [line for line in Path(arguments[0]).read_text(encoding="utf-8").splitlines() if line.strip()]
    return arguments

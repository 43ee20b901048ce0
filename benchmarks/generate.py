"""Tokens/s of scripts/generate.py against the plain loop that computes the whole text anew for every token.

    python benchmarks/generate.py                                   # 26 M random weights, 256 tokens, 3 rounds
    python benchmarks/generate.py --weight out/pretrain_512.pth --tokens 64 --rounds 1

Both sample alike (temperature, top-p) and turn by turn in one run, so that what else the machine does meets both.
The ratio is that of the medians.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import generate_parser

    generate_parser().parse_args()

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.arguments import generate_parser
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.arguments import generate_parser as script_parser
from scripts.common import load_model
from scripts.generate import Sampling, generate
from trainer.machine.command_line import run_cli


@torch.no_grad()
def plain_loop(
    model: PreTrainedModel, prompt: list[int], tokens: int, temperature: float, top_p: float
) -> torch.Tensor:
    """prompt -> [1, T], the prompt and `tokens` sampled ids: a forward over everything for each of them."""
    ids = torch.tensor([prompt])
    for _ in range(tokens):
        logits = model(ids).logits[:, -1] / temperature
        values, order = logits.sort(descending=True)
        probabilities = values.softmax(-1)
        probabilities[probabilities.cumsum(-1) - probabilities > top_p] = 0
        ids = torch.cat((ids, order.gather(1, probabilities.multinomial(1))), dim=1)
    return ids


def main() -> None:
    args = generate_parser().parse_args()
    args.threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = load_model(args.weight) if args.weight else MiniMindForCausalLM(MiniMindConfig()).eval()
    tokenizer = load_tokenizer(ROOT / "model")
    ids = DocumentEncoder(tokenizer).prompt_ids("The harbour lies on the eastern side of the island.")
    sampling = Sampling.of(script_parser().parse_args(["--max_new_tokens", str(args.tokens)]))
    # Neither stops early.
    tokenizer.eos_token = None
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None

    sides: dict[str, Callable[[], torch.Tensor]] = {
        "plain loop": partial(plain_loop, model, ids, args.tokens, sampling.temperature, sampling.top_p),
        "generate.py": partial(generate, model, tokenizer, ids, sampling),
    }
    # To warm up; of the slow side two tokens are enough for that.
    plain_loop(model, ids, 2, 1.0, 1.0)
    sides["generate.py"]()
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, work in sides.items():
            start = time.perf_counter()
            assert work().shape[1] == len(ids) + args.tokens
            rates[name].append(args.tokens / (time.perf_counter() - start))
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{parameters:.1f} M parameters, fp32, {args.threads} threads, {args.tokens} tokens, {args.rounds} rounds")
    for name, values in rates.items():
        print(f"{name:12} {statistics.median(values):7.1f} tokens/s (rounds: {', '.join(f'{v:.1f}' for v in values)})")
    ratio = statistics.median(rates["generate.py"]) / statistics.median(rates["plain loop"])
    print(f"ratio        {ratio:7.2f}")


if __name__ == "__main__":
    run_cli(main)

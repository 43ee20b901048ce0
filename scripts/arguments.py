"""The flags of the scripts. Nothing here needs torch, so `--help` and a wrong flag are answered at once."""

from common.files import relative_to_cwd
from common.flags import SWITCH, Parser, not_negative, number, positive, seed, share
from common.start import ROOT
from common.wording import announce
from model.weight_record import newest_weight

DTYPE_NAMES = ("float32", "bfloat16", "float16")
TASK_NAMES = ("perplexity", "pairs", "answers")
# names of fine-tuned weights, for questions
FINE_TUNED = "full_sft_"
DEFAULT_WEIGHT = ROOT / "out" / "pretrain_512.pth"

# Divisors that keep float32 logits finite; 0: the likeliest token
temperature = number(float, lambda value: value == 0 or 0.001 <= value <= 1000, "0, or from 0.001 to 1000")
repetition_penalty = number(float, lambda value: 0.01 <= value <= 100, "from 0.01 to 100")


def weight_of(flag: str | None, prefix: str = "") -> str:
    """What --weight names, or the newest weights in out/, if there are any of those that begin with `prefix`; a line names them."""
    if flag is not None:
        return flag
    out = DEFAULT_WEIGHT.parent
    weight = relative_to_cwd(newest_weight(out, prefix) or newest_weight(out) or DEFAULT_WEIGHT)
    announce(f"weights: {weight} (--weight names others)", to_stderr=True)
    return str(weight)


def model_flags(parser: Parser, dtype: str = "float32") -> None:
    """The flags that `load` and `dtype_of_flag` of scripts/common.py read."""
    g = parser.add_argument_group("model")
    g.add_argument(
        "--weight",
        help="a .pth of the trainer, or a folder from export_hf.py or of a Llama or Qwen3 (default: the newest in out/)",
    )
    g.add_argument("--tokenizer_path", help="folder of a tokenizer (default: the weight's own folder, or else model/)")
    g.add_argument("--device", help="cuda:0, mps or cpu (default: the best available)")
    g.add_argument(
        "--dtype",
        choices=("auto", *DTYPE_NAMES),
        default=dtype,
        help=f"precision; auto: bfloat16 where supported (default {dtype})",
    )


def generate_parser() -> Parser:
    """The flags of generate.py."""
    p = Parser(prog="generate.py", description="Continue texts, or chat with a model.")
    # An empty prompt: the model starts by itself.
    p.may_be_empty = ("prompts",)
    p.add_argument("prompts", nargs="*", help="texts to continue; none: typed in, or piped, one per line")
    model_flags(p)
    g = p.add_argument_group("sampling")
    g.add_argument("--max_new_tokens", type=positive(int), help="maximum tokens to add (default: 256, or a row's)")
    g.add_argument("--temperature", type=temperature, default=0.8, help="0: always the likeliest token (default 0.8)")
    g.add_argument("--top_p", type=share, default=0.9, help="sample from the likeliest that sum to this; 1: all (0.9)")
    g.add_argument("--top_k", type=not_negative(int), default=0, help="sample from the k likeliest; 0: all (default)")
    g.add_argument(
        "--repetition_penalty",
        type=repetition_penalty,
        default=1.0,
        help="divide positive logits of tokens already in the text by this, multiply negative ones (default 1: off)",
    )
    g.add_argument("--seed", type=seed, default=42, help="the same seed gives the same text (default 42)")
    # Takes no value: it would take the prompt after it for one.
    g.add_argument(
        "--chat",
        action="store_true",
        help="apply the chat template to each prompt; typed or piped prompts form one conversation",
    )
    g.add_argument("--system", help="with --chat: the system message that begins each conversation")
    return p


def play_parser() -> Parser:
    """The flags of play.py."""
    p = Parser(
        prog="play.py",
        description="A page in your browser: continue texts and chat with a model, and watch runs as they train.",
    )
    model_flags(p)
    g = p.add_argument_group("page")
    g.add_argument("--out_dir", default=str(ROOT / "out"), help="folder whose runs are shown (default: out)")
    g.add_argument(
        "--port",
        type=number(int, lambda value: 0 <= value <= 65535, "from 0 to 65535"),
        default=8765,
        help="port on 127.0.0.1; 0: any free one (default 8765)",
    )
    g.add_argument("--api", default=False, help="also answer programs that speak OpenAI's API, under /v1", **SWITCH)
    return p


def evaluate_parser() -> Parser:
    """The flags of evaluate.py."""
    p = Parser(
        prog="evaluate.py",
        description="Evaluate a model: perplexity of any text, minimal pairs, questions with known answers.",
    )
    p.add_argument("task", choices=TASK_NAMES, help="what to measure")
    p.add_argument(
        "--data_path",
        nargs="+",
        help="as in training, without shares; answers: conversations (default: questions on Python)",
    )
    p.add_argument(
        "--out",
        help="output path without suffix (default: beside the weight, {weight}.{task}.{data}-{digest of the paths})",
    )
    p.add_argument("--skip_bad_lines", default=False, help="skip and count faulty lines", **SWITCH)
    p.add_argument("--text_field", help="perplexity: field of the text, as in training (default: text)")
    p.add_argument("--split_text", metavar="lines|blank|MARK", help="perplexity: as in training")
    model_flags(p, dtype="auto")
    g = p.add_argument_group("scoring")
    g.add_argument(
        "--batch_tokens",
        type=positive(int),
        help="positions per forward pass (default: 1024 on a CPU, to fit its caches; else 16384)",
    )
    g.add_argument(
        "--max_length",
        type=positive(int),
        help="perplexity, pairs: positions of a window (default: 512; perplexity: as in training, if that is recorded)",
    )
    g.add_argument(
        "--stride",
        type=positive(int),
        help="perplexity: new tokens per window of a long text (default: max_length / 2)",
    )
    g.add_argument("--questions", type=positive(int), help="answers: number of questions to ask (default 40)")
    return p


def export_flags(p: Parser, *further_types: str) -> None:
    """The flags of both exports. further_types: those of --dtype that only this one has."""
    p.add_argument("--tokenizer_path", help="folder of the tokenizer (default: the weight's own, or else model/)")
    numbers = "type of the weights (GGUF: of the matrices); auto: the smallest that holds them exactly"
    p.add_argument("--dtype", choices=("auto", *DTYPE_NAMES, *further_types), default="auto", help=numbers)
    p.add_argument("--overwrite", default=False, help="replace an existing output", **SWITCH)


def export_parser() -> Parser:
    """The flags of export_hf.py."""
    p = Parser(prog="export_hf.py", description="Export a model to other programs, and convert it back.")
    p.add_argument("--weight", help="a .pth of the trainer (default: as in generate.py); for --to_pth a folder")
    written = p.add_mutually_exclusive_group(required=True)
    written.add_argument("--out_dir", help="folder to write the export to")
    written.add_argument("--to_pth", help=".pth to write, with its .json, from the folder in --weight")
    export_flags(p)
    return p


def export_gguf_parser() -> Parser:
    """The flags of export_gguf.py."""
    p = Parser(prog="export_gguf.py", description="Export a model to llama.cpp and tools built on it, such as Ollama.")
    p.add_argument("--weight", help="a .pth of the trainer (default: as in generate.py), or a folder from export_hf.py")
    p.add_argument("--out", required=True, help="the .gguf to write")
    export_flags(p, "q8_0")
    return p


def report_parser() -> Parser:
    """The flags of report.py."""
    p = Parser(
        prog="report.py",
        description="Write one HTML page about a run, or several side by side: curves, samples, settings, machine.",
    )
    p.add_argument("runs", nargs="+", help="metrics files, weights, or folders")
    p.add_argument("--out", help="page to write (default: beside the first run's metrics; compare.html for several)")
    return p

"""Evaluate a model: perplexity of any text, minimal pairs, questions with known answers.

    python scripts/evaluate.py perplexity --weight out/pretrain_512.pth --data_path valid.jsonl
    python scripts/evaluate.py perplexity --data_path wiki.test.raw.txt --max_length 1024 --stride 512
    python scripts/evaluate.py pairs      --weight out/pretrain_512_hf --data_path blimp/*.jsonl
    python scripts/evaluate.py answers    --weight out/full_sft_512.pth     # the embedded questions on Python, or --data_path

Prints a table and writes {out}.json. Multiple choice, last words and public tasks: lm_eval on an export, docs/scripts.md.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder, and answers wrong flags

import argparse
import hashlib
import json
import math
import os
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from common.errors import UserError, user_errors
from common.files import atomic_file, try_to_write
from common.wording import announce, counted, one_line, printable, without_passwords
from dataset.chat.encoder import ChatEncoder
from dataset.embedded_corpus import build_embedded_questions, first_sentence
from dataset.reading.bad_lines import BadLines, Fault
from dataset.reading.beginnings import notices_on_texts
from dataset.reading.conversations import CONVERSATION, Notes, report_of
from dataset.reading.documents import plain_texts, read_documents
from dataset.reading.faults import BadLine, skip_or_raise
from dataset.reading.file_kinds import choose_files
from dataset.reading.json_files import ANY_TEXT, text_of_line
from dataset.tokenizing.byte_level_bpe import CHAT_TEMPLATE
from dataset.tokenizing.encoder import DocumentEncoder, TooLongToEncode
from dataset.tokenizing.tokenizer_files import SAMPLE, lost_text
from model.config import IGNORE
from model.decoding import Sampling
from model.hf import MiniMindForCausalLM
from scripts.arguments import FINE_TUNED, evaluate_parser, weight_of
from scripts.common import dtype_of_flag, load, note_untrained, trained_length
from scripts.generate import generate
from trainer.machine.command_line import run_cli
from trainer.machine.devices import autocast
from trainer.reporting.reporter import publishable

# 97.5 % quantile of the normal distribution
Z = 1.959963984540054
# Bytes of the logits of a batch in fp32
LOGITS_BYTES = 1 << 30
# Seconds between progress lines in a log
LOG_SECONDS = 30
# Tokens by which an answer may exceed the right one, if the model does not think before it
MORE_TOKENS = 8
THOUGHT_TOKENS = 256
# Answers that are written together
QUESTIONS_AT_ONCE = 16
MAX_EXPONENT = 700
# Flags that some tasks do not have
TASKS_OF_FLAG = {
    **dict.fromkeys(("stride", "text_field", "split_text"), ("perplexity",)),
    "max_length": ("perplexity", "pairs"),
    "questions": ("answers",),
}


class Metric(NamedTuple):
    """A figure with its 95 % interval; NaN: none."""

    value: float
    low: float
    high: float


class Row(NamedTuple):
    """Token ids; those from `start` on are scored, each given all before it."""

    ids: Sequence[int]
    start: int


# ({name of a figure: its value}, {unit: count})
Results = tuple[dict[str, Metric], dict[str, int]]
Task = Callable[["Scorer", DocumentEncoder, argparse.Namespace], Results]


def main(argv: Sequence[str] | None = None) -> int:
    args = evaluate_parser().parse_args(argv)
    for flag, tasks in TASKS_OF_FLAG.items():
        if getattr(args, flag) is not None and args.task not in tasks:
            raise UserError(f"--{flag} has no effect on {args.task}: it is for {' and '.join(tasks)}; leave it out")
    if args.data_path is None:
        if args.task != "answers":
            raise UserError(f"--data_path: name what {args.task} is measured on")
        with user_errors():
            args.data_path = [str(build_embedded_questions())]
    args.weight = weight_of(args.weight, FINE_TUNED if args.task == "answers" else "")
    model, args.tokenizer, encoder = load(args.weight, args.tokenizer_path, args.device)
    assert isinstance(model, MiniMindForCausalLM)
    positions = model.config.max_position_embeddings
    args.max_length = args.max_length or (trained_length(model.config, 512) if args.task == "perplexity" else 512)
    # Half a window: each token has at least that much context, for twice the compute.
    args.stride = args.stride or max(args.max_length // 2, 1)
    if args.stride > args.max_length:
        raise UserError(f"--stride {args.stride} exceeds --max_length {args.max_length}: tokens would be left out")
    if args.task != "answers" and args.max_length > positions:
        raise UserError(f"--max_length {args.max_length}: at most {positions}, the model's positions")
    dtype = dtype_of_flag(args.dtype, model.device)
    scorer = Scorer(model, dtype, args.batch_tokens)
    weight = Path(args.weight).resolve()
    paths = [os.path.abspath(path) for path in args.data_path]
    names = re.sub(r"[^\w.+-]", "_", without_passwords("+".join(os.path.basename(path) for path in paths)))[:60]
    # Distinguishes data of the same name, and its splits. File names need not be UTF-8.
    digest = hashlib.sha256(os.fsencode("\n".join([*paths, *filter(None, [args.split_text])]))).hexdigest()[:6]
    out = Path(args.out or weight.with_name(f"{weight.name.removesuffix('.pth')}.{args.task}.{names}-{digest}"))
    field = {"pairs": "sentence_good", "answers": CONVERSATION}.get(args.task, args.text_field or "text")
    with user_errors():
        choices = [choose_files(path) for path in args.data_path]
        args.files = [file for files, _ in choices for file in files]
        notices = [line for _, lines in choices for line in lines] + notices_on_texts(args.files, args.split_text)
        sample = plain_texts(args.files, field, args.skip_bad_lines, args.split_text, SAMPLE)
        for notice in notices + lost_text(sample, encoder.round_trip, f"{args.data_path[0]}: {encoder.name}"):
            announce(notice, to_stderr=True)
    # Lines that --skip_bad_lines skips, counted by readers and tasks
    args.bad_lines = BadLines() if args.skip_bad_lines else None
    with user_errors():
        # Before hours of scoring: an unwritable path fails at once.
        out.parent.mkdir(parents=True, exist_ok=True)
        try_to_write(Path(f"{out}.json"))
        figures, counts = TASKS[args.task](scorer, encoder, args)
        report = {
            "task": args.task,
            "weight": args.weight,
            "data_path": args.data_path,
            "dtype": str(dtype).removeprefix("torch."),
            "max_length": args.max_length,
            "stride": args.stride,
            "counts": counts,
            "metrics": {name: metric._asdict() for name, metric in figures.items()},
            "torch": torch.__version__,
        }
        with atomic_file(f"{out}.json") as file:
            file.write(json.dumps(publishable(report), indent=2).encode() + b"\n")
    sizes = ", ".join(counted(number, unit.removesuffix("s"), unit) for unit, number in counts.items())
    print(f"{args.task}: {printable(weight.name)} on {sizes}, {report['dtype']}")
    width = max(map(len, figures))
    for name, metric in figures.items():
        interval = "" if math.isnan(metric.low) else f"   [{metric.low:.6g}, {metric.high:.6g}] 95 %"
        print(f"  {one_line(name):{width}} {metric.value:12.6g}{interval}")
    print(printable(f"{out}.json"))
    return 0


# --------------------------------------------------------------------------------------------------- the tasks


def texts(args: argparse.Namespace, text_field: str = "text") -> Iterator[tuple[str, int, str]]:
    """Yields (file, line, text) of each document of --data_path, then reports fields of chats and bad lines. Errors: DataError."""
    notes: Notes = Counter()
    for file in args.files:
        for line, text in read_documents(file, text_field, args.bad_lines, args.split_text, notes):
            yield str(file), line, text
    for reported in report_of(notes) + (args.bad_lines.report() if args.bad_lines else []):
        announce(reported, to_stderr=True)


def perplexity(scorer: "Scorer", encoder: DocumentEncoder, args: argparse.Namespace) -> Results:
    """Loss over each document, BOS and EOS as in training; intervals over documents."""
    documents: list[list[Row]] = []
    byte_counts: list[int] = []
    word_counts: list[int] = []
    for file, line, text in texts(args, args.text_field or "text"):
        # The ids of all documents stay in memory: a Python int takes nine times as much as one in an array.
        # As in `pairs`, EOS stands in for a BOS that the tokenizer lacks: the first token counts as the others.
        ids = array("i", [encoder.eos_id] if encoder.bos_id is None and encoder.eos_id is not None else [])
        try:
            for part in encoder.encode_in_parts(text):
                ids.extend(part.tolist())
        except TooLongToEncode as error:
            skip_or_raise(Fault(file, line, "too long", str(error)), args.bad_lines)
            continue
        # A single token has nothing to predict.
        if len(ids) > 1:
            documents.append(windows(ids, args.max_length, args.stride))
            byte_counts.append(len(encoder.body(text).encode()))
            word_counts.append(len(text.split()))
    scores = iter(scorer.score([row for rows in documents for row in rows]))
    losses = [-math.fsum(islice(scores, len(rows))) for rows in documents]
    tokens = [sum(len(row.ids) - row.start for row in rows) for rows in documents]
    per_token = ratio(losses, tokens)
    # exp is increasing: it maps the ends of the interval to the ends of the new one.
    figures = {"loss": per_token, "perplexity": Metric(*map(exp, per_token))}
    # Empty texts have no bytes, blank ones no words, and Chinese next to none between spaces.
    if sum(byte_counts):
        figures["bits_per_byte"] = Metric(*(nats / math.log(2) for nats in ratio(losses, byte_counts)))
    if sum(losses) < MAX_EXPONENT * sum(word_counts):
        figures["word_perplexity"] = Metric(*map(exp, ratio(losses, word_counts)))
    counts = {"documents": len(documents), "tokens": sum(tokens), "bytes": sum(byte_counts), "words": sum(word_counts)}
    return figures, counts


def windows(ids: Sequence[int], max_length: int, stride: int) -> list[Row]:
    """The rows of one document: each token but the first is scored once, after at least max_length - stride others (or all
    there are). The first window scores max_length tokens, each further one `stride`."""
    rows: list[Row] = []
    done = 1
    while done < len(ids):
        end = min(len(ids), done + (stride if rows else max_length))
        begin = max(0, end - 1 - max_length)
        rows.append(Row(ids[begin:end], done - begin))
        done = end
    return rows


def pairs(scorer: "Scorer", encoder: DocumentEncoder, args: argparse.Namespace) -> Results:
    """`sentence_good` and `sentence_bad`: right if the good one has the larger sum of log-probabilities."""
    # Without BOS, EOS takes its place: the first token needs context.
    before: list[int] = []
    if encoder.bos_id is None:
        if encoder.eos_id is None:
            raise UserError("the tokenizer has neither BOS nor EOS to begin a sentence with")
        before = [encoder.eos_id]
    rows: list[Row] = []
    # file of each pair
    files: list[str] = []
    for file, line, text in texts(args, ANY_TEXT):
        try:
            pair = []
            for field in ("sentence_good", "sentence_bad"):
                # Not parsed here: in a .txt it is no JSON.
                if f'"{field}"' not in text:
                    raise BadLine("no pair", f"no {field!r} in the object; expected sentence_good and sentence_bad")
                ids = before + encoder.prompt_ids(text_of_line(text.encode(), field) or "")
                if not 2 <= len(ids) <= args.max_length + 1:
                    what = f"{field} has {len(ids) - 1} tokens; 1 to {args.max_length} (--max_length) are scored"
                    raise BadLine("number of tokens", what)
                pair.append(Row(ids, 1))
        except BadLine as bad:
            skip_or_raise(Fault(file, line, *bad.args), args.bad_lines)
            continue
        rows += pair
        files.append(file)
    scores = scorer.score(rows)
    right: dict[str, list[bool]] = {}
    for i, file in enumerate(files):
        # A tie is wrong: equal tokens, or a model that scores everything the same.
        is_right = rows[2 * i].ids != rows[2 * i + 1].ids and scores[2 * i] > scores[2 * i + 1]
        right.setdefault(file, []).append(is_right)
    figures = {"accuracy": share([is_right for of_file in right.values() for is_right in of_file])}
    if len(right) > 1:
        stems = [Path(file).stem for file in right]
        for stem, (file, of_file) in zip(stems, right.items(), strict=True):
            figures[f"accuracy/{stem if stems.count(stem) == 1 else file}"] = share(of_file)
    return figures, {"pairs": len(files)}


def answers(scorer: "Scorer", encoder: DocumentEncoder, args: argparse.Namespace) -> Results:
    """Conversations, evenly spread over the data: right if the greedy answer has the first sentence of the last turn."""
    model = scorer.model.to(scorer.dtype)  # type: ignore[arg-type]  # transformers wraps it without its types
    positions = model.config.max_position_embeddings
    tokenizer: PreTrainedTokenizerBase = args.tokenizer
    chat = ChatEncoder(tokenizer)
    conversations = [json.loads(text) for _, _, text in texts(args, CONVERSATION)]
    n_asked = min(args.questions or 40, len(conversations))
    # Only the tokenizer of a model with trained thoughts has this template, see `tokenizer_of`.
    more = THOUGHT_TOKENS if tokenizer.chat_template == CHAT_TEMPLATE else MORE_TOKENS
    # (conversation, ids of its prompt, max_new_tokens)
    questions: list[tuple[dict[str, Any], list[int], int]] = []
    for conversation in (conversations[i * len(conversations) // n_asked] for i in range(n_asked)):
        *turns, last = conversation["messages"]
        ids = chat.chat_prompt_ids(turns, conversation.get("tools", []))
        whole = chat.encode([json.dumps(conversation, ensure_ascii=False)])[0]
        max_new_tokens = len(whole) - len(ids) + more
        # Calls alone have no sentence to compare.
        is_answer = last["role"] == "assistant" and last["content"].strip()
        if is_answer and len(ids) + max_new_tokens <= positions:
            questions.append((conversation, ids, max_new_tokens))
    right: list[bool] = []
    for first in range(0, len(questions), QUESTIONS_AT_ONCE):
        batch = questions[first : first + QUESTIONS_AT_ONCE]
        room = positions - max(len(ids) for _, ids, _ in batch)
        sampling = Sampling(max_new_tokens=min(max(most for *_, most in batch), room), temperature=0.0, top_p=1.0)
        replies = generate(model, tokenizer, [ids for _, ids, _ in batch], sampling)
        for (conversation, _, most), reply in zip(batch, replies, strict=True):
            *turns, last = conversation["messages"]
            # Thoughts before the answer are skipped.
            answer = str(tokenizer.decode(reply[:most])).rpartition("</think>")[2].partition("<|im_end|>")[0]
            right.append(first_sentence(answer) == first_sentence(last["content"]))
            # Print some of them, and all wrong ones.
            if not right[-1] or (len(right) - 1) % max(n_asked // 10, 1) == 0:
                lines = [f"? {turns[-1]['content'] if turns else ''}", f"{'=' if right[-1] else '!'} {answer.strip()}"]
                print(printable("\n".join(lines if right[-1] else [*lines, f"  right: {last['content']}"])) + "\n")
    if not right:
        raise UserError(
            "--data_path: no conversation there ends in an answer, or they have more tokens than the model has positions"
        )
    print(f"{sum(right)} of {counted(len(right), 'question')} answered with the right first sentence")
    return {"accuracy": share(right)}, {"questions": len(right)}


TASKS: dict[str, Task] = {"perplexity": perplexity, "pairs": pairs, "answers": answers}


# ----------------------------------------------------------------------------------------------------- scoring


class Scorer:
    """Scores rows, with progress on stderr: each second in a terminal, each half minute in a log."""

    def __init__(self, model: MiniMindForCausalLM, dtype: torch.dtype, batch_tokens: int | None) -> None:
        self.model = model
        self.dtype = dtype
        # Measured: more positions than fit a CPU's caches are slower.
        positions = batch_tokens or (1024 if model.device.type == "cpu" else 16384)
        self.batch_tokens = max(min(positions, LOGITS_BYTES // (4 * model.config.vocab_size)), 1)

    @torch.no_grad()
    def score(self, rows: Sequence[Row]) -> list[float]:
        """For each row the sum of the log-probabilities of its scored tokens, in nats. Errors: UserError for no rows."""
        if not rows:
            raise UserError("--data_path: nothing to evaluate there")
        note_untrained(self.model.config, max(len(row.ids) - 1 for row in rows))
        total = sum(len(row.ids) - row.start for row in rows)
        scores = [0.0] * len(rows)
        # Longest first: rows of similar length share a forward pass, and running out of memory shows at once.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
        seconds = 1 if sys.stderr.isatty() else LOG_SECONDS
        bar = tqdm(
            total=total,
            unit=" tokens",
            unit_scale=True,
            mininterval=seconds,
            maxinterval=math.inf,
            delay=seconds,
            leave=False,
        )
        with autocast(self.model.device, self.dtype), bar:
            while order:
                size = max(self.batch_tokens // (len(rows[order[0]].ids) - 1), 1)
                batch, order = order[:size], order[size:]
                for i, logprob in zip(batch, self._logprobs([rows[i] for i in batch]), strict=True):
                    scores[i] = logprob
                    bar.update(len(rows[i].ids) - rows[i].start)
        return scores

    def _logprobs(self, rows: Sequence[Row]) -> list[float]:
        """`score` of one forward pass."""
        B, T = len(rows), max(len(row.ids) for row in rows) - 1
        # Attention is causal: no position sees the padding at the end.
        inputs = torch.zeros(B, T, dtype=torch.long)
        targets = torch.full((B, T), IGNORE)
        for b, row in enumerate(rows):
            n = len(row.ids) - 1
            ids = torch.tensor(row.ids)
            inputs[b, :n] = ids[:-1]
            targets[b, row.start - 1 : n] = ids[row.start :]
        logits = self.model(input_ids=inputs.to(self.model.device), use_cache=False).logits.float()  # [B, T, V]
        # 0 where nothing is scored
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device), reduction="none")  # [B * T]
        # fp64: a sum over thousands of tokens keeps its digits.
        return (-losses.cpu().double()).view(B, T).sum(1).tolist()


# --------------------------------------------------------------------------------------------------- intervals


def share(right: Sequence[bool]) -> Metric:
    """Share of true values with Wilson's interval (Wilson 1927; https://doi.org/10.1080/01621459.1927.10502953)."""
    # Takes half a second to import
    from scipy.stats import binomtest

    # The plain interval p ± z sqrt(p (1 - p) / n) is empty at p = 0 and p = 1; Wilson's is not.
    interval = binomtest(sum(right), len(right)).proportion_ci(method="wilson")
    return Metric(sum(right) / len(right), float(interval.low), float(interval.high))


def ratio(tops: Sequence[float], bottoms: Sequence[int]) -> Metric:
    """sum(tops) / sum(bottoms); variance of a ratio of sums by linearisation (Cochran, Sampling Techniques, 6.4)."""
    n = len(tops)
    value = math.fsum(tops) / sum(bottoms)
    if n < 2:
        return Metric(value, math.nan, math.nan)
    # Residuals of the documents from the common ratio
    squares = math.fsum((top - value * bottom) ** 2 for top, bottom in zip(tops, bottoms, strict=True))
    half = Z * math.sqrt(n / (n - 1) * squares) / sum(bottoms)
    return Metric(value, value - half, value + half)


def exp(x: float) -> float:
    """e^x, with x capped at MAX_EXPONENT: a float overflows soon after."""
    return math.exp(min(x, MAX_EXPONENT))


if __name__ == "__main__":
    run_cli(main)

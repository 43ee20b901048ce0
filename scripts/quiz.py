"""Ask a model questions whose answers are known, and count those that it answers right.

    python scripts/quiz.py --weight out/full_sft_512.pth                                   # the embedded questions
    python scripts/quiz.py --weight out/full_sft_512.pth --base out/pretrain_512.pth       # beside the model it comes from
    python scripts/quiz.py --weight out/full_sft_512.pth --data_path chats.jsonl --questions 200

Each conversation of the data is asked up to the assistant's last turn, and the likeliest answer is taken. It is right if
its first sentence is that of the turn in the data, to the letter but for blanks.
"""

import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    # Ctrl-C during the imports ends the process at once; `run_cli` takes it from there.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from scripts.arguments import quiz_parser

    quiz_parser().parse_args()

import argparse
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.errors import UserError
from common.notices import announce
from common.wording import counted
from dataset.chat.chat_corpus import refuse_other_kinds
from dataset.chat.embedded_questions import build_embedded_questions, first_sentence
from dataset.chat.encoder import ChatEncoder
from dataset.reading.conversations import CONVERSATION
from dataset.reading.documents import read_documents
from dataset.reading.file_kinds import find_files
from scripts.arguments import quiz_parser
from scripts.common import compute_dtype, load
from scripts.generate import Sampling, generate
from trainer.machine.command_line import run_cli

# Tokens that an answer may have beyond the one in the data: a right one ends before.
MORE_TOKENS = 8


class Question(NamedTuple):
    """The turns up to the answer, and the answer."""

    turns: list[dict[str, Any]]
    answer: str


class Reply(NamedTuple):
    text: str
    is_right: bool


def main(argv: Sequence[str] | None = None) -> int:
    args = quiz_parser().parse_args(argv)
    paths = args.data_path or [str(build_embedded_questions(ROOT / "dataset" / "python_questions.jsonl"))]
    questions = evenly(read_questions(paths), args.questions)
    replies = ask_all(args, args.weight, questions)
    for number in evenly(range(len(questions)), args.show):
        show(questions[number], replies[number])
    announce(tally(args.weight, replies))
    if args.base:
        announce(tally(args.base, ask_all(args, args.base, questions)))
    return 0


def read_questions(paths: Sequence[str]) -> list[Question]:
    """The conversations of the files. Errors: DataError for a faulty line."""
    questions = []
    for path in paths:
        refuse_other_kinds(path)
        for file in find_files(path):
            for _, text in read_documents(file, CONVERSATION):
                messages = json.loads(text)["messages"]
                last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
                if last > 0 and messages[last]["content"]:
                    questions.append(Question(messages[:last], messages[last]["content"]))
    if not questions:
        raise UserError(f"--data_path {' '.join(paths)}: no question with an answer in there")
    return questions


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """So many of the items, at the same distance from each other."""
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def ask_all(args: argparse.Namespace, weight: str, questions: Sequence[Question]) -> list[Reply]:
    """What the model of a weight answers."""
    model, tokenizer, _ = load(argparse.Namespace(**{**vars(args), "weight": weight}))
    model = model.to(compute_dtype(args.dtype, model.device))  # type: ignore[arg-type]  # wrapped without its types
    try:
        encoder = ChatEncoder(tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    return [ask(model, tokenizer, encoder, question) for question in questions]


def ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoder: ChatEncoder, question: Question) -> Reply:
    """The likeliest answer to one question."""
    ids = encoder.turns_ids(question.turns)
    wanted = tokenizer(question.answer, add_special_tokens=False).input_ids
    greedy = Sampling(max_new_tokens=len(wanted) + MORE_TOKENS, temperature=0.0, top_p=1.0)
    found = generate(model, tokenizer, ids, greedy)
    text = str(tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True))
    return Reply(text, first_sentence(text) == first_sentence(question.answer))


def show(question: Question, reply: Reply) -> None:
    """A question and its answer; beside a wrong one the right one."""
    announce(f"? {question.turns[-1]['content']}")
    announce(f"{'=' if reply.is_right else '!'} {reply.text.strip()}")
    if not reply.is_right:
        announce(f"  right: {question.answer}")
    announce("")


def tally(weight: str, replies: Sequence[Reply]) -> str:
    """The line with the count."""
    right = sum(reply.is_right for reply in replies)
    return f"{weight}: {right} of {counted(len(replies), 'question')} answered with the right first sentence"


if __name__ == "__main__":
    run_cli(main)

"""Ask a model questions whose answers are known, and count those that it answers right.

    python scripts/quiz.py --weight out/full_sft_512.pth                                   # the embedded questions
    python scripts/quiz.py --weight out/full_sft_512.pth --base out/pretrain_512.pth       # beside the model it comes from
    python scripts/quiz.py --weight out/full_sft_512.pth --data_path chats.jsonl --questions 200

Each conversation of the data is asked up to the assistant's last turn, tools and earlier thoughts included, and the
likeliest answer is taken. It is right if its first sentence is that of the turn in the data, to the letter but for
blanks; what the model thinks before is passed over. A conversation that ends with a call to a tool has no such sentence,
and one that is longer than the model cannot be asked: lines say how many were left out.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin()
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from scripts.arguments import quiz_parser

    quiz_parser().parse_args()

import dataclasses
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
from dataset.reading.conversations import CONVERSATION, is_trained
from dataset.reading.documents import read_documents
from dataset.reading.file_kinds import find_files
from scripts.arguments import quiz_parser
from scripts.common import ModelChoice, check_is_there, load_in_dtype
from scripts.foreign_config import most_positions
from scripts.generate import Sampling, generate
from trainer.machine.command_line import run_cli

# Tokens that an answer may have beyond the one in the data: a right one ends before.
MORE_TOKENS = 8
# The special token behind what a model thinks before it answers
END_OF_THOUGHTS = "</think>"


# In the form of dataset/reading/conversations.py
Message = dict[str, Any]


class Question(NamedTuple):
    """The turns up to the answer, the functions that may be called, and the message that is the answer."""

    turns: list[Message]
    tools: list[dict[str, Any]]
    answer: Message


class Reply(NamedTuple):
    text: str
    is_right: bool


def main(argv: Sequence[str] | None = None) -> int:
    args = quiz_parser().parse_args(argv)
    if args.base:
        # It comes last, when the other model has answered everything.
        check_is_there(Path(args.base))
    paths = args.data_path or [str(build_embedded_questions(ROOT / "dataset" / "python_questions.jsonl"))]
    questions, n_without = read_questions(paths)
    if n_without:
        announce(f"note: {counted(n_without, 'conversation')} without a question, or without a text as the last answer")
    questions = evenly(questions, args.questions)
    choice = ModelChoice.of(args)
    replies = ask_all(choice, questions)
    for number in evenly(range(len(questions)), args.show):
        show(questions[number], replies[number])
    announce(tally(args.weight, replies))
    if args.base:
        announce(tally(args.base, ask_all(dataclasses.replace(choice, weight=args.base), questions)))
    return 0


def read_questions(paths: Sequence[str]) -> tuple[list[Question], int]:
    """(the questions in the files, how many conversations have none). Errors: DataError for a faulty line."""
    questions = []
    n_without = 0
    for path in paths:
        refuse_other_kinds(path)
        for file in find_files(path):
            for _, text in read_documents(file, CONVERSATION):
                conversation = json.loads(text)
                messages = conversation["messages"]
                last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
                if last > 0 and messages[last]["content"] and is_trained(messages[last]):
                    questions.append(Question(messages[:last], conversation.get("tools", []), messages[last]))
                else:
                    n_without += 1
    if not questions:
        raise UserError(f"--data_path {' '.join(paths)}: no question with an answer in there")
    return questions, n_without


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """So many of the items, at the same distance from each other."""
    count = min(most, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def ask_all(choice: ModelChoice, questions: Sequence[Question]) -> list[Reply | None]:
    """What a model answers; None for a question that does not fit it."""
    model, tokenizer, _ = load_in_dtype(choice)
    try:
        encoder = ChatEncoder(tokenizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    return [ask(model, tokenizer, encoder, question) for question in questions]


def ask(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoder: ChatEncoder, question: Question
) -> Reply | None:
    """The likeliest answer to one question; None where it does not fit the model with its answer."""
    ids = encoder.turns_ids(question.turns, question.tools)
    most = most_tokens(tokenizer, encoder, question, len(ids))
    if len(ids) + most > most_positions(model.config):
        return None
    found = generate(model, tokenizer, ids, Sampling(max_new_tokens=most, temperature=0.0, top_p=1.0))
    text = without_thoughts(found[0, len(ids) :].tolist(), tokenizer, encoder)
    return Reply(text, first_sentence(text) == first_sentence(question.answer["content"]))


def most_tokens(tokenizer: PreTrainedTokenizerBase, encoder: ChatEncoder, question: Question, n_asked: int) -> int:
    """How many tokens an answer may have. n_asked: the tokens of the question."""
    whole = {"messages": [*question.turns, question.answer], "tools": question.tools}
    (ids,) = encoder.encode([json.dumps(whole, ensure_ascii=False)])
    # Other thoughts than those in the data may lead to the right answer: they may be twice as long.
    thoughts = tokenizer(question.answer.get("reasoning_content", ""), add_special_tokens=False).input_ids
    return len(ids) - n_asked + len(thoughts) + MORE_TOKENS


def without_thoughts(ids: list[int], tokenizer: PreTrainedTokenizerBase, encoder: ChatEncoder) -> str:
    """The text of an answer, from behind what the model has thought on."""
    end_of_thoughts = encoder.special.get(END_OF_THOUGHTS)
    if end_of_thoughts in ids:
        ids = ids[ids.index(end_of_thoughts) + 1 :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def show(question: Question, reply: Reply | None) -> None:
    """A question and its answer; beside a wrong one the right one."""
    announce(f"? {question.turns[-1]['content']}")
    if reply is None:
        announce("  not asked: it does not fit the model\n")
        return
    announce(f"{'=' if reply.is_right else '!'} {reply.text.strip()}")
    if not reply.is_right:
        announce(f"  right: {question.answer['content']}")
    announce("")


def tally(weight: str, replies: Sequence[Reply | None]) -> str:
    """The line with the count."""
    asked = [reply for reply in replies if reply is not None]
    right = sum(reply.is_right for reply in asked)
    line = f"{weight}: {right} of {counted(len(asked), 'question')} answered with the right first sentence"
    left_out = len(replies) - len(asked)
    return f"{line}; {left_out:,} more do not fit the positions of the model" if left_out else line


if __name__ == "__main__":
    run_cli(main)

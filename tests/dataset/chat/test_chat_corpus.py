"""Rows of conversations. References: the mask of each conversation by itself, and rows that are not packed."""

import json

import pytest

from common.errors import DataError
from dataset.chat.chat_corpus import ChatCorpus
from dataset.chat.encoder import ChatEncoder
from dataset.reading.conversations import CONVERSATION
from dataset.reading.settings import TextSettings
from dataset.tokenizing.encoder import load_tokenizer
from model.config import IGNORE
from tests.chats import ids_and_mask, turn, write_chats
from tests.helpers import ROOT, records, write_records

TOKENIZER = load_tokenizer(ROOT / "model")
ENCODER = ChatEncoder(TOKENIZER)


def corpus_of(*paths, max_seq_len=64, **options):
    options = {"seed": 3, "progress": False, **options}
    reading = TextSettings(text_field=CONVERSATION)
    return ChatCorpus([str(path) for path in paths], ENCODER, reading, max_seq_len=max_seq_len, **options)


def whole_epoch(corpus):
    plan = corpus.plan(0)
    return plan, corpus.assembler(0)[plan.recipe(range(plan.n_rows))]


def trained_conversations(path, most):
    """(inputs, targets) of each conversation's first `most` ids, by the template read turn by turn, if any is trained."""
    found = []
    for record in records(path, None):
        ids, mask = ids_and_mask(TOKENIZER, {"messages": record["conversations"]})
        targets = [token if is_trained else IGNORE for token, is_trained in zip(ids, mask, strict=True)]
        if any(mask[:most]):
            found.append((ids[:most][:-1], targets[1:most]))
    return sorted(found)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("max_seq_len", [16, 40, 512])
def test_rows_train_each_answer_once_and_nothing_else(tmp_path, pack, max_seq_len):
    """Answers that say nothing or have no weight are read and not trained."""
    path = write_chats(tmp_path / "a.jsonl", 60)
    asked = turn("user", "Hi")
    with path.open("a", encoding="utf-8") as file:
        for first in (turn("assistant", ""), turn("assistant", "No", weight=0), turn("assistant", " \n")):
            turns = [asked, first, asked, turn("assistant", "Yes", weight=1)]
            file.write(json.dumps({"conversations": turns}) + "\n")
    corpus = corpus_of(path, max_seq_len=max_seq_len, pack=pack)
    plan, batch = whole_epoch(corpus)
    found = []
    for inputs, targets, documents in zip(batch.input_ids, batch.targets, batch.document_ids, strict=True):
        for number in range(int(documents.max()) + 1):
            own = documents == number
            found.append((inputs[own].tolist(), targets[own].tolist()))
    assert sorted(found) == trained_conversations(path, max_seq_len)
    # What the plan has told of each row beforehand
    for row in range(plan.n_rows):
        assert plan.totals(row, row + 1).targets == int((batch.targets[row] != IGNORE).sum())
    assert batch.n_targets == plan.totals(0, plan.n_rows).targets
    assert plan.fill == plan.n_pairs / (plan.n_rows * plan.T) > batch.n_targets / (plan.n_rows * plan.T)


def test_validation_without_an_answer_within_a_row_is_refused(tmp_path):
    """Its loss would be the mean of nothing."""
    path = write_chats(tmp_path / "a.jsonl", 10)
    conversation = {"messages": [turn("user", "word " * 100), turn("assistant", "Yes")]}
    valid = write_records(tmp_path / "valid.jsonl", [conversation])
    with pytest.raises(DataError, match="--val_path .*valid.jsonl: no answer starts within .* no loss to measure"):
        corpus_of(path, max_seq_len=64, val_path=valid)
    assert corpus_of(path, max_seq_len=512, val_path=valid).validation()[0].n_targets > 0


def test_conversations_that_are_too_long_are_cut_counted_and_told(tmp_path):
    short = [turn("user", "Hi"), turn("assistant", "Yes")]
    cut = [turn("user", "Hi"), turn("assistant", "word " * 100)]
    without = [turn("user", "word " * 100), turn("assistant", "Yes")]
    path = write_records(tmp_path / "a.jsonl", [{"messages": turns} for turns in (short, cut, without)])
    corpus = corpus_of(path, max_seq_len=32)
    plan, batch = whole_epoch(corpus)
    assert sorted(plan.documents_of(0, plan.n_rows)) == [0, 1]
    lost = 0
    for turns in (cut, without):
        _, mask = ids_and_mask(TOKENIZER, {"messages": turns})
        lost += sum(mask[32:])
    (line,) = corpus.truncation_report(plan)
    assert line == (
        f"note: 2 of 3 conversations exceed --max_seq_len 32 and are cut: answers lose {lost} tokens; skipped, since no "
        "answer is left: 1 conversation"
    )
    assert corpus_of(path, max_seq_len=512).truncation_report(plan) == []
    with pytest.raises(DataError, match="no answer starts within --max_seq_len"):
        corpus_of(path, max_seq_len=4).plan(0)


@pytest.mark.parametrize("shares", [("0.75", "0.25"), ("0.9..0.6", "0.1..0.4"), ("0.75", "0.25:x2")])
def test_a_share_counts_the_tokens_of_answers(tmp_path, shares):
    """Answers are a larger part of the one file than of the other. Reference: the targets of the batches."""
    a, answer = write_chats(tmp_path / "a.jsonl", 300), turn("assistant", "one two three four five six seven")
    chats = [{"messages": [turn("user", f"{number} and so on?"), answer]} for number in range(300)]
    b = write_records(tmp_path / "b.jsonl", chats)
    corpus = corpus_of(f"{a}:{shares[0]}", f"{b}:{shares[1]}")
    plan = corpus.plan(0)
    trained = [0, 0]
    for row in range(plan.n_rows):
        batch = corpus.assembler(0)[plan.recipe([row])]
        _, documents, _, _ = plan.pieces([row])
        for number, document in enumerate(documents):
            of_document = batch.targets[batch.document_ids == number]
            trained[int(document >= 300)] += int((of_document != IGNORE).sum())
    assert sum(trained) == plan.totals(0, plan.n_rows).targets
    assert trained[0] / sum(trained) == pytest.approx(0.75, abs=0.02)
    told = corpus.tokens_of_sources(0, plan.n_rows // 2)
    assert sum(tokens for _, tokens, _ in told) == plan.row_targets(0, plan.n_rows // 2)
    _, _, _, pairs = plan.pieces(range(plan.n_rows))
    assert plan.fill == pytest.approx(int(pairs.sum()) / (plan.n_rows * plan.T), rel=0.05)


def test_each_start_tells_what_is_read_of_chats(tmp_path):
    path = tmp_path / "a.jsonl"
    read_as, passed_over = "a: read as: lists of messages (role, content) (1 line)", "a: passed over: category (1 line)"
    for fields, followed in (({}, []), ({"loss": False}, ["a: followed: loss (1 line)"])):
        turns = [turn("user", "Hi"), turn("assistant", "No", **fields), turn("user", "Hi"), turn("assistant", "Yes")]
        write_records(path, [{"messages": turns, "category": 1}])
        corpus = corpus_of(path)
        assert corpus.notices == corpus_of(path).notices == [read_as, *followed, passed_over]
    # The answer that is not to be trained is not: only the other one and its end.
    assert whole_epoch(corpus)[1].n_targets == len(TOKENIZER.encode("Yes", add_special_tokens=False)) + 1


@pytest.mark.parametrize("name", ["a.txt", "a.py"])
def test_other_kinds_of_files_are_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text("a")
    with pytest.raises(DataError, match="conversations are read from .jsonl, .ndjson, .json, .csv and .tsv"):
        corpus_of(path)
    with pytest.raises(DataError, match="conversations are read from"):
        corpus_of(write_chats(tmp_path / "b.jsonl", 3), val_path=str(path))


def test_too_few_conversations_to_hold_any_out_are_told_with_a_share_that_works(tmp_path):
    path = write_chats(tmp_path / "six.jsonl", 6)
    with pytest.raises(DataError, match="--val_fraction 1e-06 holds out 0 of 6 texts, by their hashes; give") as caught:
        corpus_of(path, val_fraction=1e-6)
    works = float(str(caught.value).split("give ")[1].split(",")[0])
    assert 0 < len(corpus_of(path, val_fraction=works).val_documents) < 6
    # Whole ones, near the share, whatever their hashes are
    shares = [len(corpus_of(path, val_fraction=share / 6).val_documents) / share for share in (1, 2, 3, 4, 5)]
    assert all(1 / 2 <= share <= 2 for share in shares), shares

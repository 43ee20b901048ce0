"""What a start says of leaks. References: the documents that were planted."""

import json

from dataset import leaks_at_start
from dataset.chat.chat_corpus import ChatCorpus
from dataset.chat.encoder import ChatEncoder
from dataset.corpus import Corpus
from dataset.leaks_at_start import AGAINST, leak_notices
from dataset.quality.evaluation_texts import evaluation_of
from dataset.reading.conversations import CONVERSATION
from dataset.tokenizing.encoder import load_tokenizer
from tests.chats import turn
from tests.dataset.test_corpus_sources import write_texts
from tests.helpers import ROOT, write_corpus
from tests.helpers import train as pretrain


def the_line(corpus, against=()):
    (line,) = leak_notices(corpus, against)
    return line


def words(number, count=60):
    return " ".join(f"w{number}x{i}" for i in range(count))


def test_validation_documents_within_other_training_text_are_told(tmp_path, encoder, monkeypatch):
    """All 5 that were planted, and no other; copies to the letter have a line of their own."""
    validation = [words(i) for i in range(40)]
    training = [words(1000 + i) for i in range(100)]
    for i in (3, 9, 20, 30, 39):
        training[2 * i] = f"{words(2000 + i)} {validation[i]} {words(3000 + i)}"
    training.append(validation[7])
    paths = write_texts(tmp_path / "a.jsonl", training), write_texts(tmp_path / "b.jsonl", validation)
    corpus = Corpus([paths[0]], encoder, max_seq_len=16, seed=0, val_path=paths[1], progress=False)
    assert the_line(corpus).startswith(
        "note: 5 of 39 validation documents (12.8%) are in the training text nearly whole,"
    )
    monkeypatch.setattr("dataset.quality.leaks.CHUNK", 100)
    monkeypatch.setattr("dataset.leaks_at_start.LEAK_TOKENS", 100)
    assert all(" of it that was looked at" in line for line in leak_notices(corpus))


def test_what_is_held_out_is_looked_for_in_the_rest(tmp_path, encoder):
    """With several sources too. Reference: the texts that were planted in a training document."""
    texts = [words(i) for i in range(200)]
    first = write_texts(tmp_path / "a.jsonl", texts[:100])
    second = write_texts(tmp_path / "b.jsonl", texts[100:])
    options = {"max_seq_len": 16, "seed": 0, "val_fraction": 0.1, "progress": False}
    for paths in ([first, second], [f"{first}:0.5", f"{second}:0.5"]):
        corpus = Corpus(paths, encoder, **options)
        assert leak_notices(corpus) == []
    held_out = [texts[i] for i in corpus.val_documents[[0, -1]]]
    third = write_texts(tmp_path / "c.jsonl", [f"before {text} behind" for text in held_out])
    corpus = Corpus([*paths, f"{third}:0.1"], encoder, **options)
    assert the_line(corpus).startswith(f"note: 2 of {len(corpus.val_documents)} validation documents")


def test_without_validation_nothing_is_looked_for(tmp_path, encoder):
    path = write_texts(tmp_path / "a.jsonl", ["one text"])
    assert leak_notices(Corpus([path], encoder, max_seq_len=16, seed=0, progress=False)) == []


def write_objects(path, objects):
    path.write_text("".join(json.dumps(value) + "\n" for value in objects), encoding="utf-8")
    return str(path)


def test_each_evaluation_file_has_a_line_whatever_was_found(tmp_path, encoder):
    """3 of 30 objects are in training documents; the answer alone is too short to tell."""
    asked = [words(i) for i in range(30)]
    training = [words(1000 + i) for i in range(50)]
    for i in (2, 11, 29):
        training[i] = f"{words(2000 + i)} {asked[i]} {words(3000 + i)}"
    corpus = Corpus([write_texts(tmp_path / "a.jsonl", training)], encoder, max_seq_len=16, seed=0, progress=False)
    leaked = write_objects(
        tmp_path / "leaked.jsonl", [{"question": text, "answer": 3} for text in asked] + [{"a": "b"}]
    )
    clean = write_objects(tmp_path / "clean.jsonl", [{"text": words(5000 + i)} for i in range(4)])
    against = [evaluation_of(path, encoder, "text", sample=AGAINST) for path in (leaked, clean)]
    first, second = leak_notices(corpus, against)
    assert first == (
        f"note: --against {leaked}: 3 of 30 texts (1 more are too short to tell) are in the training text nearly whole; "
        "scripts/inspect_data.py --against names them"
    )
    assert second == f"--against {clean}: 0 of 4 texts are in the training text nearly whole"


def test_a_message_of_a_conversation_is_found_in_an_evaluation_file(tmp_path):
    """Within the template its tokens are those of the text by itself."""
    encoder = ChatEncoder(load_tokenizer(ROOT / "model"))
    asked = [words(i, 20) for i in range(10)]
    chats = [{"messages": [turn("user", text), turn("assistant", "Yes")]} for text in asked[:4]]
    path = write_objects(tmp_path / "chats.jsonl", chats)
    corpus = ChatCorpus([path], encoder, max_seq_len=512, seed=0, text_field=CONVERSATION, progress=False)
    evaluation = write_objects(tmp_path / "asked.jsonl", [{"question": text} for text in asked])
    line = the_line(corpus, [evaluation_of(evaluation, encoder, CONVERSATION, sample=AGAINST)])
    assert "4 of 10 texts are in the training text nearly whole" in line


def test_of_a_large_evaluation_file_a_sample_is_looked_at(tmp_path, encoder):
    path = write_texts(tmp_path / "a.jsonl", [words(i) for i in range(20)])
    corpus = Corpus([path], encoder, max_seq_len=16, seed=0, progress=False)
    few = leaks_at_start.AGAINST._replace(items=5)
    line = the_line(corpus, [evaluation_of(path, encoder, "text", sample=few)])
    assert line.startswith(f"note: --against {path}: 5 of 5 texts that were looked at are in the training text")


def test_a_run_says_it_at_each_start(tmp_path, capsys):
    data = write_corpus(tmp_path / "a.jsonl", 30)
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    long = [text for text in texts if len(text) > 100]
    questions = write_texts(tmp_path / "questions.jsonl", [*long[:3], "quite another text " * 10])
    for start in range(2):
        pretrain(data_path=data, out_dir=tmp_path, against=questions, max_updates=2 + start, from_resume=start)
        lines = [line for line in capsys.readouterr().out.splitlines() if "--against" in line]
        (line,) = [line for line in lines if "nearly whole" in line]
        assert line.startswith(f"note: --against {questions}: 3 of 4 texts")

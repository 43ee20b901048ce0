"""The GLUE files, their features and batches. References: the official row counts, the tokenizer's own pairs."""

import json

import numpy as np
import pytest
import torch
from transformers import BertTokenizer

from common.errors import DataError, UserError, user_errors
from encoders.glue.examples import Features, GlueAssembler, GluePlan, cached_features, encode_file, examples_of
from encoders.glue.tasks import MAX_SCORE, TASKS, Task, task_list, task_name
from tests.helpers import SHARED, needs_shared

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", '"', "[", "]", "sep", *"abcdefghij"]
RTE = "index\tsentence1\tsentence2\tlabel"
OWN = Task("mine", ("title", "body"), "stars", ("bad", "good"), ("accuracy",))
LONG = "a" * ((1 << 20) + 1)
SCORE = Task("mine", ("text",), "label", (), ("pearson",), bounds=(-MAX_SCORE, MAX_SCORE))


def tokenizer():
    return BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})


def tsv(path, *lines, encoding="utf-8", end="\n"):
    path.write_bytes("".join(line + end for line in lines).encode(encoding))
    return path


def read(path, task, labelled=True):
    """[(*sentences, label), ...]"""
    return [(*example.sentences, example.label) for example in examples_of(path, task, labelled)]


def features_of(path, task=TASKS["rte"], max_seq_len=8):
    return encode_file(path, task, tokenizer(), max_seq_len, True)


@needs_shared
@pytest.mark.parametrize(
    ("name", "train", "dev"),
    # MRPC's training file has 3,668 examples at its source; the one beside this checkout has a line less.
    [("cola", 8551, 1043), ("sst2", 67349, 872), ("rte", 2490, 277), ("stsb", 5749, 1500), ("mrpc", 3667, 408)],
)
def test_row_counts_are_the_official_ones(name, train, dev):
    for file, n in (("train", train), ("dev", dev)):
        assert len(read(SHARED / "glue_data" / TASKS[name].folder / f"{file}.tsv", TASKS[name])) == n


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_quotes_are_text_and_bom_crlf_and_odd_line_breaks_do_no_harm(tmp_path, end, encoding):
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    lines = ['1\t1\t2\t"He said\tShe "said" it', "0\t3\t4\ta\u2028b\t"]
    path = tsv(tmp_path / "train.tsv", header, *lines, encoding=encoding, end=end)
    assert read(path, TASKS["mrpc"]) == [('"He said', 'She "said" it', "1"), ("a\u2028b", "", "0")]


def test_short_lines_of_qqp_are_skipped_and_counted(tmp_path, capsys):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    path = tsv(tmp_path / "train.tsv", header, "0\t1\t2\ta\tb\t1", "1\t1\tand more?", "2\t1\t2\tc\td\t0")
    assert read(path, TASKS["qqp"]) == [("a", "b", "1"), ("c", "d", "0")]
    assert "train.tsv: 1 line with too few columns" in capsys.readouterr().out
    with pytest.raises(DataError, match=":3: 3 columns"):  # of a test file no line may be missing
        read(path, TASKS["qqp"], labelled=False)


def test_names_of_tasks_and_the_header_of_cola(tmp_path):
    """CoLA has one in its test file alone. Reference for the names: the benchmark's folders."""
    train = tsv(tmp_path / "train.tsv", "gj04\t0\t*\tThey a.", "gj04\t1\t\tThey b.")
    assert read(train, TASKS["cola"]) == [("They a.", "0"), ("They b.", "1")]
    test = tsv(tmp_path / "test.tsv", "index\tsentence", "0\tThey c.")
    assert read(test, TASKS["cola"], labelled=False) == [("They c.", "")]
    # Where a row is one text, the last one may be empty.
    assert len(read(tsv(tmp_path / "one.tsv", "sentence", "a", "", ""), TASKS["cola"], labelled=False)) == 3
    for name, task in TASKS.items():
        assert {task_name(task.folder), task_name(task.folder.lower())} == {name}
    assert task_list("SST-2, mrpc,sst2,STS-B,sts,colla") == "sst2,mrpc,stsb,colla" and task_list("All,rte") == "all"


def test_a_tsv_and_a_jsonl_file_hold_the_same(tmp_path):
    """Columns in any order and others beside them; a BOM; blank lines of a .jsonl file; its labels may be numbers and truth values."""
    rows = [('a, "quoted" one', "b", "good"), ("", "c d", "bad")]
    tsv(tmp_path / "a.tsv", "stars\tid\tbody\ttitle", *(f"{c}\t0\t{b}\t{a}" for a, b, c in rows), encoding="utf-8-sig")
    lines = [json.dumps({"title": a, "body": b, "stars": c, "more": [1]}) for a, b, c in rows]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    for name in ("a.tsv", "a.jsonl"):
        assert read(tmp_path / name, OWN) == rows
        assert features_of(tmp_path / name, OWN).labels.tolist() == [1, 0]
        assert read(tmp_path / name, OWN._replace(label="none"), labelled=False)[0][2] == ""
    (tmp_path / "b.jsonl").write_text('{"text": "a", "label": -3}\n{"text": "b", "label": "1e3"}\n')
    assert features_of(tmp_path / "b.jsonl", SCORE).labels.tolist() == [-3, 1000]
    (tmp_path / "b.jsonl").write_text('{"text": "a", "label": true}\n{"text": "b", "label": false}\n')
    assert features_of(tmp_path / "b.jsonl", SCORE._replace(labels=("false", "true"))).labels.tolist() == [1, 0]


def test_a_fault_is_named_in_a_line_with_file_and_number(tmp_path):
    for task, name, content, reason in (
        ("rte", "dev.tsv", f"{RTE}\n0\ta\tb\tentailment\n1\ta\tentailment\n", ":3: 3 columns where 4"),
        ("rte", "dev.tsv", f"{RTE}\n0\ta\tb\tperhaps\n", ":2: label 'perhaps' is not one of entailment, not_entail"),
        ("sst2", "dev.tsv", "sentence\tlabel\tlabel\na\t0\t1\n", ":1: two columns 'label'"),
        ("stsb", "dev.tsv", "sentence1\tsentence2\tscore\na\tb\tmuch\n", ":2: label 'much' is not a number from 0"),
        ("sst2", "dev.tsv", "text\tlabel\na\t1\n", ":2: 'sentence' is not there"),
        ("sst2", "dev.tsv", "sentence\tlabel\n", "no example in there"),
        ("sst2", "dev.tsv", "sentence\tlabel\ncaf\udce9\t1\n", ":2: 'utf-8' codec can't decode"),
        ("sst2", "nowhere.tsv", None, "No such file"),
        (OWN, "a.jsonl", '{"title": "a", "body": 3, "stars": 1}', ":1: expected an object with the texts title, body"),
        *((OWN, "a.jsonl", f'{{"title": "a", "body": "b", "stars": {x}}}', ", label ") for x in ('""', "null", "NaN")),
        (OWN, "a.csv", "title,body,stars", "expected a .tsv with a header or a .jsonl"),
        (OWN, "a.jsonl", '{"title": "a", "body": "b", "stars": "\\ud800"}', ":1: expected an object with the texts"),
        (OWN, "a.jsonl", "[" * 100_000, ":1: expected an object with the texts"),
        (OWN, "a.tsv", f"title\tbody\tstars\n{LONG}\tb\tbad\n", ":2: a sentence of more than 1,048,576"),
        (OWN, "a.tsv", f"title\tbody\tstars\n{LONG * 17}", ":2: a line of more than 16 MB"),
        # 1e39 is infinite in float32, and so is 1e20's square in the loss.
        *((SCORE, "a.tsv", f"text\tlabel\na\t{word}\n", ":2: label") for word in ("nan", "1e39", "-1e20", "")),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises((DataError, UserError)) as error, user_errors():
            features_of(path, TASKS[task] if isinstance(task, str) else task)
        assert str(error.value).startswith(str(path)) and reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("side", ["right", "left"])
def test_examples_are_what_the_tokenizer_makes_and_batches_are_padded(tmp_path, side):
    """The longer sentence of a pair is cut first; padding stands on the tokenizer's side, up to the longest of a batch."""
    pairs = [("a b c d e f", "g h"), ("a", '[ "'), ("a b c d", "e f g h")]
    features = features_of(tsv(tmp_path / "a.tsv", RTE, *(f"0\t{a}\t{b}\tnot_entailment" for a, b in pairs)))
    own = tokenizer()
    own.padding_side = side
    batch = GlueAssembler(features, own, 8)[np.array([0, 1, 2])]
    first, second = ([pair[i] for pair in pairs] for i in (0, 1))
    wanted = own(first, second, truncation=True, max_length=8, padding=True, return_tensors="pt")
    a, g = WORDS.index("a"), WORDS.index("g")
    assert batch.ids[0].tolist() == [2, a, a + 1, a + 2, 3, g, g + 1, 3]
    assert torch.equal(batch.ids, wanted.input_ids) and torch.equal(batch.types, wanted.token_type_ids)
    assert torch.equal(batch.mask, wanted.attention_mask)
    assert batch.labels.tolist() == [1, 1, 1] and batch.labels.dtype == torch.int64

    lengths = np.array([5, 11, 3, 4, 4, 3, 9])
    tokens = np.full(lengths.sum(), 10, dtype=np.uint32)
    features = Features(tokens, tokens * 0, np.cumsum(lengths) - lengths, lengths, lengths)
    assert GlueAssembler(features, own, 128)[np.array([0, 1, 2])].ids.shape == (3, 16)


def test_an_epoch_has_every_example_once_in_an_order_of_its_own(tmp_path):
    features = features_of(tsv(tmp_path / "a.tsv", RTE, *(f"{i}\ta\tb c\tentailment" for i in range(50))))
    orders = [GluePlan(features, *key).recipe(range(50)).tolist() for key in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(50)) for order in orders)
    plan = GluePlan(features, 1, 0)
    assert plan.totals(10, 30) == (20 * 6, 20) and plan.documents_of(10, 30) == orders[0][10:30]


def test_cache_depends_on_content_and_length_and_is_made_again_if_damaged(tmp_path):
    path = tsv(tmp_path / "train.tsv", RTE, "0\ta b\tc\tentailment")
    said = []

    def cached(max_seq_len=8, **options):
        return cached_features(path, TASKS["rte"], tokenizer(), "digest", max_seq_len, say=said.append, **options)

    found, key = cached()
    (file,) = (tmp_path / ".glue_cache").iterdir()
    made = file.stat().st_ino
    assert found.lengths.tolist() == [6] and cached()[1] == key and file.stat().st_ino == made
    assert len({key, cached(max_seq_len=9)[1], cached(labelled=False)[1]}) == 3
    whole = file.read_bytes()
    entry = whole.index(b"PK\1\2")
    # its content; in the table of contents the flag of an encrypted file, the compression, the name
    for at in (200, entry + 8, entry + 10, entry + 46):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert cached()[0].lengths.tolist() == [6]
        assert file.stat().st_size == len(whole) and file.read_bytes()[at] == whole[at]
    made = file.stat().st_ino
    cached(overwrite=True)
    assert file.stat().st_ino != made
    tsv(path, RTE, "0\ta b\tc d\tentailment")
    assert cached()[1] != key and cached()[0].lengths.tolist() == [7]
    cached(cache_dir=str(tmp_path / "there"))
    assert len(list((tmp_path / "there").iterdir())) == 1 and not said
    # A file in the way, as root may write everywhere
    assert cached(cache_dir=str(path))[0].lengths.tolist() == [7] and "cannot be kept there" in said[0]

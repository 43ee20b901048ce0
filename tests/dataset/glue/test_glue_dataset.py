"""The GLUE files, their features and batches. References: the official row counts, the loop of pops in ELECTRA's own
code, and hand-made files."""

import numpy as np
import pytest
import torch
from transformers import BertTokenizer

from common.errors import DataError
from dataset.glue.feature_cache import cached_features, read_features
from dataset.glue.features import encode_rows, longest_first
from dataset.glue.glue_dataset import GlueAssembler, GluePlan
from dataset.glue.glue_tasks import TASKS
from dataset.glue.tables import Rows, read_rows
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from tests.helpers import SHARED, needs_shared

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", '"', "[", "]", "sep", *"abcdefghij"]


def encoder():
    return SentenceEncoder(BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}))


def tsv(path, *lines, encoding="utf-8", end="\n"):
    path.write_bytes("".join(line + end for line in lines).encode(encoding))
    return path


RTE = "index\tsentence1\tsentence2\tlabel"


# ------------------------------------------------------------------------------------------------ reading


@needs_shared
@pytest.mark.parametrize(
    ("name", "train", "dev"),
    # MRPC's training file has 3,668 examples at its source; the one beside this checkout has a line less.
    [("cola", 8551, 1043), ("sst2", 67349, 872), ("rte", 2490, 277), ("stsb", 5749, 1500), ("mrpc", 3667, 408)],
)
def test_row_counts_are_the_official_ones(name, train, dev):
    for file, n in (("train", train), ("dev", dev)):
        rows = read_rows(SHARED / "glue_data" / TASKS[name].folder / f"{file}.tsv", TASKS[name])
        assert [len(column) for column in (*rows.sentences, rows.labels)] == [n] * (len(rows.sentences) + 1)
        assert rows.skipped == 0


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_quotes_are_text_and_bom_crlf_and_odd_line_breaks_do_no_harm(tmp_path, end, encoding):
    path = tsv(
        tmp_path / "train.tsv",
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '1\t1\t2\t"He said\tShe "said" it',
        "0\t3\t4\ta\u2028b\t",
        encoding=encoding,
        end=end,
    )
    rows = read_rows(path, TASKS["mrpc"])
    assert rows.sentences == [['"He said', "a\u2028b"], ['She "said" it', ""]] and rows.labels == [1, 0]


def test_cola_has_a_header_in_its_test_file_alone(tmp_path):
    train = tsv(tmp_path / "train.tsv", "gj04\t0\t*\tThey a.", "gj04\t1\t\tThey b.")
    assert read_rows(train, TASKS["cola"]).sentences == [["They a.", "They b."]]
    test = tsv(tmp_path / "test.tsv", "index\tsentence", "0\tThey c.")
    assert read_rows(test, TASKS["cola"], labelled=False) == ([["They c."]], [], 0)


def test_short_lines_of_qqp_are_skipped_and_counted(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    path = tsv(tmp_path / "train.tsv", header, "0\t1\t2\ta\tb\t1", "1\t1\tand more?", "2\t1\t2\tc\td\t0")
    rows = read_rows(path, TASKS["qqp"])
    assert rows.labels == [1, 0] and rows.skipped == 1
    with pytest.raises(DataError, match=":3: 3 columns"):  # of a test file no line may be missing
        read_rows(path, TASKS["qqp"], labelled=False)


@pytest.mark.parametrize(
    ("task", "lines", "reason"),
    [
        ("rte", [RTE, "0\ta\tb\tentailment", "1\ta\tentailment"], ":3: 3 columns where 4"),
        ("rte", [RTE, "0\ta\tb\tentailment", "1\ta\tb\tc\tentailment"], ":3: 5 columns where 4"),
        ("rte", [RTE, "0\ta\tb\tperhaps"], ":2: label 'perhaps' is not one of entailment, not_entailment"),
        ("stsb", ["sentence1\tsentence2\tscore", "a\tb\tmuch"], ":2: label 'much' is not a score from 0 to 5"),
        ("stsb", ["sentence1\tsentence2\tscore", "a\tb\tnan"], ":2: label 'nan'"),
        (
            "sst2",
            ["text\tlabel", "a\t1"],
            ":1: no column 'sentence' in the header (its columns: text, label; this is no SST-2 file)",
        ),
        ("sst2", ["sentence\tlabel"], "no example"),
        ("sst2", [], "no example in there; the file is empty"),
    ],
)
def test_a_faulty_line_is_named_with_its_file(tmp_path, task, lines, reason):
    path = tsv(tmp_path / "dev.tsv", *lines)
    with pytest.raises(DataError) as error:
        read_rows(path, TASKS[task])
    assert str(error.value).startswith(str(path)) and reason in str(error.value)


def test_text_that_is_not_utf8_and_a_missing_file_are_named(tmp_path):
    path = tsv(tmp_path / "dev.tsv", "sentence\tlabel", "caf\u00e9\t1", encoding="latin-1")
    with pytest.raises(DataError, match="dev.tsv:2: not UTF-8"):
        read_rows(path, TASKS["sst2"])
    with pytest.raises(DataError, match="nowhere.tsv: cannot be read"):
        read_rows(tmp_path / "nowhere.tsv", TASKS["sst2"])


# ------------------------------------------------------------------------------------------ features, batches


def pop_loop(first, second, budget):
    """As in the original: _truncate_seq_pair of BERT and ELECTRA."""
    a, b = list(range(first)), list(range(second))
    while len(a) + len(b) > budget:
        (a if len(a) > len(b) else b).pop()
    return len(a), len(b)


@pytest.mark.parametrize("budget", [1, 2, 5, 12, 13])
def test_truncation_is_the_loop_of_pops(budget):
    first, second = (x.ravel() for x in np.meshgrid(np.arange(20), np.arange(20)))
    found = longest_first(first, second, budget)
    wanted = [pop_loop(a, b, budget) for a, b in zip(first, second, strict=True)]
    assert list(zip(*(x.tolist() for x in found), strict=True)) == wanted


def features_of(tmp_path, *lines, task="rte", max_seq_len=8):
    path = tsv(tmp_path / "train.tsv", *lines)
    return encode_rows(read_rows(path, TASKS[task]), TASKS[task], encoder(), max_seq_len)


def test_batches_hold_cls_sep_and_segments_and_a_literal_sep_is_text(tmp_path):
    features = features_of(
        tmp_path, RTE, "0\ta b c d e f\tg h\tentailment", '1\ta\t[SEP] "\tnot_entailment', "2\t\t\tentailment"
    )
    batch = GlueAssembler(features, encoder(), 8)[np.array([0, 1, 2])]
    a = WORDS.index("a")
    g = WORDS.index("g")
    assert batch.ids.tolist() == [
        [2, a, a + 1, a + 2, 3, g, g + 1, 3],  # 6 + 2 tokens, 5 fit
        [2, a, 3, 6, 8, 7, 5, 3],
        [2, 3, 3, 0, 0, 0, 0, 0],
    ]
    assert batch.types.tolist() == [[0] * 5 + [1] * 3, [0] * 3 + [1] * 5, [0, 0, 1, 0, 0, 0, 0, 0]]
    assert batch.mask.sum(1).tolist() == [8, 8, 3] == features.lengths.tolist()
    assert batch.labels.tolist() == [0, 1, 0] and batch.labels.dtype == torch.int64
    assert GlueAssembler(features, encoder(), 128)[np.array([2])].ids.shape == (1, 8)  # its longest, a multiple of 8


def test_single_sentences_are_cut_and_padded_too(tmp_path):
    features = features_of(tmp_path, "x\t1\t\ta b c d e f g h", "x\t0\t\ta", task="cola", max_seq_len=7)
    batch = GlueAssembler(features, encoder(), 7)[np.array([0, 1])]
    assert batch.mask.sum(1).tolist() == [7, 3] and batch.types.sum() == 0 and batch.ids.shape == (2, 7)
    assert batch.ids[0, -1] == 3 == batch.ids[1, 2]


def test_an_epoch_has_every_example_once_in_an_order_of_its_own(tmp_path):
    features = features_of(tmp_path, RTE, *(f"{i}\ta\tb c\tentailment" for i in range(50)))
    orders = [
        GluePlan(features, seed, epoch).recipe(range(50)).tolist() for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(50)) for order in orders)
    plan = GluePlan(features, 1, 0)
    assert plan.totals(10, 30) == (20 * 6, 20) and plan.documents_of(10, 30) == orders[0][10:30]


def test_cache_depends_on_content_and_length_and_is_made_again_if_damaged(tmp_path, monkeypatch):
    path = tsv(tmp_path / "train.tsv", RTE, "0\ta b\tc\tentailment")
    task, e, said = TASKS["rte"], encoder(), []

    def cached(**options):
        return cached_features(path, task, e, options.pop("max_seq_len", 8), say=said.append, **options)

    first = cached()
    assert first.parent == tmp_path / ".glue_cache" and cached() == first
    assert first.stat().st_mode == path.stat().st_mode, "whoever may read the data may read its features"
    assert cached(max_seq_len=9) != first and cached(labelled=False) != first
    made = first.read_bytes()
    first.write_bytes(made[:40])
    assert cached() == first and read_features(first).lengths.tolist() == [6]
    stat = first.stat().st_mtime_ns, first.stat().st_ino
    assert cached() == first and (first.stat().st_mtime_ns, first.stat().st_ino) == stat
    cached(overwrite=True)
    assert first.stat().st_ino != stat[1]
    tsv(path, RTE, "0\ta b\tc d\tentailment")
    assert cached() != first and read_features(cached()).lengths.tolist() == [7]
    assert cached(cache_dir=str(tmp_path / "there")).parent == tmp_path / "there" and not said
    assert not [p for p in (tmp_path / ".glue_cache").iterdir() if p.suffix != ".npz"]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    place = tmp_path / "full"
    place.mkdir()
    (place / ".glue_cache").write_text("a file in the way, as root may write everywhere")
    path = tsv(place / "train.tsv", RTE, "0\ta\ta\tentailment")
    assert tmp_path / "home" in cached().parents and len(said) == 1 and "cannot be written" in said[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": np.array([99, 99, 99, 99], np.uint16)},
        {"tokens": np.array([0.5, 1, 2, 3])},
        {"begin": np.array([0, 2**62])},
        {"begin": np.array([-1, 2])},
        {"begin": np.array([0, 3])},
        {"begin": np.array([0])},
        {"first": np.array([[1], [1]])},
        {"second": np.array([1, 2], np.int32)},
        {"labels": np.array([0, 2])},
        {"labels": np.zeros(0, np.int64)},
        {"labels": np.zeros(2, np.float32)},
        {"pair": np.array([True])},
        {"skipped": np.array("many")},
        {"classes": np.zeros(4, np.int16)},
        {"first": np.zeros(0, np.int64), "second": np.zeros(0, np.int64), "begin": np.zeros(0, np.int64)},
    ],
    ids=range(15),
)
def test_a_cache_that_is_none_of_ours_is_made_again(tmp_path, changes):
    """Anybody may have put it beside the data."""
    path = tsv(tmp_path / "train.tsv", RTE, "0\ta\tc\tentailment", "1\tb\td\tnot_entailment")

    def cached():
        return cached_features(path, TASKS["rte"], encoder(), 8, say=lambda _: None)

    file = cached()
    whole = read_features(file)
    np.savez(file, **{**whole._asdict(), **changes})
    again = read_features(cached())
    for name, array in whole._asdict().items():
        assert np.array_equal(getattr(again, name), array), name


def test_a_compressed_cache_is_not_read(tmp_path):
    """A small file may hold more than any memory has."""
    path = tsv(tmp_path / "train.tsv", RTE, "0\ta\tc\tentailment")
    file = cached_features(path, TASKS["rte"], encoder(), 8, say=lambda _: None)
    np.savez_compressed(file, **read_features(file)._asdict())
    with pytest.raises(ValueError, match="compressed"):
        read_features(file)
    assert read_features(cached_features(path, TASKS["rte"], encoder(), 8)).lengths.tolist() == [5]


def test_both_orders_are_cut_as_the_examples_that_they_are(tmp_path):
    """`double_unordered`: the swapped examples behind the others. Reference: the loop of pops, which takes from the second
    sentence at a tie, so that a pair and its swapped twin may be cut differently."""
    lines = ("0\ta b c d\te f g h\tentailment", "1\ta b c d e f\tg\tnot_entailment")
    path = tsv(tmp_path / "train.tsv", RTE, *lines)
    e = encoder()
    options = {"cache_dir": str(tmp_path / "cache"), "labelled": True}
    once = cached_features(path, TASKS["rte"], e, 8, **options)
    twice = cached_features(path, TASKS["rte"], e, 8, both_orders=True, **options)
    assert once != twice
    features = read_features(twice)
    sentences = [("a b c d", "e f g h"), ("a b c d e f", "g"), ("e f g h", "a b c d"), ("g", "a b c d e f")]
    assert features.labels.tolist() == [0, 1, 0, 1]
    for i, (first, second) in enumerate(sentences):
        pair = [first.split(), second.split()]
        while len(pair[0]) + len(pair[1]) > 8 - 3:
            pair[0 if len(pair[0]) > len(pair[1]) else 1].pop()
        begin = features.begin[i]
        middle = begin + features.first[i]
        end = middle + features.second[i]
        found = [features.tokens[begin:middle].tolist(), features.tokens[middle:end].tolist()]
        assert found == [[WORDS.index(word) for word in sentence] for sentence in pair]


def test_a_tokenizer_with_cls_elsewhere_than_first_is_refused():
    """XLNet's examples end with CLS, and its head reads the last position."""
    from transformers import XLNetTokenizer

    tokenizer = XLNetTokenizer(
        vocab=[
            ("<unk>", 0.0),
            ("<s>", 0.0),
            ("</s>", 0.0),
            ("<cls>", 0.0),
            ("<sep>", 0.0),
            ("<pad>", 0.0),
            ("▁", -1.0),
            ("a", -1.0),
        ]
    )
    assert tokenizer("a").input_ids[-1] == tokenizer.cls_token_id
    with pytest.raises(ValueError, match="XLNetTokenizer does not begin an example with its CLS token"):
        SentenceEncoder(tokenizer)


def test_a_tokenizer_with_a_segment_for_cls_gets_it():
    """Funnel's; BERT's CLS is of the first segment."""
    for cls_type in (0, 2):
        tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)})
        if cls_type:
            tokenizer.cls_token_type_id = cls_type
        own = SentenceEncoder(tokenizer)
        features = encode_rows(Rows([["a"], ["b"]], [0], 0), TASKS["rte"], own, 16)
        batch = GlueAssembler(features, own, 16)[np.array([0])]
        assert batch.types[0, :5].tolist() == [cls_type, 0, 0, 1, 1]

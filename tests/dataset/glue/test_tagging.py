"""Sentences with tags as features. Reference: every word by hand, whatever the parts of a long sentence."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.errors import DataError
from dataset.glue.features import NO_CLASS
from dataset.glue.glue_dataset import GlueAssembler, GluePlan
from dataset.glue.glue_tasks import TAGS, Task
from dataset.glue.tagging import Sentence, encode_sentences, read_sentences, tags_of_file
from dataset.tokenizing.sentence_encoder import SentenceEncoder
from tests.dataset.glue.test_glue_dataset import WORDS, encoder

NER = Task("ner", ("words",), "tags", ("B-A", "I-A", "O"), ("entity_f1",), kind=TAGS)


def test_a_word_has_its_class_at_its_first_token_and_long_sentences_become_parts():
    """ "a[b" is three tokens, a word of none is [UNK]; six tokens fit into an example of eight."""
    sentences = [
        Sentence(["a", "a[b", "\u200b"], [2, 0, 1]),
        Sentence(["a", "b", "c", "d", "a[b", "e"], [0, 1, 2, 2, 0, 1]),
        Sentence(["a[b]c[d]e"], [1]),
    ]
    features = encode_sentences(sentences, encoder(), 8)
    assert features.part_of.tolist() == [0, 1, 1, 2]
    assert features.first.tolist() == [5, 4, 4, 6] and features.lengths.tolist() == [7, 6, 6, 8]
    assert features.n_labels.tolist() == [3, 4, 2, 1]
    n = NO_CLASS
    assert features.classes.tolist() == [2, 0, n, n, 1, 0, 1, 2, 2, 0, n, n, 1, 1, n, n, n, n, n]
    assert features.tokens[:5].tolist() == [WORDS.index(word) for word in ("a", "a", "[", "b", "[UNK]")]
    batch = GlueAssembler(features, encoder(), 8)[np.array([2, 0])]
    assert batch.labels.tolist() == [[n, 0, n, n, 1, n, n, n], [n, 2, 0, n, n, 1, n, n]]
    assert batch.mask.sum(1).tolist() == [6, 7] and batch.types.sum() == 0
    plan = GluePlan(features, 1, 0)
    assert plan.totals(0, 4) == (27, 10)


def test_words_within_a_sentence_have_a_blank_before_them():
    """To a tokenizer of bytes "a" and " a" are two words."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4, "\u0120": 5, "\u0120a": 6}
    backend = Tokenizer(models.BPE(vocabulary, [("\u0120", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.backend_tokenizer.post_processor = None

    class Own(SentenceEncoder):
        def __init__(self, tokenizer):
            tokenizer.build_inputs_with_special_tokens = lambda ids: [1, *ids, 2]
            from tokenizers.processors import TemplateProcessing

            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
            )
            super().__init__(tokenizer)

    features = encode_sentences([Sentence(["a", "a"], [0, 1])], Own(tokenizer), 8)
    assert features.tokens.tolist() == [6, 6]


def test_sentences_are_read_and_their_tags_found(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"words": ["a", "b"], "tags": ["B-A", "O"]}\n\n{"words": ["c"], "tags": ["I-A"]}\n')
    assert read_sentences(path, NER) == [(["a", "b"], [0, 2]), (["c"], [1])]
    assert read_sentences(path, NER, labelled=False)[0].classes == [0, 0]
    assert tags_of_file(path, NER) == ["B-A", "I-A", "O"]
    path.write_text('{"words": ["a"], "tags": ["O"]}\n{"words": ["b", "c"], "tags": ["O", " "]}\n')
    with pytest.raises(DataError, match="train.jsonl:2: a tag is blank; mend the line"):
        tags_of_file(path, NER)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"words": ["a"], "tags": ["B-X"]}, "tag 'B-X' is not one of B-A, I-A, O"),
        ({"words": ["a", "b"], "tags": ["O"]}, "2 words and 1 tags"),
        ({"words": [], "tags": []}, "'words' has no word"),
        ({"words": "a b", "tags": ["O"]}, "'words' is a string, not a list of strings"),
        ({"words": ["a", 3], "tags": ["O", "O"]}, "an item of 'words' is a number, not a string"),
        ({"words": ["a"]}, "no 'tags' in the object; mend the line, or name another field by --text or --label"),
        ({"words": ["\ud800"], "tags": ["O"]}, "half a surrogate pair"),
    ],
)
def test_a_faulty_sentence_is_named_with_its_line(tmp_path, record, reason):
    path = tmp_path / "dev.jsonl"
    path.write_text('{"words": ["a"], "tags": ["O"]}\n' + json.dumps(record) + "\n")
    with pytest.raises(DataError) as error:
        read_sentences(path, NER)
    assert str(error.value).startswith(f"{path}:2: ") and reason in str(error.value)


def test_a_file_without_a_sentence_has_no_tags(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n")
    with pytest.raises(DataError, match="train.jsonl: no example in there"):
        tags_of_file(tmp_path / "train.jsonl", NER)

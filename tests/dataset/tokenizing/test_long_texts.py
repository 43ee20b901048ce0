"""Texts in parts, and by tiktoken. Reference: the tokenizers library on the whole text."""

import importlib.util
import json
import pickle
import sys
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.errors import DataError
from dataset.store import encode_worker
from dataset.store.token_store import open_or_build
from dataset.tokenizing import encoder as encoder_module
from dataset.tokenizing import safe_cuts
from dataset.tokenizing.encoder import DocumentEncoder, LineEncoder
from dataset.tokenizing.safe_cuts import SafeCuts
from dataset.tokenizing.tiktoken_engine import NotExact, TiktokenEngine
from tests.dataset.tokenizing.test_encoder import LetterTokenizer, small_tokenizer
from tests.dataset.tokenizing.tokenizer_kinds import KINDS, LEARNED, tokenizer_of

# What pieces, normalizers and added tokens could join, and anything else.
SNIPPETS = [
    *(
        "the",
        "cat",
        "at",
        "'s",
        "'S",
        "'ll",
        "12",
        "3",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        ",",
        ".",
        "..",
        "。",
        "，",
        "二",
        "好",
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "ß",
        "ſ",
        "ﬁ",
        "İ",
        "Σ",
        "\u00a0",
        "\u2028",
        "\u200d",
        "😀",
        "🏳️‍🌈",
        "ᄀ",
        "ᅡ",
        "ᆨ",
        "각",
        "か\u3099",
    ),
    *(
        "<x>",
        "<s>",
        "</s>",
        "a b",
        "。我",
        "▁",
        "`",
        "/",
        "-",
        "_",
        "A",
        "B",
        "\0",
        "ा",
        "क",
        "्",
        "Ａ",
        "…",
        "‼",
        "\ue000",
        "ꟑ",
    ),
]
TEXTS = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=3)), max_size=30).map("".join)


@cache
def encoder_of(kind: str, parse: bool = False) -> DocumentEncoder:
    return DocumentEncoder(tokenizer_of(KINDS[kind]()), parse)


def whole(encoder: DocumentEncoder, text: str) -> list[int]:
    backend = Tokenizer.from_str(encoder._backend.to_str())
    backend.encode_special_tokens = not encoder.parse_special_tokens
    return backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_parts_are_those_of_the_whole(kind, parse):
    encoder = encoder_of(kind, parse)

    @settings(max_examples=40, deadline=None)
    @given(TEXTS, st.integers(1, 6))
    def check(text, most):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoder_module, "PART_CHARACTERS", most)
            assert encoder.encode([text]) == [whole(encoder, text)]

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_cut(kind):
    """Ordinary text, in English and in Chinese, falls into parts of the size that is asked for."""
    cuts = SafeCuts(KINDS[kind]().to_str())
    for text in ("The cats sat on a mat. It was there, wasn't it?\nYes. ", "我们 在这里，你好！ 東京に行く。\n北京 "):
        parts = list(cuts.parts(text * 50, 64))
        assert "".join(parts) == text * 50
        assert max(map(len, parts)) <= 64


def test_lines_of_a_long_text_in_groups(monkeypatch):
    """LineEncoder's parts are its ids, whatever lines are blank, long or without a token."""
    tokenizer = tokenizer_of(KINDS["bert"]())
    tokenizer.sep_token = "</s>"
    encoder = LineEncoder(tokenizer)
    monkeypatch.setattr(encoder_module, "PART_CHARACTERS", 20)
    for text in ("", "\n", "the cat\n\n\nsat on it\n \nat", "the cat sat, " * 9 + "\nthe\n" + "a" * 200 + "\n"):
        ids = [token for part in encoder.encode_in_parts(text) for token in part]
        expected = []
        for line in text.split("\n"):
            line_ids = whole(encoder, line)
            if line_ids:
                expected += [*line_ids, encoder.sep_id]
        assert ids == expected


@pytest.mark.parametrize("text_field", ["text", "t"])
def test_a_store_with_a_long_document_is_that_of_the_plain_calls(tmp_path, monkeypatch, text_field):
    monkeypatch.setattr(encode_worker, "BATCH_CHARACTERS", 40)
    monkeypatch.setattr(encoder_module, "PART_CHARACTERS", 40)
    encoder = DocumentEncoder(small_tokenizer())
    texts = ["the cat", LEARNED, "", "<s>" + LEARNED * 2 + "</s>", "a cat"]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({text_field: text}) + "\n" for text in texts))
    store = open_or_build(str(path), encoder, text_field=text_field, num_procs=1, progress=False)
    bodies = [text.removeprefix("<s>").removesuffix("</s>") for text in texts if text]
    expected = [[encoder.bos_id, *whole(encoder, body), encoder.eos_id] for body in bodies]
    found = [store.tokens[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)]
    assert found == expected
    assert store.text_bytes.tolist() == [len(body.encode()) for body in bodies]


def test_what_cannot_be_encoded_in_bounded_memory_is_a_bad_line(tmp_path, monkeypatch):
    """Letters without a gap, and any long text for a tokenizer of which nothing is known: file and line, no traceback."""
    monkeypatch.setattr(encoder_module, "LONGEST_WHOLE", 1000)
    monkeypatch.setattr(safe_cuts, "LONGEST_WHOLE", 1000)
    monkeypatch.setattr(encoder_module, "PART_CHARACTERS", 100)
    monkeypatch.setattr(encode_worker, "BATCH_CHARACTERS", 100)
    path = tmp_path / "data.jsonl"
    texts = ["the cat", "a" * 1001, "a" * 1000, "the cat " * 500, "at"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    known = DocumentEncoder(small_tokenizer())
    unknown = DocumentEncoder(LetterTokenizer(bos_token="<s>", eos_token="</s>"))
    for encoder, bad in ((known, [2]), (unknown, [2, 4])):
        options = {"cache_dir": str(tmp_path / encoder.fingerprint), "num_procs": 1, "progress": False}
        with pytest.raises(DataError, match=r"data\.jsonl:2: .*allows no cut"):
            open_or_build(str(path), encoder, **options)
        store = open_or_build(str(path), encoder, skip_bad_lines=True, **options)
        assert [fault.line for fault in store.bad_lines.places["too long"]] == bad
        assert len(store) == len(texts) - len(bad)
    with pytest.raises(ValueError, match="allows no cut"):
        known.encode(["a" * 1001])


# --------------------------------------------------------------------------------------------------- tiktoken

EXACT = ["own", "gpt2", "llama3", "gpt-4o"]


def engine_of(kind: str, parse: bool = False) -> TiktokenEngine:
    pytest.importorskip("tiktoken")
    return TiktokenEngine(KINDS[kind]().to_str(), parse)


@pytest.mark.parametrize("kind", EXACT)
def test_ids_of_tiktoken_are_those_of_the_library(kind):
    engine = engine_of(kind)
    encoder = encoder_of(kind)
    assert engine.encode(LEARNED) is not None

    @settings(max_examples=50, deadline=None)
    @given(TEXTS)
    def check(text):
        ids = engine.encode(text)
        assert ids is None or ids == whole(encoder, text)

    check()


def test_tiktoken_of_random_bytes_and_merges():
    """Texts of few letters, in which many merges compete."""
    engine = engine_of("own")
    encoder = encoder_of("own")

    @settings(max_examples=80, deadline=None)
    @given(st.text(alphabet="abeinorst ", max_size=60))
    def check(text):
        assert engine.encode(text) == whole(encoder, text)

    check()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {*EXACT, "possessive"}))
def test_tokenizers_that_tiktoken_cannot_repeat_are_left_to_the_library(kind):
    """A normalizer, several patterns, a space put in front, another model; added tokens only in texts that hold one."""
    if kind == "added tokens":
        engine = engine_of(kind)
        assert engine.encode("the cat") is None
        assert engine.encode("the dog's") == whole(encoder_of(kind), "the dog's")
        return
    with pytest.raises(NotExact):
        engine_of(kind)


def changed(change) -> str:
    """The small tokenizer with a changed model."""
    spec = json.loads(small_tokenizer().backend_tokenizer.to_str())
    change(spec["model"])
    return json.dumps(spec)


def swap_ids(model: dict) -> None:
    first, second = ("".join(merge) for merge in model["merges"][:2])
    model["vocab"][first], model["vocab"][second] = model["vocab"][second], model["vocab"][first]


def add_unreachable(model: dict) -> None:
    """ "ab" comes before "bc", so that no text becomes a, bc and then abc."""
    for merge in (["x", "y"], ["y", "z"], ["x", "yz"]):
        model["merges"].append(merge)
        model["vocab"]["".join(merge)] = len(model["vocab"])


def add_second_way(model: dict) -> None:
    """Two merges with the same result."""
    for merge in (["x", "y"], ["y", "z"], ["xy", "z"], ["x", "yz"]):
        model["merges"].append(merge)
        model["vocab"].setdefault("".join(merge), len(model["vocab"]))


@pytest.mark.parametrize("change", [swap_ids, add_unreachable, add_second_way])
def test_vocabularies_whose_ids_do_not_tell_the_merges_are_left_to_the_library(change):
    pytest.importorskip("tiktoken")
    TiktokenEngine(small_tokenizer().backend_tokenizer.to_str(), False)
    with pytest.raises(NotExact):
        TiktokenEngine(changed(change), False)


def test_a_token_that_no_merge_makes_where_whole_pieces_are_looked_up():
    """`ignore_merges`, as Llama 3 has it: the library takes it for the piece that it spells, tiktoken would not."""
    pytest.importorskip("tiktoken")

    def look_up(model):
        model["ignore_merges"] = True

    def and_add(model):
        look_up(model)
        model["vocab"]["zqx"] = len(model["vocab"])

    TiktokenEngine(changed(look_up), False)
    with pytest.raises(NotExact):
        TiktokenEngine(changed(and_add), False)


def test_characters_on_which_the_engines_differ_go_to_the_library(monkeypatch):
    engine = engine_of("own")
    assert engine.encode("\U0001f600 \u2028 \x85 \0") == whole(encoder_of("own"), "\U0001f600 \u2028 \x85 \0")
    monkeypatch.setattr(engine._characters, "_disputed", lambda characters: {"\u3042"} & set(characters))
    assert engine.encode("い") == whole(encoder_of("own"), "い")
    assert engine.encode("いあ") is None


def test_half_a_surrogate_pair_fails_as_before():
    encoder = DocumentEncoder(small_tokenizer())
    with pytest.raises(Exception) as before:
        encoder.encode(["a\ud800"])
    assert encoder.use_tiktoken_where_exact([]) or not tiktoken_is_there()
    with pytest.raises(type(before.value)):
        encoder.encode(["a\ud800"])


def tiktoken_is_there() -> bool:
    return importlib.util.find_spec("tiktoken") is not None


@pytest.mark.parametrize("num_procs", [1, 2])
def test_the_store_does_not_tell_which_engine_made_it(tmp_path, monkeypatch, num_procs):
    """With tiktoken, without it, and where a sample of the text shows a difference."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": LEARNED[i:]}) + "\n" for i in range(200)), encoding="utf-8")
    used = []

    def build(name):
        encoder = DocumentEncoder(tokenizer_of(KINDS["own"]()))
        options = {"cache_dir": str(tmp_path / name), "num_procs": num_procs, "progress": False}
        store = open_or_build(str(path), encoder, **options)
        used.append(encoder._tiktoken is not None)
        return store.folder.name, (store.folder / "tokens.bin").read_bytes()

    stores = [build("with")]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tiktoken", None)
        stores.append(build("without"))
    with monkeypatch.context() as patch:
        patch.setattr(TiktokenEngine, "encode", lambda self, text: [0])
        stores.append(build("wrong"))
    assert stores[0] == stores[1] == stores[2]
    assert used == [tiktoken_is_there(), False, False]


def test_an_encoder_in_another_process_uses_tiktoken_too():
    encoder = DocumentEncoder(small_tokenizer())
    fingerprint = encoder.fingerprint
    used = encoder.use_tiktoken_where_exact([LEARNED])
    assert used == tiktoken_is_there()
    copy = pickle.loads(pickle.dumps(encoder))
    assert (copy._tiktoken is not None) == used
    assert copy.fingerprint == fingerprint
    assert (
        copy.encode([LEARNED, "x"])
        == encoder.encode([LEARNED, "x"])
        == DocumentEncoder(small_tokenizer()).encode([LEARNED, "x"])
    )

"""Where a pattern allows a cut. Reference: the engine's matches of the whole text, for all short texts and every cut."""

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from dataset.tokenizing.piece_pattern import PiecePattern, UnknownPattern
from dataset.tokenizing.piece_rules import COMPACT, GPT2, LLAMA_BPE, QWEN2
from dataset.tokenizing.split_rules import DIGITS_TOGETHER, WHITESPACE, PatternRule, Unprovable
from tests.dataset.tokenizing.tokenizer_kinds import GPT4O, POSSESSIVE

# Built as the patterns of tokenizers are, of all that the reader knows, over three letters.
ATOMS = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", ".", r"\w"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(
            inner, st.sampled_from(["?", "*", "+", "{2}", "{1,2}", "{2,}", "+?", "*+", "??", "{1,2}+", "{2}?"])
        ).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        inner.map(lambda source: f"(?:{source})"),
        inner.map(lambda source: f"(?>{source})"),
        inner.map(lambda source: f"(?={source})"),
        inner.map(lambda source: f"(?!{source})"),
    ),
    max_leaves=6,
)


def texts_of(alphabet: str, longest: int) -> list[str]:
    texts = []
    for length in range(1, longest + 1):
        texts.extend("".join(letters) for letters in itertools.product(alphabet, repeat=length))
    return texts


def engine_takes(source: str) -> bool:
    """Not a lookahead that is repeated by itself, for one: no tokenizer can have it."""
    try:
        Regex(source)
    except Exception as error:
        # The library has no class of its own for it.
        assert "Oniguruma error" in str(error), source
        return False
    return True


def check_every_cut(source: str, alphabet: str, longest: int) -> int:
    """Cut each short text wherever the rule allows it, and compare the pieces with those of the whole. Returns how many
    cuts it allowed."""
    rule = PatternRule(source)
    matches = pre_tokenizers.Split(Regex(source), "removed", invert=True)
    isolated = pre_tokenizers.Split(Regex(source), "isolated")

    def found(splitter, text: str, offset: int = 0) -> list[tuple[int, str]]:
        return [(begin + offset, piece) for piece, (begin, _) in splitter.pre_tokenize_str(text)]

    cuts = 0
    for text in texts_of(alphabet, longest):
        for i in range(1, len(text)):
            pair = (text[i - 1], text[i])
            if rule.apply(pair) is None:
                continue
            before, after = text[:i], text[i:]
            assert found(matches, before) + found(matches, after, i) == found(matches, text), (source, text, i)
            if rule.splits(pair):
                assert found(isolated, before) + found(isolated, after, i) == found(isolated, text), (source, text, i)
                cuts += 1
    return cuts


@pytest.mark.parametrize("source", [COMPACT, GPT2, LLAMA_BPE, QWEN2, GPT4O, POSSESSIVE])
def test_published_patterns_cut_parts_as_they_cut_the_whole(source):
    assert check_every_cut(source, "aS1 \n'.", 4) > 1000


@pytest.mark.parametrize(
    "source", [r"\s", WHITESPACE, DIGITS_TOGETHER, "a b", r"\s+(?!\S)|\s+", r"[^\s]+(?:\n(?=\n))?"]
)
def test_simple_patterns_cut_parts_as_they_cut_the_whole(source):
    check_every_cut(source, "ab1 \n", 4)


# Many patterns are none that PiecePattern takes.
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(PATTERNS)
def test_any_pattern_cuts_parts_as_it_cuts_the_whole(source):
    try:
        PiecePattern(source)
    except UnknownPattern:
        assume(False)
    assume(engine_takes(source))
    check_every_cut(source, "abc", 4)


@pytest.mark.parametrize(
    "source, follow",
    [
        ("abc", {("a", "b"), ("b", "c")}),
        ("ab|cd", {("a", "b"), ("c", "d")}),
        ("ab?c", {("a", "b"), ("a", "c"), ("b", "c")}),
        ("(?:ab)+", {("a", "b"), ("b", "a")}),
        ("a{1,3}b", {("a", "a"), ("a", "b")}),
        ("a{1}b", {("a", "b")}),
        ("a(?:b|c)*d", {("a", "b"), ("a", "c"), ("a", "d")} | set(itertools.product("bc", "bcd"))),
        # What a lookahead tests is seen too, and then forgotten.
        ("a(?=bc)d", {("a", "b"), ("b", "c"), ("a", "d")}),
    ],
)
def test_which_atom_can_be_tested_after_which(source, follow):
    """Reference: by hand, from Glushkov's definition."""
    pattern = PiecePattern(source)
    found = {(pattern.atoms[before].source, pattern.atoms[after].source) for before, after in pattern.follow}
    assert found == follow


@pytest.mark.parametrize(
    "source, simple",
    [
        ("ab|c+", ["ab", "c+"]),
        # An optional part that looks ahead can be left out; one that cannot be left out takes the alternative with it.
        ("a(?:b(?=c))?|d", ["a", "d"]),
        ("a(?=b)|d", ["d"]),
        ("a++|b+?|(?>c)|d", ["d"]),
    ],
)
def test_alternatives_that_succeed_whatever_follows(source, simple):
    assert PiecePattern(source).simple == simple


@pytest.mark.parametrize(
    "source",
    [
        *("", "a*", "a|", "(?=a)", "^a", "a$", r"\ba", r"a\1", "(?<=a)b", "(?<!a)b", "(?P<n>a)", "(*a)"),
        *(
            "a**",
            "a{",
            "a{x}",
            "a{1,2,3}",
            "{1}",
            "(a",
            "a)",
            "[a",
            "[]a]",
            "[a[b]]",
            "[a&&b]",
            r"\p{",
            r"\pL",
            "a\\",
            "]",
        ),
        "a" * 5000,
        "(" * 3000,
    ],
)
def test_what_is_not_analysed_is_refused(source):
    """What looks back or at the ends of a text, what engines read in different ways, and what is no pattern at all."""
    with pytest.raises(Unprovable):
        PatternRule(source)

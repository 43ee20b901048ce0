"""Passages on a terminal: the words that a discriminator doubts stand out, beside what stood there before."""

import re
from collections.abc import Sequence

from common.terminal import ShownWord, Style, TerminalText, filled, marked
from model.electra.detection import Passage, Word, outcome

# Between two paragraphs of a text: each may become a passage.
PARAGRAPH_END = re.compile(r"\n\s*\n")
# Bold, underlined and red; yellow; green.
DOUBTED = Style("1;4;31", ">>", "<<")
MISSED = Style("33")
REPLACED = Style("32", "*", "*")
# Of the labels before the lines
INDENT = 10


def passage_lines(passages: Sequence[Passage], width: int, in_colour: bool) -> TerminalText:
    """Passages as lines, one behind the other, and what was found of the replaced words of all."""
    lines = [legend(passages, in_colour), ""]
    for passage in passages:
        lines += lines_of(passage, width, in_colour)
        lines.append("")
    lines.append(summary(passages))
    return TerminalText("\n".join(lines))


def legend(passages: Sequence[Passage], in_colour: bool) -> str:
    """A line on what the marks mean."""
    parts = [f"{marked('doubted', DOUBTED, in_colour)}: the discriminator believes that the word was replaced"]
    if any(passage.is_corrupted for passage in passages):
        parts.append(f"{marked('replaced', REPLACED, in_colour)}: it was")
        # Without colours such a word does not stand out: that it was replaced shows in the line above.
        if in_colour:
            parts.append(f"{marked('missed', MISSED, in_colour)}: it was, and is not doubted")
    return "; ".join(parts)


def lines_of(passage: Passage, width: int, in_colour: bool) -> list[str]:
    """A passage: the original, what stands there now, and the words in doubt with their probabilities."""
    if not passage.is_corrupted:
        lines = filled("text", INDENT, words_now(passage), width, in_colour)
        return [*lines, *listed("doubted", [with_probability(word) for word in passage.doubted], width)]
    before: list[ShownWord] = []
    for word in passage.words:
        if word.original is not None:
            before.append((word.before, word.original, REPLACED))
        else:
            before.append((word.before, word.text, None))
    return [
        *filled("original", INDENT, before, width, in_colour),
        *filled("now", INDENT, words_now(passage), width, in_colour),
        *listed("doubted", [with_original(word) for word in passage.doubted], width),
        *listed("missed", [with_original(word) for word in passage.missed], width),
    ]


def words_now(passage: Passage) -> list[ShownWord]:
    """The words as the discriminator reads them, for `filled`."""
    words: list[ShownWord] = []
    for word in passage.words:
        style = MISSED if word.is_replaced else None
        if passage.doubts(word):
            style = DOUBTED
        words.append((word.before, word.text, style))
    return words


def with_probability(word: Word) -> str:
    return f"{word.text} {word.probability:.2f}"


def with_original(word: Word) -> str:
    return f"{with_probability(word)} ({'as it was' if word.original is None else f'was {word.original}'})"


def listed(label: str, entries: Sequence[str], width: int) -> list[str]:
    """A line of entries, or several lines."""
    if not entries:
        return filled(label, INDENT, [("", "none", None)], width, False)
    words: list[ShownWord] = []
    for number, entry in enumerate(entries, 1):
        words.append((" ", entry + (";" if number < len(entries) else ""), None))
    return filled(label, INDENT, words, width, False)


def summary(passages: Sequence[Passage]) -> str:
    """A line on how many words are doubted, and from which probability on."""
    lowest = min(passage.threshold for passage in passages)
    highest = max(passage.threshold for passage in passages)
    bound = f"{lowest:.2f}" if lowest == highest else f"{lowest:.2f} to {highest:.2f}"
    said = f"a word is doubted from a probability of {bound} on"
    return f"{outcome(passages)}; {said}"

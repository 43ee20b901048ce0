"""Which neighbouring characters a pre-tokenizer's regular expression can look at in one attempt to match.

A tokenizer cuts text into pieces with a pattern such as ` ?\\p{L}+| ?\\p{N}+|\\s+(?!\\S)|\\s+`. Take two neighbours in a
text, x and y. Suppose that no attempt to match can test y after it has taken x. Then every attempt that begins at or
before x goes the same way whether the text goes on with y or ends after x. So the text may be cut between the two, and
the pieces of both parts are the pieces of the whole.

To know which pairs are like that, the pattern is read as the "position automaton" of Glushkov ("The abstract theory of
automata", 1961): its atoms (a literal, a class) are the states, and `follow` holds the pairs of atoms of which the
second can be tested right after the first has matched. What stands in a lookahead counts as if it were matched there.
Greedy, lazy and possessive repetition only choose between paths of this automaton, so they make no difference here.

Constructs that look backwards or at the ends of the text, and those that regular expression engines read in different
ways, are refused with UnknownPattern.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

# In characters. The patterns of published tokenizers have a few hundred.
LONGEST_PATTERN = 4000
# Escapes of a class of characters, and of one character.
CLASS_ESCAPES = frozenset("sSdDwW")
CONTROL_ESCAPES = frozenset("rntfv")
# Characters that mean something outside a class. A "]" or "}" that closes nothing is a literal to some engines only.
META = frozenset("^$\\()[]{}|?*+.")
# Two letters that one character matches where case is ignored: "ß" matches "ss", "ﬁ" matches "fi".
TWO_LETTER_FOLDS = ("ff", "fi", "fl", "ss", "st")


class UnknownPattern(ValueError):
    """The pattern has a construct that is not analysed."""


@dataclass(frozen=True)
class Atom:
    """What matches one character: its source, which stands as a pattern by itself."""

    source: str
    ignores_case: bool

    @property
    def pattern(self) -> str:
        """The atom as a pattern of its own, with the case setting of its place."""
        return f"(?i:{self.source})" if self.ignores_case else self.source


@dataclass
class Part:
    """A part of the pattern: the atoms that it can begin and end with, and whether it can match nothing.

    These three are all that Glushkov's construction has to know of a part to join it to its neighbours. Atoms are
    numbered in the order in which they stand in the pattern. `Part()` is the empty part.
    """

    nullable: bool = True
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()

    def followed_by(self, other: "Part") -> "Part":
        """This part and then the other one."""
        # What can match nothing lets its neighbour begin or end in its place.
        first = self.first | other.first if self.nullable else self.first
        last = self.last | other.last if other.nullable else other.last
        return Part(self.nullable and other.nullable, first, last)


@dataclass
class PiecePattern:
    """The automaton of a pattern.

    `same_everywhere` is False where engines disagree on the meaning: `{1,3}+` is possessive in one and a repetition of
    a repetition in another. `simple` holds alternatives of the top level without lookahead and without lazy, possessive
    or atomic parts; an optional part that has one of these is left out. Errors: UnknownPattern.
    """

    source: str
    atoms: list[Atom] = field(default_factory=list)
    follow: set[tuple[int, int]] = field(default_factory=set)
    same_everywhere: bool = True
    simple: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.source) > LONGEST_PATTERN:
            raise UnknownPattern(f"it has more than {LONGEST_PATTERN} characters")
        try:
            whole = _Reader(self).read()
        except RecursionError:
            raise UnknownPattern("its groups are nested too deep") from None
        if whole.nullable:
            raise UnknownPattern("it can match nothing")

    def refuse_folds(self, matches: Callable[[Atom, str], bool]) -> None:
        """Raises UnknownPattern where one character could match two atoms at once because case is ignored."""
        # An engine that ignores case may match "ß" against the two atoms of "ss". It then sees over two atoms in one
        # character, and `follow`, which takes a character for one atom, would not tell what it sees next.
        for before, after in self.follow:
            left = self.atoms[before]
            right = self.atoms[after]
            if not (left.ignores_case and right.ignores_case):
                continue
            for fold in TWO_LETTER_FOLDS:
                if matches(left, fold[0]) and matches(right, fold[1]):
                    raise UnknownPattern(f"one character can match {fold!r} in it where case is ignored")


class _Reader:
    """Reads a pattern from left to right and fills in its automaton.

    It is a parser by recursive descent: a method for each rule of the grammar, which reads from `at` on and returns
    the Part that it read. Glushkov's construction needs nothing else: each method gives the atoms numbers as it meets
    them, and connects the last atoms of what stands before with the first ones of what stands behind.
    """

    def __init__(self, pattern: PiecePattern) -> None:
        self.pattern = pattern
        self.source = pattern.source
        # The place of the next character to read.
        self.at = 0
        # Whether the place is within a (?i:...).
        self.ignores_case = False
        # Set by what keeps an alternative from being simple: lookahead, atomic groups, lazy and possessive repetition.
        self.not_simple = False

    def read(self) -> Part:
        """Read the whole pattern."""
        whole = self._alternatives(top=True)
        if self.at < len(self.source):
            raise UnknownPattern(f"a bracket closes nothing at character {self.at + 1}")
        return whole

    def _peek(self, length: int = 1) -> str:
        """The next characters, fewer at the end; nothing is taken."""
        return self.source[self.at : self.at + length]

    def _alternatives(self, top: bool) -> Part:
        """What stands between two brackets, or the whole pattern: sequences with | between them."""
        nullable = False
        first: frozenset[int] = frozenset()
        last: frozenset[int] = frozenset()
        while True:
            one = self._sequence(top)
            nullable = nullable or one.nullable
            first |= one.first
            last |= one.last
            if self._peek() != "|":
                return Part(nullable, first, last)
            self.at += 1

    def _sequence(self, top: bool) -> Part:
        """One alternative; `top`: of the whole pattern, so that its core is kept."""
        # The core of an alternative tells what it matches whatever text follows. An item with a lookahead in it depends
        # on what follows. If the item is optional, the alternative succeeds without it too, so the core leaves it out,
        # as in `[^\s\p{L}]+(?:\n(?=\n))?`; if it is not, the alternative has no core. Possessive and atomic parts give
        # nothing back, so with more text they may take what the rest needs: no core either. Lazy ones count as these,
        # for the sake of fewer cases.
        whole = Part()
        core: list[str] = []
        is_simple = True
        while self._peek() not in ("", "|", ")"):
            begin = self.at
            seen_before = self.not_simple
            self.not_simple = False
            item = self._item()
            within_item = self.not_simple
            is_optional = self._peek() in ("?", "*")
            self.not_simple = False
            item = self._repeated(item)
            in_repetition = self.not_simple
            self.not_simple = seen_before or within_item or in_repetition
            if in_repetition or (within_item and not is_optional):
                is_simple = False
            elif not within_item:
                core.append(self.source[begin : self.at])
            self._connect(whole.last, item.first)
            whole = whole.followed_by(item)
        if top and is_simple and core:
            self.pattern.simple.append("".join(core))
        return whole

    def _connect(self, before: frozenset[int], after: frozenset[int]) -> None:
        """Note that each of the atoms `after` can be tested right after each of those `before` has matched."""
        for left in before:
            for right in after:
                self.pattern.follow.add((left, right))

    def _item(self) -> Part:
        """A group or an atom, without the repetition that may stand behind it."""
        character = self._peek()
        if character == "(":
            return self._group()
        if character == "[":
            return self._atom(self._class_source())
        if character == "\\":
            return self._atom(self._escape_source())
        if character == ".":
            self.at += 1
            return self._atom(character)
        if character in META:
            raise UnknownPattern(f"{character!r} at character {self.at + 1} is not analysed")
        self.at += 1
        return self._atom(character)

    def _atom(self, source: str) -> Part:
        """The part of a single new atom."""
        self.pattern.atoms.append(Atom(source, self.ignores_case))
        number = frozenset([len(self.pattern.atoms) - 1])
        return Part(False, number, number)

    def _group(self) -> Part:
        """A group in its brackets, of the kinds that only look at what is to come."""
        ignored_case_outside = self.ignores_case
        lookahead = False
        if self._peek(3) == "(?:":
            self.at += 3
        elif self._peek(4) == "(?i:":
            self.at += 4
            self.ignores_case = True
        elif self._peek(3) in ("(?=", "(?!"):
            self.at += 3
            lookahead = True
            self.not_simple = True
        elif self._peek(3) == "(?>":
            self.at += 3
            self.not_simple = True
        elif self._peek(2) in ("(?", "(*"):
            raise UnknownPattern(f"the group at character {self.at + 1} is not analysed")
        else:
            self.at += 1
        inside = self._alternatives(top=False)
        if self._peek() != ")":
            raise UnknownPattern("a bracket is not closed")
        self.at += 1
        self.ignores_case = ignored_case_outside
        if lookahead:
            # It takes nothing, so nothing follows the last atom in it, and what stands before it meets what is behind.
            return Part(nullable=True, first=inside.first, last=frozenset())
        return inside

    def _repeated(self, item: Part) -> Part:
        """The item with the repetition that stands behind it, if one does."""
        character = self._peek()
        if character in ("?", "*", "+"):
            self.at += 1
            least = 1 if character == "+" else 0
            loops = character != "?"
            interval = False
        elif character == "{":
            least, loops = self._interval()
            interval = True
        else:
            return item
        suffix = self._peek()
        if suffix in ("?", "+"):
            self.at += 1
            self.not_simple = True
            if interval:
                # `{2}?` is lazy in one engine and optional in another, `{1,3}+` possessive or repeated once more. The
                # automaton allows all of these.
                self.pattern.same_everywhere = False
                least = 0
                loops = True
        if self._peek() in ("?", "*", "+", "{"):
            raise UnknownPattern("a repetition of a repetition is not analysed")
        if loops:
            self._connect(item.last, item.first)
        return Part(item.nullable or least == 0, item.first, item.last)

    def _interval(self) -> tuple[int, bool]:
        """(the least number of times, whether more than once is possible) of `{2}`, `{2,}` or `{2,4}`."""
        end = self.source.find("}", self.at)
        # An end of -1, where no brace closes, makes this empty, which is no number.
        inside = self.source[self.at + 1 : max(end, self.at + 1)]
        least, comma, most = inside.partition(",")
        if not _is_count(least) or (most and not _is_count(most)):
            raise UnknownPattern(f"the brace at character {self.at + 1} is not analysed")
        self.at = end + 1
        loops = bool(comma) or int(least) > 1
        return int(least), loops

    def _escape_source(self) -> str:
        """Take an escape, such as `\\n`, `\\s` or `\\p{L}`, and return its source."""
        letter = self.source[self.at + 1 : self.at + 2]
        if letter in ("p", "P"):
            end = self.source.find("}", self.at)
            name = self.source[self.at + 3 : max(end, self.at + 3)]
            if self._peek(3)[2:] != "{" or end < 0 or not name.replace("_", "").isalpha():
                raise UnknownPattern(f"the property at character {self.at + 1} is not analysed")
            source = self.source[self.at : end + 1]
        elif letter in CLASS_ESCAPES | CONTROL_ESCAPES or _is_ascii_sign(letter):
            source = self.source[self.at : self.at + 2]
        else:
            raise UnknownPattern(f"the escape at character {self.at + 1} is not analysed")
        self.at += len(source)
        return source

    def _class_source(self) -> str:
        """Take a class in its brackets and return its source. What it matches is asked of the engines, not read here."""
        begin = self.at
        self.at += 1
        if self._peek() == "^":
            self.at += 1
        if self._peek() == "]":
            raise UnknownPattern("an empty class")
        while self._peek() != "]":
            # A class within a class, an intersection, a difference: written alike, but not read alike everywhere.
            if self._peek() in ("", "[") or self._peek(2) in ("&&", "--", "~~"):
                raise UnknownPattern(f"the class at character {begin + 1} is not analysed")
            if self._peek() == "\\":
                self._escape_source()
            else:
                self.at += 1
        self.at += 1
        return self.source[begin : self.at]


def _is_count(text: str) -> bool:
    """Whether it is a number that a brace may hold, of five digits at most."""
    return text.isascii() and text.isdigit() and len(text) < 6


def _is_ascii_sign(text: str) -> bool:
    """Whether it is one ASCII character that a backslash makes a literal; empty text, at the pattern's end, is none."""
    return text != "" and text.isascii() and not text.isalnum()

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
        return f"(?i:{self.source})" if self.ignores_case else self.source


@dataclass
class Part:
    """A part of the pattern: the atoms that it can begin and end with, and whether it can match nothing."""

    nullable: bool = True
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


@dataclass
class PiecePattern:
    """The automaton of a pattern.

    `same_everywhere` is False where engines disagree on the meaning: `{1,3}+` is possessive in one and a repetition of
    a repetition in another. `alternatives` are the sources of the top level; `simple` those of them without lookahead
    and without possessive or atomic parts.
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
        for before, after in self.follow:
            left = self.atoms[before]
            right = self.atoms[after]
            if not (left.ignores_case and right.ignores_case):
                continue
            for fold in TWO_LETTER_FOLDS:
                if matches(left, fold[0]) and matches(right, fold[1]):
                    raise UnknownPattern(f"one character can match {fold!r} in it where case is ignored")


class _Reader:
    """Reads a pattern from left to right and fills in its automaton."""

    def __init__(self, pattern: PiecePattern) -> None:
        self.pattern = pattern
        self.source = pattern.source
        self.at = 0
        self.ignores_case = False
        self.not_simple = False

    def read(self) -> Part:
        whole = self._alternatives(top=True)
        if self.at < len(self.source):
            raise UnknownPattern(f"a bracket closes nothing at character {self.at + 1}")
        return whole

    def _peek(self, length: int = 1) -> str:
        return self.source[self.at : self.at + length]

    def _alternatives(self, top: bool) -> Part:
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
        whole = Part()
        core: list[str] = []
        is_simple = True
        while self._peek() not in ("", "|", ")"):
            begin = self.at
            outside = self.not_simple
            self.not_simple = False
            item = self._item()
            inside = self.not_simple
            optional = self._peek() in ("?", "*")
            self.not_simple = False
            item = self._repeated(item)
            possessive = self.not_simple
            if possessive or (inside and not optional):
                is_simple = False
            elif not inside:
                core.append(self.source[begin : self.at])
            self.not_simple = outside or inside or possessive
            self._connect(whole.last, item.first)
            first = whole.first | item.first if whole.nullable else whole.first
            last = whole.last | item.last if item.nullable else item.last
            whole = Part(whole.nullable and item.nullable, first, last)
        if top and is_simple and core:
            self.pattern.simple.append("".join(core))
        return whole

    def _connect(self, before: frozenset[int], after: frozenset[int]) -> None:
        for left in before:
            for right in after:
                self.pattern.follow.add((left, right))

    def _item(self) -> Part:
        character = self._peek()
        if character == "(":
            return self._group()
        if character == "[":
            return self._atom(self._class_source())
        if character == "\\":
            return self._atom(self._escape_source(in_class=False))
        if character == ".":
            self.at += 1
            return self._atom(character)
        if character in META:
            raise UnknownPattern(f"{character!r} at character {self.at + 1} is not analysed")
        self.at += 1
        return self._atom(character)

    def _atom(self, source: str) -> Part:
        self.pattern.atoms.append(Atom(source, self.ignores_case))
        number = frozenset([len(self.pattern.atoms) - 1])
        return Part(False, number, number)

    def _group(self) -> Part:
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
        # A lookahead takes nothing, so nothing follows the last atom in it.
        return Part(True, inside.first, frozenset()) if lookahead else inside

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
        least, comma, most = self.source[self.at + 1 : max(end, self.at + 1)].partition(",")
        numbers = (least, most) if comma and most else (least,)
        if end < 0 or not all(number.isascii() and number.isdigit() and len(number) < 6 for number in numbers):
            raise UnknownPattern(f"the brace at character {self.at + 1} is not analysed")
        self.at = end + 1
        loops = bool(comma) or int(least) > 1
        return int(least), loops

    def _escape_source(self, in_class: bool) -> str:
        letter = self.source[self.at + 1 : self.at + 2]
        if letter in ("p", "P"):
            end = self.source.find("}", self.at)
            name = self.source[self.at + 3 : max(end, self.at + 3)]
            if self._peek(3)[2:] != "{" or end < 0 or not name.replace("_", "").isalpha():
                raise UnknownPattern(f"the property at character {self.at + 1} is not analysed")
            source = self.source[self.at : end + 1]
        elif letter in CLASS_ESCAPES | CONTROL_ESCAPES or (letter.isascii() and letter and not letter.isalnum()):
            source = self.source[self.at : self.at + 2]
        else:
            raise UnknownPattern(f"the escape at character {self.at + 1} is not analysed")
        self.at += len(source)
        return source

    def _class_source(self) -> str:
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
                self._escape_source(in_class=True)
            else:
                self.at += 1
        self.at += 1
        return self.source[begin : self.at]

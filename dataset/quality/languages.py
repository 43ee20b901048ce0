"""In which language a text is, roughly: by its writing system, by signs of program code, and by the commonest words.

A guess that costs a tenth of a millisecond, for a table of what a corpus holds. It looks at the beginning of a text,
gives each text one name, and knows nothing of dialects. Languages in Latin letters that are not in WORDS are "other in
Latin letters".
"""

import re

import numpy as np

# Of the text. More would tell little more.
LOOKED_AT = 4000

CODE = "code"
CHINESE = "Chinese"
JAPANESE = "Japanese"
OTHER_LATIN = "other in Latin letters"
OTHER = "other"
NO_LETTERS = "no letters"

LATIN = "Latin letters"
KANA = "kana"
HAN = "Han"

# Where a range of letters begins in Unicode, and what it is written in; up to the next entry. None: no letters, or few.
RANGES: list[tuple[int, str | None]] = [
    (0x0000, None),
    (0x0041, LATIN),  # A to Z
    (0x005B, None),
    (0x0061, LATIN),  # a to z
    (0x007B, None),
    (0x00C0, LATIN),
    (0x0250, None),
    (0x0370, "Greek"),
    (0x0400, "Cyrillic letters"),
    (0x0530, "Armenian"),
    (0x0590, "Hebrew"),
    (0x0600, "Arabic letters"),
    (0x0780, None),
    (0x0900, "Devanagari (Hindi and others)"),
    (0x0980, "Bengali"),
    (0x0A00, OTHER),  # writing systems of India and Sri Lanka
    (0x0B80, "Tamil"),
    (0x0C00, OTHER),
    (0x0E00, "Thai"),
    (0x0E80, OTHER),  # Lao, Tibetan, Burmese
    (0x10A0, "Georgian"),
    (0x1100, "Korean"),
    (0x1200, OTHER),  # Ethiopic, Cherokee, Khmer, Mongolian
    (0x1E00, LATIN),
    (0x1F00, "Greek"),
    (0x2000, None),
    (0x2C00, OTHER),
    (0x2E00, None),
    (0x3041, KANA),
    (0x3100, None),
    (0x3131, "Korean"),
    (0x3190, None),
    (0x31F0, KANA),
    (0x3200, None),
    (0x3400, HAN),
    (0x4DC0, None),
    (0x4E00, HAN),
    (0xA000, OTHER),
    (0xAC00, "Korean"),
    (0xD7B0, None),
    (0xF900, HAN),
    (0xFB00, None),
    (0xFB1D, "Hebrew"),
    (0xFB50, "Arabic letters"),
    (0xFE00, None),
    (0xFF21, LATIN),
    (0xFF5B, None),
    (0x20000, HAN),
    (0x32000, None),
]
BEGINS = np.array([begin for begin, _ in RANGES], np.uint32)
SYSTEMS = [system for _, system in RANGES]
# A character of these says as much as several letters.
DENSE = {HAN: 3, KANA: 2, "Korean": 2}
# Of Han and kana together: Japanese has some of both, Chinese hardly ever kana.
SHARE_OF_KANA = 0.05

# Signs that are frequent in programs of most languages and rare in prose.
SIGNS = re.compile(r"[{}\[\]();=<>_+*&|\\]")
# Lines that begin or end as those of programs do.
LINE_OF_CODE = re.compile(
    r"^[ \t]*(?:(?:def|class|import|from|return|if|elif|else|for|while|with|try|except|raise|assert|function|var|let|const"
    r"|public|private|static|void|int|package|func|fn|use|struct|case|switch|end)\b|#|//|/\*|@|\*)|[{};:(,\[\\)\]}]$"
)
# (share of signs in the text, share of lines that look like code): where both are reached it is code. Of Python files 96 %
# are told so, and of articles of an encyclopedia 0.2 %.
SIGNS_AND_LINES = ((0.03, 0.2), (0.02, 0.4))

# Words that stand in nearly every sentence of a language, without those that two of these have in common.
WORDS = {
    "English": "the of and to in is was that for with as it by on are this from at be have has not which or were his",
    "German": "der die und den von zu das mit sich des auf für ist im dem nicht ein eine als auch es werden aus er hat dass",
    "French": "le la les des et du dans une est que qui pour au sur par plus pas avec sont ce il elle aux cette ont",
    "Spanish": "el los las del y que en una por con para su al lo como más pero sus fue este entre cuando muy también",
    "Portuguese": "os da dos em um uma não na ao mais foi são como seu sua pelo pela também até isso ele nos das",
    "Italian": "il di che è della per nel una sono con gli del non alla dei si anche più degli delle questo nella fu ha",
    "Dutch": "het een en van dat op te zijn met voor niet aan er ook maar om bij nog uit werd wordt door naar deze heeft",
    "Polish": "w i na się nie jest do z to że jako od przez po oraz był była były który która które dla ich jego",
    "Turkish": "ve bir bu için ile olarak da de olan daha çok en gibi kadar sonra ne ancak tarafından ise her",
}
_LANGUAGES_OF: dict[str, list[str]] = {}
for _language, _words in WORDS.items():
    for _word in _words.split():
        _LANGUAGES_OF.setdefault(_word, []).append(_language)
WORD = re.compile(r"[^\W\d_]+")
# Of all words. In English prose 30 to 40 % are of the list, in lists of names 5 to 10 %.
SHARE_OF_WORDS = 0.04


def language_of(text: str) -> str:
    """The name of a language, of a writing system, CODE, or NO_LETTERS."""
    text = text[:LOOKED_AT]
    system = writing_system(text)
    if system in (HAN, KANA):
        return JAPANESE if system == KANA else CHINESE
    if system is None:
        return NO_LETTERS
    if system != LATIN:
        return system
    return CODE if is_code(text) else latin_language(text)


def writing_system(text: str) -> str | None:
    """What most of the text is written in; KANA for Japanese, HAN for Chinese, None where there is no letter."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = np.bincount(np.searchsorted(BEGINS, codes, side="right") - 1, minlength=len(RANGES))
    weights: dict[str, int] = {}
    for i in np.flatnonzero(counts):
        system = SYSTEMS[i]
        if system is not None:
            weights[system] = weights.get(system, 0) + int(counts[i]) * DENSE.get(system, 1)
    if not weights:
        return None
    kana = weights.pop(KANA, 0)
    han_and_kana = weights.get(HAN, 0) + kana
    if han_and_kana:
        weights[HAN] = han_and_kana
    # Of equal ones the first by name, so that nothing depends on an order of insertion.
    system = max(sorted(weights), key=weights.__getitem__)
    if system == HAN and kana > SHARE_OF_KANA * han_and_kana:
        return KANA
    return system


def is_code(text: str) -> bool:
    """Whether the text looks like a program."""
    signs = len(SIGNS.findall(text)) / max(len("".join(text.split())), 1)
    if signs < min(least for least, _ in SIGNS_AND_LINES):
        return False
    lines = [line.rstrip() for line in text.split("\n") if line.strip()]
    like_code = sum(LINE_OF_CODE.search(line) is not None for line in lines) / len(lines)
    return any(signs >= least_signs and like_code >= least_lines for least_signs, least_lines in SIGNS_AND_LINES)


def latin_language(text: str) -> str:
    """The language with most of its own common words in the text."""
    words = WORD.findall(text.lower())
    counts: dict[str, int] = {}
    for word in words:
        for language in _LANGUAGES_OF.get(word, ()):
            counts[language] = counts.get(language, 0) + 1
    if not counts:
        return OTHER_LATIN
    language = max(sorted(counts), key=counts.__getitem__)
    return language if counts[language] >= SHARE_OF_WORDS * len(words) else OTHER_LATIN

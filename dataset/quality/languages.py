"""In which language a text is, as far as its writing system tells: a count for a table of what a corpus holds."""

import unicodedata
from collections import Counter

# characters at the beginning of a text; more would tell little more
LOOKED_AT = 400
NO_LETTERS = "no letters"
# What the names of characters in Unicode begin with. Others stand for themselves, as in "Cyrillic letters".
NAMES = {"CJK": "Chinese", "HIRAGANA": "Japanese", "HANGUL": "Korean"}
# the share of kana, of Han and kana together: Japanese has some of both, Chinese hardly ever kana
SHARE_OF_KANA = 0.05
# A character of these says as much as several letters.
DENSE = {"CJK": 3, "HIRAGANA": 2, "HANGUL": 2}


def language_of(text: str) -> str:
    """Chinese, Japanese, Korean, the letters that most of the text is written in, or NO_LETTERS."""
    counts = Counter(unicodedata.name(c, "").partition(" ")[0] for c in text[:LOOKED_AT] if c.isalpha())
    kana = counts.pop("KATAKANA", 0) + counts.pop("HIRAGANA", 0)
    if kana > SHARE_OF_KANA * (kana + counts["CJK"]):
        counts["HIRAGANA"] = kana + counts.pop("CJK", 0)
    weights = {name: count * DENSE.get(name, 1) for name, count in counts.items() if count}
    if not weights:
        return NO_LETTERS
    # Of equal ones the first by name, so that nothing depends on an order of insertion.
    most = max(sorted(weights), key=weights.__getitem__)
    return NAMES.get(most, f"{most.capitalize()} letters")

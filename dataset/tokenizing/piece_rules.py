"""The rules by which tokenizers cut text into pieces before they merge: regular expressions, by the names of llama.cpp.

The first alternative that fits takes the piece, and merges never cross a border between two. A program that runs a model
has to cut as its training did. llama.cpp and Ollama do not read the expression from the model's file: they know some
tokenizers by name and have their rules built in. So a model can go there only if its rule is one of those.
"""

# Of Llama 3. Word for word, since other programs recognise it by the text of the expression (Ollama by its SHA-256).
LLAMA_BPE = (
    # The English contractions: 's, 't, 're, ...
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    # A word or a run of Han characters, with the space, bracket, dot or comma before it.
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    # Three digits at most, so that a long number takes no entry of its own.
    r"|\p{N}{1,3}"
    # Punctuation with the line breaks after it.
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    # Line breaks with the white space before them.
    r"|\s*[\r\n]+"
    # Other white space; the last character is left to the word that follows.
    r"|\s+(?!\S)"
    r"|\s+"
)
# Of Qwen 2 and Qwen 3: that of Llama 3, but each digit is a piece by itself.
QWEN2 = LLAMA_BPE.replace(r"\p{N}{1,3}", r"\p{N}")
# How ByteLevel cuts by itself (`use_regex`): the rule of GPT-2, and of the public MiniMind tokenizers.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Our own. No other program has it built in, but it gives the most bytes per token.
COMPACT = (
    # A number, four digits at most: a year is one piece.
    r" ?\p{N}{1,4}"
    # A word or a run of Han characters, with the space, bracket, dot or comma before it.
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    # Punctuation with the line break and the indentation after it, as in ":\n       ".
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+(?:[ \t]+(?=[ \t]))?)?"
    # White space; the last character is left to the word that follows.
    r"|\s+(?!\S)"
    r"|\s+"
)

# What train_tokenizer.py --pieces takes.
PIECE_RULES = {"llama-bpe": LLAMA_BPE, "qwen2": QWEN2, "compact": COMPACT}

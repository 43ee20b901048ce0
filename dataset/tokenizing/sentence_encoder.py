"""Sentences to token ids, for fine-tuning an encoder."""

from typing import Any

from dataset.tokenizing.encoder import DocumentEncoder

# That are encoded together.
LINES = 4096


class SentenceEncoder(DocumentEncoder):
    """Encodes sentences: their ids and nothing else. A "[SEP]" in a sentence is text, no special token.

    Errors: ValueError for a tokenizer without CLS, SEP or padding, or whose own examples begin with something else.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.bos_id = self.eos_id = self._bos = self._eos = None
        self.unk_id = tokenizer.unk_token_id
        self.cls_id, self.sep_id, self.pad_id = (getattr(tokenizer, f"{n}_token_id") for n in ("cls", "sep", "pad"))
        if None in (self.cls_id, self.sep_id, self.pad_id):
            raise ValueError("the tokenizer has no CLS, SEP or padding token; an encoder such as ELECTRA is wanted")
        # Funnel has a segment for CLS alone.
        self.cls_type = getattr(tokenizer, "cls_token_type_id", 0)
        own_format = tokenizer("a").input_ids
        if own_format[:1] != [self.cls_id]:
            raise ValueError(
                f"{type(tokenizer).__name__} does not begin an example with its CLS token; an encoder that reads CLS "
                "first, as BERT does, is wanted"
            )

    def encode(self, texts: list[str]) -> list[list[int]]:
        chunks = (texts[lo : lo + LINES] for lo in range(0, len(texts), LINES))
        return [ids for chunk in chunks for ids in self._encode_bodies(chunk)]

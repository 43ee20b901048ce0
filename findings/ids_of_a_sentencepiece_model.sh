#!/usr/bin/env bash
# sentencepiece 0.2.3 and transformers 5.24.0: LlamaTokenizer of a BPE model with byte fallback
# One would guess: transformers reads the rules of a SentencePiece model from its file, which holds them, and gives the ids that SentencePiece gives,
# as transformers 4.57 does.
# What happens: it keeps pieces and merges and puts one set of rules around them. A model trained with add_dummy_prefix=False gets the leading
# blank after all, and runs of blanks are cut otherwise even in a model with the prefix.
# In a run: weights trained on SentencePiece's ids are evaluated and served on other ids: indented code and each start of a text.
# Instead: encode a page of your text with both before training, or make a tokenizer.json once and use that everywhere.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --no-compile transformers==5.24.0 sentencepiece==0.2.3 protobuf==7.36.2
env/bin/python - <<'END'
import pathlib
import pydoc_data.topics

import sentencepiece
import transformers

lines = [line for text in pydoc_data.topics.topics.values() for line in text.split("\n") if line.strip()][:3000]
pathlib.Path("text.txt").write_text("\n".join(lines))
print("sentencepiece", sentencepiece.__version__, "transformers", transformers.__version__)
for prefix in (True, False):
    folder = pathlib.Path(f"prefix_{prefix}")
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input="text.txt", model_prefix=folder / "tokenizer", model_type="bpe", vocab_size=1000, byte_fallback=True,
        add_dummy_prefix=prefix, remove_extra_whitespaces=False, normalization_rule_name="identity", minloglevel=2,
    )
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    other = transformers.LlamaTokenizer.from_pretrained(folder)
    assert [own.id_to_piece(id) for id in range(1000)] == other.convert_ids_to_tokens(range(1000))
    differing = [line for line in lines if own.encode(line) != other.encode(line, add_special_tokens=False)]
    line = differing[0]
    print(f"add_dummy_prefix={prefix}: {len(differing)} of {len(lines)} lines have other ids, such as {line!r}")
    print("   ", own.encode(line, out_type=str)[:6], other.tokenize(line)[:6])
    assert len(differing) > 1000
END

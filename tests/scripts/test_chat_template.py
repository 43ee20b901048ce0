"""scripts/chat_template.py: which of a tokenizer's templates writes a conversation. Reference: transformers' rendering."""

import pytest

from common.errors import UserError
from dataset.tokenizing.encoder import load_tokenizer
from scripts import generate
from tests.helpers import ROOT, copy_tokenizer
from tests.scripts.playground.pages import played_model

FOREIGN = "{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}"
OTHER = "{% for m in messages %}other{% endfor %}"


def named(**templates):
    """As the files of several publishers have them."""
    return [{"name": name, "template": template} for name, template in templates.items()]


def test_the_default_one_of_several_writes_a_conversation(tmp_path):
    place = copy_tokenizer(tmp_path, chat_template=named(tool_use=OTHER, default=FOREIGN))
    tokenizer = load_tokenizer(place)
    ids = generate.turns_encoder(tokenizer)([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids) == "[user: hello]"
    assert played_model(folder=place).chat


@pytest.mark.parametrize("template", [None, "", named(tool_use=OTHER, rag=FOREIGN), 5])
def test_a_tokenizer_without_a_template_that_can_be_used_is_one_line(weight, tmp_path, template):
    place = copy_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(UserError, match="has no chat template, or several of which none is called default") as error:
        generate.main(["--weight", weight, "--tokenizer_path", str(place), "--device", "cpu", "--chat", "hello"])
    assert "\n" not in str(error.value) and "--tokenizer_path" in str(error.value)
    assert not played_model(folder=place).chat


def test_our_template_without_our_special_tokens_is_one_line(monkeypatch):
    tokenizer = load_tokenizer(ROOT / "model")
    monkeypatch.setattr(type(tokenizer), "added_tokens_decoder", {})
    with pytest.raises(UserError, match="a tokenizer with the special tokens"):
        generate.turns_encoder(tokenizer)

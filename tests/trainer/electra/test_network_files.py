"""--generator_config and --discriminator_config. Reference: the fields of the files."""

import json
import os
import shutil

import pytest
from transformers import ElectraConfig

from common.errors import UserError
from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.trainer.test_train_electra import SMALL, train

DISCRIMINATOR = {
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.25,
    "initializer_range": 0.2,
}
GENERATOR = {**DISCRIMINATOR, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
# The flags that such files replace.
WITHOUT_SIZES = dict.fromkeys(
    ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "embedding_size")
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("electra")
    return {"data_path": write_lines(folder / "data.jsonl")[0], "vocab_path": write_vocab(folder / "vocab.txt")}


def files(folder, generator=GENERATOR, discriminator=DISCRIMINATOR):
    """The two flags, and none of the sizes."""
    flags = dict(WITHOUT_SIZES)
    for name, fields in (("generator_config", generator), ("discriminator_config", discriminator)):
        path = folder / f"{name}.json"
        path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
        flags[name] = path
    return flags


def test_the_networks_are_those_of_the_files(data, tmp_path, capsys):
    run = train(**data, out_dir=tmp_path, max_steps=1, **files(tmp_path), init_std=0.05)
    for network, wanted in ((run.job.model.generator, GENERATOR), (run.job.model.discriminator, DISCRIMINATOR)):
        for name, value in wanted.items():
            assert getattr(network.config, name) == value, name
        assert network.config.vocab_size == len(run.job.tokenizer)
    assert run.job.model.generator.electra.embeddings is run.job.model.discriminator.electra.embeddings
    assert "--init_std 0.05 has no effect: the files of the networks say it" in capsys.readouterr().out
    # What was saved goes on from there.
    again = {**data, **WITHOUT_SIZES, "model_path": tmp_path / "electra_small", "out_dir": tmp_path / "again"}
    assert train(**again, max_steps=1).job.model.generator.config.num_hidden_layers == 1


def test_the_file_of_a_saved_model_is_taken(data, tmp_path):
    """All that transformers writes. Reference: the fields that decide on the networks."""
    saved = ElectraConfig(**DISCRIMINATOR, hidden_act="relu", layer_norm_eps=1e-5, classifier_dropout=0.1)
    saved.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    # Of the published small network, beside these.
    fields = {**written, **saved.to_dict(), "position_embedding_type": "absolute", "vocab_size": 50}
    run = train(**data, out_dir=tmp_path, max_steps=1, **files(tmp_path, generator=fields, discriminator=fields))
    config = run.job.model.discriminator.config
    for name in ("hidden_act", "layer_norm_eps", "classifier_dropout", "hidden_size", "max_position_embeddings"):
        assert getattr(config, name) == getattr(saved, name), name
    # What is not the usual value is compared at a resume; what is usual is as in earlier versions.
    found = run.job.identity.entries["architecture"]
    assert found["hidden_act"] == ["relu", "relu"] and found["layer_norm_eps"] == [1e-5, 1e-5]
    assert "type_vocab_size" not in found
    again = {**data, "out_dir": tmp_path, "max_steps": 2, "from_resume": 1}
    with pytest.raises(UserError, match="another architecture"):
        train(**again, **files(tmp_path, generator=fields, discriminator={**fields, "hidden_act": "gelu"}))


def test_the_files_that_a_run_has_saved_are_taken(data, tmp_path):
    """They have fields of our own beside those of transformers."""
    first = train(**data, out_dir=tmp_path / "a", max_steps=1, temperature=2)
    saved = tmp_path / "a" / "electra_small"
    fields = json.loads((saved / "discriminator" / "config.json").read_text())
    assert "trained_length" in fields and "replaced_by" in json.loads((saved / "generator" / "config.json").read_text())
    configs = {f"{name}_config": saved / name / "config.json" for name in ("generator", "discriminator")}
    second = train(**data, out_dir=tmp_path / "b", max_steps=1, **WITHOUT_SIZES, **configs)
    for name in ("generator", "discriminator"):
        wanted = getattr(first.job.model, name).config
        assert getattr(second.job.model, name).config.hidden_size == wanted.hidden_size


def test_the_size_is_told_where_it_decides(data, tmp_path, capsys):
    """Files of the networks have sizes of their own, and so has the folder of --model_path."""
    train(**data, out_dir=tmp_path / "a", max_steps=1)
    assert "model: ELECTRA small, " in capsys.readouterr().out
    train(**data, out_dir=tmp_path / "b", max_steps=1, **files(tmp_path))
    sizes = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "embedding_size")
    )
    train(**data, **sizes, out_dir=tmp_path / "c", max_steps=1, model_path=tmp_path / "a" / "electra_small")
    assert capsys.readouterr().out.count("model: ELECTRA, ") == 2


def test_a_tilde_is_written_out(data, tmp_path, monkeypatch):
    """As the shell does, which does not see a --config file. Reference: the folder that HOME names."""
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = files(tmp_path)
    shutil.copy(data["vocab_path"], tmp_path / "vocab.txt")
    for name in ("generator_config", "discriminator_config"):
        flags[name] = f"~/{name}.json"
    begun = {**data, "vocab_path": "~/vocab.txt", **flags, "out_dir": tmp_path / "first", "max_steps": 1}
    assert train(**begun).job.model.generator.config.hidden_size == GENERATOR["hidden_size"]
    goes_on = {**data, "vocab_path": None, **WITHOUT_SIZES, "model_path": "~/first/electra_small", "max_steps": 1}
    assert (
        train(**goes_on, out_dir=tmp_path / "second").job.model.generator.config.hidden_size == GENERATOR["hidden_size"]
    )


def test_untied_networks_of_files_may_have_embeddings_of_any_width(data, tmp_path):
    generator = {**GENERATOR, "embedding_size": 8}
    flags = files(tmp_path, generator=generator)
    run = train(**data, out_dir=tmp_path, max_steps=1, untied_embeddings=1, **flags)
    widths = [network.config.embedding_size for network in (run.job.model.generator, run.job.model.discriminator)]
    assert widths == [8, 16]
    with pytest.raises(UserError, match="embedding_size is 8 in the generator and 16"):
        train(**data, out_dir=tmp_path / "b", max_steps=1, **flags)


@pytest.mark.parametrize(
    "generator, wanted",
    [
        ("[1, 2]", "a JSON object"),
        ("{", "no JSON file"),
        ({**GENERATOR, "model_type": "bert"}, 'model_type is "bert", "electra" is wanted'),
        ({**GENERATOR, "num_attention_heads": 3}, "hidden_size 8 is no multiple of 3 attention heads"),
        ({**GENERATOR, "num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, a whole number from 1 to 1,000"),
        ({**GENERATOR, "vocab_size": 6}, "vocab_size is 6"),
        ({**GENERATOR, "max_position_embeddings": 12}, "max_position_embeddings is 12, 24 is wanted"),
        ({**GENERATOR, "hidden_size": 0}, "hidden_size is 0"),
        ({**GENERATOR, "hidden_size": "wide"}, "hidden_size"),
        ({**GENERATOR, "num_hidden_layers": True}, "num_hidden_layers is true, a whole number"),
        ({**GENERATOR, "hidden_act": "foo"}, 'hidden_act is "foo", one of gelu, '),
        ({**GENERATOR, "hidden_act": ["gelu"]}, "hidden_act is .* one of gelu, "),
        ({**GENERATOR, "initializer_range": -1}, "initializer_range is -1, a number above 0, at most 10 is wanted"),
        ({**GENERATOR, "initializer_range": float("nan")}, "initializer_range is NaN, a number above 0, at most 10"),
        ({**GENERATOR, "initializer_range": 1e300}, "initializer_range is 1e\\+300, a number above 0, at most 10"),
        ('{"hidden_size": 8, "hidden_size": 16}', "hidden_size stands there twice"),
        ({**GENERATOR, "layer_norm_eps": "small"}, 'layer_norm_eps is "small", a number above 0 is wanted'),
        ({**GENERATOR, "hidden_dropout_prob": 1}, "hidden_dropout_prob is 1, a number from 0 up and below 1 is wanted"),
        ({**GENERATOR, "classifier_dropout": -0.5}, "classifier_dropout is -0.5, null or a number from 0"),
        ({**GENERATOR, "tie_word_embeddings": False}, "tie_word_embeddings is false, true is wanted"),
        ({**GENERATOR, "return_dict": False}, "return_dict is false, true is wanted"),
        ({**GENERATOR, "return_dict": 1}, "return_dict is 1, true is wanted"),
        ({**GENERATOR, "is_decoder": True}, "is_decoder is true, false is wanted"),
        ({**GENERATOR, "position_init": "cosine"}, 'position_init is "cosine", one of normal, sinusoidal is wanted'),
        ({**GENERATOR, "untied_embeddings": 1}, "untied_embeddings is 1, true or false is wanted"),
        ({**GENERATOR, "hiden_size": 8}, "'hiden_size' is none of the fields that count here, which are vocab_size, "),
        ({**GENERATOR, "attn_implementation": "evil/attention"}, "'attn_implementation' is none of the fields"),
        ({**GENERATOR, "auto_map": {"AutoModel": "evil.py"}}, "'auto_map' is none of the fields"),
    ],
)
def test_a_faulty_file_is_named_in_one_line(data, tmp_path, generator, wanted):
    with pytest.raises(UserError, match=wanted) as error:
        train(**data, out_dir=tmp_path, **files(tmp_path, generator=generator))
    assert "--generator_config" in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there(data, tmp_path):
    flags = {**files(tmp_path), "generator_config": tmp_path / "nothing.json"}
    with pytest.raises(UserError, match="--generator_config .*nothing.json cannot be read"):
        train(**data, out_dir=tmp_path, **flags)
    # It would be waited for without end.
    os.mkfifo(tmp_path / "nothing.json")
    with pytest.raises(UserError, match="--generator_config .*nothing.json cannot be read .not a regular file"):
        train(**data, out_dir=tmp_path, **flags)


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({"discriminator_config": None}, "--generator_config needs the other one too"),
        ({"hidden_size": SMALL["hidden_size"]}, "--generator_config decides the networks: drop --hidden_size"),
        ({"generator_layers": 1}, "--generator_config decides the networks: drop --generator_layers"),
        ({"model_path": "out"}, "--model_path decides the networks: drop --generator_config"),
    ],
)
def test_two_ways_to_name_the_networks_are_refused(data, tmp_path, capsys, changes, wanted):
    with pytest.raises(SystemExit):
        train(**{**data, "out_dir": tmp_path, **files(tmp_path), **changes})
    assert wanted in capsys.readouterr().err

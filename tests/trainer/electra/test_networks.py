"""--generator_config and --discriminator_config. Reference: the fields of the files."""

import json

import pytest
from transformers import ElectraConfig

from common.errors import UserError
from tests.trainer.test_train_electra import SMALL, train
from trainer.electra.settings import NETWORK_SIZES

DISCRIMINATOR = {
    "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "hidden_dropout_prob": 0.25, "initializer_range": 0.2,
}  # fmt: skip
GENERATOR = {**DISCRIMINATOR, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
# The flags that such files replace.
WITHOUT_SIZES = dict.fromkeys(NETWORK_SIZES)


def files(folder, generator=GENERATOR, discriminator=DISCRIMINATOR):
    """The two flags, and none of the sizes."""
    flags = dict(WITHOUT_SIZES)
    for name, fields in (("generator_config", generator), ("discriminator_config", discriminator)):
        path = folder / f"{name}.json"
        path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
        flags[name] = path
    return flags


def test_the_networks_are_those_of_the_files(data, tmp_path, capsys, monkeypatch):
    """Also where a --config file names them with a tilde, which no shell writes out then."""
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = files(tmp_path) | {"generator_config": "~/generator_config.json"}
    run = train(**data, out_dir=tmp_path, max_steps=1, **flags, init_std=0.05)
    for network, wanted in ((run.job.model.generator, GENERATOR), (run.job.model.discriminator, DISCRIMINATOR)):
        for name, value in wanted.items():
            assert getattr(network.config, name) == value, name
        assert network.config.vocab_size == len(run.job.tokenizer)
    assert run.job.model.generator.electra.embeddings is run.job.model.discriminator.electra.embeddings
    out = capsys.readouterr().out
    assert "--init_std 0.05 has no effect: the networks come from files" in out and "model: ELECTRA, " in out
    # What was saved goes on from there.
    again = {**data, **WITHOUT_SIZES, "model_path": "~/electra_small", "out_dir": tmp_path / "again"}
    assert train(**again, max_steps=1).job.model.generator.config.num_hidden_layers == 1


def test_the_file_of_a_saved_model_is_taken(data, tmp_path):
    """All that transformers writes. Reference: the fields that decide on the networks."""
    saved = ElectraConfig(**DISCRIMINATOR, hidden_act="relu", layer_norm_eps=1e-5, classifier_dropout=0.1)
    # Of the published small network, beside these.
    fields = {**saved.to_dict(), "position_embedding_type": "absolute", "vocab_size": 50}
    run = train(**data, out_dir=tmp_path, max_steps=1, **files(tmp_path, generator=fields, discriminator=fields))
    config = run.job.model.discriminator.config
    for name in ("hidden_act", "layer_norm_eps", "classifier_dropout", "hidden_size", "max_position_embeddings"):
        assert getattr(config, name) == getattr(saved, name), name
    again = {**data, "out_dir": tmp_path, "max_steps": 2, "from_resume": 1}
    with pytest.raises(UserError, match="another architecture"):
        train(**again, **files(tmp_path, generator=fields, discriminator={**fields, "hidden_act": "gelu"}))


@pytest.mark.parametrize(
    "generator, wanted",
    [
        ("[1, 2]", "a JSON object of an ElectraConfig's fields is wanted"),
        ("{", "a JSON object of an ElectraConfig's fields is wanted"),
        ({**GENERATOR, "num_attention_heads": 3}, "hidden_size 8 is no multiple of 3 heads"),
        ({**GENERATOR, "vocab_size": 6}, "vocab_size is 6"),
        ({**GENERATOR, "max_position_embeddings": 12}, "max_position_embeddings is 12, 24 is wanted"),
        ({**GENERATOR, "hidden_size": "wide"}, "hidden_size"),
        (None, "No such file or directory"),
    ],
)
def test_a_faulty_file_is_named_in_one_line(data, tmp_path, generator, wanted):
    flags = files(tmp_path, generator=generator)
    if generator is None:
        flags["generator_config"].unlink()
    with pytest.raises(UserError, match=wanted) as error:
        train(**data, out_dir=tmp_path, **flags)
    assert "--generator_config" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({"discriminator_config": None}, "--generator_config needs the other one too"),
        ({"hidden_size": SMALL["hidden_size"]}, "--generator_config decides the networks: drop --hidden_size"),
        ({"model_path": "out"}, "--model_path decides the networks: drop --generator_config"),
    ],
)
def test_two_ways_to_name_the_networks_are_refused(data, tmp_path, capsys, changes, wanted):
    with pytest.raises(SystemExit):
        train(**{**data, "out_dir": tmp_path, **files(tmp_path), **changes})
    assert wanted in capsys.readouterr().err

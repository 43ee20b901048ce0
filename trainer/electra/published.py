"""How a run of train_electra.py differs from the published run of its size, for the line of --recipe original."""

from model.electra.sizes import SIZES
from trainer.electra.original import difference, difference_of_rows
from trainer.electra.settings import ElectraSettings

# {setting: the field of a Size that has its published value}
OF_SIZE = {
    "learning_rate": "learning_rate",
    "max_steps": "max_steps",
    "max_seq_len": "max_seq_len",
    "mask_share": "mask_share",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "embedding_size": "embedding",
    "generator_divisor": "divisor",
    "generator_layers": "layers",
}


def differences(settings: ElectraSettings, rows: int) -> list[str]:
    """From the published run, in what its size decides. rows: of an update."""
    size = SIZES[settings.size]
    found = []
    for name, field in OF_SIZE.items():
        value = getattr(settings, name)
        published = getattr(size, field)
        if name == "max_steps" and settings.budget is not None:
            # What the setting has is a guess: a clock sets the end.
            found.append(difference(f"--budget {settings.budget}", f"{published} updates"))
        elif value not in (None, published):
            found.append(difference(f"--{name} {value}", published))
    found += difference_of_rows(rows, size.batch_size)
    for name in ("generator_config", "discriminator_config"):
        if (file := getattr(settings, name)) is not None:
            found.append(difference(f"--{name} {file}", f"the network of --size {settings.size}"))
    if settings.model_path is not None:
        found.append(difference(f"--model_path {settings.model_path}", "random weights"))
    return found

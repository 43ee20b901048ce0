"""The networks of a run and its vocabulary: fresh ones, or those of an earlier run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import ElectraConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from common.errors import UserError
from common.notices import announce
from dataset.reading.file_kinds import expanded
from dataset.tokenizing.sample import TextSource, draw_sample
from dataset.tokenizing.vocabulary import check_size
from dataset.tokenizing.wordpiece import entries, load_wordpiece, train_wordpiece, wordpiece
from model.electra.masked_lm import MaskedLanguageModel
from model.electra.model_electra import UNTIED, ElectraPretrainer, configs
from model.electra.pretrainer import Pretrainer
from model.electra.sizes import ELECTRA, MLM, SIZES
from trainer.electra.network_files import config_of_file, configs_of_files
from trainer.electra.settings import ElectraSettings
from trainer.machine.collectives import on_main
from trainer.machine.measure import total_memory
from trainer.machine.out_of_memory import gigabytes
from trainer.machine.ranks import Ranks
from trainer.saving.checkpoint import Checkpoints

# Folder of the vocabulary that is trained where none is given.
OWN = "vocabulary"
# Of a vocabulary that is trained on the data.
OWN_ENTRIES = 8192
# Of the data that such a vocabulary is trained on.
SAMPLE_BYTES = 60e6
# Weight, gradient and AdamW's two moments in fp32.
BYTES_PER_PARAMETER = 16
BYTES_PER_WEIGHT = 4
CPU = torch.device("cpu")
# By --objective.
PRETRAINERS: dict[str, type[Pretrainer]] = {ELECTRA: ElectraPretrainer, MLM: MaskedLanguageModel}
PretrainerT = TypeVar("PretrainerT", bound=Pretrainer)
# The fields of a config that decide which weights fit, what they compute and how `--from_scratch` begins. So a resume cannot
# change the dropout.
ARCHITECTURE = (
    "vocab_size",
    "embedding_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "hidden_dropout_prob",
    "position_init",
    UNTIED,
)
# Further ones, which only networks from files have other values of. The usual values are left out: earlier versions kept no
# such fields, and must still resume.
OF_FILES = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}


def architecture(model: Pretrainer) -> dict[str, list[Any]]:
    """{field: its value in each network} of those fields of ARCHITECTURE and OF_FILES that say something."""
    found = {}
    for name in (*ARCHITECTURE, *OF_FILES):
        usual = OF_FILES.get(name)
        values = [getattr(network.config, name, None) for network in model.networks()]
        if any(value != usual for value in values):
            found[name] = values
    return found


def open_vocabulary(
    settings: ElectraSettings, data_path: list[str], stem: Path, ranks: Ranks
) -> PreTrainedTokenizerBase:
    """The tokenizer of --vocab_path, or --model_path's, or a WordPiece one that is trained on the data; a resume finds
    that of its start. stem: the path of the run's files without their endings."""
    if settings.vocab_path:
        return load_wordpiece(expanded(settings.vocab_path), settings.lower_case)
    kept = kept_vocabulary(stem) if settings.from_resume else None
    if kept is not None:
        return load_wordpiece(kept, named_by="--from_resume 1: ")
    # The embeddings in --model_path belong to its own vocabulary.
    if settings.model_path:
        return model_vocabulary(settings)

    def train_it() -> list[str]:
        sources = [
            TextSource(path, settings.text_field, settings.skip_bad_lines, settings.text_suffixes) for path in data_path
        ]
        announce(f"no --vocab_path: training a WordPiece vocabulary of {OWN_ENTRIES:,} entries on the data")
        sample = draw_sample(sources, [1.0] * len(sources), SAMPLE_BYTES)
        return entries(train_wordpiece(sample, OWN_ENTRIES, settings.lower_case))

    return wordpiece(on_main(ranks, train_it), settings.lower_case)


def kept_vocabulary(stem: Path) -> Path | None:
    """The folder of the vocabulary that an earlier run has begun with, or None where there is nothing to go on with."""
    checkpoints = Checkpoints(f"{stem}_resume")
    # A run that ended before its first save has left a vocabulary too, perhaps of other data.
    if not checkpoints.paths():
        return None
    # A run whose folder was renamed back has its vocabulary among its checkpoints until the resume begins. What stands
    # beside them then is that of the later run.
    for folder in (checkpoints.folder, stem.parent):
        if (folder / OWN / "vocab.txt").exists():
            return folder / OWN
    return None


def model_vocabulary(settings: ElectraSettings) -> PreTrainedTokenizerBase:
    """The tokenizer beside --model_path's encoder. Errors: UserError where there is none."""
    check_networks(settings)
    place = folder_of(settings) / PRETRAINERS[settings.objective].ENCODER
    try:
        return load_wordpiece(place, named_by="")
    except ValueError as error:
        raise UserError(
            f"--model_path {settings.model_path} needs its vocabulary: name it by --vocab_path ({error})"
        ) from error


def init_model(
    settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase, device: torch.device = CPU, group_size: int = 1
) -> ElectraPretrainer:
    """Fresh networks, or those of --model_path. Errors: ValueError where flags, folder and tokenizer do not fit, and where
    the networks are too large to be trained on the device. group_size: of the ranks that have them together."""
    options: dict[str, Any] = {
        "sampling": settings.sampling,
        "gen_smooth": settings.gen_smooth,
        "disc_smooth": settings.disc_smooth,
        "temperature": settings.temperature,
        "disallow_correct": settings.disallow_correct,
    }
    if settings.model_path:
        load = partial(ElectraPretrainer.from_pretrained, untied_embeddings=settings.untied_embeddings, **options)
        return load_networks(settings, tokenizer, load)
    if settings.generator_config is not None:
        generator, discriminator = configs_of_files(settings, tokenizer)
    else:
        generator, discriminator = configs_of_flags(settings, tokenizer)
    build = partial(ElectraPretrainer.from_configs, generator, discriminator)
    check_memory(build, discriminator, device, group_size)
    return build(settings.weight_init, **options)


def init_masked_lm(
    settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase, device: torch.device = CPU, group_size: int = 1
) -> MaskedLanguageModel:
    """A fresh encoder, or that of --model_path. Errors: as of init_model."""
    smoothing = settings.gen_smooth
    if settings.model_path:
        return load_networks(settings, tokenizer, partial(MaskedLanguageModel.from_pretrained, smoothing=smoothing))
    if settings.discriminator_config is not None:
        config = config_of_file("--discriminator_config", settings.discriminator_config, settings, tokenizer)
    else:
        _, config = configs_of_flags(settings, tokenizer)
    build = partial(MaskedLanguageModel.from_config, config)
    check_memory(build, config, device, group_size)
    return build(settings.weight_init, smoothing)


def configs_of_flags(
    settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[ElectraConfig, ElectraConfig]:
    """(generator's, discriminator's) ElectraConfig. Errors: ValueError where the sizes do not go together."""
    changes = {
        "width": settings.hidden_size,
        "layers": settings.num_hidden_layers,
        "heads": settings.num_attention_heads,
        "ffn": settings.intermediate_size,
        "embedding": settings.embedding_size,
        # Without a generator there is nothing that it must divide.
        "divisor": 1 if settings.objective == MLM else settings.generator_divisor,
    }
    generator, discriminator = configs(
        SIZES[settings.size],
        vocab_size=len(tokenizer),
        pad_id=tokenizer.pad_token_id,
        max_seq_len=settings.max_seq_len,
        init_std=settings.init_std,
        position_init=settings.position_init,
        generator_layers=settings.generator_layers,
        untied_embeddings=settings.untied_embeddings,
        **changes,
    )
    for config in (generator, discriminator):
        set_dropout(config, settings.dropout)
    return generator, discriminator


def check_memory(
    build: Callable[[], Pretrainer], encoder: ElectraConfig, device: torch.device, group_size: int = 1
) -> None:
    """Errors: UserError where not even the weights, gradients and AdamW's moments fit; before any is made. build: makes the
    networks, encoder: the config of the one that is fine-tuned, group_size: of the ranks that shard them."""
    # On this device tensors have a shape and no content, and nothing is drawn.
    with torch.device("meta"):
        networks = build()
    parameters = sum(parameter.numel() for parameter in networks.parameters())
    needed = parameters * BYTES_PER_PARAMETER // group_size
    if device.type == "cpu":
        # Each rank makes whole networks in main memory before they are sharded.
        needed = max(needed, parameters * BYTES_PER_WEIGHT)
    there = total_memory(device)
    if there is not None and needed > there:
        raise UserError(
            f"hidden_size {encoder.hidden_size}, num_hidden_layers {encoder.num_hidden_layers}: "
            f"{parameters / 1e9:,.1f} billion parameters need {gigabytes(needed)} to train, and this machine has "
            f"{gigabytes(there)} on {device}: choose a smaller --size, --hidden_size or --num_hidden_layers"
        )


def set_dropout(config: Any, dropout: float) -> None:
    """Of hidden states and of attention."""
    config.hidden_dropout_prob = dropout
    config.attention_probs_dropout_prob = dropout


def folder_of(settings: ElectraSettings) -> Path:
    """Of --model_path. The shell writes a ~ out, but not one in a --config file."""
    assert settings.model_path
    return expanded(settings.model_path)


def check_networks(settings: ElectraSettings) -> None:
    """Errors: UserError where a network is missing in --model_path."""
    names = PRETRAINERS[settings.objective].NETWORKS
    for name in names:
        if not (folder_of(settings) / name / "config.json").is_file():
            raise UserError(
                f"--model_path {settings.model_path}: no {name}/config.json there; train_electra.py --objective "
                f"{settings.objective} leaves a folder with {' and '.join(names)}"
            )


def load_networks(
    settings: ElectraSettings, tokenizer: PreTrainedTokenizerBase, load: Callable[[Path], PretrainerT]
) -> PretrainerT:
    """The networks of --model_path, with --dropout. load: gives those of a folder. Errors: UserError where they cannot be
    loaded, or do not fit the tokenizer or the flags."""
    what = f"--model_path {settings.model_path}"
    check_networks(settings)
    # Of transformers: it would be drawn over our own lines.
    disable_progress_bar()
    try:
        model = load(folder_of(settings))
    except UserError as error:
        # It begins with the folder of the network.
        raise UserError(f"--model_path {error}") from error
    except ValueError as error:
        raise UserError(f"{what}: {error}") from error
    check_size(len(tokenizer), model.encoder_config.vocab_size, what)
    for network in model.networks():
        for name, least in (("vocab_size", len(tokenizer)), ("max_position_embeddings", settings.max_seq_len)):
            if getattr(network.config, name) < least:
                raise UserError(f"{what}: {name} is {getattr(network.config, name)}, {least} is wanted")
        set_dropout(network.config, settings.dropout)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = settings.dropout
    return model

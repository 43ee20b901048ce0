"""Folders of tiny ELECTRA networks, as a run leaves them."""

from dataset.tokenizing.wordpiece import load_wordpiece, save_wordpiece
from model.electra.detection import tell_detector
from tests.dataset.electra.test_electra_dataset import write_vocab
from tests.model.electra.test_model_electra import tiny


def write_run(folder, has_generator=True, length=None, threshold=None, seed=0, **options):
    """discriminator/ and generator/ of random weights in a folder; returns (folder, the ElectraPretrainer, tokenizer)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_wordpiece(write_vocab(folder / "vocab.txt"))
    model = tiny(seed=seed, vocab_size=len(tokenizer), **options).eval()
    if length is not None:
        tell_detector(model.discriminator.config, length, threshold)
    networks = {"discriminator": model.discriminator}
    if has_generator:
        networks["generator"] = model.generator
    for name, network in networks.items():
        network.save_pretrained(folder / name)
        save_wordpiece(tokenizer, folder / name)
    return folder, model, tokenizer

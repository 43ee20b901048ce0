"""Hand a model on to llama.cpp and what is built on it, such as Ollama: one file with weights, tokenizer and settings.

    python scripts/export_gguf.py --weight out/pretrain_512.pth --out out/pretrain_512.gguf

llama.cpp computes a dense minimind2 as its `llama`, minimind3 as `qwen3` and `qwen3moe`, and a minimind2 with experts as
`bailingmoe`. The file is read again and compared with the weights before it gets its name. Whether llama.cpp gives the
same tokens and logits is tested in tests/scripts/test_export_gguf.py.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Run by path: nothing in scripts/ may shadow a dependency.
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
if __name__ == "__main__":
    from common.start import begin

    begin()
    # --help and wrong flags are answered before torch is imported, which takes seconds.
    from scripts.arguments import export_gguf_parser

    export_gguf_parser().parse_args()

import gc
from collections.abc import Sequence

from common.errors import UserError, user_errors
from common.files import MOST_CONFIG_BYTES, atomic_file, read_object
from common.packages import optional_package
from common.paths import utf8_folder
from common.wording import announce
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import starts_with_bos
from dataset.tokenizing.vocabulary import check_ids_fit, check_size
from model.config import MiniMindConfig
from model.hf_format import CONFIG, load_folder, read_config
from model.model_minimind import MiniMindForCausalLM
from scripts.arguments import export_gguf_parser
from scripts.common import check_is_there, check_vocabulary, drop_untrained_thoughts, load_model, tokenizer_folder
from scripts.export_hf import smallest_exact
from scripts.gguf_format import Metadata, architecture_of, model_metadata, to_gguf
from scripts.gguf_tokenizer import tokenizer_metadata
from trainer.machine.command_line import run_cli

SUFFIX = ".gguf"


def main(argv: Sequence[str] | None = None) -> int:
    args = export_gguf_parser().parse_args(argv)
    with user_errors():
        export(args.weight, utf8_folder("--out", args.out), args.tokenizer_path, args.dtype, args.overwrite)
    return 0


def export(
    weight: str | Path,
    out: Path,
    tokenizer_path: str | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
) -> float:
    """Write the file `out`; returns the largest change of a weight by its type (0.0: none was changed).

    Errors: UserError and ValueError for a model or tokenizer that llama.cpp would not follow exactly, and for weights that
    the type cannot hold.
    """
    # Many do without the package.
    optional_package("gguf", "to write a GGUF file")
    from scripts import gguf_file

    check_free(out, weight, overwrite)
    model = load_minimind(weight)
    config = model.config
    folder = tokenizer_folder(weight, tokenizer_path)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(weight, tokenizer, tokenizer_path)
    drop_untrained_thoughts(tokenizer, weight)
    ids = DocumentEncoder(tokenizer).vocab_size
    check_size(ids, config.vocab_size, str(folder))
    check_ids_fit(ids, config.vocab_size, str(folder))

    architecture = architecture_of(config)
    tensors = to_gguf(model.state_dict(), config)
    if dtype == "auto":
        rounded = {name: tensor for name, tensor in tensors.items() if not gguf_file.stays_exact(name, tensor)}
        dtype = str(smallest_exact(rounded)).removeprefix("torch.")
    of_matrices, file_type = gguf_file.KINDS[dtype]
    types = gguf_file.types_of(tensors, of_matrices)
    metadata: Metadata = {"general.type": "model", "general.name": out.stem, "general.file_type": int(file_type)}
    # That of the blocks of Q8_0.
    metadata["general.quantization_version"] = gguf_file.QUANTISATION_VERSION
    metadata.update(model_metadata(config))
    # Each document of our training began with BOS, whatever the tokenizer does by itself. How others trained a model in a
    # folder, only its tokenizer tells.
    begins_with_bos = starts_with_bos(tokenizer) if Path(weight).is_dir() else True
    metadata.update(tokenizer_metadata(tokenizer, config.vocab_size, str(folder), begins_with_bos))

    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as file:
        gguf_file.write(file, architecture, metadata, tensors, types)
        # Of the file itself, so that an error of writing is found as well.
        file.flush()
        change = gguf_file.check(Path(file.name), metadata, tensors, types)
        # The reader maps the file, and Windows renames no mapped file.
        gc.collect()
    left = [name for name, number_type in types.items() if number_type == gguf_file.Type.F16 != of_matrices]
    announce(f"{out}: {architecture} in {dtype}, {out.stat().st_size / 1e6:.1f} MB")
    announce(f"tokenizer: llama.cpp cuts texts into the same pieces by its rule {metadata['tokenizer.ggml.pre']}")
    if left:
        announce(
            f"{len(left)} matrices are in float16, their rows being no multiple of {gguf_file.BLOCK}: {left[0]}, ..."
        )
    changed = f"weights changed by {change:.1e} at most" if change else "no weight was changed"
    announce(f"checked: read again, {len(tensors)} tensors, {changed}")
    return change


def load_minimind(weight: str | Path) -> MiniMindForCausalLM:
    """A .pth, or a folder of a model that MiniMind computes too, such as a Llama. Errors: UserError and ValueError."""
    path = Path(weight)
    check_is_there(path)
    if not path.is_dir():
        return MiniMindForCausalLM.from_pth(path)
    utf8_folder("--weight", path)
    config = path / CONFIG
    if config.exists() and read_object(config, MOST_CONFIG_BYTES).get("model_type") == MiniMindConfig.model_type:
        # Of MiniMind's own save_pretrained, which transformers loads by this very class.
        model = load_model(path)
        assert isinstance(model, MiniMindForCausalLM)
        return model
    # Nothing that config.json speaks of is built before it was found to be a model of ours.
    return load_folder(MiniMindForCausalLM, path, read_config(path))


def check_free(out: Path, weight: str | Path, overwrite: bool) -> None:
    """UserError unless the file can be written there; only an earlier one is ever replaced."""
    if out.suffix != SUFFIX:
        raise UserError(f"--out {out}: the name must end in {SUFFIX}")
    if not out.exists():
        return
    if not out.is_file():
        raise UserError(f"{out} is no file: choose another --out")
    if Path(weight).exists() and out.samefile(weight):
        raise UserError(f"{out} is the weight itself: choose another --out")
    if not overwrite:
        raise UserError(f"{out} is there already: choose another --out, or pass --overwrite")


if __name__ == "__main__":
    run_cli(main)

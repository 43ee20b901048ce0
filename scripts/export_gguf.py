"""Export a model to llama.cpp and tools built on it, such as Ollama: one file with weights, tokenizer and settings.

python scripts/export_gguf.py --weight out/pretrain_512.pth --out out/pretrain_512.gguf
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder, and answers wrong flags

import os
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError, optional_package, user_errors, utf8
from common.files import atomic_file
from common.wording import announce
from dataset.tokenizing.encoder import DocumentEncoder
from dataset.tokenizing.tokenizer_files import check_vocabulary_size, starts_with_bos
from scripts.arguments import export_gguf_parser, weight_of
from scripts.common import load_model, tokenizer_of
from scripts.export_hf import smallest_exact
from trainer.machine.command_line import run_cli


def main(argv: Sequence[str] | None = None) -> int:
    args = export_gguf_parser().parse_args(argv)
    with user_errors():
        export(weight_of(args.weight), Path(utf8(args.out, "--out")), args.tokenizer_path, args.dtype, args.overwrite)
    return 0


def export(
    weight: str | Path, out: Path, tokenizer_path: str | None = None, dtype: str = "auto", overwrite: bool = False
) -> float:
    """Write the file `out`; returns the largest change of a weight by rounding (0.0: none).

    Errors: UserError and ValueError for a model or tokenizer that llama.cpp would not reproduce exactly, and for weights
    that overflow the type.
    """
    if out.exists() and not overwrite:
        raise UserError(f"{out} is there already: choose another --out, or pass --overwrite")
    gguf = optional_package("gguf", "to write a GGUF file")
    from scripts import gguf_format

    model = load_model(weight, with_interface=False)
    config = model.config
    tokenizer = tokenizer_of(weight, tokenizer_path)
    folder = f"--tokenizer_path {tokenizer.name_or_path}"
    ids = DocumentEncoder(tokenizer).vocab_size
    check_vocabulary_size(ids, config.vocab_size, folder)

    architecture = gguf.MODEL_ARCH_NAMES[gguf_format.architecture_of(config)]
    tensors = gguf_format.to_gguf(model.state_dict(), config)
    # llama.cpp wants vectors in float32, and the router too: close scores decide on the expert.
    matrices = {name for name, tensor in tensors.items() if tensor.dim() > 1 and "ffn_gate_inp." not in name}
    if dtype == "auto":
        dtype = str(smallest_exact({name: tensors[name] for name in matrices})).removeprefix("torch.")
    number_type = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]
    matrix_type = gguf.GGMLQuantizationType[number_type]

    out.parent.mkdir(parents=True, exist_ok=True)
    change = 0.0
    with atomic_file(out) as file:
        writer = gguf.GGUFWriter(file.name, architecture)
        writer.add_type("model")
        writer.add_name(out.stem)
        file_type = "ALL_F32" if dtype == "float32" else f"MOSTLY_{number_type}"
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        gguf_format.write_settings(writer, config)
        # Our training starts each document with BOS, whatever the tokenizer does by itself. A folder may come from others:
        # only its tokenizer shows how they trained.
        begins_with_bos = starts_with_bos(tokenizer) if Path(weight).is_dir() else True
        rule = gguf_format.write_tokenizer(writer, tokenizer, config.vocab_size, folder, begins_with_bos)
        for name, tensor in tensors.items():
            wanted = matrix_type if name in matrices else gguf.GGMLQuantizationType.F32
            data, stored_type, changed_by = gguf_format.quantized(tensor, wanted, name)
            change = max(change, changed_by)
            writer.add_tensor(name, data, raw_dtype=stored_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        length = writer.fout[0].tell()
        writer.close()
        # On a full disk numpy's tofile may lose the end of the data without an error.
        if os.path.getsize(file.name) != length:
            raise OSError(f"{length:,} bytes")
    changed = f"weights changed by {change:.1e} at most" if change else "no weight was changed"
    announce(f"{out}: {architecture} in {dtype}, {out.stat().st_size / 1e6:.1f} MB; {changed}")
    announce(f"tokenizer: llama.cpp cuts texts into the same pieces by its rule {rule}")
    return change


if __name__ == "__main__":
    run_cli(main)

"""Export a model to other programs, and convert it back.

    python scripts/export_hf.py --weight out/pretrain_512.pth --out_dir out/pretrain_512_hf
    python scripts/export_hf.py --weight out/pretrain_512_hf --to_pth out/back_512.pth

The folder holds a model that transformers, vLLM, llama.cpp and others know: Llama for a dense minimind2, Qwen2-MoE for
its mixture of experts, Qwen3 and Qwen3-MoE for minimind3. It contains no code. It is reloaded and its logits are
compared with the source's on real text before the folder is renamed to --out_dir. --to_pth compares the two models before
the weights are rounded to half precision.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder, and answers wrong flags

import contextlib
import gc
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from jinja2 import Environment, FileSystemLoader
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.errors import UserError, user_errors, utf8
from common.files import atomic_folder, remove, restore, temporary_beside
from common.settings import flags_of
from common.wording import announce
from dataset.tokenizing.byte_level_bpe import CHAT_TEMPLATE
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import (
    DEFAULT,
    bos_template,
    check_vocabulary_size,
    has_tokenizer,
    save_tokenizer,
    tokenizer_folder,
    vocabulary_digest,
)
from model.config import record_of
from model.hf_format import StateDict, hf_config, load_config, load_network, to_hf
from model.model_minimind import MiniMindLM
from model.weight_record import (
    ROW_LENGTH_FIELD,
    SPECIAL_TOKENS_FIELD,
    THOUGHTS_FIELD,
    VOCABULARY_FIELD,
    read_record,
    tokenizer_beside,
)
from scripts.arguments import export_parser, weight_of
from scripts.common import end_ids, load_model, tokenizer_of
from trainer.machine.command_line import run_cli
from trainer.pretrain.settings import TrainingSettings
from trainer.reporting.records import RunRecords
from trainer.saving.weights import save_pth

TEXTS = (
    "The harbour lies on the eastern side of the island, and most of the 4,200 people who live there fish, build boats "
    "or work in the two hotels. In winter the ferry comes twice a week; when the wind is strong it does not come at all.",
    "这座小城建在河的两岸，城里有三座桥，最老的一座是1872年修的。每年春天河水上涨的时候，人们就把店铺里的东西搬到楼上去，等水退了再搬回来。",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / len(values)\n",
)
# largest difference of logits in fp32, relative to the largest logit if that exceeds 1
TOLERANCE = 1e-5


def main(argv: Sequence[str] | None = None) -> int:
    args = export_parser().parse_args(argv)
    if args.to_pth and args.dtype != "auto":
        raise UserError(f"--dtype {args.dtype} has no effect with --to_pth: a .pth is in half precision; leave it out")
    with user_errors():
        weight = weight_of(args.weight)
        if args.out_dir:
            export(weight, Path(utf8(args.out_dir, "--out_dir")), args.tokenizer_path, args.dtype, args.overwrite)
        else:
            convert_to_pth(Path(weight), Path(args.to_pth), args.tokenizer_path, args.overwrite)
    return 0


def export(
    weight: str | Path, out_dir: Path, tokenizer_path: str | None = None, dtype: str = "auto", overwrite: bool = False
) -> float:
    """Write `out_dir`; returns the largest difference of a logit (0.0: bitwise the same model).

    Errors: ValueError for weights that no known architecture computes or that the dtype cannot hold.
    """
    restore(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        # Only an earlier export is ever replaced.
        looks_like_one = (out_dir / "config.json").exists() and (out_dir / "model.safetensors").exists()
        source = Path(weight).resolve()
        if not looks_like_one or out_dir.resolve() in (source, *source.parents):
            raise UserError(f"{out_dir} is no earlier export, or holds the weight itself: choose another --out_dir")
        if not overwrite:
            raise UserError(f"{out_dir} is there already: choose another --out_dir, or pass --overwrite")
    model = load_model(weight)
    tokenizer = tokenizer_of(weight, tokenizer_path)
    encoder = DocumentEncoder(tokenizer)
    config = hf_config(model.config)
    if model.config.use_moe and (model.config.hidden_size % 4 or model.config.moe_intermediate_size % 4):
        raise UserError(
            "transformers computes experts only if 4 divides hidden_size and moe_intermediate_size; export_gguf.py exports any"
        )
    state = to_hf(model.state_dict(), model.config)
    out_dtype = smallest_exact(state) if dtype == "auto" else getattr(torch, dtype)
    config.dtype = out_dtype
    weight_record = read_record(Path(weight))
    ends = end_ids(model, tokenizer.eos_token_id)
    if config.pad_token_id in (tokenizer.bos_token_id, *ends) or weight_record.get(SPECIAL_TOKENS_FIELD):
        # Texts have this token, and transformers would give its embedding no gradient. The tokenizer keeps its padding.
        config.pad_token_id = None
    # Our own fields, read by evaluate.py, generate.py and `convert_to_pth`
    for field in {SPECIAL_TOKENS_FIELD, ROW_LENGTH_FIELD} & weight_record.keys():
        setattr(config, field, weight_record[field])
    state = {name: cast(tensor, out_dtype, name) for name, tensor in state.items()}

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(out_dir, temporary_beside(out_dir)) as unfinished:
        unfinished.mkdir()
        # safetensors: loading it runs no pickle
        save_file(state, unfinished / "model.safetensors", metadata={"format": "pt"})
        write_config(config, unfinished / "config.json")
        # safetensors lets only the owner read its files; a server may run as another user.
        (unfinished / "model.safetensors").chmod((unfinished / "config.json").stat().st_mode)
        # `tokenizer("hi")` starts with BOS, as every document in training, unless it has something else there.
        bos = tokenizer.bos_token
        if bos is not None and tokenizer(bos).input_ids == tokenizer(bos, add_special_tokens=False).input_ids:
            template = bos_template(str(bos), tokenizer.bos_token_id)
            tokenizer.backend_tokenizer.post_processor = template
        save_tokenizer(tokenizer, unfinished)
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad")}
        ids["eos_token_id"] = ends if len(ends) > 1 else tokenizer.eos_token_id
        GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, **ids).save_pretrained(unfinished)

        # Compares the files as written, so that write errors are found too
        reloaded = transformers_model(unfinished)
        rounded = {name: tensor.to(out_dtype) for name, tensor in model.state_dict().items()}
        rounding = largest_change(model.state_dict(), rounded)
        model.load_state_dict(rounded)
        difference, positions = compare(model, reloaded, encoder)
        comparison = verdict(
            difference, positions, f"reloaded as {type(reloaded).__name__} with AutoModelForCausalLM, no remote code"
        )
        dtype_name = str(out_dtype).removeprefix("torch.")
        if rounding:
            comparison += f"; {dtype_name} has changed weights by {rounding:.1e} at most"
        write_model_card(unfinished, model, weight, config, comparison, out_dir.name)
        # In float32 the reloaded weights are mapped from the file, and Windows renames no folder with a mapped file. Cycles keep them alive.
        del reloaded
        gc.collect()
    assert config.architectures
    announce(f"{out_dir}: {config.architectures[0]} in {dtype_name}\n{comparison}")
    return difference


def convert_to_pth(folder: Path, path: Path, tokenizer_path: str | None = None, overwrite: bool = False) -> float:
    """Write `path` (.pth, half precision) and its .json; returns the largest difference of a logit before rounding."""
    if path.suffix != ".pth":
        raise UserError(f"--to_pth {path}: the name must end in .pth")
    # The config goes into a .json beside the weights, the tokenizer into a folder.
    for written_to in (path, path.with_suffix(".json"), tokenizer_beside(path)):
        if written_to.exists() and not overwrite:
            raise UserError(f"{written_to} is there already: choose another --to_pth, or pass --overwrite")
    model = load_model(folder)
    source = transformers_model(folder)
    tokenizer = load_tokenizer(tokenizer_path or tokenizer_folder(folder))
    # Otherwise the repository's tokenizer is only a fallback: the folder's record may name the one used in training.
    is_the_models_own = tokenizer_path is not None or has_tokenizer(folder)
    weight_record = read_record(folder)
    vocabulary = vocabulary_digest(tokenizer) if is_the_models_own else weight_record.get(VOCABULARY_FIELD)
    difference, positions = compare(model, source, DocumentEncoder(tokenizer))
    comparison = verdict(difference, positions, f"{type(model).__name__} against {type(source).__name__}")
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {**record_of(model.config), THOUGHTS_FIELD: tokenizer.chat_template == CHAT_TEMPLATE and is_the_models_own}
    if ROW_LENGTH_FIELD in weight_record:
        fields[ROW_LENGTH_FIELD] = weight_record[ROW_LENGTH_FIELD]
    save_pth(model.state_dict(), fields, path.with_suffix(""), vocabulary, weight_record.get(SPECIAL_TOKENS_FIELD))
    beside = tokenizer_beside(path)
    remove(beside)
    if is_the_models_own and vocabulary != vocabulary_digest(load_tokenizer(DEFAULT)):
        with atomic_folder(beside, temporary_beside(beside)) as temporary:
            save_tokenizer(tokenizer, temporary)
    # Read back from the file: tensors beyond half precision stay in fp32.
    rounding = largest_change(model.state_dict(), torch.load(path, weights_only=True))
    rounded = f"rounded to half precision: weights changed by {rounding:.1e} at most"
    announce(f"{path}: {model.config.generation}\n{comparison}\n{rounded if rounding else 'no weight was rounded'}")
    return difference


def transformers_model(folder: Path) -> PreTrainedModel:
    """The model of a folder, in transformers' own class; fp32, eval mode. Errors: UserError."""
    disable_progress_bar()
    what = str(folder)
    # An empty GenerationConfig instead of the folder's, which may be faulty and is not needed.
    model, _ = load_network(
        what, folder, AutoModelForCausalLM, load_config(what, folder), generation_config=GenerationConfig()
    )
    return model.eval()


def largest_change(state: StateDict, rounded: StateDict) -> float:
    """The largest difference between a weight in fp32 and in another precision."""
    return max(float((tensor - rounded[name].float()).abs().max()) for name, tensor in state.items())


def smallest_exact(state: StateDict) -> torch.dtype:
    """The first of float16, bfloat16, float32 that holds every weight unchanged."""
    for dtype in (torch.float16, torch.bfloat16):
        if all(torch.equal(tensor.to(dtype).float(), tensor.float()) for tensor in state.values()):
            return dtype
    return torch.float32


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """tensor in dtype. Errors: ValueError for a number that overflows or is not finite."""
    out = tensor.to(dtype)
    if not out.isfinite().all():
        advice = "" if dtype is torch.float32 else ": try float32"
        raise ValueError(f"{name} reaches {float(tensor.abs().max()):.3g}, which {dtype} does not hold{advice}")
    return out.contiguous()


def write_config(config: PretrainedConfig, path: Path) -> None:
    """Write config.json with the names of older readers beside those of transformers 5."""
    # All fields, not only non-default ones: other readers have other defaults.
    fields = json.loads(config.to_json_string(use_diff=False))
    # Fields of classifiers, of encoders, or of this machine
    for name in ("id2label", "label2id", "problem_type", "_name_or_path", "is_encoder_decoder"):
        fields.pop(name, None)
    rope = fields["rope_parameters"]
    fields["rope_theta"] = rope["rope_theta"]
    fields["torch_dtype"] = fields["dtype"]
    fields["rope_scaling"] = None
    if rope["rope_type"] != "default":
        fields["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if "sliding_window" in fields:
        # Unused; candle asks for it, and some versions of transformers 5 refuse their own default of 28 in a smaller model.
        fields["max_window_layers"] = fields["num_hidden_layers"]
    # For Qwen3-MoE transformers 5 writes only the first name, and transformers 4 reads only the second.
    if "num_local_experts" in fields:
        fields["num_experts"] = fields["num_local_experts"]
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def compare(first: MiniMindLM, second: PreTrainedModel, encoder: DocumentEncoder) -> tuple[float, str]:
    """(largest difference of a logit over TEXTS in fp32, at which positions).

    Relative to the largest logit where that is above 1: fp32 itself rounds in proportion.
    """
    worst = torch.zeros(())
    positions = 0
    kind = "English, Chinese and Python text"
    check_vocabulary_size(encoder.vocab_size, first.config.vocab_size, "--tokenizer_path", fewer_are_fine=True)
    try:
        # Some parts, such as a window of attention, act only at a distance.
        rows = [encoder.prompt_ids(text) for text in (*TEXTS, "".join(TEXTS) * 8)]
    except UserError:
        rows = [[]]
    # A tokenizer of proteins may know none of them, or each character as unknown.
    if min(len(set(row)) for row in rows) < 3:
        kind = "drawn ids"
        rows = torch.randint(encoder.vocab_size, (4, 512), generator=torch.Generator().manual_seed(0)).tolist()
    for row in rows:
        ids = torch.tensor([row[: first.config.max_position_embeddings]])
        logits = first(ids).logits
        others = second(ids).logits
        scale = logits.abs().max().clamp(min=1)
        # Unlike Python's `max`, this keeps a NaN.
        worst = torch.maximum(worst, (logits - others).abs().max() / scale)
        positions += ids.shape[1]
    return float(worst), f"{positions} positions of {kind}"


def verdict(difference: float, positions: str, what: str) -> str:
    """One line about a comparison. Errors: ValueError if the logits differ."""
    if not difference <= TOLERANCE:
        raise ValueError(f"{what}: the logits differ by {difference:.1e}, more than {TOLERANCE}; not written")
    logits = f"differ by {difference:.1e} at most" if difference else "are bitwise the same"
    return f"checked: {what}, the logits {logits} at {positions} (fp32)"


# -------------------------------------------------------------------------------------------------- the model card

# Flags in the card: of the training, and others that shape what is learned; none that names files, hosts or accounts.
SHAPING = [flag for flag in flags_of(TrainingSettings) if flag not in ("from_resume", "max_bad_updates")]
SHAPING += ["max_seq_len", "init_scheme", "dtype", "val_fraction"]


def write_model_card(
    folder: Path, model: MiniMindLM, weight: str | Path, exported: PretrainedConfig, comparison: str, name: str
) -> None:
    """Write README.md, and loss.png if the run logged losses. comparison: the line about the comparison of logits."""
    run = None
    flags: list[tuple[str, str]] = []
    stem = Path(weight).stem
    # No metrics, or a run that ended before its first line
    with contextlib.suppress(UserError):
        run = RunRecords.read(Path(weight).with_name(f"{stem.removesuffix('.best')}.metrics.jsonl"))
        settings = run.start_record("settings")
        flags = [(f"`--{flag}`", f"`{settings[flag]}`") for flag in SHAPING if flag in settings]
    if run is not None and "loss" in run.columns:
        from trainer.reporting.html_report import loss_picture

        (folder / "loss.png").write_bytes(loss_picture([run], [""]))
    prompts = [prompt for _, prompt, _ in (run.samples if run else []) if prompt]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True)
    card = environment.get_template("model_card.jinja").render(
        name=name,
        config=model.config,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        architecture=(exported.architectures or [""])[0],
        dtype=str(exported.dtype).removeprefix("torch."),
        run=run,
        # as a string of Python
        prompt=json.dumps(prompts[-1], ensure_ascii=False) if prompts else None,
        is_best=stem.endswith(".best"),
        flags=flags,
        comparison=comparison,
    )
    (folder / "README.md").write_bytes(f"{card.strip()}\n".encode(errors="backslashreplace"))


if __name__ == "__main__":
    run_cli(main)

"""One model in several programs: do they make the same tokens, the same logits and the same greedy texts of it?

    python benchmarks/readers.py --data_path en.jsonl zh.jsonl code.jsonl --transformers4 FOLDER --minimind2 FOLDER --minimind3 FOLDER

Each weight is exported as users export it, to a Hugging Face folder and to GGUF in float32. Every program reads what is
made for it in a process of its own, by its own interface alone (benchmarks/reader_workers). Our code is the reference:
`DocumentEncoder.prompt_ids` for the tokens, the model of the .pth for the rest. The result is a table in Markdown, with a
line for each program, also for those that are not there. Exit code 1 where one of them disagrees.

    pip install --no-deps --target FOLDER transformers==4.57.3 tokenizers==0.22.1 huggingface_hub==0.36.0
    git clone https://github.com/jingyaogong/minimind FOLDER        (--minimind2: its commit 83e52f6; --minimind3: d65ef2c)
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)
# --help and wrong flags are answered before torch is imported, which takes seconds.
if __name__ == "__main__":
    from benchmarks.arguments import readers_parser

    readers_parser().parse_args()

import argparse
import json
import math
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.arguments import readers_parser
from benchmarks.out_file import check_out
from common.errors import DataError, UserError, user_errors
from common.wording import one_line
from dataset.embedded_corpus import build_embedded_corpus
from dataset.reading.documents import read_documents
from dataset.reading.file_kinds import find_files
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import export_gguf, export_hf
from trainer.machine.command_line import run_cli
from trainer.saving.weights import save_weights

WORKERS = ROOT / "benchmarks" / "reader_workers"
# A greedy text begins with so many tokens of a text, and goes on for so many.
PROMPT_TOKENS = 16
NEW_TOKENS = 24
# Of the logits in fp32, relative to the largest one if that exceeds 1. llama.cpp adds up in another order.
TOLERANCE = 1e-5
TOLERANCE_LLAMA_CPP = 5e-4
SECONDS = 1200
# Marks a cell of the table.
DISAGREES = "**NO**"

KINDS: dict[str, dict[str, Any]] = {
    "minimind2": {},
    "minimind2_moe": {"use_moe": True},
    "minimind3": {"generation": "minimind3"},
    "minimind3_moe": {"generation": "minimind3", "use_moe": True, "num_experts_per_tok": 2},
}
SMALL: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4}

# The numbers of a config that the public code reads, by the names of either generation.
PUBLIC_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings", "dropout", "bos_token_id", "eos_token_id",
    "inference_rope_scaling", "tie_word_embeddings", "use_moe", "num_experts_per_tok", "norm_topk_prob", "num_experts",
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "scoring_func", "seq_aux",
)  # fmt: skip

Json = dict[str, object]
# Of the table: weight, reader, version, ids, logits, greedy texts.
Row = tuple[str, str, str, str, str, str]


@dataclass(frozen=True)
class Questions:
    """What every program is asked: ids of `documents`, logits of `texts` (ids), and what follows their first tokens."""

    documents: list[str]
    texts: list[list[int]]

    def as_request(self, logits: Path) -> Json:
        return {
            "documents": self.documents,
            "texts": self.texts,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
            "logits": str(logits),
        }


@dataclass(frozen=True)
class Answer:
    """ids of the documents; logits [positions, vocabulary] and greedy text of each text."""

    version: str
    ids: list[list[int]]
    logits: list[np.ndarray]
    greedy: list[str]


@dataclass(frozen=True)
class Reader:
    """A program, what its worker is told beside the questions, and the folders that it finds its packages in first.

    absent: why it cannot be asked, in a few words; None: it can.
    """

    name: str
    worker: str
    request: Json
    folders: Sequence[str | None] = ()
    absent: str | None = None
    tolerance: float = TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    args = readers_parser().parse_args(argv)
    out = Path(args.out) if args.out else None
    if out is not None:
        check_out(out)
    with user_errors():
        table = markdown(rows_of_table(args))
    print(table)
    if out is not None:
        out.write_text(table + "\n", encoding="utf-8")
    return 1 if DISAGREES in table else 0


def rows_of_table(args: argparse.Namespace) -> list[Row]:
    """Ask every program about every weight."""
    tokenizer = load_tokenizer(args.tokenizer_path)
    encoder = DocumentEncoder(tokenizer)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        documents = [*export_hf.TEXTS, *read_files(args.data_path, args.documents, encoder, work)]
        texts = [encoder.prompt_ids(text) for text in export_hf.TEXTS]
        questions = Questions(documents, texts)
        weights = [Path(weight) for weight in args.weight or []] or random_weights(encoder.vocab_size, work)
        for weight in weights:
            reference = our_answer(weight, tokenizer, questions)
            rows.append((weight.stem, "this repository", reference.version, "reference", "reference", "reference"))
            for reader in readers_of(weight, args, work):
                version, ids, logits, greedy = ask_and_compare(reader, reference, questions, work)
                rows.append((weight.stem, reader.name, version, ids, logits, greedy))
    return rows


def read_files(paths: list[str] | None, most: int, encoder: DocumentEncoder, work: Path) -> Iterator[str]:
    """The first texts of each file, without a BOS and EOS that they carry as text."""
    if not paths:
        paths = [str(build_embedded_corpus(work / "python_docs.jsonl"))]
    for path in paths:
        for file in find_files(path):
            for _, text in islice(read_documents(file), most):
                yield encoder.body(text)


def random_weights(vocab_size: int, work: Path) -> list[Path]:
    """A small model of each kind, as the trainer saves it."""
    weights = []
    for kind, fields in KINDS.items():
        torch.manual_seed(0)
        model = MiniMindForCausalLM(MiniMindConfig(**SMALL, **fields, vocab_size=vocab_size))
        for name, parameter in model.named_parameters():
            # Away from 1, so that a norm that is left out shows.
            if "norm" in name:
                parameter.data.uniform_(0.5, 1.5)
        save_weights(model.state_dict(), model.config.to_dict(), work / kind)
        weights.append(work / f"{kind}.pth")
    return weights


# --------------------------------------------------------------------------------------------- the programs


@torch.no_grad()
def our_answer(weight: Path, tokenizer: PreTrainedTokenizerBase, questions: Questions) -> Answer:
    """The reference: the ids as in training, and the model of the .pth in fp32."""
    # The types of transformers know no model that is defined elsewhere.
    model: Any = MiniMindForCausalLM.from_pth(weight)
    encoder = DocumentEncoder(tokenizer)
    logits = []
    greedy = []
    for ids in questions.texts:
        logits.append(model(torch.tensor([ids])).logits[0].numpy())
        prompt = torch.tensor([ids[:PROMPT_TOKENS]])
        written = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        greedy.append(str(tokenizer.decode(written[0], skip_special_tokens=True)))
    ids_of_documents = [encoder.prompt_ids(document) for document in questions.documents]
    return Answer(f"PyTorch {torch.__version__}", ids_of_documents, logits, greedy)


def readers_of(weight: Path, args: argparse.Namespace, work: Path) -> list[Reader]:
    """All programs for a weight, those that cannot be asked included."""
    config = MiniMindForCausalLM.from_pth(weight).config
    folder = work / f"{weight.stem}_hf"
    export_hf.export(weight, folder, args.tokenizer_path, overwrite=True)
    exported: Json = {"folder": str(folder)}
    checkout = args.minimind2 if config.generation == "minimind2" else args.minimind3
    fields = config.to_dict()
    public: Json = {
        "checkout": str(Path(checkout or "").resolve()),
        "weight": str(weight.resolve()),
        "tokenizer": str(Path(args.tokenizer_path).resolve()),
        "config": {name: fields[name] for name in PUBLIC_FIELDS if fields.get(name) is not None},
    }
    file, refused = gguf_of(weight, args.tokenizer_path, work)
    return [
        Reader(
            "transformers 4",
            "transformers_worker.py",
            exported,
            (args.transformers4,),
            None if args.transformers4 else "not installed (--transformers4)",
        ),
        Reader("transformers 5", "transformers_worker.py", exported),
        Reader(
            "llama.cpp", "llama_cpp_worker.py", {"file": str(file)}, (args.llama_cpp,), refused, TOLERANCE_LLAMA_CPP
        ),
        Reader(
            "public MiniMind code",
            "minimind_worker.py",
            public,
            # Its requirements name a transformers 4.
            (checkout, args.transformers4),
            None if checkout else f"not installed (--{config.generation})",
        ),
    ]


def gguf_of(weight: Path, tokenizer_path: str, work: Path) -> tuple[Path, str | None]:
    """(the weight as a GGUF file in float32, why there is none)."""
    file = work / f"{weight.stem}.gguf"
    try:
        export_gguf.export(weight, file, tokenizer_path, "float32", overwrite=True)
    except (UserError, DataError, ValueError) as error:
        # The first clause says enough, and a table shows no folders of this machine.
        reason = one_line(error).replace(tokenizer_path, "the tokenizer").replace(str(weight), weight.name)
        return file, f"no GGUF file ({reason[:120]})"
    return file, None


# ------------------------------------------------------------------------------------------ asking, comparing


def ask_and_compare(reader: Reader, reference: Answer, questions: Questions, work: Path) -> tuple[str, str, str, str]:
    """(version or why it was not asked, documents with equal ids, largest difference of a logit, greedy texts equal)."""
    if reader.absent is not None:
        return reader.absent, "–", "–", "–"
    answer = ask(reader, questions, work / "logits.npz")
    if isinstance(answer, str):
        return answer, "–", "–", "–"
    equal = sum(theirs == ours for theirs, ours in zip(answer.ids, reference.ids, strict=True))
    ids = f"{equal:,} of {len(reference.ids):,}"
    if equal < len(reference.ids):
        ids += f" {DISAGREES}"
    difference = largest_difference(answer.logits, reference.logits)
    logits = f"{difference:.1e}"
    # Turned round, a NaN would pass.
    if not difference <= reader.tolerance:
        logits += f" {DISAGREES}"
    greedy = "yes" if answer.greedy == reference.greedy else DISAGREES
    return answer.version, ids, logits, greedy


def ask(reader: Reader, questions: Questions, logits: Path) -> Answer | str:
    """What the program answers, or why there is no answer: it is not installed, or it failed."""
    folders = [str(Path(folder).resolve()) for folder in reader.folders if folder]
    earlier = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders + earlier), "HF_HUB_OFFLINE": "1"}
    request = {**questions.as_request(logits), **reader.request}
    # -P: the folder of the worker is not searched for packages.
    command = [sys.executable, "-P", str(WORKERS / reader.worker)]
    # Those of the program before must not stand for this one's.
    logits.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"{DISAGREES}: it gave no answer within {SECONDS:,} seconds"
    if done.returncode:
        last_lines = done.stderr.strip().splitlines()[-1:]
        reason = one_line(" ".join(last_lines))[:200] or f"exit code {done.returncode}"
        return f"{DISAGREES}: it failed ({reason})"
    try:
        return answer_of(done.stdout, questions, logits)
    # A library may print or write anything. One program's fault must not lose the lines of the others.
    except (ValueError, LookupError, TypeError, AttributeError, OSError, zipfile.BadZipFile) as error:
        return f"{DISAGREES}: no answer can be read ({one_line(f'{type(error).__name__}: {error}')[:200]})"


def answer_of(output: str, questions: Questions, logits: Path) -> Answer | str:
    """The answer in a worker's output and its file of logits, or that a package is missing.

    Errors: of many kinds, where it is not such an answer or not one to each question.
    """
    # Some programs print lines of their own before the worker answers.
    lines = output.splitlines()
    if not lines:
        raise ValueError("nothing was printed")
    answer = json.loads(lines[-1])
    if "missing" in answer:
        return f"not installed ({one_line(answer['missing'])[:100]})"
    with np.load(logits) as arrays:
        values = [arrays[name] for name in arrays.files]
    if len(answer["ids"]) != len(questions.documents) or len(values) != len(questions.texts):
        raise ValueError("not every question is answered")
    return Answer(str(answer["version"]), answer["ids"], values, answer["greedy"])


def largest_difference(theirs: list[np.ndarray], ours: list[np.ndarray]) -> float:
    """Relative to the largest logit of a text where that is above 1: fp32 itself rounds in proportion. NaN stays NaN.

    Infinite where the shapes do not match.
    """
    worst = 0.0
    for a, b in zip(theirs, ours, strict=True):
        # A program may have a vocabulary that is filled up to a round number; none may have a smaller one.
        if a.ndim != 2 or len(a) != len(b) or a.shape[1] < b.shape[1]:
            return math.inf
        difference = np.abs(a[:, : b.shape[1]] - b).max() / max(1.0, np.abs(b).max())
        worst = float(np.maximum(worst, difference))
    return worst


def markdown(rows: Sequence[Row]) -> str:
    """The table. A cell of the first column stands once."""
    lines = [
        "| weight | reader | version | equal ids | largest difference of a logit | same greedy texts |",
        "|---|---|---|---|---|---|",
    ]
    weight_before = ""
    for weight, *cells in rows:
        first = "" if weight == weight_before else weight
        weight_before = weight
        lines.append(f"| {' | '.join((first, *cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_cli(main)

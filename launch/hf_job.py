# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "tokenizers==0.23.3", "fastokens==0.3.5", "safetensors==0.8.0", "numpy==2.4.6",
#     "PyYAML==6.0.3", "filelock==4.2.11", "rensa==0.5.0", "tqdm==4.70.1", "psutil==7.2.2", "jinja2==3.1.6", "matplotlib==3.11.2",
#     "zstandard==0.25.0", "pyarrow==26.0.1", "charset-normalizer==3.5.3",
# ]
#
# [tool.hf-jobs]
# flavor = "l4x1"
# timeout = "2h"
# secrets = ["HF_TOKEN"]
# ///
"""Hugging Face Jobs: train, export, and push the model to the Hub. In the repository, after `hf auth login`:

    git archive -o minimind.zip HEAD
    hf jobs uv run launch/hf_job.py minimind.zip --push_to_hub NAME --data_path my.jsonl --budget 1h

Other arguments are flags of the trainer; files of this machine among them go along. `--flavor a10g-largex4` before the script
takes other hardware, all of whose GPUs are used. `-v hf://buckets/USER/NAME:/out` there and `--out_dir /out` keep checkpoints, from
which the same command goes on (not tried).
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("code", help="archive of the repository")
    parser.add_argument("--push_to_hub", required=True, help="name of the model on the Hub")
    parser.add_argument("--out_dir", default="out", help="folder of weights and checkpoints")
    args, flags = parser.parse_known_args()
    code = tempfile.mkdtemp()
    shutil.unpack_archive(args.code, code)
    sys.path.insert(0, code)
    from trainer.machine.command_line import run_cli

    run_cli(lambda: job(code, args, flags))


def job(code: str, args: argparse.Namespace, flags: list[str]) -> int:
    """Train and push. Returns the exit code. Errors: UserError if the Hub does not take the model."""
    from model.weight_record import newest_weight
    from scripts.hubs import open_repository

    # Before the hours of training
    open_repository("huggingface", args.push_to_hub, is_public=False)
    gpus = torch.cuda.device_count()
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(gpus)] if gpus > 1 else []
    words = ["trainer/train_pretrain.py", "--from_resume", "1", "--out_dir", args.out_dir, *flags]
    exit_code = subprocess.call([sys.executable, *launcher, *words], cwd=code)
    if exit_code:
        return exit_code
    weight = str(newest_weight(Path(code, args.out_dir)))
    words = ["--weight", weight, "--out_dir", "out/export", "--push_to_hub", args.push_to_hub]
    return subprocess.call([sys.executable, "scripts/export_hf.py", *words], cwd=code)


if __name__ == "__main__":
    main()

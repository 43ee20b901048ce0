"""The settings of train_sft.py: those of train_pretrain.py with other defaults, and conversations instead of text."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.settings import Settings, setting, switch, with_default
from dataset.reading.conversations import CONVERSATION
from dataset.reading.settings import OFF, DocumentSettings
from model.weight_record import newest_weight
from trainer.pretrain.settings import DataSettings, PretrainSettings

# Default data, in dataset/
USUAL_FILE = "sft_mini_512.jsonl"


@dataclass(kw_only=True)
class ConversationSettings(Settings):
    """data"""

    data_path: list[str] | None = setting(
        None,
        several=True,
        help=".jsonl, .json, .parquet or .arrow of chats in one of the forms of docs/sft.md, a folder or a glob; several with "
        f"shares, such as a.jsonl:0.7 b.jsonl:0.3 (default: dataset/{USUAL_FILE} if it exists, else questions on the documentation "
        "inside Python)",
        first=True,
    )
    mixture: str | None = with_default(DataSettings, "mixture", None)
    max_seq_len: int = with_default(DataSettings, "max_seq_len", 512)
    pack: bool = switch(True, help="conversations share rows; 0: one padded conversation per row, as in MiniMind")
    skip_bad_lines: bool = switch(False, help="skip and count faulty lines instead of stopping at the first")
    cache_dir: str | None = with_default(DocumentSettings, "cache_dir", None)
    deduplicate: str = with_default(DocumentSettings, "deduplicate", OFF)


@dataclass(kw_only=True)
class SftSettings(ConversationSettings, PretrainSettings):
    """All settings of train_sft.py."""

    prog: ClassVar[str] = "train_sft.py"
    description: ClassVar[str] = (
        "Fine-tune a MiniMind on conversations. For less than 42 MB of data other defaults apply, see docs/sft.md."
    )
    save_weight: str = with_default(PretrainSettings, "save_weight", "full_sft")
    wandb_project: str = with_default(PretrainSettings, "wandb_project", "MiniMind-Full-SFT")
    from_weight: str = with_default(PretrainSettings, "from_weight", "pretrain")
    # defaults of MiniMind's train_full_sft.py
    batch_size: int = with_default(PretrainSettings, "batch_size", 16)
    accumulation_steps: int = with_default(PretrainSettings, "accumulation_steps", 1)
    learning_rate: float = with_default(PretrainSettings, "learning_rate", 1e-5)
    epochs: int = with_default(PretrainSettings, "epochs", 2)
    # A plan's rates are for fresh weights.
    fixed_in_plans: ClassVar[frozenset[str]] = frozenset({"learning_rate", "muon_lr", "embed_lr", "weight_decay"})
    # Flags of pretraining that have fixed values for conversations
    text_field: ClassVar[str] = CONVERSATION  # type: ignore[misc]  # a setting there, the same for all objects here
    long_documents: ClassVar[str] = "truncate"  # type: ignore[misc]
    parse_special_tokens: ClassVar[bool | None] = None  # type: ignore[misc]
    text_suffixes: ClassVar[list[str] | None] = None  # type: ignore[misc]
    split_text: ClassVar[str | None] = None  # type: ignore[misc]

    def weight(self) -> Path | None:
        """As in pretraining; if no flag says which model, the newest pretrained weights."""
        weight = super().weight()
        is_named = (
            self.user_set & {"from_weight", "hidden_size", "use_moe"} or self.from_weight != SftSettings.from_weight
        )
        if weight is None or is_named:
            return weight
        out = Path(self.out_dir)
        if self.from_resume:
            # What the newest run started from: newer pretrained weights may have come since.
            runs = out.glob(f"{self.save_weight}_*_resume")
            if run := max(runs, key=lambda run: run.stat().st_mtime, default=None):
                suffix = run.name.removeprefix(self.save_weight).removesuffix("_resume")
                return out / f"{self.from_weight}{suffix}.pth"
        return newest_weight(out, f"{self.from_weight}_") or weight

    @classmethod
    def groups(cls) -> tuple[type[Settings], ...]:
        """Those of pretraining, with conversations in place of documents."""
        return tuple(ConversationSettings if group is DataSettings else group for group in PretrainSettings.groups())

"""The parser of each script, and the settings of inspect_data.py, which has flags of the trainer. Nothing here needs torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from common.flags import Parser, not_negative, seed
from common.settings import Settings, SettingsParser, setting, switch
from common.start import ROOT
from scripts import arguments
from trainer.pretrain.settings import DataSettings, ValidationDataSettings


@dataclass(kw_only=True)
class LookSettings(Settings):
    """what to look at"""

    row: list[int] = setting(
        [], check=not_negative(int), several=True, metavar="N", help="show rows N of the first epoch", first=True
    )
    texts: bool = switch(True, help="read all texts, for near copies and odd documents; 0: only count")
    examples: int = setting(3, check=not_negative(int), help="examples per kind of finding")
    tokenizer_path: str = setting(str(ROOT / "model"), help="folder of a Hugging Face tokenizer")
    seed: int = setting(42, check=seed, help="seed of the run whose rows are shown")


@dataclass(kw_only=True)
class InspectSettings(ValidationDataSettings, DataSettings, LookSettings):
    """All settings of inspect_data.py; --help shows the groups from the last to the first."""

    prog: ClassVar[str] = "inspect_data.py"
    description: ClassVar[str] = "Look at the data before training on it, with the data flags of that training."


# {script: its flags}
PARSERS: dict[str, Callable[[], Parser]] = {
    "generate": arguments.generate_parser,
    "play": arguments.play_parser,
    "evaluate": arguments.evaluate_parser,
    "export_hf": arguments.export_parser,
    "export_gguf": arguments.export_gguf_parser,
    "report": arguments.report_parser,
    "inspect_data": partial(SettingsParser, InspectSettings),
}

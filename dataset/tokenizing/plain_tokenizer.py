"""A tokenizer of our own kind without transformers, whose import takes half as long as that of torch."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from common.files import atomic_folder, read_object, sync_folder, temporary_beside
from dataset.tokenizing.tokenizer_files import CONFIG, NO_TEMPLATE, load_by_transformers, portable_template

# in the order of transformers
STANDARD_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# Other fields of a config; what they say is in tokenizer.json too, or does nothing to a byte-level BPE.
OTHER_FIELDS = {
    *("tokenizer_class", "chat_template", "model_max_length", "model_input_names", "added_tokens_decoder"),
    *("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "legacy"),
    *("spaces_between_special_tokens", "sp_model_kwargs", "additional_special_tokens"),
}
# Files from which transformers may make another tokenizer
OTHER_FILES = ("config.json", "added_tokens.json", "special_tokens_map.json", "chat_template.*", "additional_chat_*")


def plain_tokenizer(folder: Path) -> "PlainTokenizer | None":
    """The tokenizer in a folder; None if only transformers can tell how it acts."""
    if any(True for name in OTHER_FILES for _ in folder.glob(name)):
        return None
    # Of what is missing or odd, transformers tells.
    with contextlib.suppress(Exception):
        files = {name: (folder / name).read_bytes() for name in (CONFIG, "tokenizer.json")}
        fields: dict[str, Any] = read_object(folder / CONFIG)
        if is_plain(fields, json.loads(files["tokenizer.json"])):
            return PlainTokenizer(folder, fields, files)
    return None


def is_plain(fields: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    """True for a byte-level BPE with all special tokens in its tokenizer.json. fields: of its config. spec: that file."""
    extra = fields.get("additional_special_tokens") or []
    declared = fields.get("added_tokens_decoder") or {str(token["id"]): token for token in spec["added_tokens"]}
    special = [token["content"] for token in spec["added_tokens"] if token["special"]]
    return (
        fields.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
        and fields.keys() <= OTHER_FIELDS | named_tokens(fields).keys()
        and isinstance(fields.get("chat_template", ""), str)
        and all(token in special for token in (*named_tokens(fields).values(), *extra))
        and [{**token, "id": int(i)} for i, token in declared.items()] == spec["added_tokens"]
        and (spec["model"]["type"], (spec["decoder"] or {}).get("type")) == ("BPE", "ByteLevel")
        and not (spec["truncation"] or spec["padding"])
    )


def named_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """{name: special token} of a config, in the order of transformers."""
    names = [name for name, value in fields.items() if name.endswith("_token") and isinstance(value, str)]
    return {name: fields[name] for name in sorted(names, key=lambda name: (*STANDARD_TOKENS, name).index(name))}


class PlainTokenizer:
    """A byte-level BPE with the ids, texts, tokens and attribute names of a PreTrainedTokenizerFast.

    What is not here, such as calls and `save_pretrained`, transformers' own tokenizer does, loaded when it is asked for.
    """

    def __init__(self, folder: Path, fields: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """fields: of the config. files: {name: content}."""
        self._whole: Any = None
        self._files = files
        self.name_or_path = str(folder)
        self.chat_template: Any = portable_template(fields.get("chat_template"))
        self.backend_tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        # as transformers does
        if self.backend_tokenizer.post_processor is None:
            self.backend_tokenizer.post_processor = NO_TEMPLATE
        named = named_tokens(fields)
        for name in STANDARD_TOKENS:
            setattr(self, name, named.get(name))
            setattr(self, f"{name}_id", self.backend_tokenizer.token_to_id(named[name]) if name in named else None)
        extra = fields.get("additional_special_tokens") or []
        self.all_special_tokens = list(dict.fromkeys([*named.values(), *extra]))

    def copy_to(self, folder: Path) -> None:
        """Write the files that it was read from to a new folder, which appears complete or not at all. Errors: OSError."""
        with atomic_folder(folder, temporary_beside(folder)) as temporary:
            temporary.mkdir()
            for name, content in self._files.items():
                (temporary / name).write_bytes(content)
        sync_folder(folder.parent)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """The text of one sequence. options: of transformers, without effect on a byte-level BPE."""
        return self.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self._of_transformers()(*texts, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        # Transformers' own keeps tokens, ids and lists of them in step.
        assert name not in STANDARD_TOKENS or name not in self.__dict__, "change that of load_by_transformers"
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # asked for by copy and pickle, before there are any attributes
            raise AttributeError(name)
        return getattr(self._of_transformers(), name)

    def _of_transformers(self) -> Any:
        if self._whole is None:
            self._whole = load_by_transformers(Path(self.name_or_path))
            # One backend for both: what somebody changed, or changes, is what is saved.
            self._whole.backend_tokenizer.post_processor = self.backend_tokenizer.post_processor
            self.backend_tokenizer = self._whole.backend_tokenizer
        self._whole.chat_template = self.chat_template
        return self._whole

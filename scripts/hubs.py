"""Uploads an export to a hub of models, for `export_hf.py --push_to_hub`. The hub's package finds the user's token."""

from collections.abc import Callable
from pathlib import Path

from common.errors import UserError, library_errors, optional_package

# Uploads a folder; returns the address of its page.
Upload = Callable[[Path], str]
LOGIN = {"huggingface": "`hf auth login`, or HF_TOKEN", "modelscope": "`modelscope login`, or MODELSCOPE_API_TOKEN"}


def open_repository(hub: str, name: str, is_public: bool) -> Upload:
    """Make a repository of models, or find it. Errors: UserError with the hub's reason."""
    what = f"--push_to_hub {name}: {hub}"
    with library_errors(f"{what} gives no such repository; it wants your token: {LOGIN[hub]}"):
        upload, shows_it = (modelscope if hub == "modelscope" else huggingface)(name, is_public)
    # A hub does not change who sees a repository that is there.
    if shows_it != is_public:
        seen_by, mend = ("everybody", "add") if shows_it else ("its owner alone", "leave out")
        raise UserError(f"{what} shows this repository to {seen_by}: choose another, or {mend} --public")

    def upload_or_say(folder: Path) -> str:
        with library_errors(f"{what} has not taken {folder}, which stays on this machine"):
            return upload(folder)

    return upload_or_say


def huggingface(name: str, is_public: bool) -> tuple[Upload, bool]:
    """(its upload, whether everybody sees it)"""
    # A slow import
    from huggingface_hub import HfApi

    api = HfApi()
    address = api.create_repo(name, private=not is_public, exist_ok=True)

    def upload(folder: Path) -> str:
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Export of MiniMind pretraining")
        return address

    return upload, not api.model_info(address.repo_id).private


def modelscope(name: str, is_public: bool) -> tuple[Upload, bool]:
    """(its upload, whether everybody sees it)"""
    api = optional_package("modelscope.hub.api", "for --hub modelscope").HubApi()
    api.create_repo(name, visibility="public" if is_public else "private", exist_ok=True)

    def upload(folder: Path) -> str:
        # Its cache would be a file in the folder.
        api.upload_folder(repo_id=name, folder_path=folder, use_cache=False)
        return f"{api.endpoint}/models/{name}"

    # 1: its owner, 3: an organisation, 5: everybody
    return upload, api.get_repo(name, "model").visibility == 5

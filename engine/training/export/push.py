"""Uploads of an exported folder to the Hugging Face hub: one file after the other, then one commit
with all of them. So the repository never shows an incomplete model, and a push that was cancelled
or cut off continues quickly: the hub keeps the files that it has.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import safe_files
from engine.errors import RunError, first_line
from engine.model.lora.peft_folder import CONFIG as ADAPTER_CONFIG
from engine.progress import Progress, no_progress
from engine.training.export.gguf_known import GGUF_SUFFIX

NO_LOGIN = (
    "There is no login of the Hugging Face hub on this machine: run `hf auth login` in a terminal "
    "or set HF_TOKEN, then push again."
)


def push(
    folder: str | os.PathLike[str],
    repository: str,
    private: bool = True,
    progress: Progress = no_progress,
) -> str:
    """Uploads the model in `folder` to `repository` (``name`` or ``owner/name``), and returns its
    address. The repository is made if it is missing, and `private` then.

    `progress` is called with bytes before each file; an exception from it ends the push, and the
    repository shows nothing of it. Raises RunError for a folder without a model, without a login,
    and for whatever the hub refuses.
    """
    files = _files_of(Path(folder).expanduser())
    # These imports take long, and the app is served before.
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import get_token

    if not get_token():
        raise RunError(NO_LOGIN)
    api = HfApi()
    total = sum(file.stat().st_size for file in files)
    done = 0
    progress(0, total, "Asking the hub")
    with _refusals(repository):
        made = api.create_repo(repository, private=private, exist_ok=True)
    additions = []
    for file in files:
        progress(done, total, f"Uploading {file.name}")
        with _refusals(repository):
            addition = CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=str(file))
            api.preupload_lfs_files(made.repo_id, additions=[addition], free_memory=False)
        additions.append(addition)
        done += file.stat().st_size
    progress(done, total, "Making the commit")
    with _refusals(repository):
        api.create_commit(made.repo_id, additions, commit_message="Trained with Ramstream")
    return str(made)


def _files_of(folder: Path) -> list[Path]:
    """Returns the files of an exported model. Raises RunError if the folder has none, and where it
    has a link or a pipe: a file that somebody else linked there must not reach the hub.
    """
    try:
        found = safe_files.entries(folder, folder)
        safe_files.refuse_other_than_files(folder, folder)
    except FileNotFoundError:
        found = {}
    except OSError as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{folder} cannot be read ({error.strerror}).") from None
    files = sorted(
        folder / name
        for name, status in found.items()
        if stat.S_ISREG(status.st_mode) and not name.startswith(".")
    )
    names = {file.name for file in files}
    has_settings = "config.json" in names or ADAPTER_CONFIG in names
    is_model = has_settings and any(name.endswith(".safetensors") for name in names)
    if not is_model and not any(name.endswith(GGUF_SUFFIX) for name in names):
        raise RunError(
            f"{folder} holds no exported model (config.json and .safetensors, or a .gguf file); "
            "export one first."
        )
    return files


@contextmanager
def _refusals(repository: str) -> Iterator[None]:
    """Turns the errors of the hub and of the connection into one sentence."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise RunError(
            f"{repository!r} is no name for a repository ({first_line(error)}); give NAME or "
            "OWNER/NAME."
        ) from None
    except Exception as error:  # noqa: BLE001  connections fail with errors of several libraries
        # The error of an upload may come as the cause of another one.
        if isinstance(error, HfHubHTTPError) or isinstance(error.__cause__, HfHubHTTPError):
            raise RunError(
                f"The hub refuses the push to {repository} ({first_line(error)}); check that the "
                "login may write there (`hf auth whoami`) and that it has room."
            ) from None
        raise RunError(
            f"The push to {repository} was cut off ({first_line(error)}); push again, and what the "
            "hub has is not sent twice."
        ) from None

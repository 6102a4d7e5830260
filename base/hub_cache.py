"""Models by their name on the Hugging Face hub: the folder in huggingface_hub's cache, which is
downloaded if it is not there and there is a network. No torch is imported here."""

import shutil
from pathlib import Path

from base.rules import UserError

# what a model needs; nothing that would have to be run
PATTERNS = [
    "*.safetensors",
    "*.json",
    "merges.txt",
    "chat_template.jinja",
]


def model_folder(name: str) -> Path:
    """The folder of OWNER/NAME. Raises UserError with what to do, if it cannot be had."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # with its patterns, or the files that nobody fetches would be missed
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=PATTERNS, local_files_only=True
        )
        if any(Path(folder).glob("*.safetensors")):
            return Path(folder)
    except HFValidationError:
        raise UserError(f"hub:{name}: write hub:OWNER/NAME") from None
    except LocalEntryNotFoundError:
        pass
    try:
        about = huggingface_hub.HfApi().model_info(name, files_metadata=True)
    except Exception as error:  # of the network, of the hub, of an access that is not granted
        raise UserError(
            f"hub:{name}: not in the cache, and cannot be fetched ({type(error).__name__}); where there is a network, "
            f"`hf download {name} --local-dir FOLDER`, and name FOLDER here"
        ) from None
    files = huggingface_hub.utils.filter_repo_objects(
        about.siblings, allow_patterns=PATTERNS, key=lambda file: file.rfilename
    )
    size = sum(file.size or 0 for file in files)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if size > free:
        raise UserError(
            f"hub:{name}: has {size / 1e9:.2f} GB, and {cache} has room for {free / 1e9:.2f}; "
            "HF_HOME names another place"
        )
    print(f"hub:{name}: revision {about.sha}, {size / 1e6:,.0f} MB", flush=True)
    try:
        # by its branch: under a sha the cache would note no refs/main, by which it is found again
        folder = huggingface_hub.snapshot_download(name, allow_patterns=PATTERNS)
    except Exception as error:
        raise UserError(f"hub:{name}: the download failed ({error}); start it again") from None
    return Path(folder)

"""Models by their name on the Hugging Face hub: the folder in huggingface_hub's cache, which is
downloaded if it is not there and there is a network. No torch is imported here."""

from pathlib import Path

from base.rules import UserError

# what a model needs; nothing that would have to be run
PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "merges.txt",
    "chat_template.jinja",
]


def model_folder(name: str) -> Path:
    """The folder of OWNER/NAME. Raises UserError with what to do, if it cannot be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if any(folder.glob("*.safetensors")):
            return folder
    except HFValidationError:
        raise UserError(f"hub:{name}: write hub:OWNER/NAME") from None
    except LocalEntryNotFoundError:
        pass
    try:
        folder = Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # of the network, of the hub, of an access that is not granted
        raise UserError(
            f"hub:{name}: not in the cache, and cannot be fetched ({type(error).__name__}); where "
            f"there is a network, `hf download {name} --local-dir FOLDER`, and name FOLDER here"
        ) from None
    print(f"hub:{name}: revision {folder.name}", flush=True)
    return folder

"""Writes a checkpoint as safetensors, to share it or to use it elsewhere. Loading it runs no code.

    python export.py --checkpoint=out/best.pt --safetensors=export

The folder export/ gets model.safetensors and config.json. Every script that loads a checkpoint also
loads such a folder: `train.py --init_from=export`, `sample.py --checkpoint=export`.
"""

import configurator
from configurator import UserError, key

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from runs.checkpoint import import_safetensors, load
from runs.files import claim, write_whole


@dataclass
class ExportConfig:
    checkpoint: str = key("out/best.pt", "a checkpoint, or an out_dir (its ckpt.pt)")
    safetensors: str = key("export", "folder for model.safetensors and config.json", is_path=True)
    overwrite: bool = key(False, "true: write into a folder that holds other files, and replace these two")


def main(argv: list[str]) -> None:
    config = configurator.load(ExportConfig, argv, positional=None, program="export.py", description=__doc__)
    export(config.checkpoint, config.safetensors, config.overwrite)
    print(f"written to {config.safetensors}/: model.safetensors, config.json")


def export(path: Path | str, folder: Path | str, overwrite: bool = False) -> None:
    """Writes folder/model.safetensors, the weights, and folder/config.json, the model's keys. Raises UserError."""
    to_bytes, folder, checkpoint = import_safetensors().save, Path(folder), load(path)
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint["model"].items()}
    about = {name: checkpoint[name] for name in ("model_args", "iter_num", "data") if name in checkpoint}
    weights = to_bytes(tensors, metadata={"format": "pt"})
    text = json.dumps(about | {"sha256": hashlib.sha256(weights).hexdigest()}, indent=2)
    claim(folder, "export", overwrite)
    try:
        write_whole(folder / "model.safetensors", lambda file: file.write(weights))
        write_whole(folder / "config.json", lambda file: file.write(text.encode()))
    except OSError as error:
        raise UserError(f"safetensors={str(folder)!r}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    configurator.run(main)

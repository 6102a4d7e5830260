"""A checkpoint as safetensors, for other programs and for sharing: weights that no code runs from.

    python export.py --checkpoint=out/best.pt --safetensors=export          model.safetensors and config.json

What loads a checkpoint loads the folder, too: `train.py --init_from=export`, `sample.py --checkpoint=export`.
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
    checkpoint: str = key("out/best.pt", "the checkpoint, or the out_dir that holds ckpt.pt")
    safetensors: str = key("export", "folder for model.safetensors and config.json", is_path=True)
    overwrite: bool = key(False, "true: the folder may hold something else; files of those names are replaced")


def main(argv):
    config = configurator.load(ExportConfig, argv, positional=None, program="export.py", description=__doc__)
    export(config.checkpoint, config.safetensors, config.overwrite)
    print(f"written to {config.safetensors}/: model.safetensors, config.json")


def export(path, folder, overwrite=False):
    """The weights as `folder`/model.safetensors, and as config.json what it takes to build their model."""
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

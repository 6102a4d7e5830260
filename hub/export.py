"""Writes a checkpoint as safetensors, to share it or to use it elsewhere. Loading it runs no code.

    python hub/export.py --checkpoint=out/best.pt --safetensors=export
    python hub/export.py --from_hf=Qwen3-0.6B --out_dir=out/qwen3              a model of a hub
    python hub/export.py --from_hf=nanoGPT/out/ckpt.pt --out_dir=out/nanogpt   or of nanoGPT
    python hub/export.py --checkpoint=out/best.pt --to_hf=exported --family=llama

The folder export/ gets model.safetensors and config.json. Every script that loads a checkpoint also
loads such a folder: `train.py --init_from=export`, `sample.py --checkpoint=export`. transformers
loads exported/. docs/checkpoints.md lists which models can be read and written.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from base import configurator
from base.configurator import UserError, key
from base.files import find_checkpoint


@dataclass
class ExportConfig:
    checkpoint: str = key(
        "out/best.pt", "a checkpoint, or an out_dir (its ckpt.pt)", find=find_checkpoint
    )
    safetensors: str = key("export", "folder for model.safetensors and config.json")
    to_hf: str | None = key(
        None, "folder for the checkpoint as a model of transformers, if one has its keys"
    )
    family: str | None = key(None, "to_hf: the family there, llama, qwen3 or qwen3_5_text")
    from_hf: str | None = key(
        None,
        "a folder of transformers, a GGUF file or nanoGPT's ckpt.pt, to be written to out_dir",
        find=find_checkpoint,
    )
    out_dir: str = key("out/imported", "from_hf: folder for the checkpoint")
    block_size: int = key(
        2048, "from_hf: the longest context to keep; a longer one takes more memory", at_least=1
    )
    overwrite: bool = key(
        False, "true: write into a folder that holds other files, and replace those of these names"
    )


configurator.begin(__name__, ExportConfig, positional=None)

from hub.export_hf import write_folder
from hub.huggingface import checkpoint_of, export_to
from runs.checkpoint import load


def main(argv: list[str]) -> None:
    config = configurator.load(ExportConfig, argv, positional=None)
    if config.from_hf is not None and config.to_hf is not None:
        raise UserError("from_hf, to_hf: give one of them, not both")
    if config.to_hf is not None:
        print(write_folder(config.checkpoint, config.to_hf, config.family, config.overwrite))
        return
    if config.from_hf is not None:
        folder = config.out_dir
        file = find_checkpoint(config.from_hf)
        checkpoint = checkpoint_of(file, config.block_size)
    else:
        folder = config.safetensors
        file = find_checkpoint(config.checkpoint)
        checkpoint = load(file)
    kept = ("model_args", "iter_num", "data", "dtype")
    about = {name: checkpoint[name] for name in kept if name in checkpoint}
    data = checkpoint.get("data", {})
    names = export_to(folder, checkpoint["model"], about, file, data, config.overwrite)
    print(f"written to {folder}/: {names}")


if __name__ == "__main__":
    configurator.run(main)

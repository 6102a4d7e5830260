"""Models in the folders of transformers: read as a checkpoint of ours, and written from one. Nothing in them is run.

    read_folder("Qwen3-0.6B", "out/qwen3")          config.json, *.safetensors, tokenizer.json -> a checkpoint
    write_folder("out/qwen3", "exported")           the other way, for what a class of transformers can hold

Both ways go through the tables of runs/families.py. A tensor is in memory only while it is copied.
"""

import configurator
from configurator import UserError, show

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import MOST_TOKENIZER, TOKENIZER_FILE, FileTokenizer, name_of_file
from model import GPT, GPTConfig
from runs.checkpoint import SAFETENSORS_DTYPES, file_of, import_safetensors, load, save_safetensors
from runs.families import Part, config_of, family_of, keys_of, parts_of
from runs.files import claim, new_folder, read_json, switch, write_whole, wrong_field
from runs.notes import unused_keys

TOKENIZER_FILES = (
    TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
# tensors of a folder that hold nothing of the text model: parts for images, extra layers that predict further tokens
LEFT_OUT = ("model.visual.", "visual.", "mtp.", "model.mtp.")
BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # angles; GPT-2's causal masks, no biases


# ----------------------------------------------------------------------------------------------------------------------
# Reading a folder


class Folder:
    """The tensors of a folder's safetensors files. At first only their headers are read.

    prefix: what names of the family's tensors begin with; a folder may leave it out.
    """

    def __init__(self, folder: Path, prefix: str):
        self._open = import_safetensors().safe_open
        self.files: dict[str, tuple[Path, str]] = {}  # our spelling of a tensor's name: its file, its name there
        self.shapes: dict[str, torch.Tensor] = {}  # tensors without memory
        self.left_out: list[str] = []
        dtypes = {word: dtype for dtype, word in SAFETENSORS_DTYPES.items()}
        for file, names in self._shards(folder).items():
            with self._reading(file) as tensors:
                there = list(tensors.keys())
                if lacking := sorted(set(names or ()) - set(there)):
                    raise UserError(f"{file}: lacks {some(lacking)}, which the index says it has")
                for name in there:
                    if name.startswith(LEFT_OUT) or name.endswith(BUFFERS):
                        self.left_out.append(name)
                        continue
                    header = tensors.get_slice(name)
                    if header.get_dtype() not in dtypes:
                        raise UserError(f"{file}: {show(name)} is {header.get_dtype()}, not one of {', '.join(dtypes)}")
                    own = name.replace("model.language_model.", "model.", 1)
                    own = own if own.startswith((prefix, "lm_head.")) else prefix + own
                    if own in self.files:
                        first, spelling = self.files[own]
                        places = f"{show(spelling)} in {first.name} and {show(name)} in {file.name}"
                        raise UserError(f"{folder}: holds {show(own)} twice, as {places}")
                    self.files[own] = file, name
                    dtype = dtypes[header.get_dtype()]
                    self.shapes[own] = torch.empty(header.get_shape(), dtype=dtype, device="meta")

    def _shards(self, folder):
        """{file: the names that the index gives it, or None without an index}. Raises UserError."""
        if os.path.isfile(folder / "model.safetensors"):  # before the index, as transformers reads it
            return {inside(folder, "model.safetensors"): None}
        index = inside(folder, "model.safetensors.index.json")
        if not os.path.isfile(index):
            if any(folder.glob("*.bin")):
                raise UserError(f"{folder}: its weights are a pickle, which can run code; take its safetensors files")
            raise UserError(f"{folder}: has no model.safetensors")
        table = read_json(index)
        if wrong := wrong_field(table, {"weight_map": (dict, 1, 1 << 20)}):
            raise UserError(f"{index}: {wrong}")
        shards: dict[Path, list[str]] = {}
        for name, file in table["weight_map"].items():
            if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
                raise UserError(f"{index}: names {show(file)}, which is no .safetensors file of the folder itself")
            shards.setdefault(inside(folder, file), []).append(name)
        return shards

    @contextlib.contextmanager
    def _reading(self, file):
        if not os.path.isfile(file):
            raise UserError(f"{file}: is missing")
        try:
            with self._open(file, framework="pt") as tensors:
                yield tensors
        except UserError:
            raise
        except Exception as error:  # safetensors has errors of its own
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"{file}: damaged, or no safetensors ({reason})") from None

    def read(self, name: str) -> torch.Tensor:
        # the file is opened anew for each tensor: what was read through one opening stays in memory until it is closed
        file, spelling = self.files[name]
        with self._reading(file) as tensors:
            return tensors.get_tensor(spelling)


def some(names) -> str:
    names = list(names)
    return ", ".join(names[:3])[:200] + f" and {len(names) - 3} more" * (len(names) > 3)


def read_folder(folder: Path | str, out_dir: Path | str, block_size: int, overwrite: bool = False) -> list[str]:
    """Writes the model in a folder of transformers to out_dir, as a checkpoint. Returns lines to print.

    block_size: the most tokens of context that are kept of what the model was trained with. Raises UserError.
    """
    folder, out_dir = Path(folder), Path(out_dir)
    if not os.path.isdir(folder):
        raise UserError(f"from_hf={show(str(folder))}: no such folder")
    their_config = read_json(inside(folder, "config.json"))
    if not isinstance(their_config, dict) or "model_type" not in their_config:
        raise UserError(f"{folder}: its config.json names no model_type, so it is no folder of transformers")
    text_config = their_config.get("text_config")
    if isinstance(text_config, dict):  # a model of images and text: the text model has a config of its own
        their_config |= {"model_type": f"{their_config['model_type']}_text"} | text_config
    their_config = {name: value for name, value in their_config.items() if value is not None}
    try:
        family = family_of(their_config)  # before the tensors: the reason for a pickle of Qwen2 is Qwen2
        tensors = Folder(folder, "transformer." if family == "gpt2" else "model.")
        their_config.setdefault("tie_word_embeddings", family == "gpt2")
        config = configurator.build(GPTConfig, keys_of(their_config, block_size))
        parts = list(parts_of(config, family))
        layout = layout_of(config, parts, tensors)
        if config.tie_embeddings and "lm_head.weight" in tensors.files:  # a tied output layer, saved a second time
            (embedding,) = parts[0].theirs
            if not torch.equal(*(tensors.read(name).float() for name in ("lm_head.weight", embedding))):
                raise UserError(f"its lm_head.weight is not {embedding}, though its config.json ties them")
    except UserError as error:
        where = "" if str(folder) in str(error) else f"{folder}: "
        raise UserError(f"{where}{error}") from None

    about: dict[str, Any] = {"model_args": dataclasses.asdict(config), "iter_num": 0}
    if os.path.isfile(folder / TOKENIZER_FILE):
        tokenizer = FileTokenizer(inside(folder, TOKENIZER_FILE))
        about["data"] = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    parts.sort(key=lambda part: -layout[part.ours[0]].itemsize)  # safetensors wants wide numbers first
    order = {name: layout[name] for part in parts for name in part.ours}
    with export_to(out_dir, folder, overwrite, {}) as (new, written):
        about["sha256"] = save_safetensors(new / "model.safetensors", order, _translated(parts, tensors, layout))
        write_json(new / "config.json", about)
    lines = [f"written to {out_dir}/: {', '.join(written)}"]
    if tensors.left_out:
        lines.append(f"left out: {some(tensors.left_out)}")
    longest = their_config["n_positions" if family == "gpt2" else "max_position_embeddings"]
    if config.block_size < longest:
        lines.append(f"block_size={config.block_size}, of {longest} that it was made for; --block_size=... keeps more")
    if TOKENIZER_FILE not in written:
        lines.append(f"note: {folder} has no tokenizer.json, so sample.py cannot turn text into its ids")
    return lines


def layout_of(config: GPTConfig, parts: list[Part], tensors: Folder) -> dict[str, torch.Tensor]:
    """{name: our tensor without memory}. UserError names tensors that are missing, unknown, or of another shape."""
    wanted = [name for part in parts for name in part.theirs]
    if missing := [name for name in wanted if name not in tensors.shapes]:
        raise UserError(f"lacks {some(missing)}, which its config.json asks for")
    unknown = tensors.shapes.keys() - set(wanted)
    if unknown := sorted(unknown - {"lm_head.weight"}):
        raise UserError(f"holds {some(unknown)}, which the model here has no place for")
    try:
        with torch.device("meta"):
            expected = GPT(config).state_dict()
    except (RuntimeError, TypeError, OverflowError):
        raise UserError("its config.json asks for tensors that are too large") from None
    layout = {}
    for part in parts:
        theirs = [tensors.shapes[name] for name in part.theirs]
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in theirs])
        try:
            made = part.to_ours([tensor.to(dtype) for tensor in theirs])
            is_right = all(a.shape == expected[name].shape for a, name in zip(made, part.ours, strict=True))
        except (RuntimeError, ValueError, IndexError):
            is_right = False
        if not is_right:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in theirs)
            raise UserError(f"{some(part.theirs)}: {shapes} is not the shape that its config.json gives")
        layout |= dict(zip(part.ours, made, strict=True))
    return layout


def _translated(parts, tensors, layout):
    """Yields our tensors one after the other."""
    for part in parts:
        theirs = [tensors.read(name) for name in part.theirs]
        for name, tensor in zip(part.ours, part.to_ours(theirs), strict=True):
            yield tensor.to(layout[name].dtype)


def inside(folder: Path, name: str) -> Path:
    """folder/name. UserError if it is a link out of the folder: a stranger's folder could so have any file copied.

    The cache of a hub keeps the files of snapshots/REVISION in blobs/.
    """
    home, real = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    is_blob = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not is_blob and not real.is_relative_to(home):
        raise UserError(f"{folder / name}: is a link to {real}, out of its folder; put the file itself there")
    return folder / name


@contextlib.contextmanager
def export_to(folder: Path, path: Path | str, overwrite: bool, data: dict) -> Iterator[tuple[Path, list[str]]]:
    """Yields a folder for model.safetensors and config.json, and the names of all files that are written.

    At the end they are in `folder`, all at one moment, with the tokenizer's files, which are copied.

    path: where the model comes from; data: what a checkpoint keeps of its data set, whose folder has the tokenizer.json
    of a run that was trained here. Raises UserError.
    """
    file = file_of(path)
    if os.path.realpath(folder) in (os.path.realpath(file.parent), os.path.dirname(os.path.realpath(file))):
        raise UserError(f"{folder}: holds the model that is to be written; name another folder")
    contents = {
        name: configurator.read_regular(inside(file.parent, name), MOST_TOKENIZER)
        for name in TOKENIZER_FILES
        if os.path.isfile(file.parent / name)
    }
    own = Path(data.get("path") or ".") / TOKENIZER_FILE
    if TOKENIZER_FILE not in contents and os.path.isfile(own):
        content = configurator.read_regular(own, MOST_TOKENIZER)
        contents |= {TOKENIZER_FILE: content} if name_of_file(content) == data.get("tokenizer") else {}
    is_older_export = claim(folder, "export", overwrite)
    written = ["model.safetensors", "config.json", *contents]
    with new_folder(folder) as new:
        for name, content in contents.items():
            write_whole(new / name, lambda file, content=content: file.write(content))
        yield new, written
        # config.json comes last, since nobody reads a folder without it; an older export's tokenizer must not stay
        switch(folder, [*(TOKENIZER_FILES if is_older_export else contents), "model.safetensors", "config.json"])


def write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2, allow_nan=False)  # load has refused what is no JSON
    write_whole(path, lambda file: file.write(text.encode()))


# ----------------------------------------------------------------------------------------------------------------------
# Writing a folder


def write_folder(path: Path | str, folder: Path | str, overwrite: bool = False) -> list[str]:
    """Writes a checkpoint of ours as a folder of transformers. Returns lines to print.

    Raises UserError, with the key that stands in the way, for a model that no class of transformers here can hold.
    """
    checkpoint, folder = load(path), Path(folder)
    config = configurator.build(GPTConfig, checkpoint["model_args"] | {"kernels": "auto"}, source=str(path))
    weights = checkpoint["model"]
    if config.gate_activation == "sigmoid2":  # y * 2s(g): the 2 goes to the weight behind the gate, which is exact
        config = dataclasses.replace(config, gate_activation="sigmoid")
        doubled = [i for i, (_, gate) in enumerate(config.layers()) if "readout" in gate.positions]
        doubled = [name for i in doubled if (name := f"blocks.{i}.mixer.out_proj.weight") in weights]
        weights = weights | {name: 2 * weights[name] for name in doubled}
    hidden = {len(tensor) for name, tensor in weights.items() if name.endswith("mlp.up.weight") and tensor.dim() == 2}
    if len(hidden) != 1:
        raise UserError(f"{path}: its MLPs have {len(hidden)} widths; in transformers all layers have one")
    try:
        if "wte.weight" not in weights:
            raise UserError("its weights are not those of its config")
        about = config_of(config, hidden.pop(), weights["wte.weight"].dtype)
        back = configurator.build(GPTConfig, keys_of(about, config.block_size))
        _check_same(config, back)
        parts = list(parts_of(back, about["model_type"]))
        with torch.device("meta"):
            expected = {name: tensor.shape for name, tensor in GPT(back).state_dict().items()}
        if expected != {name: tensor.shape for name, tensor in weights.items()}:
            raise UserError("its weights are not those of its config")
    except UserError as error:
        raise UserError(f"{path}: cannot be written for transformers: {error}") from None

    theirs = {}
    for part in parts:
        made = part.to_theirs([weights[name] for name in part.ours])
        theirs |= dict(zip(part.theirs, made, strict=True))
    order = dict(sorted(theirs.items(), key=lambda item: -item[1].itemsize))
    with export_to(folder, path, overwrite, checkpoint.get("data", {})) as (new, written):
        save_safetensors(new / "model.safetensors", order, order.values())
        write_json(new / "config.json", about)
    return [f"written to {folder}/ for transformers: {', '.join(written)}"]


# keys that say how a model is made or trained; the shapes of the weights say the rest
NOT_IN_A_FOLDER = (
    "init", "out_init_scale", "dropout", "kernels", "match_params", "mlp_ratio", "mlp_width", "attention", "gate",
)  # fmt: skip


def _check_same(config, back):
    """UserError for the first key that their config.json did not bring back."""
    if config.layers() != back.layers():
        raise UserError(
            f"attention={config.attention!r}, gate={config.gate!r}: there, softmax layers have no gate, or "
            "(not in GPT-2) all have an elementwise one and may stand beside gated_deltanet with its native gate"
        )
    # None stands for a number that follows from others
    names = "delta_key_heads", "delta_heads", "delta_key_dim", "delta_value_dim"
    follows = {"n_kv_head": config.n_head} | dict(zip(names, config.delta_sizes, strict=True))
    unused = unused_keys(config)
    for field in dataclasses.fields(GPTConfig):
        ours, theirs = getattr(config, field.name), getattr(back, field.name)
        ours = follows.get(field.name) if ours is None else ours
        if ours != theirs and field.name not in (*unused, *NOT_IN_A_FOLDER):
            raise UserError(f"{field.name}={ours!r}: there it can only be {theirs!r}")

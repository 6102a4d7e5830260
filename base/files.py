"""Files: written whole or not at all, read with every field checked; folders with a kind, and one
writer at a time."""

import contextlib
import difflib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from base.hub_cache import model_folder
from base.rules import UserError, show, wrong_field

try:
    import fcntl
except ImportError:  # every script imports this file before anything that only Linux and macOS have
    sys.exit("error: nanogate needs Linux or macOS; on Windows use WSL")

DATA = Path(__file__).resolve().parents[1] / "data"
# of a run; of export.py or a hub; of a hub with several files, or with a pickle, which is refused
# with a reason
CHECKPOINTS = ("ckpt.pt", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")

# -- What is read ----------------------------------------------------------------------------------


def is_no_file(path: Path | str) -> bool:
    """Whether a folder, a pipe or a device is there, also behind a link. To open a pipe would wait
    for its writer."""
    return os.path.exists(path) and not os.path.isfile(path)


def read_regular(path: Path | str, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes. Raises UserError, also for a pipe or device,
    which may never end."""
    # ValueError: a zero byte in the name
    with one_line(f"{path}: cannot be read", OSError, ValueError):
        if is_no_file(path):
            raise OSError("is no file")
        if os.path.getsize(path) > most:
            raise OSError(f"has more than {most:,} bytes, and is too large for a file of this kind")
        return Path(path).read_bytes()


def find_path(path: Path | str) -> None:
    """Raises UserError for a file or folder that is not there."""
    if not os.path.exists(path):
        raise UserError(f"{path}: no such file or folder")


def find_data(name: Path | str | None) -> None:
    """Raises UserError, which names the script to run, where a folder that is named holds no data
    set."""
    for folder in parts_of_mixture(name) if name else ():
        file = Path(folder) / "meta.json"
        if not os.path.exists(file):
            raise UserError(f"{file}: no such file; {how_to_prepare(folder)}")


def parts_of_mixture(name: Path | str) -> dict[str, int]:
    """{folder: weight} of a mixture, "data/a:7,data/b:3"; {name: 1} for the name of a folder.
    Raises UserError."""
    words = str(name).split(",")
    if len(words) == 1 or os.path.exists(name):
        return {str(name): 1}
    parts: dict[str, int] = {}
    for word in words:
        part = re.fullmatch(r" *(.+):([1-9]\d{0,3}) *", word)
        if not part or part[1] in parts:
            raise UserError(
                f"{show(str(name))}: a mixture has folders, each once, and whole numbers up to "
                "9999, as in data/a:7,data/b:3"
            )
        parts[part[1]] = int(part[2])
    return parts


def how_to_prepare(folder: Path | str) -> str:
    """Which script to run: that in data/ whose name is most like the folder's."""
    names = [script.parent.name for script in DATA.glob("*/prepare.py")]
    near = difflib.get_close_matches(Path(folder).name, names, 1, 0.8)
    if not near:
        return "the docstring of your config names the script in data/ that makes it, and its keys"
    name = near[0]
    advice = f"run python data/{name}/prepare.py, with the keys that your config's docstring names"
    if Path(folder).parent == Path():  # a bare name, as nanoGPT has it
        advice += f", and say dataset=data/{name}"
    return advice


def find_checkpoint(path: Path | str) -> Path:
    """The checkpoint's file; of a folder, the first of CHECKPOINTS that it has. hub:OWNER/NAME is a
    folder in the cache of the Hugging Face hub. Raises UserError if it is not there."""
    file = Path(path)
    if str(path).startswith("hub:"):
        file = model_folder(str(path).removeprefix("hub:"))
    if os.path.isdir(file):
        file /= next((name for name in CHECKPOINTS if os.path.isfile(file / name)), CHECKPOINTS[0])
    if not os.path.isfile(file):
        raise UserError(
            f"{file}: no such checkpoint; train.py writes ckpt.pt to its out_dir, and a hub's is "
            "hub:OWNER/NAME"
        )
    return file


def read_json(path: Path | str, infinity: bool = False) -> Any:
    """What a JSON file of at most 64 MB holds. Raises UserError for one that is missing, damaged or
    large."""
    return parse_json(read_regular(path, 1 << 26), path, infinity)


def parse_json(text: str | bytes, name: Path | str, infinity: bool = False) -> Any:
    """What a JSON text holds. Raises UserError, also for NaN and Infinity, which JSON lacks, and
    for a key twice. infinity: whether Infinity may stand there, as in files of transformers."""

    def refuse(constant):
        if infinity and constant == "Infinity":
            return float(constant)
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: cannot be read as JSON ({error})") from None


def refuse_twice(pairs: Iterable[tuple]) -> dict:
    """The dict of the pairs. UserError for a name that occurs twice: the first value would be
    dropped in silence."""
    values: dict = {}
    for name, value in pairs:
        if name in values:
            raise UserError(f"the key {show(name)} stands there twice")
        values[name] = value
    return values


def read_jsonl(file: Path | str, rules: dict | None = None) -> list[dict]:
    """The objects of a file of JSON lines; none where there is no file. A last line that was cut
    short is left out. rules: {name: rule (base/rules.py)} of every object. UserError names a
    damaged line."""
    if not os.path.isfile(file):
        return []
    lines = read_regular(file, 1 << 30).split(b"\n")
    if _object_of(lines[-1]) is None:
        lines.pop()
    rows = []
    for number, line in enumerate(lines, 1):
        row = _object_of(line)
        if row is None or wrong_field(row, rules or {}):
            raise UserError(f"{file} line {number}: damaged; remove the line")
        rows.append(row)
    return rows


def _object_of(line):
    """The JSON object of a line, or None for anything else, such as one that a kill has cut
    short."""
    with contextlib.suppress(UserError):
        row = parse_json(line, "")
        return row if isinstance(row, dict) else None


def is_of_memory(error: BaseException) -> bool:
    # of torch on a CPU, on CUDA and on MPS
    words = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(part in str(error) for part in words)


@contextlib.contextmanager
def one_line(words: str, *kinds: type[Exception]) -> Iterator[None]:
    """An error of these kinds inside becomes a UserError, `words (reason)`; without kinds whatever
    a library raises, named by its type, too: a panic of Rust is no Exception. A UserError and a
    lack of memory stay what they are."""
    caught = kinds or BaseException
    try:
        yield
    except caught as error:
        is_ours = isinstance(error, UserError | KeyboardInterrupt | SystemExit | GeneratorExit)
        if is_ours or is_of_memory(error):
            raise
        if kinds:
            reason = str(getattr(error, "strerror", None) or error)
        else:
            reason = f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())
        raise UserError(f"{words} ({reason[:200]})") from None


# -- What is written -------------------------------------------------------------------------------


def write_text(path: Path | str, text: str) -> None:
    """write_whole of a text."""
    write_bytes(path, text.encode(errors="backslashreplace"))  # half a character is no UTF-8


def write_bytes(path: Path | str, content: bytes) -> None:
    """write_whole of bytes."""
    write_whole(path, lambda file: file.write(content))


def write_whole(path: Path | str, write: Callable) -> None:
    """write(file) under a temporary name in the same folder, fsync, rename: a kill leaves the old
    file or the new one. Raises UserError, also where check_place does, and what `write` raises."""
    path = Path(path)
    temporary = temporary_of(path)
    check_place(path)
    with one_line(f"{path}: cannot be written", OSError):
        try:
            with open(temporary, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def temporary_of(path: Path) -> Path:
    # the name is cut, or it would be too long where that of `path` is not
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")


def remove_leftovers(folder: Path) -> None:
    """Removes what kills have left of write_whole. The caller has the lock of the folder."""
    for left in folder.glob(f".*.{'[0-9a-f]' * 16}.tmp"):
        left.unlink()


def link_whole(file: Path, path: Path) -> None:
    """Makes the path a hard link to the file, or a copy where the file system has none. A kill
    leaves the old."""
    temporary = temporary_of(path)
    try:
        os.link(file, temporary)
        os.replace(temporary, path)
    except OSError:
        with open(file, "rb") as source:
            write_whole(path, lambda copy: shutil.copyfileobj(source, copy))


def sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_to_append(path: Path | str) -> IO:
    """The file of this path, opened to append text to; it is made where there is none. Raises
    UserError where check_place does."""
    check_place(path)
    with one_line(f"{path}: cannot be written", OSError):
        return open(path, "a", encoding="utf-8")


def open_rows(path: Path | str) -> IO:
    """A file of JSON lines to append to. Its last line is ended, or removed if a kill has cut it
    short."""
    file = open_to_append(path)
    text = Path(path).read_bytes()
    end = text.rfind(b"\n") + 1
    if _object_of(text[end:]) is None:
        file.truncate(end)
    else:
        file.write("\n")
    return file


# -- What a script may write over ------------------------------------------------------------------


def check_place(path: Path | str) -> None:
    """Raises UserError where a file cannot take the place of what is at the path: a link, whose
    file lies elsewhere, a folder, or a device, such as /dev/null."""
    if os.path.islink(path) or is_no_file(path):
        raise UserError(f"{path}: cannot be written (is a link, a folder or a device)")


def check_inside(
    folder: Path | str, names: Iterable[str] = (), folders: Iterable[str] = ()
) -> None:
    """Raises UserError, before hours of work, where the folder of an output has something else in
    the place of its files, which are named, or of its own folders, into which no link may lead."""
    for name in names:
        check_place(Path(folder) / name)
    for name in folders:
        path = Path(folder) / name
        if os.path.islink(path) or os.path.exists(path) and not os.path.isdir(path):
            raise UserError(f"{path}: cannot be written (is a link or no folder)")


def make_folder(path: Path) -> Path:
    """Makes a folder inside an output, and returns its path. Raises UserError for a link, also
    where it leads to a folder: its files are another output's."""
    check_inside(path.parent, folders=[path.name])
    with one_line(f"{path}: cannot be written", OSError):
        path.mkdir(exist_ok=True)
    return path


# {kind: (ending of its name, how an older one is known: names that its JSON has, or bytes in it)}
OUTPUTS: dict[str, tuple[str, Any]] = {
    "scores": (".json", {"checkpoint", "dataset", "split"}),
    "meters": (".json", {"checkpoints"}),
    "claims": (".json", {"claims"}),
    "figure": (".png", b"Software\x00Matplotlib"),
    "page of a text": (".html", b"The page that token_page.py writes"),
    "report": (".html", b"<!-- written by experiment.py -->"),
}


def is_of_kind(path: Path | str, kind: str) -> bool:
    """Whether there is a file at the path, and no link, that a script has written as an output of
    this kind of OUTPUTS."""
    ending, mark = OUTPUTS[kind]
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    if ending != ".json":
        return mark in Path(path).read_bytes()
    with contextlib.suppress(UserError):
        content = read_json(path)
        return isinstance(content, dict) and mark <= content.keys()
    return False


def check_output(path: Path | str, kind: str, key: str = "") -> None:
    """Raises UserError, before hours of work, where a script may not write an output of this kind
    of OUTPUTS.

    An output replaces nothing but a file of its own kind. key: what names the path on the command
    line.
    """
    name = f"{key}={str(path)!r}" if key else str(path)
    check_place(path)
    # ValueError: a zero byte in the name
    with one_line(f"{name}: cannot be written", OSError, ValueError):
        tempfile.TemporaryFile(dir=Path(path).parent).close()
        is_there = Path(path).exists()  # raises for a name that is too long
    if Path(path).suffix != OUTPUTS[kind][0]:
        raise UserError(f"{name}: must end in {OUTPUTS[kind][0]}")
    if is_there and not is_of_kind(path, kind):
        raise UserError(
            f"{name}: is something else already, which would be replaced; name another file, or "
            "move it"
        )


class InUse(UserError):
    """Another process has the lock of a folder."""


def lock(folder: Path | str, wait: float = 0.0) -> IO:
    """Returns an open file that keeps other processes out of the folder until it is closed or this
    process dies.

    While another process holds the lock, this waits for so many seconds, and then raises InUse,
    with that process and its machine. On a file system without such locks nobody is kept out.
    Raises UserError for a file `lock` of somebody else, which stays as it is.
    """
    path = Path(folder) / "lock"
    check_place(path)
    deadline = time.monotonic() + wait
    with one_line(f"{path}: cannot be locked", OSError):
        file = open(path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
    try:
        while True:
            file.seek(0)
            owner = file.read(300).strip()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise InUse(
                        f"{folder}: {owner or 'another process'} is running in it; wait, stop it, "
                        "or take another out_dir"
                    ) from None
                time.sleep(0.1)
            except OSError:  # of a file system without locks
                break
        if owner and not owner.startswith("process "):
            raise UserError(f"{path}: is no lock of this project; move it away")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


# in every folder that this project writes to: what kind it is
MARKER = ".nanogate"


def claim(folder: Path | str, kind: str, overwrite: bool = False) -> bool:
    """Makes the folder and marks it as one of this kind ("run", "data set", "export" ...), before
    anything is written.

    Returns whether it was one already, whose files the caller may remove. Raises UserError for a
    folder of another kind and, unless overwrite, for one that holds anything else.
    """
    folder = Path(folder)
    marker = folder / MARKER
    with one_line(f"{folder}: cannot be written", OSError, ValueError):
        folder.mkdir(parents=True, exist_ok=True)
        # the marker is looked for last: a process that shares the folder makes it before anything
        # else. A marked folder inside is an output of its own, as out/gla is in out
        inside = [file for file in folder.iterdir() if MARKER not in file.name]
        others = sorted(file.name for file in inside if not (file / MARKER).is_file())
        is_marked = marker.is_file()
        marked = kind
        if is_marked:
            marked = marker.read_text(encoding="utf-8", errors="replace").strip()
    if marked != kind:
        raise UserError(
            f"{folder}: is the folder of another kind of output, {show(marked)}; name another "
            "folder"
        )
    if not is_marked and others and not overwrite:
        raise UserError(
            f"{folder}: holds what is not of this project ({', '.join(others[:3])[:99]}); name "
            "another folder, or add --overwrite=true: files of the same names are then replaced"
        )
    if not is_marked:
        write_text(marker, f"{kind}\n")
    return is_marked


@contextlib.contextmanager
def new_folder(
    folder: Path | str, index: str, old: Iterable[str] = (), progress: str = ""
) -> Iterator[Path]:
    """Yields folder/.new, which is this process's alone. At the end the `old` files of the folder
    go, and the new ones, but those whose names begin with a dot, take their places.

    progress: the name of a file in it that says how far the work has come. Where that file is,
    everything stays when the work fails, and a later call finds it and goes on.

    The index is the file that readers open first. It goes before all others and comes after them,
    so that a kill leaves the old files, the new ones, or a folder without an index, which is
    refused.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    new = make_folder(folder / ".new")
    with lock(new):
        is_done = False
        try:
            if not (progress and (new / progress).is_file()):
                clear(new)
            yield new
            made = {file.name for file in new.glob("[!.]*")} - {"lock", index}
            check_inside(folder, [index, *made])  # before the first of them goes
            for name in [index, *old]:
                (folder / name).unlink(missing_ok=True)
            for name in [*sorted(made), index]:
                (new / name).replace(folder / name)
            is_done = True
        finally:
            if is_done or not (progress and (new / progress).is_file()):
                shutil.rmtree(new, ignore_errors=True)


def clear(new: Path, but: Iterable[str] = ()) -> None:
    """Removes from the folder of new_folder what a process that was killed has left, but these."""
    for left in new.iterdir():
        if left.name not in {"lock", *but}:
            left.unlink()

"""Files: written whole or not at all, read with every field checked; folders with a kind, and one
writer at a time."""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from base.hub_cache import model_folder
from base.rules import DataError, UserError, show, wrong_field

try:
    import fcntl
except ImportError:  # every script imports this file before anything that only Linux and macOS have
    sys.exit("error: nanogate needs Linux or macOS; on Windows use WSL")

DATA = Path(__file__).resolve().parents[1] / "data"
# of a run; of export.py or a hub; of a hub with several files, or with a pickle, which is refused
# with a reason
CHECKPOINTS = ("ckpt.pt", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


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
        with open(path, "rb") as file:
            data = file.read(most + 1)
    if len(data) > most:
        raise UserError(
            f"{path}: has more than {most:,} bytes, which is too large for a file of this kind"
        )
    return data


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
            raise DataError(f"{file}: no such file", how_to_prepare(folder))


def parts_of_mixture(name: Path | str) -> dict[str, int]:
    """{folder: weight} of a mixture, "data/a:7,data/b:3"; {name: 1} for the name of a folder.
    Raises UserError."""
    words = str(name).split(",")
    if len(words) == 1 or os.path.exists(name):
        return {str(name): 1}
    found = [re.fullmatch(r" *(.+):([1-9]\d{0,3}) *", word) for word in words]
    parts = {part[1]: int(part[2]) for part in found if part}
    if len(parts) < len(words):
        example = "data/a:7,data/b:3: of 10 examples 7 are of a; each folder stands there once"
        raise UserError(
            f"{show(str(name))}: a mixture has folders and whole numbers up to 9999, as in {example}"
        )
    return parts


def how_to_prepare(folder: Path | str) -> str:
    """Which data set may be meant, or else which script to run."""
    prepared = nearest_data(folder, "meta.json")
    if prepared is not None and os.path.realpath(folder) != os.path.realpath(prepared):
        return f"did you mean {os.path.relpath(prepared)}?"
    known = nearest_data(folder, "prepare.py")
    if known is not None:
        return f"run python {os.path.relpath(known)}/prepare.py"
    return "run python data/<name>/prepare.py"


def nearest_data(folder: Path | str, file: str) -> Path | None:
    """The folder in data/ that has this file and whose name is most like the given folder's."""
    names = [found.parent.name for found in DATA.glob(f"*/{file}")]
    near = difflib.get_close_matches(Path(folder).name, names, 1, 0.8)
    return DATA / near[0] if near else None


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
            f"{file}: no such checkpoint; train.py writes ckpt.pt and best.pt to its out_dir"
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


def write_text(path: Path | str, text: str) -> None:
    """write_whole of a text."""
    content = text.encode(errors="backslashreplace")  # half a character is no UTF-8
    write_whole(path, lambda file: file.write(content))


def write_whole(path: Path | str, write: Callable) -> None:
    """write(file) under a temporary name in the same folder, fsync, rename: a kill leaves the old
    file or the new one.

    A link at the path is replaced, and what it points to stays as it is; so does the file of a hard
    link. Raises UserError, also where a folder, a pipe or a device is in the way, and what `write`
    raises.
    """
    path = Path(path)
    temporary = temporary_of(path)
    with one_line(f"{path}: cannot be written", OSError):
        refuse_no_file(path)
        try:
            with open(temporary, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    sync_folder(path.parent)  # the rename itself


def sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system syncs a folder
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def temporary_of(path: Path) -> Path:
    # the name is cut, or it would be too long where that of `path` is not
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")


def link_whole(file: Path, path: Path) -> None:
    """Makes the path a hard link to the file, or a copy where the file system has none. A kill
    leaves the old."""
    temporary = temporary_of(path)
    try:
        os.link(file, temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError:
        with open(file, "rb") as source:
            write_whole(path, lambda copy: shutil.copyfileobj(source, copy))


def remove_leftovers(folder: Path) -> None:
    """Removes what kills have left of write_whole. The caller has the lock of the folder."""
    for left in folder.glob(f".*.{'[0-9a-f]' * 16}.tmp"):
        if what_is_at(left) == "file":
            left.unlink()


# -- What a script may write over ------------------------------------------------------------------


def what_is_at(path: Path | str) -> str | None:
    """ "file", "link", "folder" or "device" (also a pipe or a socket), or None where there is
    nothing. No link is followed. Raises OSError, as for a name that is too long."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    for kind, is_kind in (("file", stat.S_ISREG), ("link", stat.S_ISLNK), ("folder", stat.S_ISDIR)):
        if is_kind(mode):
            return kind
    return "device"


def refuse_no_file(path: Path | str) -> None:
    """Raises OSError where a file cannot take the place of what is at the path: a rename would
    replace /dev/null."""
    if what_is_at(path) in ("folder", "device"):
        raise OSError("is a folder or a device")


def refuse_link(path: Path | str) -> None:
    """Raises OSError for a link, since what is written through it changes a file or a folder that
    lies elsewhere."""
    if what_is_at(path) == "link":
        raise OSError("is a link, through which nothing is written; remove the link")


def check_inside(
    folder: Path | str, names: Iterable[str] = (), folders: Iterable[str] = ()
) -> None:
    """Raises UserError, before hours of work, where the folder of an output has something else in
    the place of its files, which are named, or of its own folders, into which no link may lead."""
    for name in names:
        with one_line(f"{Path(folder) / name}: cannot be written", OSError):
            refuse_no_file(Path(folder) / name)
    for name in folders:
        with one_line(f"{Path(folder) / name}: cannot be written", OSError):
            refuse_link(Path(folder) / name)
            if what_is_at(Path(folder) / name) not in (None, "folder"):
                raise OSError("is no folder")


def make_folder(path: Path) -> Path:
    """Makes a folder inside an output, and returns its path. Raises UserError for a link, also
    where it leads to a folder: its files are another output's."""
    with one_line(f"{path}: cannot be written", OSError):
        refuse_link(path)
        path.mkdir(exist_ok=True)
    return path


PNG, MATPLOTLIB = b"\x89PNG\r\n\x1a\n", b"Software\x00Matplotlib"
REPORT_END = "<!-- written by experiment.py -->"
EDGE = 1024
TEXT, MANY = (str, 0, 1 << 16), 1 << 20


@dataclasses.dataclass
class Output:
    """A kind of file that scripts write, and how an older one is known, so that nothing else is
    replaced.

    ending: of its name; holds: what its JSON holds, as a rule of base/rules.py; or else begins: its
    first bytes, and mark: bytes that it has within EDGE of its beginning or of its end
    """

    ending: str
    holds: dict = dataclasses.field(default_factory=dict)
    begins: bytes = b""
    mark: bytes = b""


OUTPUTS = {
    "scores": Output(".json", {"checkpoint": TEXT, "dataset": TEXT, "split": TEXT}),
    "meters": Output(
        ".json", {"checkpoints": [{"checkpoint": TEXT, "layers": [object, 0, MANY]}, 0, MANY]}
    ),
    "claims": Output(
        ".json", {"claims": [{"name": TEXT, "verdict": TEXT, "seeds": (dict, 0, MANY)}, 0, MANY]}
    ),
    "figure": Output(".png", begins=PNG, mark=MATPLOTLIB),
    "page of a text": Output(
        ".html", begins=b"<!DOCTYPE html>", mark=b"The page that token_page.py writes"
    ),
    "report": Output(".html", begins=b"<!doctype html>", mark=REPORT_END.encode()),
}


def is_of_kind(path: Path | str, kind: str) -> bool:
    """Whether there is a file at the path, and no link, that a script has written as an output of
    this kind."""
    known = OUTPUTS[kind]
    if what_is_at(path) != "file":
        return False
    if known.holds:
        with contextlib.suppress(UserError):
            return wrong_field(read_json(path), known.holds) is None
        return False
    with open(path, "rb") as file:
        first = file.read(EDGE)
        file.seek(max(0, os.fstat(file.fileno()).st_size - EDGE))
        last = file.read(EDGE)
    return first.startswith(known.begins) and (known.mark in first or known.mark in last)


def check_output(path: Path | str, kind: str, key: str = "") -> None:
    """Raises UserError, before hours of work, where a script may not write an output of this kind
    of OUTPUTS.

    An output replaces nothing but a file of its own kind. key: what names the path on the command
    line.
    """
    name = f"{key}={str(path)!r}" if key else str(path)
    ending = OUTPUTS[kind].ending
    # ValueError: a zero byte in the name
    with one_line(f"{name}: cannot be written", OSError, ValueError):
        refuse_no_file(path)
        refuse_link(path)
        if Path(path).suffix != ending:
            raise UserError(f"{name}: must end in {ending}")
        tempfile.TemporaryFile(dir=Path(path).parent).close()
        if what_is_at(path) and not is_of_kind(path, kind):
            raise UserError(
                f"{name}: is something else already, which would be replaced; name another file or move it"
            )


def check_to_append(path: Path | str) -> None:
    """Raises UserError where open_to_append would."""
    with one_line(f"{path}: cannot be written", OSError):
        refuse_no_file(path)
        refuse_link(path)


def open_to_append(path: Path | str) -> IO:
    """The file of this path alone, opened to append text to; it is made where there is none. A hard
    link gets a copy first, so that the file of the other name stays as it is. Raises UserError for
    a link."""
    check_to_append(path)
    with one_line(f"{path}: cannot be written", OSError):
        if what_is_at(path) and os.lstat(path).st_nlink > 1:
            with open(path, "rb") as source:
                write_whole(path, lambda copy: shutil.copyfileobj(source, copy))
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


class InUse(UserError):
    """Another process has the lock of a folder."""


# what a lock holds; zeros are left where a machine lost power
LOCK = re.compile(rb"\0*|process \d[^\n]{0,290}\n?")


def lock(folder: Path | str, wait: float = 0.0) -> IO:
    """Returns an open file that keeps other processes out of the folder until it is closed or this
    process dies.

    While another process holds the lock, this waits for so many seconds, and then raises InUse,
    with that process and its machine. On a file system without such locks nobody is kept out.
    Raises UserError for a file `lock` of somebody else, which stays as it is.
    """
    path = Path(folder) / "lock"
    deadline = time.monotonic() + wait
    while True:
        file = _open_lock(path)
        try:
            _wait_for(file, folder, deadline)
            is_there = what_is_at(path) == "file" and os.path.samestat(
                os.lstat(path), os.fstat(file.fileno())
            )
            # while this process waited, another one has put a file of its own in the place
            if not is_there:
                file.close()
                continue
            # of a copy by `cp -al`: the other folder keeps this file
            if os.fstat(file.fileno()).st_nlink > 1:
                path.unlink()
                file.close()
                continue
            if not LOCK.fullmatch(os.pread(file.fileno(), 999, 0)):
                raise UserError(
                    f"{path}: is no lock of this project, and is not written over; move it away"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            return file
        except BaseException:
            file.close()
            raise


def _open_lock(path):
    """The file, open to be locked, and not what a link leads to. Raises UserError."""
    with one_line(f"{path}: cannot be locked", OSError):
        refuse_no_file(path)
        refuse_link(path)
        # O_NOFOLLOW and O_NONBLOCK: for a link or a pipe that was put there since
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        return open(os.open(path, flags, 0o666), "a+", encoding="utf-8")


def _wait_for(file, folder, deadline):
    """Locks the file. Raises InUse if another process still has it at the deadline."""
    with contextlib.suppress(OSError):  # of a file system without locks
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    owner = os.pread(file.fileno(), 99, 0).decode(errors="replace").strip()
                    owner = owner if owner and owner.isprintable() else "another process"
                    raise InUse(
                        f"{folder}: {owner} is running in it; wait, stop it, or take another out_dir"
                    ) from None
                time.sleep(0.1)


MARKER = ".nanogate"  # in every folder that this project writes to: what kind it is
# in a folder whose files are to be replaced: the new ones, until all of them are whole
NEW = ".new"


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
        # else a marked folder inside is an output of its own, as out/gla is in out
        inside = [file for file in folder.iterdir() if MARKER not in file.name]
        others = [file.name for file in inside if not os.path.isfile(file / MARKER)]
        refuse_no_file(marker)
        if marker.is_file():
            marked = marker.read_text(encoding="utf-8", errors="replace").strip()[:40]
            if marked != kind:
                raise UserError(
                    f"{folder}: is the folder of another kind of output, {marked!r}; name another folder"
                )
            return True
        if others and not overwrite:
            article = "an" if kind[0] in "aeio" else "a"
            raise UserError(
                f"{folder}: holds what is not of {article} {kind} ({', '.join(sorted(others)[:3])[:99]}); name another "
                "folder, or add --overwrite=true: files of the same names are then replaced"
            )
    write_text(marker, f"{kind}\n")
    return False


@contextlib.contextmanager
def new_folder(folder: Path | str, index: str, old: Iterable[str] = ()) -> Iterator[Path]:
    """Yields folder/.new, which is this process's alone. At the end its files, but those whose
    names begin with a dot, replace those of the folder, and the `old` ones that it lacks go.

    The index is the file that readers open first. It goes before all others and comes after them,
    so that a kill leaves the old files, the new ones, or a folder without an index, which is
    refused.
    """
    folder = Path(folder)
    new = folder / NEW
    with one_line(f"{folder}: cannot be written", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    make_folder(new)
    with one_line(f"{new}: cannot be written", OSError):
        if os.listdir(new) and not os.path.isfile(new / MARKER):
            raise OSError("holds files that are not of this project; move them away")
    write_text(new / MARKER, "unfinished output\n")
    with lock(new):
        try:
            with one_line(f"{new}: cannot be emptied", OSError):
                for left in new.iterdir():  # files of a process that was killed
                    if left.name not in ("lock", MARKER):
                        left.unlink()
            yield new
            made = {file.name for file in new.glob("[!.]*")} - {"lock", index}
            gone = [index, *{*old} - made]
            check_inside(folder, [*gone, *made])  # before the first of them goes
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        # what ends this process from here on leaves .new, which tells the next call whose the files
        # are
        for name in gone:
            (folder / name).unlink(missing_ok=True)
        for name in [*made, index]:
            (new / name).replace(folder / name)
        shutil.rmtree(new, ignore_errors=True)

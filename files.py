"""Files that are written whole or not at all, files of JSON lines, folders with a kind and one writer at a time."""

import contextlib
import json
import os
import socket
from pathlib import Path

from configurator import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def write_whole(path, write):
    """write(file) under a temporary name in the same folder, fsync, rename: a kill leaves the old file or the new one.

    Returns the size in bytes. Raises what open and `write` raise. What a kill leaves under the temporary name is
    overwritten by the next write.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every system lets a folder be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself
        finally:
            os.close(folder)
    return size


MARKER = ".nanogate"  # in every folder that this project writes to: what kind it is


def claim(folder, kind, overwrite=False):
    """Makes the folder, and marks it as one of this kind ("run", "data set", "export" ...), before anything is written.

    UserError for a folder that holds something else: with overwrite it may be anything but another kind of ours.
    """
    folder = Path(folder)
    marker = folder / MARKER
    try:
        found = marker.read_text(errors="replace").strip()[:40] if marker.is_file() else None
        if found == kind:
            return
        if found is not None:
            raise UserError(f"{folder}: is the folder of another kind of output, {found!r}; name another folder")
        others = [file.name for file in folder.iterdir() if file.name != f".{MARKER}.tmp"] if folder.is_dir() else []
        if others and not overwrite:
            raise UserError(
                f"{folder}: holds what is not of a {kind} ({', '.join(sorted(others)[:3])[:99]}); name another folder, "
                f"or add --overwrite=true: files of the same names are then replaced"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(marker, lambda file: file.write(f"{kind}\n".encode()))
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None


def read_jsonl(file, fields=None):
    """The objects of a file of JSON lines; none where there is no file. A last line that a kill cut short is left out.

    fields: {name: type} that each object has. UserError names a damaged line.
    """
    text, rows = Path(file).read_bytes() if Path(file).is_file() else b"", []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or any(type(row.get(name)) is not kind for name, kind in (fields or {}).items()):
            raise UserError(f"{file} line {number}: damaged; remove the line")
        rows.append(row)
    return rows


def lock(folder, wait=False):
    """The open file that keeps others out of the folder until it is closed, or its process dies.

    If another one has it: UserError, or with `wait` only once that one has closed it. A system or a file system without
    such locks goes without.
    """
    file = open(Path(folder) / "lock", "a+")
    if fcntl is None:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.seek(0)
        owner = file.read(99).strip() or "another process"
        file.close()
        raise UserError(f"{folder}: {owner} is running in it; wait, stop it, or take another out_dir") from None
    except OSError:
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file

"""Which files of a project a script imports, found by reading the files and not by looking at what
has been imported.

    imported_files(root, ["train.py"])      ["evaluate.py", "gate.py", ..., "train.py"]

The list follows from the files alone. It has what is imported on the top level of a file and what
is imported within a function, which some options need and others do not: two runs of the same files
have the same list, whatever their keys and whatever else their process has imported. A module whose
name is computed while the script runs is not found.
"""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path


def imported_files(root: Path, scripts: Iterable[str]) -> list[str]:
    """The scripts and all files under the root that they import, directly or through others;
    sorted, relative to root.

    A module that is no file under the root, such as torch, is left out. A file that is no valid
    Python has no imports.
    """
    found = set(scripts)
    waiting = list(found)
    while waiting:
        name = waiting.pop()
        # of mine/fast/scan.py and of mine/fast/__init__.py ("mine", "fast")
        package = Path(name).parent.parts
        for module in modules_of((root / name).read_bytes(), package):
            new = set(files_of(root, module)) - found
            found |= new
            waiting += new
    return sorted(found)


@functools.cache  # the files are read anew each time, and few of them have changed
def modules_of(text: bytes, package: tuple[str, ...]) -> list[list[str]]:
    """Each module that a file imports, as the parts of its name. Of `from a import b` both a and
    a.b: b may be one."""
    modules: list[list[str]] = []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return modules
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = []
            if node.level:  # one dot is the package itself, each further dot the one around it
                module += package[: len(package) - node.level + 1]
            if node.module:
                module += node.module.split(".")
            modules.append(module)
            for alias in node.names:
                modules.append([*module, alias.name])
        elif isinstance(node, ast.Call):
            modules += [name.split(".") for name in names_in_call(node)]
    return modules


def names_in_call(call: ast.Call) -> list[str]:
    """["a.b"] of importlib.import_module("a.b") and of __import__("a.b"), [] of other calls and of
    computed names."""
    function = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if function not in ("import_module", "__import__") or not call.args:
        return []
    name = getattr(call.args[0], "value", None)
    return [name] if isinstance(name, str) else []


def files_of(root: Path, module: list[str]) -> Iterator[str]:
    """The files under the root that the import of a module runs: those of the packages around it,
    and its own."""
    # "*" of `from a import *`, or a name that is no module's
    if not all(part.isidentifier() for part in module):
        return
    for length in range(1, len(module) + 1):
        path = Path(*module[:length])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if (root / file).is_file():
                yield str(file)
                break

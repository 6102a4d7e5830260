"""The size of the house, which `make lint` prints: lines by folder, documents in kB, and circles of imports.

    python tests/house.py

The exit status is 1 if a ceiling is broken.
"""

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CEILINGS = {  # what: at most
    "kB: docs": 72,
    "kB: prose of results": 52,
    "kB: prose of results/bench": 8,
    "kB: results without generated pages": 16_000,
    "circles of imports": 0,
}
TOGETHER = {"bench.py": "speed + bench.py", "speed": "speed + bench.py"}
TOGETHER |= {"experiment.py": "study + experiment.py", "study": "study + experiment.py"}


def tracked() -> list[Path]:
    """The files that git knows, relative to the root, as far as they are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


def sizes_of(files: list[Path]) -> Counter:
    """{"lines: NAME": lines of Python}, of folders, of files on top and of the product, which is all but the tests;
    {"kB: NAME": size}, of documents by kind, and of results/."""
    sizes: Counter = Counter()
    for file in files:
        place, kilobytes = file.parts[0], (ROOT / file).stat().st_size / 1000
        if file.suffix == ".py":
            n = (ROOT / file).read_bytes().count(b"\n")
            sizes[f"lines: {TOGETHER.get(place, place)}"] += n
            if place != "tests":
                sizes["lines: product"] += n
                if file != Path("model.py"):
                    longest = "lines: longest other product file"
                    sizes[longest] = max(sizes[longest], n)
        if place == "results" and file.suffix != ".html":
            sizes["kB: results without generated pages"] += kilobytes
        if file.suffix == ".md":
            sizes[f"kB: {'prose of results' if place == 'results' else place}"] += kilobytes
            if file.parts[:2] == ("results", "bench"):
                sizes["kB: prose of results/bench"] += kilobytes
    return sizes


def imports(files: list[Path]) -> dict[str, set[str]]:
    """{module: the modules of the project that it imports on its top level}"""
    files = [file for file in files if file.suffix == ".py" and file.parts[0] != "tests"]
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    graph = {}
    for module, file in modules.items():
        names = set()
        for node in top_level(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                package = module.split(".")[: -node.level] if node.level else []
                base = ".".join([*package, *([node.module] if node.module else [])])
                names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        graph[module] = names & modules.keys() - {module}
    return graph


def top_level(node: ast.AST):
    """The statements that run when a module is imported: also those within if, try and classes, not in functions."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from top_level(child)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the one before it, the first of them also the last one, where there are such."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def main() -> int:
    if not (ROOT / ".git").exists():
        print("not a clone of git: its files are not counted")
        return 0
    files = tracked()
    found = circle(imports(files))
    sizes = sizes_of(files) | {"circles of imports": bool(found)}
    for name, size in sorted(sizes.items()):
        limit = f"  of at most {CEILINGS[name]:>6,}" + "  BROKEN" * (size > CEILINGS[name]) if name in CEILINGS else ""
        print(f"  {name:<40}{size:>9,.0f}{limit}")
    if found:
        print(f"  circle: {', '.join(found)}")
    return int(any(sizes[name] > most for name, most in CEILINGS.items()))


if __name__ == "__main__":
    sys.exit(main())

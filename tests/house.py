"""The size of the house, which `make lint` prints: how much a reader has to read, and how dense it is.

    python tests/house.py                what is read off the files
    python tests/house.py --run          and what a training run of 6 steps enters (10 seconds)

Tokens are those of Python's tokenizer without comments, docstrings and line ends: another line break changes none of
them. Nested comprehensions, assignments with := and lambdas of more than one call or operator are counted per 1,000
lines of code. The exit status is 1 if a ceiling is broken.
"""

import ast
import contextlib
import dataclasses
import graphlib
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CEILINGS = {  # what: at most
    "kB: docs": 82,
    "kB: prose of results": 64,
    "kB: prose of results/bench": 8,
    "kB: results without generated pages": 16_000,
    "circles of imports": 0,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def tracked() -> list[Path]:
    """The files that git knows, relative to the root, as far as they are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


def product_of(files: list[Path]) -> list[Path]:
    """The Python files that are not tests."""
    return [file for file in files if file.suffix == ".py" and file.parts[0] != "tests"]


# -- Read off the files ------------------------------------------------------------------------------------------------


def code_of(text: str) -> tuple[int, int]:
    """(tokens, lines) of the code of a file: without comments, docstrings, blank lines."""
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    tokens, lines = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in NO_CODE or token.start[0] in docstrings:
            continue
        tokens += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    return tokens, len(lines)


def dense_places(tree: ast.AST) -> Counter:
    """{kind: how many}: comprehensions within others or with two "for", :=, lambdas of several calls or operators."""
    found: Counter = Counter()
    for node in ast.walk(tree):
        inner = [child for child in ast.walk(node) if child is not node]
        if isinstance(node, COMPREHENSIONS):
            is_nested = any(isinstance(child, COMPREHENSIONS) for child in inner)
            found["nested comprehensions"] += is_nested or len(node.generators) > 1
        if isinstance(node, ast.NamedExpr):
            found[":="] += 1
        steps = (ast.Call, ast.BinOp, ast.BoolOp, ast.IfExp, ast.Compare, ast.Lambda, *COMPREHENSIONS)
        if isinstance(node, ast.Lambda) and sum(isinstance(child, steps) for child in inner) > 1:
            found["long lambdas"] += 1
    return found


def sizes_of(files: list[Path]) -> Counter:
    """{"tokens: NAME": number}, of folders, of files on top and of the product; {"kB: NAME": size} of documents by
    kind, and of results/."""
    sizes: Counter = Counter()
    lines = 0
    places: Counter = Counter()
    for file in product_of(files):
        text = (ROOT / file).read_text()
        tokens, of_code = code_of(text)
        sizes[f"tokens: {file.parts[0]}"] += tokens
        sizes["tokens of the product"] += tokens
        lines += of_code
        places += dense_places(ast.parse(text))
        sizes["Python files on top"] += len(file.parts) == 1
    if lines:
        sizes["tokens a code line"] = sizes["tokens of the product"] / lines
        for kind in ("nested comprehensions", ":=", "long lambdas"):
            sizes[f"{kind} per 1,000 lines"] = 1000 * places[kind] / lines
    for file in files:
        kilobytes = (ROOT / file).stat().st_size / 1000
        if file.parts[0] == "results" and file.suffix != ".html":
            sizes["kB: results without generated pages"] += kilobytes
        if file.suffix == ".md":
            prose = prose_of((ROOT / file).read_text(encoding="utf-8"))
            kilobytes = len(prose.encode()) / 1000
            sizes[f"kB: {'prose of results' if file.parts[0] == 'results' else file.parts[0]}"] += kilobytes
            if file.parts[:2] == ("results", "bench"):
                sizes["kB: prose of results/bench"] += kilobytes
    return sizes


def prose_of(page: str) -> str:
    """A page without what study/pages.py writes into it."""
    return re.sub(r"<!-- \w+: [^>]+? -->.*?<!-- end -->", "", page, flags=re.DOTALL)


def imports(files: list[Path], in_functions: bool = True) -> dict[str, set[str]]:
    """{module: the modules of the project that it imports}, also within functions, unless in_functions is false."""
    files = product_of(files)
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    graph = {}
    for module, file in modules.items():
        tree = ast.parse((ROOT / file).read_text())
        names = set()
        for node in ast.walk(tree) if in_functions else top_level(tree):
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


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Circles until none is left, each of which is opened by taking its last import away."""
    graph = {module: set(names) for module, names in graph.items()}
    found = []
    while one := circle(graph):
        found.append(one)
        graph[one[1]].discard(one[0])
        graph[one[0]].discard(one[1])
    return found


# -- What a run enters -------------------------------------------------------------------------------------------------


def keys_of() -> Counter:
    """How many keys a model and a run have."""
    from keys import GPTConfig, TrainConfig

    of_model = len(dataclasses.fields(GPTConfig))
    return Counter({"keys of a model": of_model, "keys of a run": len(dataclasses.fields(TrainConfig)) - of_model})


def entered(files: list[Path]) -> Counter:
    """What a run of 6 steps with the default keys, but for its size, enters: functions and files of the product, and
    those that the run's config is passed to."""
    import train
    from data.text import prepare
    from keys import TrainConfig

    ours = {str(ROOT / file): file for file in product_of(files)}
    functions, with_config = set(), set()

    def look(frame, event, argument):
        file = ours.get(frame.f_code.co_filename)
        if event == "call" and file is not None and "<" not in frame.f_code.co_name:  # no lambda or comprehension
            functions.add((file, frame.f_code.co_qualname))
            n = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            if any(isinstance(frame.f_locals.get(name), TrainConfig) for name in frame.f_code.co_varnames[:n]):
                with_config.add((file, frame.f_code.co_qualname))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        prepare.main([str(ROOT / "README.md"), f"--out_dir={folder}/data", "--tokenizer=byte"])
        words = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=64", "--max_iters=6", "--device=cpu"]
        words += [f"--dataset={folder}/data", f"--out_dir={folder}/run", "--dtype=float32"]
        sys.setprofile(look)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                train.main(words)
        finally:
            sys.setprofile(None)
    return Counter(
        {
            "functions that a run enters": len(functions),
            "files that a run enters": len({file for file, _ in functions}),
            "functions that its config is passed to": len(with_config),
            "files that its config is passed to": len({file for file, _ in with_config}),
        }
    )


def main(words: list[str]) -> int:
    if not (ROOT / ".git").exists():
        print("not a clone of git: its files are not counted")
        return 0
    sys.path.insert(0, str(ROOT))
    files = tracked()
    found = circles(imports(files))
    sizes = sizes_of(files) + keys_of()
    if "--run" in words:
        sizes += entered(files)
    sizes["circles of imports"] = len(found)
    for name, size in sorted(sizes.items()):
        limit = ""
        if name in CEILINGS:
            limit = f"  of at most {CEILINGS[name]:>6,}" + "  BROKEN" * (size > CEILINGS[name])
        digits = 1 if name.endswith(" line") or name.endswith(" lines") else 0
        print(f"  {name:<48}{size:>9,.{digits}f}{limit}")
    for one in found:
        print(f"  circle: {', '.join(one)}")
    return int(any(sizes[name] > most for name, most in CEILINGS.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

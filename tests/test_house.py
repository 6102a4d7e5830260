"""The size of the repository keeps its ceilings, and a circle of imports would be found."""

import ast

import house
import pytest


def test_the_sizes_of_this_repository_keep_the_ceilings(capsys):
    if not (house.ROOT / ".git").exists():
        pytest.skip("not a clone of git")
    assert house.main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in house.CEILINGS) and "  tokens: ops " in printed


def test_code_is_counted_by_its_tokens_whatever_its_line_breaks_comments_and_docstrings():
    one = "def f(a):  # why\n    return g(a,\n             1)\n"
    other = '"""A file."""\n\ndef f(a):\n    """One\n    more."""\n\n    return g(a, 1)\n'
    assert house.code_of(one) == (13, 3) and house.code_of(other) == (13, 2)
    dense = "[[x for x in y] for y in z]\n[x for y in z for x in y]\nif (n := f()):\n    h = lambda x: g(x) + 1\n"
    plain = "[x for x in y]\nn = f()\nh = lambda x: g(x)\n"
    assert house.dense_places(ast.parse(dense)) == {"nested comprehensions": 2, ":=": 1, "long lambdas": 1}
    assert not +house.dense_places(ast.parse(plain))


def test_a_circle_of_imports_is_found_also_within_functions(tmp_path, monkeypatch):
    files = {
        "a.py": "if True:\n    from b.c import x\n", "e2.py": "import e\n",
        "b/__init__.py": "", "b/c.py": "from . import d\n", "b/d.py": "import a\nimport json\n",
        "e.py": "import a\ndef f():\n    import e2\n",
    }  # fmt: skip
    monkeypatch.setattr(house, "ROOT", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = [house.Path(name) for name in files]
    graph = house.imports(paths, in_functions=False)
    assert set(house.circle(graph)) == {"a", "b.c", "b.d"} and graph["e"] == {"a"}
    assert [set(one) for one in house.circles(house.imports(paths))] == [{"a", "b.c", "b.d"}, {"e", "e2"}]
    graph["b.d"].clear()
    assert not house.circle(graph)


def of_the_locale(source):
    """The lines of a file's calls that read or write text in the encoding of the locale; ruff sees those of a literal
    Path() alone. Functions of our own, which read and write UTF-8, have an argument more."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        mode = given.get("mode", call.args[1] if len(call.args) > 1 else ast.Constant("r"))
        is_text = name == "open" and not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
        is_text = is_text or "text" in given or (name, len(call.args)) in (("read_text", 0), ("write_text", 1))
        is_of_python = name in ("open", "read_text", "write_text", "run", "Popen", "check_output")
        if is_of_python and is_text and "encoding" not in given and ast.unparse(call.func) != "os.open":
            found.append(call.lineno)
    return found


def test_no_text_is_read_or_written_in_the_encoding_of_the_locale():
    wrong = "open(a)\nopen(a, 'w')\nb.read_text()\nb.write_text(c)\nrun(a, text=True)\nopen(a, mode=m)\n"
    right = "open(a, 'rb')\nopen(a, 'w', encoding='utf-8')\nfiles.write_text(a, b)\nos.open(a, 1)\nb.read_bytes()\n"
    assert of_the_locale(wrong) == [1, 2, 3, 4, 5, 6] and of_the_locale(right) == []
    found = {}
    for file in house.tracked():
        if file.suffix == ".py" and file.parts[0] != "tests" and not file.name.startswith("."):
            found[str(file)] = of_the_locale((house.ROOT / file).read_bytes())
    assert len(found) > 70 and {name: lines for name, lines in found.items() if lines} == {}

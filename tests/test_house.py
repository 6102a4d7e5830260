"""
What `make lint` prints of the size of the repository is counted right, and a ceiling that is broken is found.

    python -m pytest tests/test_house.py
"""

import subprocess
from pathlib import Path

import house
import pytest

FILES = {
    "model.py": "import ops.fast\n" * 5,
    "bench.py": "import speed\n\n",
    "speed/__init__.py": "",
    "speed/a.py": "from speed import b\n",
    "speed/b.py": "def f():\n    import speed.a\n",
    "ops/fast.py": "if True:\n    from ops.slow import x\n",
    "ops/slow.py": "from .deep import y\n",
    "ops/deep.py": "import json\nfrom . import fast\n",
    "tests/test_a.py": "import model\n" * 7,
    "docs/a.md": "x" * 3000,
    "results/bench/README.md": "x" * 2000,
    "results/a/report.html": "x" * 9000,
    "results/LOG.md": "x" * 500,
    "results/a/rows.jsonl": "x" * 1000,
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    (tmp_path / "mine.py").write_text("x = 1\n" * 999)  # a user's own, which git does not know
    return tmp_path


def test_lines_and_kilobytes_are_those_of_the_files_that_git_knows(root):
    files = house.tracked(root)
    assert sorted(map(str, files)) == sorted(FILES)
    assert house.lines_by_folder(files, root) == {
        "lines: product": 15,
        "lines: tests": 7,
        "lines: model.py": 5,
        "lines: ops": 5,
        "lines: speed + bench.py": 5,
        "lines: longest other product file": 2,
    }
    assert house.kilobytes(files, root) == {
        "kB: docs": 3.0,
        "kB: prose of results": 2.5,
        "kB: prose of results/bench": 2.0,
        "kB: results without generated pages": 3.5,
    }


def test_a_circle_of_imports_is_found_on_the_top_level_and_not_in_functions(root):
    graph = house.imports(house.tracked(root), root)
    assert graph["ops.fast"] == {"ops.slow"} and graph["ops.deep"] == {"ops.fast"} and graph["speed.b"] == set()
    assert house.circles(graph) == [["ops.deep", "ops.fast", "ops.slow"]]


def test_only_a_ceiling_that_was_kept_can_be_broken():
    ceilings = {"a": (10, True), "b": (10, False), "c": (10, True), "d": (10, False)}
    printed, is_kept = house.judge({"a": 10, "b": 11, "d": 9, "e": 99}, ceilings)
    assert is_kept and [("not reached yet" in line, "mark it" in line) for line in printed] == [
        (False, False), (True, False), (False, True), (False, False),
    ]  # fmt: skip
    printed, is_kept = house.judge({"a": 10, "c": 10.1}, ceilings)
    assert not is_kept and ["BROKEN" in line for line in printed] == [False, True]


def test_the_sizes_of_this_repository_keep_the_ceilings(capsys):
    if not (Path(house.ROOT) / ".git").exists():
        pytest.skip("not a clone of git")
    assert house.main() == 0
    assert set(house.CEILINGS) <= {line[2:42].strip() for line in capsys.readouterr().out.splitlines()}

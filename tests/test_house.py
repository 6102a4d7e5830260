"""The size of the repository keeps its ceilings, and a circle of imports would be found."""

import house
import pytest


def test_the_sizes_of_this_repository_keep_the_ceilings(capsys):
    if not (house.ROOT / ".git").exists():
        pytest.skip("not a clone of git")
    assert house.main() == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in house.CEILINGS) and "lines: ops" in printed


def test_a_circle_of_imports_is_found_on_the_top_level_and_not_in_functions(tmp_path, monkeypatch):
    files = {
        "a.py": "if True:\n    from b.c import x\n", "e2.py": "import e\n",
        "b/__init__.py": "", "b/c.py": "from . import d\n", "b/d.py": "import a\nimport json\n",
        "e.py": "import a\ndef f():\n    import e2\n",
    }  # fmt: skip
    monkeypatch.setattr(house, "ROOT", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = house.imports([house.Path(name) for name in files])
    assert set(house.circle(graph)) == {"a", "b.c", "b.d"} and graph["e"] == {"a"}
    graph["b.d"].clear()
    assert not house.circle(graph)

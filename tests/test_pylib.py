"""data/pylib: which packages of an environment are read, and what of them is a text."""

import importlib
import itertools

import pytest
from conftest import Helpers

from data.pylib import prepare as pylib
from data.shards import open_dataset
from data.tokenizer import tokenizer_of

error_of, words = Helpers.error_of, Helpers.words


def code(name, n=40):
    """A source of n lines that no other name has."""
    return "".join(f"def {name}_{i}(x):\n    return x * {i}\n" for i in range(n))


def install(site, name, files, requires=(), version="1.0"):
    """What an installer leaves of a package: its files and their list."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}", encoding="utf-8"
    )
    for path, text in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    record = "".join(f"{path},,\n" for path in itertools.chain(files, [f"{info.name}/METADATA"]))
    (info / "RECORD").write_text(record, encoding="utf-8")


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A folder of packages, of which requirements.txt names one: {"requirements", "out_dir"}."""
    site = tmp_path / "site"
    core = {f"core/{letter}.py": code(letter) for letter in "abcdefghijklmnopqrst"}
    odd = {
        "core/tests/test_a.py": code("hidden"), "core/test_b.py": code("hidden2"), "core/empty.py": "\n \n",
        "core/latin.py": b"# caf\xe9\n", "core/copy.py": code("a"), "core/made.py": "# auto-generated\n" + code("made"),
        "core/table.py": "x = [\n" + "".join(f"  {i}, {i + 1}, 'row',\n" for i in range(60)) + "]\n",
        "../outside.py": code("outside"), "core/data.txt": "no source",
    }  # fmt: skip
    needs = ["Needed_One>=1", "other; extra == 'more'", "old; python_version < '3'", "absent"]
    install(site, "core-lib", core | odd, needs, version="2.1")
    install(site, "needed.one", {"needed_one.py": code("needed"), "needed_two.py": code("two")})
    install(site, "other", {"other.py": code("other")})
    install(site, "old", {"old.py": code("old")})
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(pylib, "read_sources", lambda: {"this.py": code("standard"), "copied.py": code("t")})
    importlib.invalidate_caches()
    file = tmp_path / "requirements.txt"
    file.write_text(
        "# what it needs\ncore_lib==2.1  # pinned\nwindows-only; sys_platform == 'nowhere'\n", encoding="utf-8"
    )
    return dict(requirements=file, out_dir=tmp_path / "data", val_fraction=0.1)


def text_of(folder, split):
    dataset = open_dataset(folder)
    examples = [inputs for inputs, *_ in dataset.eval_batches(split, 1, 1_000_000)]
    return tokenizer_of(dataset).decode_bytes(examples[0][0].tolist()).decode()


def test_the_packages_that_are_named_and_what_they_need_are_read_without_what_is_no_source(environment):
    pylib.main(words(**environment))
    meta = open_dataset(environment["out_dir"]).meta
    assert meta["parameters"]["packages"] == {"core-lib": "2.1", "needed-one": "1.0"}
    train, val = (text_of(environment["out_dir"], split) for split in ("train", "val"))
    both = train + val
    for name in ("standard", "t", "a", "s", "needed", "two"):
        assert f"def {name}_0(x)" in both, name
    for name in ("hidden", "hidden2", "outside", "made", "other", "old"):
        assert f"def {name}_0(x)" not in both, name
    assert both.count("def a_0(x)") == 1 and both.count("def t_0(x)") == 1 and "'row'" not in both
    names = {name for name in ("needed", "two", "standard", "t") if f"def {name}_0(x)" in val}
    assert names and not any(f"def {name}_0(x)" in train for name in names)  # whole modules validate


def test_a_tokenizer_is_trained_on_its_training_text(environment):
    pylib.main(words(**environment, tokenizer="bpe:300"))
    dataset = open_dataset(environment["out_dir"])
    assert dataset.vocab_size == 300 and "def standard_0(x)" in text_of(environment["out_dir"], "train") + text_of(
        environment["out_dir"], "val"
    )


def test_a_package_that_is_not_installed_is_named(environment):
    environment["requirements"].write_text("core-lib\nno-such-package==1\n", encoding="utf-8")
    expected = f"no-such-package: is not installed; run pip install -r {environment['requirements']}"
    assert error_of(pylib.main, words(**environment)) == expected
    environment["requirements"].write_text("core-lib ==\n", encoding="utf-8")
    assert "requirements.txt: cannot be read" in error_of(pylib.main, words(**environment))

"""--checkpoint=hub:OWNER/NAME: from the cache of the Hugging Face hub, by a download, or one line of what to do."""

import shutil
import types
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers as hf

from base import hub_cache
from base.files import find_checkpoint
from runs import checkpoint as checkpoints

SHA = "0123456789" * 4


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **keys: real(name, cache_dir=tmp_path / "cache", **keys)
    )
    return tmp_path / "cache"


def put(cache, folder):
    """A snapshot as huggingface_hub lays it out."""
    there = cache / "models--owner--name"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text(SHA)
    return shutil.copytree(folder, there / "snapshots" / SHA)


@pytest.fixture
def folder(tmp_path):
    config = hf.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4
    )
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def test_a_model_in_the_cache_is_the_folder_that_it_is_a_copy_of(cache, folder):
    put(cache, folder)
    assert find_checkpoint("hub:owner/name").parent.name == SHA
    a, b = (checkpoints.load_model(path)[0] for path in ("hub:owner/name", folder))
    idx = torch.arange(20)[None]
    assert torch.equal(a(idx), b(idx))


@pytest.mark.parametrize(
    "name, line",
    [
        ("owner/absent", "`hf download owner/absent"),
        ("owner/name", "`hf download owner/name"),  # whose weights alone are not there
        ("a/b/c", "write hub:OWNER/NAME"),
    ],
)
def test_what_is_not_in_the_cache_and_cannot_be_fetched_is_one_line(name, line, cache, folder, helpers, monkeypatch):
    (folder / "model.safetensors").unlink()
    put(cache, folder)

    def no_network(self, name, **keys):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    message = helpers.error_of(find_checkpoint, f"hub:{name}")
    assert message.startswith(f"hub:{name}: ") and line in message


def test_a_download_prints_its_revision_and_asks_the_disk_first(cache, folder, helpers, monkeypatch, capsys):
    files = [types.SimpleNamespace(rfilename=file.name, size=file.stat().st_size) for file in folder.iterdir()]
    files.append(types.SimpleNamespace(rfilename="pytorch_model.bin", size=1 << 60))  # is not fetched
    about = types.SimpleNamespace(sha=SHA, siblings=files)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **keys: about)
    cached = huggingface_hub.snapshot_download

    def download(name, **keys):
        if keys.get("local_files_only"):
            return cached(name, **keys)
        assert keys == {"allow_patterns": hub_cache.PATTERNS}  # by its branch, so that it is found again
        return str(put(cache, folder))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
        assert "has room for 0.00" in helpers.error_of(find_checkpoint, "hub:owner/name")
    assert Path(find_checkpoint("hub:owner/name")).is_file()
    assert f"hub:owner/name: revision {SHA}, " in capsys.readouterr().out

"""Models of transformers, read from the folders that it writes, and ours, written for it.

python -m pytest tests/test_huggingface.py

No hub is needed: a model of each class gets random weights, is saved with save_pretrained, and read as a user's folder
would be. published.py has the gated attention of Qiu et al., which no class of transformers has.
"""

from configurator import UserError

import copy
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import published
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
from conftest import LINES
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import evaluate
import export
import meters
import plot
import sample
import train
from data.shards import open_dataset
from data.text import prepare as text_prepare
from data.tokenizer import FileTokenizer, get_tokenizer, tokenizer_of_checkpoint
from model import GPT, GPTConfig
from runs import checkpoint as checkpoints
from runs import huggingface

ROOT = Path(export.__file__).parent
SIZES = dict(
    vocab_size=300, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5, attn_implementation="eager",
    tie_word_embeddings=False,
)  # fmt: skip
DELTA = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=12,
    num_hidden_layers=4,
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5e5}
PARTIAL_NAME = "partial_rotary_factor"
PARTIAL = ROPE | {PARTIAL_NAME: 0.25}
DENSE = dict(mlp_only_layers=[0, 1, 2, 3], num_experts=4, moe_intermediate_size=8, num_experts_per_tok=2)
GPT2 = dict(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation="eager")


FAMILIES = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE)),
    "Llama, tied, no GQA": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES | dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=8))
    ),
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=ROPE)),
    "Qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | dict(tie_word_embeddings=True))),
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "GPT-2, untied, exact gelu": lambda: GPT2LMHeadModel(
        GPT2Config(**GPT2, tie_word_embeddings=False, activation_function="gelu", n_inner=40, layer_norm_epsilon=1e-3)
    ),
    "Qwen3-Next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES | DELTA, **DENSE, rope_parameters=PARTIAL)),
    "Qwen3.5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES | DELTA, rope_parameters=PARTIAL)),
    "Qwen3.5, another pattern, tied": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **SIZES | DELTA | dict(num_hidden_layers=3, tie_word_embeddings=True),
            layer_types=["full_attention", "linear_attention", "full_attention"],
        )
    ),
    "Qwen3.5 with images": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=SIZES | DELTA | dict(rope_parameters=PARTIAL | {"mrope_section": [1, 1, 0]}),
            vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32),
        )
    ),
}


def imported(helpers, folder, out, **keys):
    export.main(helpers.words(from_hf=folder, out_dir=out, **keys))
    return checkpoints.load_model(out)[0]


IDX = torch.arange(2 * 48).view(2, 48) * 37 % 300


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_an_imported_model_are_those_of_transformers(name, helpers, tmp_path, capsys):
    theirs = published.save(
        FAMILIES[name](), tmp_path / "theirs", max_shard_size="30KB"
    )  # several files and their index
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    with torch.no_grad():
        expected = theirs(IDX).logits
        torch.testing.assert_close(ours(IDX), expected, rtol=0, atol=1e-4)
        state, logits = ours.init_state(2), []
        for start, stop in ((0, 30), *((i, i + 1) for i in range(30, 48))):
            x, state = ours.features(IDX[:, start:stop], state, start)
            logits.append(ours.logits(x))
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1
    assert ("left out: model.visual." in capsys.readouterr().out) == ("images" in name)


def test_a_gpt2_as_on_the_hub_is_read(helpers, tmp_path, capsys):
    """Names without a prefix, causal masks among the tensors, and a config.json that does not say what is tied."""
    theirs = published.save(GPT2LMHeadModel(GPT2Config(**GPT2)), tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(64, 64).tril()[None, None] for i in (0, 1)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    about = json.loads((tmp_path / "config.json").read_text())
    about.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(about | {"n_ctx": 64, "n_inner": None}))
    ours = imported(helpers, tmp_path, tmp_path / "ours", block_size=50)
    assert ours.config.tie_embeddings and ours.wpe.weight.shape == (50, 32)
    said = capsys.readouterr().out
    assert "left out: h.0.attn.bias, h.1.attn.bias\n" in said and "block_size=50, of 64" in said
    with torch.no_grad():
        torch.testing.assert_close(ours(IDX), theirs(IDX).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(activation_function="relu"), "activation_function='relu': the MLP here has a gelu"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scores are scaled by the width alone"),
        (dict(scale_attn_weights=False), "scores are scaled by the width alone"),
        (dict(n_embd="wide"), "n_embd='wide': must be a whole number"),
        (dict(n_embd=36), "is not the shape that its config.json gives"),
        (dict(n_positions=65), "transformer.wpe.weight: (64, 32) is not the shape"),
        (dict(n_layer=3), "lacks transformer.h.2."),
    ],
    ids=str,
)
def test_a_gpt2_that_is_none_is_one_line(fields, words, helpers, tmp_path):
    published.save(FAMILIES["GPT-2"](), tmp_path / "theirs")
    change(**fields)(tmp_path / "theirs")
    message = helpers.error_of(export.main, helpers.words(from_hf=tmp_path / "theirs", out_dir=tmp_path / "ours"))
    assert words in message and not (tmp_path / "ours").exists()


@pytest.mark.parametrize("kind", ["baseline", "headwise", "elementwise"])
def test_logits_of_the_gated_models_are_those_of_their_definition(kind, helpers, tmp_path):
    theirs = published.save_gated_qwen3(kind, tmp_path / "theirs", **SIZES, rope_parameters=ROPE)
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    assert ours.config.gate == ("none" if kind == "baseline" else kind)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDX), theirs(IDX).logits, rtol=0, atol=1e-4)


def theirs_of(about):
    """The logits of transformers' model of a config.json, whose weights follow from their names; None if refused."""
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(about))).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2)
            return model(IDX[:, :8]).logits
    except Exception:
        return None


def ours_of(about):
    try:
        keys = huggingface.keys_of({name: value for name, value in about.items() if value is not None}, 64)
        return {name: value for name, value in keys.items() if name != "block_size"}
    except UserError:
        return None


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT-2", "Qwen3-Next", "Qwen3.5"])
def test_a_field_of_config_json_changes_our_model_exactly_where_it_changes_theirs(name):
    about = FAMILIES[name]().config.to_dict()
    there, here = theirs_of(about), ours_of(about)
    of_all = PreTrainedConfig().to_dict().keys() | {"output_router_logits"}  # what is returned, not computed
    own = [field for field in about if field not in of_all] + ["tie_word_embeddings"]
    others = {name: about[name] for name in own} | dict(
        partial_rotary_factor=0.25, rope_theta=1e3, mlp_bias=False, hidden_size=32, num_attention_heads=4
    )
    ropes = about.get("rope_parameters") or {}
    more = [{"rope_parameters": ropes | {field: ropes.get(field, 0.25) / 2}} for field in ("rope_theta", PARTIAL_NAME)]
    more += [{"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {"full_attention": ROPE}}]
    more += [{field: changed_value(value)} for field, value in others.items() if type(value) in (int, float, bool)]
    seen = 0
    for changed in more if name != "GPT-2" else [part for part in more if "rope" not in str(part)]:
        ours, theirs = ours_of(about | changed), theirs_of(about | changed)
        if ours is None:  # refused; no field that transformers needs is refused for its own value
            continue
        assert theirs is not None and (ours == here) == torch.equal(theirs, there), changed
        seen += ours != here
    assert seen >= 6


def changed_value(value):
    return not value if isinstance(value, bool) else value * 2 if isinstance(value, int) else value * 0.75


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A folder of a small Qwen3 in several files."""
    folder = tmp_path_factory.mktemp("qwen3")
    published.save(FAMILIES["Qwen3"](), folder, max_shard_size="30KB")
    return folder


def change(**fields):
    def damage(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return damage


def change_tensor(name, content):
    """Another tensor under this name, or none; in the file that holds it."""

    def damage(folder):
        index = folder / "model.safetensors.index.json"
        table = json.loads(index.read_text())
        file = folder / table["weight_map"].get(name, sorted(table["weight_map"].values())[0])
        tensors = safetensors.torch.load_file(file)
        tensors.pop(name, None)
        safetensors.torch.save_file(tensors | ({} if content is None else {name: content}), file)
        weight_map = {key: value for key, value in table["weight_map"].items() if key != name}
        index.write_text(json.dumps({"weight_map": weight_map | ({} if content is None else {name: file.name})}))

    return damage


def twice(name):
    """The tensor in a second file of the index, with other numbers."""

    def damage(folder):
        table = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        file = folder / next(file for file in sorted(table.values()) if file != table[name])
        tensors = safetensors.torch.load_file(file)
        safetensors.torch.save_file(tensors | {name: torch.ones(32)}, file)

    return damage


def first_file(write):
    def damage(folder):
        file = sorted(folder.glob("*.safetensors"))[0]
        write(file, file.read_bytes())

    return damage


def only(name, content):
    def damage(folder):
        for file in folder.iterdir():
            if file.name != "config.json":
                file.unlink()
        (folder / name).write_bytes(content)

    return damage


REFUSED = {
    "a model whose q, k and v alone have biases": (change(model_type="qwen2"), "only its q, k and v have biases"),
    "a config of GPT-2 without its names": (change(model_type="gpt2"), "it has no "),
    "a mixture of experts": (change(model_type="qwen3_moe"), "a mixture of experts"),
    "experts in Qwen3-Next": (change(model_type="qwen3_next", num_experts=8), "num_experts: a mixture of experts"),
    "an unknown model": (change(model_type="falcon"), "model_type='falcon': not read here"),
    "a model_type of anything": (change(model_type=[1]), "model_type=[1]: must be a text"),
    "scaled RoPE": (
        change(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        "rope_parameters: RoPE scaled by 'yarn'",
    ),
    "scaled RoPE, old spelling": (change(rope_scaling={"type": "linear"}), "rope_scaling: RoPE scaled by 'linear'"),
    "partial RoPE, which Qwen3 does not have": (
        change(rope_parameters=PARTIAL),
        "partial_rotary_factor=0.25: qwen3 of transformers turns all channels",
    ),
    "partial RoPE, old spelling": (change(partial_rotary_factor=0.5), "partial_rotary_factor=0.5: qwen3 of"),
    "a RoPE for each kind of layer": (
        change(rope_parameters={"full_attention": ROPE}),
        "'full_attention' has a RoPE of its own",
    ),
    "biases": (change(attention_bias=True), "attention_bias=True: its linear layers have biases"),
    "a sliding window": (change(use_sliding_window=True), "use_sliding_window"),
    "an unknown layer": (change(layer_types=["full_attention", "chunked"]), "layer_types: 'chunked' is not read"),
    "too few layers": (change(layer_types=["full_attention"]), "layer_types: 1 for 2 layers"),
    "another activation": (change(hidden_act="relu"), "hidden_act='relu'"),
    "quantised weights": (change(quantization_config={"bits": 4}), "its weights are quantised"),
    "a width of words": (change(hidden_size="wide"), "hidden_size='wide': must be a whole number"),
    "a width of another model": (change(hidden_size=34), "is not the shape that its config.json gives"),
    "more layers than there are": (change(num_hidden_layers=4, layer_types=None), "lacks model.layers.2."),
    "fewer layers than there are": (change(num_hidden_layers=1, layer_types=None), "holds model.layers.1."),
    "memory for nothing": (change(vocab_size=1 << 39), "is not the shape that its config.json gives"),
    "more numbers than can be counted": (change(vocab_size=1 << 40, hidden_size=1 << 40), "tensors that are too large"),
    "a tensor that is missing": (change_tensor("model.norm.weight", None), "lacks model.norm.weight"),
    "a tensor that nobody reads": (
        change_tensor("model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
        "holds model.layers.0.self_attn.q_proj.bias, which the model here has no place for",
    ),
    "a tensor of another shape": (change_tensor("model.norm.weight", torch.ones(31)), "model.norm.weight: (31,)"),
    "a tensor of no axes": (
        change_tensor("model.layers.0.self_attn.q_proj.weight", torch.ones(())),
        "is not the shape",
    ),
    "two spellings of a tensor": (
        change_tensor("embed_tokens.weight", torch.ones(300, 32)),
        "holds 'model.embed_tokens.weight' twice, as ",
    ),
    "a tensor in two files": (twice("model.norm.weight"), "holds 'model.norm.weight' twice, as "),
    "a tied output layer of its own": (
        change(tie_word_embeddings=True),
        "lm_head.weight is not model.embed_tokens.weight, though its config.json ties them",
    ),
    "whole numbers": (
        change_tensor("model.norm.weight", torch.ones(32, dtype=torch.int8)),
        "is torch.int8, and no number",
    ),
    "a file cut short": (first_file(lambda file, data: file.write_bytes(data[:-9])), "damaged, or no safetensors"),
    "a header of noise": (first_file(lambda file, data: file.write_bytes(b"\xff" * 99)), "damaged, or no safetensors"),
    "a file that is missing": (first_file(lambda file, data: file.unlink()), "00001-of-"),
    "a pickle": (only("pytorch_model.bin", b"x"), "its weights are a pickle, which can run code"),
    "no weights": (only("readme.md", b"x"), "has no model.safetensors"),
    "an index that leads elsewhere": (
        only("model.safetensors.index.json", b'{"weight_map": {"a": "../a.safetensors"}}'),
        "names '../a.safetensors', which is no .safetensors file of the folder itself",
    ),
    "an index of noise": (only("model.safetensors.index.json", b"{"), "cannot be read as JSON"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
    "a config of something else": (change(model_type=None), "model_type=None: must be a text"),
    "a damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "damaged, or no tokenizer"),
}


@pytest.mark.parametrize(("damage", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_damaged_or_foreign_folder_is_one_line(damage, words, qwen3, helpers, tmp_path):
    folder = shutil.copytree(qwen3, tmp_path / "theirs")
    damage(folder)
    message = helpers.error_of(export.main, helpers.words(from_hf=folder, out_dir=tmp_path / "ours"))
    assert words in message and str(folder) in message
    assert not (tmp_path / "ours" / "config.json").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "config.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_refused_but_for_the_blobs_of_a_hub_s_cache(name, helpers, tmp_path, capsys):
    folder, secret, out = tmp_path / "hub" / "snapshots" / "0123", tmp_path / "elsewhere" / "secret", tmp_path / "ours"
    published.save(FAMILIES["Qwen3"](), folder)
    published.save_tokenizer(folder / "tokenizer.json", 300)
    (folder / "vocab.json").write_text("{}")
    for place in (secret, tmp_path / "hub" / "blobs" / "4567"):
        place.parent.mkdir()
        shutil.copy(folder / name, place)
    for target in (secret, "../../../elsewhere/secret", "../../blobs/4567"):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        words = helpers.words(from_hf=folder, out_dir=out)
        if "4567" not in str(target):
            message = helpers.error_of(export.main, words)
            assert message.startswith(f"{folder / name}: is a link to {secret}") and not out.exists()
    export.main(words)
    assert "model.safetensors, config.json, tokenizer.json, vocab.json" in capsys.readouterr().out
    assert not any(file.is_symlink() for file in out.iterdir())


def test_an_import_into_its_own_folder_or_through_a_link_to_it_is_refused(qwen3, helpers, tmp_path):
    folder = shutil.copytree(qwen3, tmp_path / "theirs")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (tmp_path / "link").symlink_to(folder)
    for source, target in ((folder, folder), (folder, tmp_path / "link"), (tmp_path / "link", folder)):
        words = helpers.words(from_hf=source, out_dir=target, block_size=8, overwrite=True)
        assert "holds the model that is to be written; name another folder" in helpers.error_of(export.main, words)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_folder_with_weights_in_one_file_and_in_shards_is_read_as_transformers_reads_it(qwen3, helpers, tmp_path):
    folder = shutil.copytree(qwen3, tmp_path / "theirs")
    theirs = Qwen3ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        theirs.model.norm.weight.mul_(2)
    safetensors.torch.save_file(theirs.state_dict(), folder / "model.safetensors", {"format": "pt"})
    ours = imported(helpers, folder, tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(ours(IDX), Qwen3ForCausalLM.from_pretrained(folder).eval()(IDX).logits)


def test_a_folder_of_transformers_is_no_checkpoint_yet(qwen3, helpers, tmp_path):
    single = shutil.copytree(qwen3, tmp_path / "single")
    published.save(FAMILIES["Qwen3"](), single)
    message = helpers.error_of(sample.main, helpers.words(checkpoint=single))
    assert f"python export.py --from_hf={single}" in message
    assert "no such folder" in helpers.error_of(export.main, ["--from_hf=nowhere"])
    assert "names no model_type" in helpers.error_of(
        export.main, [f"--from_hf={imported_folder(helpers, qwen3, tmp_path)}"]
    )


def imported_folder(helpers, qwen3, tmp_path):
    export.main(helpers.words(from_hf=qwen3, out_dir=tmp_path / "out"))
    return tmp_path / "out"


def test_without_the_libraries_one_line_says_how_to_get_them(qwen3, tokenizer_file, helpers, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install tokenizers" in helpers.error_of(FileTokenizer, tokenizer_file)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    words = helpers.words(from_hf=qwen3, out_dir=tmp_path)
    assert "pip install safetensors" in helpers.error_of(export.main, words)


# ----------------------------------------------------------------------------------------------------------------------
# Export


OURS = dict(
    n_layer=2, n_head=4, n_kv_head=2, head_dim=8, n_embd=16, vocab_size=50, block_size=32, mlp="swiglu", qk_norm=True,
    rope_base=5e5, norm_eps=1e-6,
)  # fmt: skip
OF_GPT2 = dict(
    n_layer=2, n_head=4, n_embd=32, vocab_size=50, block_size=32, mlp="gelu_tanh", norm="layer", bias=True,
    position="learned", dropout=0.1, n_kv_head=None, qk_norm=False,
)  # fmt: skip
EXPORTED = {
    "Qwen3ForCausalLM": OURS | dict(tie_embeddings=False),
    "Qwen3ForCausalLM, tied": OURS,
    "GPT2LMHeadModel": OF_GPT2,
    "GPT2LMHeadModel, untied": OF_GPT2 | dict(mlp="gelu", tie_embeddings=False, mlp_width=24, norm_eps=1e-5),
    "LlamaForCausalLM": OURS | dict(qk_norm=False, n_embd=32, n_kv_head=None),
    "Qwen3NextForCausalLM": OURS | dict(gate="elementwise", rope_fraction=0.5),
    "Qwen3NextForCausalLM, matched": OURS | dict(gate="elementwise", match_params=True, n_kv_head=None),
    "Qwen3NextForCausalLM, hybrid": OURS
    | dict(
        n_layer=4, attention="gated_deltanet,gated_deltanet,gated_deltanet,softmax", delta_key_heads=2,
        gate="native,native,native,elementwise", delta_value_dim=12, tie_embeddings=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_model_is_the_same_in_transformers_and_comes_back_bit_for_bit(name, helpers, tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**EXPORTED[name])).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.rand_like(p))  # norms between 1 and 1.3: 1 + (weight - 1) is then exact
    (tmp_path / "run").mkdir()
    checkpoints.save(tmp_path / "run" / "ckpt.pt", {"model": model.state_dict(), "model_args": vars(model.config)})
    export.main(helpers.words(checkpoint=tmp_path / "run", to_hf=tmp_path / "theirs"))
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert type(theirs).__name__ == name.partition(",")[0]
    assert theirs.config.eos_token_id is None  # the class has a number of its own, which here is any token
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    idx = IDX[:, :32] % 50
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(idx).logits, model(idx), rtol=0, atol=1e-4)
    back = imported(helpers, tmp_path / "theirs", tmp_path / "back")
    assert helpers.equal(back.state_dict(), model.state_dict())
    assert back.config.layers() == model.config.layers() and back.config.block_size == 32


@pytest.mark.parametrize("name", [name for name in EXPORTED if "Next" in name])
def test_a_gate_that_doubles_leaves_with_its_factor_in_the_output_projection(name, helpers, tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**EXPORTED[name] | dict(gate_activation="sigmoid2"))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.rand_like(p))
    checkpoints.save(tmp_path / "a.pt", {"model": model.state_dict(), "model_args": vars(model.config)})
    export.main(helpers.words(checkpoint=tmp_path / "a.pt", to_hf=tmp_path / "theirs"))
    back = imported(helpers, tmp_path / "theirs", tmp_path / "back")
    theirs, idx = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval(), IDX[:, :32] % 50
    assert back.config.gate_activation == "sigmoid"
    with torch.no_grad():
        assert torch.equal(back(idx), model(idx))
        torch.testing.assert_close(theirs(idx).logits, model(idx), rtol=0, atol=1e-4)
        x = torch.randn(1, 6, 16)
        mask = torch.full((6, 6), -torch.inf).triu(1)[None, None]
        *_, mixer = (block.mixer for block in model.blocks)
        ours = mixer(x)
        y, _ = theirs.model.layers[-1].self_attn(x, theirs.model.rotary_emb(x, torch.arange(6)[None]), mask)
        torch.testing.assert_close(y, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen3", "GPT-2"])
def test_a_bfloat16_model_goes_there_and_back_bit_for_bit(name, helpers, tmp_path):
    published.save(FAMILIES[name]().bfloat16(), tmp_path / "theirs")
    imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    export.main(helpers.words(checkpoint=tmp_path / "ours", to_hf=tmp_path / "back"))
    first, second = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert helpers.equal(first, second) and {tensor.dtype for tensor in second.values()} == {torch.bfloat16}


NOT_HELD = {
    "mlp": dict(mlp="gelu"),
    "gate_activation": dict(gate="elementwise", gate_activation="non_sparse"),
    "gate='headwise'": dict(gate="headwise"),
    "attention='gla'": dict(attention="gla"),
    "qk_norm": dict(gate="elementwise", qk_norm=False),
    "position": dict(position="none"),
    "logit_softcap": dict(logit_softcap=30.0),
    "short_conv": dict(short_conv=4),
    "rope_scaling": dict(rope_scaling="yarn", rope_factor=2.0),
    "pad_vocab_to": dict(pad_vocab_to=64),
    "branch_scale": dict(branch_scale=0.5),
    "bias=True": dict(bias=True),
    "rope_fraction=0.5": dict(rope_fraction=0.5),
    "rope_fraction=0.25": dict(rope_fraction=0.25, qk_norm=False),
    "hidden_size=18": dict(qk_norm=False, n_embd=18),
    "bias=False": OF_GPT2 | dict(bias=False),
    "mlp='swiglu'": OF_GPT2 | dict(mlp="swiglu"),
    "position='rope'": OF_GPT2 | dict(position="rope"),
    "not in GPT-2": OF_GPT2 | dict(gate="elementwise"),
    "2 widths": dict(gate="none,elementwise", match_params=True),
}


@pytest.mark.parametrize(("named", "keys"), NOT_HELD.items(), ids=NOT_HELD)
def test_what_no_class_holds_is_refused_by_name(named, keys, helpers, tmp_path):
    model = GPT(GPTConfig(**OURS | keys))
    checkpoints.save(tmp_path / "a.pt", {"model": model.state_dict(), "model_args": vars(model.config)})
    message = helpers.error_of(export.main, helpers.words(checkpoint=tmp_path / "a.pt", to_hf=tmp_path / "theirs"))
    assert named in message and not (tmp_path / "theirs").exists()


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer, and the programs on an imported model


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A byte-level tokenizer of 70,002 ids, whose bytes are the last ones but two."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    published.save_tokenizer(file, 70_002)
    return file


def test_a_byte_level_tokenizer_gives_back_every_byte(tokenizer_file):
    tokenizer = FileTokenizer(tokenizer_file)
    text = "".join(LINES) + "".join(map(chr, range(300))) + "<|end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert len(ids) == len(text.encode())  # special tokens in the text are plain text
    assert tokenizer.decode_bytes([70_000]) == b"<|end|>"
    assert tokenizer.encode_array(text).tolist() == ids and tokenizer.encode_array(text).dtype == np.uint32
    assert tokenizer.vocab_size == 70_002
    assert get_tokenizer(tokenizer.name, ["nowhere", tokenizer_file.parent]).name == tokenizer.name


def test_a_tokenizer_of_pieces_falls_back_to_bytes(tmp_path):
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "fox", "t", "h", "e"]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    for text in LINES:
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()
    assert tokenizer.encode_array("the").dtype == np.uint16


def test_a_token_that_spells_no_bytes_is_its_own_text_as_in_the_library(tokenizer_file, tmp_path):
    about = json.loads(tokenizer_file.read_text())
    vocab = about["model"]["vocab"]
    vocab |= {"\u4e2d": len(vocab), "a\u2581": len(vocab) + 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    ours, theirs = FileTokenizer(tmp_path / "tokenizer.json"), tokenizers.Tokenizer.from_str(json.dumps(about))
    for token in ("\u4e2d", "a\u2581", "a"):
        assert ours.decode_bytes([vocab[token]]) == token.encode() == theirs.decode([vocab[token]]).encode()


def split_at(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def test_a_text_on_which_a_tokenizer_fails_is_one_line(tokenizer_file, helpers, tmp_path):
    about = json.loads(tokenizer_file.read_text()) | {"pre_tokenizer": split_at("(ab|abab)+$")}
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    message = helpers.error_of(tokenizer.encode, 60 * "ab" + "!")
    assert "tokenizer.json: fails on a text of 121 characters (" in message


def test_the_tokenizer_of_a_checkpoint_is_found_beside_it_or_in_its_data(tokenizer_file, tmp_path):
    about = {"tokenizer": FileTokenizer(tokenizer_file).name}
    assert tokenizer_of_checkpoint(tokenizer_file.with_name("best.pt"), about).name == about["tokenizer"]
    own = about | {"path": str(tokenizer_file.parent)}
    assert tokenizer_of_checkpoint(tmp_path, own).name == about["tokenizer"]


def test_a_tokenizer_that_is_not_read_or_not_there_is_one_line(tokenizer_file, helpers, tmp_path):
    about = json.loads(tokenizer_file.read_text())
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(about | {"decoder": {"type": "WordPiece", "prefix": "#", "cleanup": True}})
    )
    assert "neither bytes nor pieces" in helpers.error_of(FileTokenizer, tmp_path / "tokenizer.json")
    assert "copy it there" in helpers.error_of(get_tokenizer, "tokenizer.json 0123", [tmp_path.parent])
    words = [str(tokenizer_file), f"--tokenizer={tmp_path / 'empty'}", f"--out_dir={tmp_path / 'data'}"]
    assert "or a folder with a tokenizer.json" in helpers.error_of(text_prepare.main, words)


def test_the_programs_run_on_an_imported_model(tokenizer_file, helpers, tmp_path, capsys):
    model = published.save_gated_qwen3("elementwise", tmp_path / "theirs", **SIZES | dict(vocab_size=70_016))
    shutil.copy(tokenizer_file, tmp_path / "theirs")
    (tmp_path / "book.txt").write_text("".join(LINES * 20))
    out, data = tmp_path / "ours", tmp_path / "data"
    export.main(helpers.words(from_hf=tmp_path / "theirs", out_dir=out, block_size=32))
    assert "block_size=32, of 64 that it was made for" in capsys.readouterr().out
    text_prepare.main([str(tmp_path / "book.txt"), *helpers.words(tokenizer=out, out_dir=data)])
    dataset = open_dataset(data)
    inputs, _ = dataset.batch("train", 0, seed=0, batch_size=2, block_size=32)
    assert inputs.min() > 65_535 and bytes(FileTokenizer(data / "tokenizer.json").decode_bytes(inputs[0].tolist()))
    here = dict(device="cpu", threads=1)
    assert "names no data set" in helpers.error_of(evaluate.main, helpers.words(checkpoint=out, **here))
    capsys.readouterr()
    evaluate.main(helpers.words(checkpoint=out, dataset=data, **here))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    with torch.no_grad():
        tokens = torch.cat([inputs for inputs, _, _ in dataset.eval_batches("val", 1, 32)], 1)
        assert abs(result["loss"] - loss_of(model, dataset)) < 1e-4
    assert tokens.max() < 70_002 and result["tokenizer"].startswith("tokenizer.json ")
    meters.main(helpers.words(checkpoint=out, dataset=data, rows=2, score_batches=1, **here))
    assert json.loads((out / "meters.json").read_text())["checkpoints"][0]["layers"][0]["gates"]["readout"]
    plot.main([str(out)])
    assert (out / "page.png").stat().st_size > 10_000
    text_of = {}
    run = helpers.train(data, tmp_path / "run", max_iters=1, meters=False)  # trained here, with their tokenizer
    for checkpoint in (out, run):
        capsys.readouterr()
        words = dict(checkpoint=checkpoint, start="fox", num_samples=1, max_new_tokens=8, device="cpu")
        sample.main(helpers.words(**words))
        text_of[checkpoint] = capsys.readouterr().out
        assert text_of[checkpoint].startswith("fox")
    export.main(helpers.words(checkpoint=out, safetensors=tmp_path / "again"))
    sample.main(helpers.words(**words | dict(checkpoint=tmp_path / "again")))
    assert capsys.readouterr().out.endswith(text_of[out])


def test_a_gpt2_samples_and_a_gate_added_to_it_starts_at_the_same_function(helpers, tmp_path, capsys):
    theirs = published.save(FAMILIES["GPT-2"](), tmp_path / "theirs")
    published.save_tokenizer(tmp_path / "theirs" / "tokenizer.json", 300)
    ours, data = imported(helpers, tmp_path / "theirs", tmp_path / "ours"), tmp_path / "data"
    capsys.readouterr()
    words = dict(checkpoint=tmp_path / "ours", start="fox", num_samples=1, max_new_tokens=8, device="cpu")
    sample.main(helpers.words(**words))
    assert capsys.readouterr().out.startswith("fox")
    idx = IDX[:1, :20]
    assert torch.equal(ours.generate(idx, 9, temperature=0), theirs.generate(idx, max_new_tokens=9, do_sample=False))
    (tmp_path / "book.txt").write_text("".join(LINES * 20))
    text_prepare.main([str(tmp_path / "book.txt"), *helpers.words(tokenizer=tmp_path / "ours", out_dir=data)])
    keys = dict(init_from=tmp_path / "ours", dataset=data, max_iters=2, batch_size=2, device="cpu", threads=1)
    gate = dict(gate="elementwise", gate_activation="sigmoid2")
    losses = []
    for name, more in (("plain", {}), ("gated", gate)):
        train.main(helpers.words(out_dir=tmp_path / name, **keys, **more))
        losses.append(helpers.metrics(tmp_path / name, "eval")[0]["val_loss"])
    assert losses[0] == losses[1]
    gated, _ = checkpoints.load_model(tmp_path / "gated")
    assert gated.blocks[1].mixer.gates["readout"].proj.weight.any() and gated.config.bias


def loss_of(model, dataset):
    """Mean loss of transformers' model over the validation split, in windows of 32 tokens."""
    total = count = 0
    for inputs, targets, _ in dataset.eval_batches("val", 1, 32):
        n = int((targets != -100).sum())
        total += float(F.cross_entropy(model(inputs).logits[0], targets[0], reduction="sum", ignore_index=-100))
        count += n
    return total / count


# ----------------------------------------------------------------------------------------------------------------------
# Memory


MEASURE = """
import sys
import safetensors.torch
import torch
import model
from runs import checkpoint, huggingface

def status(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])

def save_file(*args, write=safetensors.torch.save_file):  # when all tensors are ready to be written
    print("measured", status("RssAnon") - before)
    write(*args)

with torch.device("meta"):  # torch loads what it needs for tensors without memory
    model.GPT(model.GPTConfig(n_layer=1, vocab_size=9))
safetensors.torch.save_file, before, resident = save_file, status("RssAnon"), status("VmRSS")
if sys.argv[1] != "load":
    huggingface.read_folder(sys.argv[1], sys.argv[2], block_size=64)
else:
    loaded, _ = checkpoint.load_model(sys.argv[2])
    loaded(torch.zeros(1, 8, dtype=torch.long))
    print("measured", status("VmHWM") - resident)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_import_takes_the_memory_of_what_it_rearranges_and_a_load_that_of_one_model(tmp_path):
    keys = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=5, vocab_size=8000)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES | keys | dict(head_dim=128)))
    weights = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    model.config.save_pretrained(tmp_path / "theirs")
    safetensors.torch.save_file(weights, tmp_path / "theirs" / "model.safetensors")
    size = sum(tensor.nbytes for tensor in weights.values())
    assert size > 100e6
    measured = []
    for what in (str(tmp_path / "theirs"), "load"):
        command = [sys.executable, "-c", MEASURE, what, str(tmp_path / "ours")]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        measured += [int(number) / size for number in re.findall(r"measured (\d+)", ended.stdout)]
    of_import, of_load = measured
    assert of_import < 1 and of_load < 1.4

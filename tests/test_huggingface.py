"""Models of transformers: each gets random weights, is saved with save_pretrained, and read as a user's folder is.

published.py has the gated attention of Qiu et al., which no class of transformers has.
"""

import copy
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import unicodedata
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import published
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers as hf
from conftest import LINES, ROOT
from small_models import logits_of_pieces

import sample
from base import configurator
from base.configurator import UserError
from data.shards import open_dataset
from data.text import prepare as text_prepare
from data.tokenizer import FileTokenizer, get_tokenizer, tokenizer_of_checkpoint, train_bpe
from hub import export, export_hf, families, tensors
from hub.families import GATED as QWEN3_5
from hub.text import copied_files
from keys import TrainConfig
from model import GPT, GPTConfig
from runs import checkpoint as checkpoints
from runs.hardware import autocast

SIZES = dict(
    vocab_size=300, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5, attn_implementation="eager",
    tie_word_embeddings=False,
)  # fmt: skip
DEEP = SIZES | {"num_hidden_layers": 4}
DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=12)
ROPE = {"rope_type": "default", "rope_theta": 5e5}
PART = "partial_rotary_factor"
PARTIAL = ROPE | {PART: 0.25}
MAMBA2 = dict(vocab_size=300, hidden_size=32, num_heads=4, head_dim=16, state_size=8, num_hidden_layers=2, chunk_size=8)
LLAMA3 = {  # pairs that turn often, a few times and less than once in 32 positions
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 500}  # pairs 1, 8
GPT2 = dict(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation="eager")

FAMILIES = {
    "Llama": hf.LlamaConfig(**SIZES, rope_parameters=ROPE),
    "Llama, tied, no GQA": hf.LlamaConfig(**SIZES | dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=8)),
    "Qwen3": hf.Qwen3Config(**SIZES, rope_parameters=ROPE),
    "GPT-2": hf.GPT2Config(**GPT2),
    "GPT-2, untied, exact gelu": hf.GPT2Config(
        **GPT2, tie_word_embeddings=False, activation_function="gelu", n_inner=40, layer_norm_epsilon=1e-3
    ),
    "Llama 3.1": hf.LlamaConfig(**SIZES, rope_parameters=ROPE | LLAMA3),
    "Llama, linear": hf.LlamaConfig(**SIZES, rope_parameters=ROPE | {"rope_type": "linear", "factor": 4.0}),
    "Llama, YaRN": hf.LlamaConfig(**SIZES, rope_parameters=ROPE | YARN),
    "Mistral": hf.MistralConfig(**SIZES, sliding_window=5),
    "Mistral without a window": hf.MistralConfig(**SIZES, sliding_window=None),
    "Qwen2": hf.Qwen2Config(**SIZES),
    "Qwen3.5": hf.Qwen3_5TextConfig(**DEEP | DELTA, rope_parameters=PARTIAL),
    "Mamba-2": hf.Mamba2Config(**MAMBA2, n_groups=1),
    "Mamba-2, tied": hf.Mamba2Config(**MAMBA2, n_groups=1, conv_kernel=3, tie_word_embeddings=True),
    "Qwen3.5 with images": hf.Qwen3_5Config(
        text_config=DEEP | DELTA | dict(rope_parameters=PARTIAL | {"mrope_section": [1, 1, 0]}),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32),
    ),
}
GATED = ["baseline", "headwise", "elementwise"]  # published.py's


def save(name, folder, fields=(), dtype=torch.float32, **how):
    """The folder of a model of theirs with random weights. Returns the model."""
    if name in GATED:
        return published.save_gated_qwen3(name, folder, **how, **SIZES, rope_parameters=ROPE)
    config = copy.deepcopy(FAMILIES[name])
    config.update(dict(fields))
    theirs = hf.AutoModelForImageTextToText if "images" in name else hf.AutoModelForCausalLM
    return published.save(theirs.from_config(config).to(dtype), folder, **how)


def imported(helpers, folder, out, **keys):
    export.main(helpers.words(from_hf=folder, out_dir=out, **keys))
    return checkpoints.load_model(out)[0]


IDX = torch.arange(2 * 64).view(2, 64) * 37 % 299
DOCS = (ROOT / "docs" / "checkpoints.md").read_text()
ROWS = re.findall(r"^\|.*?\| (.*?) \|[^|]*\| (?:yes|no) \| (\de-\d) \|$", DOCS, re.M)
WITHIN = {family: float(number) for cell, number in ROWS for family in re.findall(r"`(\w+)`", cell)}  # of logits


@torch.no_grad()
def largest_difference(ours, theirs):
    """Between the logits of ours and of theirs, with ours for each length of text, and with the cache."""
    expected = theirs(IDX).float()
    assert expected.std() > 0.1
    each = (ours(IDX[:, :n]) - expected[:, :n] for n in range(1, 65))
    in_pieces = logits_of_pieces(ours, IDX, [30, *[1] * 34]) - expected
    return max(y.abs().max().item() for y in (*each, in_pieces))


@pytest.mark.parametrize("name", [*FAMILIES, *GATED])
def test_logits_of_an_imported_model_are_those_of_transformers(name, helpers, tmp_path):
    theirs = save(name, tmp_path / "theirs", max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    assert largest_difference(ours, lambda idx: theirs(idx).logits) < WITHIN[theirs.config.model_type]
    assert name not in GATED or ours.config.gate == ("none" if name == "baseline" else name)
    idx, how = IDX[:1, :20], dict(max_new_tokens=9, do_sample=False, eos_token_id=None, use_cache=name not in GATED)
    ids = theirs.generate(idx, attention_mask=torch.ones_like(idx), **how)  # or else it guesses that id 0 is padding
    assert torch.equal(ours.generate(idx, 9, temperature=0), ids)


OF_SPREAD = re.findall(r"([\d.e-]+) of it in (float32|bfloat16)", DOCS)


@torch.no_grad()
@pytest.mark.parametrize("most, dtype", OF_SPREAD)
def test_logits_of_a_model_with_an_outlier_are_within_a_share_of_their_spread(most, dtype, tmp_path):
    theirs = save("Llama", tmp_path)
    theirs.get_input_embeddings().weight[IDX[:, 0], 7] = 25_000.0  # as real models have in the first token
    theirs.save_pretrained(tmp_path)
    ours, _ = checkpoints.load_model(tmp_path)
    hidden, expected = theirs.model(IDX, output_hidden_states=True).hidden_states[1], theirs(IDX).logits
    assert hidden.abs().max() > 20_000 and len(OF_SPREAD) == 2
    with autocast("cpu", dtype):
        difference = (ours(IDX) - expected).abs() / expected.std(-1, keepdim=True)
    assert difference.max() < float(most)
    assert dtype == "float32" or difference.max() > 1e-3  # which it is


@torch.no_grad()
def assert_is_cut(ours, theirs):
    assert ours.config.block_size == 50
    torch.testing.assert_close(ours(IDX[:, :50]), theirs(IDX[:, :50]).logits, rtol=0, atol=1e-4)


def test_a_gpt2_as_on_the_hub_is_read(helpers, tmp_path):
    """Names without a prefix, causal masks among the tensors, and a config.json that does not say what is tied."""
    theirs = save("GPT-2", tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(64, 64).tril()[None, None] for i in (0, 1)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    about = json.loads((tmp_path / "config.json").read_text())
    about.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(about | {"n_ctx": 64, "n_inner": None}))
    ours = imported(helpers, tmp_path, tmp_path / "ours", block_size=50)
    assert ours.config.tie_embeddings and ours.wpe.weight.shape == (50, 32)
    assert_is_cut(ours, theirs)


def save_nanogpt(file, bias, **changed):
    """What nanoGPT's train.py would save of a GPT-2: compiled, with its causal masks. Returns transformers' model."""
    theirs = save("GPT-2", file.parent / "theirs", dict(activation_function="gelu"))
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # nn.Linear there
    masks = ((f"_orig_mod.transformer.h.{i}.attn.bias", torch.ones(1, 1, 64, 64).tril()) for i in (0, 1))
    weights = OrderedDict(masks)
    for name, w in theirs.state_dict().items():
        if name.endswith("bias") and not bias:
            w.zero_()
        else:
            weights[f"_orig_mod.{name}"] = w.T if name.endswith(linear) else w
    args = dict(n_layer=2, n_head=4, n_embd=32, block_size=64, bias=bias, vocab_size=300, dropout=0.1)
    run = dict(optimizer={"state": {}}, iter_num=9, best_val_loss=torch.tensor(2.0), config={"device": "cuda"})
    torch.save(run | dict(model=weights, model_args=args | changed), file)
    return theirs


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_is_read_without_running_it(bias, helpers, tmp_path):
    theirs = save_nanogpt(tmp_path / "ckpt.pt", bias)
    torch.testing.assert_close(checkpoints.load_model(tmp_path)[0](IDX), theirs(IDX).logits, rtol=0, atol=1e-5)
    ours = imported(helpers, tmp_path / "ckpt.pt" if bias else tmp_path, tmp_path / "ours", block_size=50)
    assert ours.config.bias == bias
    assert_is_cut(ours, theirs)
    refused = {
        "n_layer='two': must be": lambda: save_nanogpt(tmp_path / "ckpt.pt", bias, n_layer="two"),
        "no checkpoint of nanoGPT": lambda: save_nanogpt(tmp_path / "ckpt.pt", bias, attention="gla"),
        "refused, it is damaged or": lambda: torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "ckpt.pt"),
    }
    for words, damage in refused.items():
        damage()
        message = helpers.error_of(export.main, helpers.words(from_hf=tmp_path / "ckpt.pt", out_dir=tmp_path / "b"))
        assert words in message and str(tmp_path) in message


def test_nanogpt_s_checkpoint_is_sampled_as_it_is_with_a_tokenizer_that_is_named(helpers, tmp_path, capsys):
    file, text = tmp_path / "ckpt.pt", tmp_path / "input.txt"
    save_nanogpt(file, True)
    text.write_text("".join(map(chr, range(32, 332))))  # 300 characters
    words = helpers.words(num_samples=1, max_new_tokens=5, device="cpu", start="To be")
    message = helpers.error_of(sample.main, [str(file), *words])
    assert message.startswith(f"{file}: does not say how text becomes tokens; add --tokenizer=gpt2,")
    assert message.endswith("--tokenizer=char:input.txt")
    drawn = []
    for way in ([str(file)], [f"--out_dir={tmp_path}"], [f"--checkpoint={file}"]):
        capsys.readouterr()
        sample.main([*way, *words, f"--tokenizer=char:{text}"])
        drawn.append(capsys.readouterr().out)
    assert drawn[0].startswith("To be") and len(drawn[0].split("\n")[0]) == 10 and len(set(drawn)) == 1


def theirs_of(about):
    """Shapes and logits of transformers' model of a config.json, whose weights follow from their names; or None."""
    try:
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**copy.deepcopy(about))).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2)
            return {name: p.shape for name, p in model.named_parameters()}, model(IDX[:, :8]).logits
    except Exception:
        return None, None


def ours_of(about):
    try:
        said = {field: value for field, value in about.items() if value is not None or field == "sliding_window"}
        keys = families.keys_of(said, 64)
        return {name: value for name, value in keys.items() if name != "block_size"}
    except UserError:
        return None


def changed_value(value):
    return not value if isinstance(value, bool) else value * 2 if isinstance(value, int) else value * 0.75


@pytest.mark.parametrize("name", [name for name in FAMILIES if "images" not in name and "tied" not in name])
def test_a_field_of_config_json_changes_our_model_exactly_where_it_changes_theirs(name):
    compare_changes(FAMILIES[name].to_dict(), [{"time_step_limit": [0.0, 0.5]}])  # of Mamba-2


def compare_changes(about, changes=()):
    """Compares every change of one number or truth value, and others."""
    (shapes, there), here, ropes = theirs_of(about), ours_of(about), about.get("rope_parameters") or {}
    of_all = hf.PreTrainedConfig().to_dict().keys() | {"output_router_logits"}  # what is returned, not computed
    of_all |= {"chunk_size", *(field for field in about if field.startswith("fuse_"))}  # how: only rounding differs
    values = {field: about[field] for field in about if field not in of_all}
    values |= dict(tie_word_embeddings=about["tie_word_embeddings"], mlp_bias=False)
    changes = [*changes, *({field: changed_value(x)} for field, x in values.items() if type(x) in (int, float, bool))]
    if "rope_parameters" in about:
        changes += [{PART: 0.1875}, {"rope_theta": 750.0}, {"rope_scaling": {"rope_type": "default"}}]
        changes += [{"rope_parameters": {"full_attention": ROPE}}]
        changes += [{"rope_parameters": ropes | {field: value}} for field, value in (("rope_theta", 9.0), (PART, 0.5))]
    if about["model_type"] == QWEN3_5:
        changes.append({"layer_types": about["layer_types"][::-1]})
    changes += [{"sliding_window": None}, {"original_max_position_embeddings": 8}]
    seen = 0
    for changed in changes:
        ours, (their_shapes, theirs) = ours_of(about | changed), theirs_of(about | changed)
        if ours == here and shapes != their_shapes:
            continue  # which the tensors of a folder show
        if (
            ours is not None and theirs is not None
        ):  # refused; no field that transformers needs is refused for its own value
            assert (ours == here) == torch.equal(theirs, there), changed
            seen += ours != here
    assert seen >= 6


@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name in hf.CONFIG_MAPPING])
def test_a_number_that_config_json_leaves_out_is_their_default(family):
    theirs = hf.AutoConfig.for_model(family).to_dict()
    theirs |= theirs.get("rope_parameters", {})
    ours = {field: x for field, x in families.FAMILIES[family].defaults.items() if isinstance(x, int | float)}
    ours = {field: x for field, x in ours.items() if theirs.get(field) is not None}
    assert ours == {field: theirs[field] for field in ours} and ours


# -- The other way -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def save_ours(file, keys):
    """A checkpoint of ours whose weights are far from their start."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**keys)).eval()
    for p in model.parameters():
        p.add_(0.3 * torch.rand_like(p))  # norms between 1 and 1.3: 1 + (weight - 1) is then exact
    checkpoints.save(file, {"model": model.state_dict(), "model_args": vars(model.config)})
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Llama, tied, no GQA", "Qwen3"])
def test_a_folder_of_transformers_comes_back_bit_for_bit(name, helpers, tmp_path):
    dtype = torch.bfloat16 if name == "Qwen3" else torch.float32
    theirs = save(name, tmp_path / "theirs", dtype=dtype)
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    family = theirs.config.model_type
    export.main(helpers.words(checkpoint=tmp_path / "ours", to_hf=tmp_path / "back", family=family))
    first, second = (safetensors.torch.load_file(tmp_path / x / "model.safetensors") for x in ("theirs", "back"))
    assert helpers.equal(first, second) and {tensor.dtype for tensor in second.values()} == {dtype}
    assert imported(helpers, tmp_path / "back", tmp_path / "again").config == ours.config
    how = dict(dtype=dtype, output_loading_info=True, attn_implementation="eager")
    folders = tmp_path / "theirs", tmp_path / "back"
    (theirs, _), (back, report) = (hf.AutoModelForCausalLM.from_pretrained(folder, **how) for folder in folders)
    assert type(back) is type(theirs) and not any(report.values())
    assert torch.equal(back(IDX).logits, theirs(IDX).logits)


OURS = dict(
    n_layer=2, n_head=4, n_kv_head=2, head_dim=8, n_embd=16, vocab_size=50, block_size=64, mlp="swiglu", qk_norm=True,
    rope_base=5e5, norm_eps=1e-6,
)  # fmt: skip
OF_GPT2 = dict(n_kv_head=None, head_dim=None, mlp="gelu", norm="layer", bias=True, position="learned", qk_norm=False)
HYBRID = dict(n_layer=4, attention="gated_deltanet,softmax", delta_sizes=[2, 4, 8, 9], tie_embeddings=False)
WITH_GATES = OURS | HYBRID | dict(gate="native,elementwise")
WRITTEN = {  # keys of ours, and the family
    "Llama": (OURS | dict(qk_norm=False, n_embd=32, n_kv_head=None), "llama"),
    "elementwise": (OURS | dict(gate="elementwise"), "qwen3_5_text"),
    "partial RoPE": (OURS | dict(attention="qwen3_next", gate="elementwise"), "qwen3_5_text"),
    "a hybrid": (WITH_GATES, "qwen3_5_text"),
    "a hybrid, doubled": (WITH_GATES | dict(gate_activation="sigmoid2"), "qwen3_5_text"),
}
SMALL = dict(n_layer=4, head_dim=8, n_embd=32, vocab_size=50, block_size=64, mlp_ratio=4.125)
PRETRAIN = ROOT / "config" / "pretrain"
for shape in ("124M", "350M", "1.3B"):
    one, hybrid = str(PRETRAIN / f"{shape}.py"), str(PRETRAIN / "hybrid.py")
    for words in ([one], [one, hybrid]):
        keys = configurator.read_words(TrainConfig, words)
        of_model = {name: value for name, value in keys.items() if name in GPTConfig.__dataclass_fields__}
        WRITTEN[" ".join(Path(word).stem for word in words)] = (of_model | SMALL, "qwen3_5_text")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_gate_that_equals_one_of_theirs_leaves(name, helpers, tmp_path):
    (keys, family), idx = WRITTEN[name], IDX % 50
    model = save_ours(tmp_path / "ckpt.pt", keys)
    export.main(helpers.words(checkpoint=tmp_path, to_hf=tmp_path / "theirs", family=family))
    theirs, report = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        expected = theirs.eval()(idx).logits
        torch.testing.assert_close(expected, model(idx), rtol=0, atol=1e-4)
        step = theirs(idx[:, 60:], past_key_values=theirs(idx[:, :60]).past_key_values).logits
        torch.testing.assert_close(step, expected[:, 60:], rtol=0, atol=1e-4)
        back = imported(helpers, tmp_path / "theirs", tmp_path / "b")
        torch.testing.assert_close(back.double()(idx), model.double()(idx), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Qwen3.5"])
def test_rope_is_written_as_transformers_5_reads_it_and_as_those_before_do(name, helpers, tmp_path):
    save(name, tmp_path / "theirs")
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    export.main(helpers.words(checkpoint=tmp_path / "ours", to_hf=tmp_path / "back", family=FAMILIES[name].model_type))
    about = json.loads((tmp_path / "back" / "config.json").read_text())
    new, old = {"rope_parameters"}, {"rope_theta", "partial_rotary_factor"}
    for dropped in (new, old):  # transformers 5 knows either spelling
        (tmp_path / "back" / "config.json").write_text(json.dumps({k: about[k] for k in about.keys() - dropped}))
        theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
        torch.testing.assert_close(theirs(IDX).logits, ours(IDX), rtol=0, atol=1e-4)
    assert about["rope_theta"] == ours.config.rope_base and about[PART] == ours.blocks[-1].mixer.rope_fraction


NOT_HELD = {
    "mlp='gelu': there it can only be 'swiglu'": ("qwen3", dict(mlp="gelu")),
    "gate_activation='silu': there it": ("qwen3_5_text", dict(gate="elementwise", gate_activation="silu")),
    "gate='headwise': there it can only be 'elementwise": ("qwen3_5_text", dict(gate="headwise")),
    "gate='elementwise@value': there it can only be": ("qwen3_5_text", dict(gate="elementwise@value")),
    "gate='elementwise': there it can only be 'none'": ("qwen3", dict(gate="elementwise")),
    "gate='none': there it can only be 'elementwise": ("qwen3_5_text", dict(gate="none")),
    "attention='gla': there it can only be 'softmax'": ("llama", dict(attention="gla", qk_norm=False)),
    "attention='qwen2': there it can only be 'softmax'": ("llama", dict(attention="qwen2", qk_norm=False)),
    "qk_norm=False: there it can only be True": ("qwen3_5_text", dict(gate="elementwise", qk_norm=False)),
    "position='none'": ("qwen3", dict(position="none")),
    "gate_bias=1.5": ("qwen3_5_text", dict(gate="elementwise", gate_bias=1.5)),
    "gate_input='static'": ("qwen3_5_text", dict(gate="elementwise", gate_input="static")),
    "short_conv=4": ("qwen3", dict(short_conv=4)),
    "partial_rotary_factor=0.25: must be one of 1.0": ("llama", dict(attention="qwen3_next", qk_norm=False)),
    "window='8': there it can only be 'none'": ("llama", dict(window="8", qk_norm=False)),
    "rope_scaling='ntk'": ("qwen3", dict(rope_scaling="ntk", rope_factor=2.0)),
    "gate_rank=2": ("qwen3_5_text", dict(gate="elementwise", gate_rank=2)),
    "gate_width=3: there it can only be None": ("qwen3_5_text", dict(gate="elementwise", gate_width=3)),
    "mlp='none': there it can only be 'swiglu'": ("qwen3", dict(mlp="none")),
    "size mismatch for blocks.0.mlp.up.weight": (
        "qwen3_5_text", HYBRID | dict(gate="native,elementwise", match_params=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "family", "keys"), [(words, *case) for words, case in NOT_HELD.items()], ids=NOT_HELD
)
def test_what_a_family_has_not_is_refused_by_its_key(words, family, keys, helpers, tmp_path):
    save_ours(tmp_path / "a.pt", OURS | keys)
    asked = helpers.words(checkpoint=tmp_path / "a.pt", to_hf=tmp_path / "theirs", family=family)
    message = helpers.error_of(export.main, asked)
    assert words in message and str(tmp_path) in message and not (tmp_path / "theirs").exists()
    assert helpers.error_of(export.main, [*asked, "--from_hf=b"]).endswith("from_hf, to_hf: give one of them, not both")
    message = helpers.error_of(export.main, [*asked[:2], "--family=gpt3"])
    assert message.startswith("family='gpt3': must be one of")


@dataclasses.dataclass
class Edited(GPTConfig):
    residual_scale: float = 0.5


WITH_QK_NORM = dict(gate="elementwise", qk_norm=True)
EDITED = {
    'Unexpected key(s) in state_dict: "blocks.0.hyper.alpha"': ("llama", {}, "blocks.0.hyper.alpha"),
    'Unexpected key(s) in state_dict: "head.bias"': ("llama", {}, "head.bias"),
    "gate_input='residual': there it can only be 'token'": ("qwen3_5_text", WITH_QK_NORM, None),
    "residual_scale=0.25: there it can only be 0.5": ("llama", dict(residual_scale=0.25), None),
}


@pytest.mark.parametrize(("words", "edit"), EDITED.items(), ids=EDITED)
def test_an_edited_model_is_not_written_as_a_published_one(words, edit, helpers, tmp_path, monkeypatch):
    family, keys, added = edit
    config_class = Edited if "residual_scale" in keys else GPTConfig
    model = GPT(config_class(**OURS | dict(qk_norm=False) | keys))
    if "gate_input" in words:
        monkeypatch.setattr("keys.check", lambda config: None)  # an edited rule of the key
        model.config.gate_input = "residual"
    checkpoint = {"model": model.state_dict() | ({added: torch.ones(2)} if added else {})}
    monkeypatch.setattr(export_hf, "load_model", lambda path: (model, checkpoint))
    asked = helpers.words(checkpoint=tmp_path / "a.pt", to_hf=tmp_path / "theirs", family=family)
    assert words in helpers.error_of(export.main, asked) and not (tmp_path / "theirs").exists()


# -- What is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of small models, a Qwen3 in several files and a GPT-2."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("Qwen3", "GPT-2")}
    for name, folder in folders.items():
        save(name, folder, max_shard_size="30KB")
    return folders


def change(**fields):
    def damage(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return damage


def change_tensor(name, content):
    """Another tensor under this name, or none, in one of the files."""

    def damage(folder):
        index = folder / "model.safetensors.index.json"
        table = json.loads(index.read_text())["weight_map"] if index.exists() else {"": "model.safetensors"}
        file = folder / table.get(name, min(table.values()))
        tensors = safetensors.torch.load_file(file)
        tensors.pop(name, None)
        safetensors.torch.save_file(tensors | ({} if content is None else {name: content}), file)

    return damage


def leave_a_pickle(folder):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin")


NORM, Q_PROJ = "model.norm.weight", "model.layers.0.self_attn.q_proj"
REFUSED = {
    "a model that is not read": (change(model_type="gemma2"), "model_type='gemma2': must be one of "),
    "another RoPE": (change(rope_parameters={"rope_type": "longrope", "factor": 4.0}), "rope_type='longrope': must be"),
    "RoPE by kind of layer": (change(rope_parameters={"full_attention": ROPE}), "its full_attention={'rope_type'"),
    "YaRN of its own numbers": (change(rope_parameters=YARN | {"beta_fast": 8}), "its beta_fast=8 is not read"),
    "Llama 3's RoPE of other numbers": (
        change(rope_parameters=LLAMA3 | {"high_freq_factor": 8.0}),
        "high_freq_factor=8.0: must be",
    ),
    "a factor that is missing": (change(rope_parameters={"rope_type": "linear"}), "KeyError: 'factor'"),
    "windows in some layers": (change(use_sliding_window=True), "use_sliding_window=True: must be one of False"),
    "quantised weights": (change(quantization_config={"bits": 4}), "quantization_config={'bits': 4}: must be"),
    "a tensor that is missing": (change_tensor(NORM, None), f"lacks {NORM}"),
    "a tensor that nobody reads": (change_tensor(f"{Q_PROJ}.bias", torch.ones(64)), f"holds {Q_PROJ}.bias, which the"),
    "a tensor of another shape": (change_tensor(NORM, torch.ones(31)), "size mismatch for norm.weight"),
    "whole numbers": (change_tensor(NORM, torch.ones(32, dtype=torch.int8)), "is torch.int8: write it as"),
    "a pickle": (leave_a_pickle, "has no model.safetensors; a pickle is not read"),
    "GPT-2 with relu": (change(activation_function="relu"), "activation_function='relu': must be one of gelu"),
}


@pytest.mark.parametrize(("name", "damage", "words"), [(name, *case) for name, case in REFUSED.items()], ids=REFUSED)
def test_a_damaged_or_foreign_folder_is_one_line(name, damage, words, folders, helpers, tmp_path):
    assert_refused(folders["GPT-2" if name.startswith("GPT-2") else "Qwen3"], damage, words, helpers, tmp_path)


def assert_refused(source, damage, words, helpers, tmp_path):
    folder = shutil.copytree(source, tmp_path / "theirs")
    damage(folder)
    message = helpers.error_of(export.main, helpers.words(from_hf=folder, out_dir=tmp_path / "ours"))
    assert words in message and str(folder) in message
    assert not (tmp_path / "ours" / "config.json").exists()


def pipe(name, *before):
    """A pipe of this name, which nobody writes to: to open it would wait for ever."""

    def damage(folder):
        for step in before:
            step(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


PIPES = {
    "a pipe as config.json": (pipe("config.json"), "config.json: cannot be read (is no file)"),
    "a pipe as the index": (pipe("model.safetensors.index.json"), "no such checkpoint"),
    "a pipe as tokenizer.json": (pipe("tokenizer.json"), "tokenizer.json: cannot be read (is no file)"),
    "a pipe as merges.txt": (pipe("merges.txt"), "merges.txt: cannot be read (is no file)"),
}


@pytest.mark.parametrize(("name", "damage", "words"), [(name, *case) for name, case in PIPES.items()], ids=PIPES)
def test_nothing_is_waited_for(name, damage, words, folders, helpers, tmp_path):
    assert_refused(folders["Qwen3"], damage, words, helpers, tmp_path)


def test_a_link_to_a_file_elsewhere_is_read(folders, helpers, tmp_path):
    (tmp_path / "cache").mkdir()
    for file in folders["Qwen3"].iterdir():  # as in the cache of a hub
        (tmp_path / "cache" / file.name).symlink_to(file)
    expected = checkpoints.load(folders["Qwen3"])["model"]
    assert helpers.equal(checkpoints.load(tmp_path / "cache")["model"], expected)


# -- The tokenizer, and the programs on an imported model --------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A byte-level tokenizer of 70,002 ids, whose bytes are the last ones but two."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    published.save_tokenizer(file, 70_002)
    return file


def test_a_byte_level_tokenizer_gives_back_every_byte_and_is_found_beside_a_checkpoint(tokenizer_file, tmp_path):
    tokenizer = FileTokenizer(tokenizer_file)
    text = "".join(LINES) + "".join(map(chr, range(300))) + "<|end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert len(ids) == len(text.encode())  # special tokens in the text are plain text
    assert tokenizer.decode_bytes([70_000]) == b"<|end|>"
    assert tokenizer.encode_array(text).tolist() == ids and tokenizer.encode_array(text).dtype == np.uint32
    assert tokenizer.vocab_size == 70_002
    assert get_tokenizer(tokenizer.name, ["nowhere", tokenizer_file.parent]).name == tokenizer.name
    about = {"tokenizer": tokenizer.name}
    tokenizer_file.with_name("best.pt").touch()
    assert tokenizer_of_checkpoint(tokenizer_file.with_name("best.pt"), about).name == tokenizer.name
    in_data = about | {"path": str(tokenizer_file.parent)}
    assert tokenizer_of_checkpoint(tmp_path, in_data).name == tokenizer.name


def test_the_one_of_a_norm_is_added_with_all_digits_of_its_bfloat16_weight():
    weight = torch.full((3,), 2.0**-12, dtype=torch.bfloat16)
    assert tensors.to_ours("norm.weight", weight, None, QWEN3_5).tolist() == [1 + 2.0**-12] * 3


def test_a_tokenizer_that_has_taken_the_place_of_training_s_is_not_exported(tokenizer_file, tmp_path):
    for name, is_copied in ((FileTokenizer(tokenizer_file).name, True), ("tokenizer.json 0123", False)):
        data = {"path": str(tokenizer_file.parent), "tokenizer": name}
        assert ("tokenizer.json" in copied_files(tmp_path / "ckpt.pt", data)) == is_copied


def test_ids_with_a_gap_end_with_the_largest(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    assert FileTokenizer(tmp_path / "tokenizer.json").vocab_size == 8


def test_a_tokenizer_of_pieces_falls_back_to_bytes(tmp_path):
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "fox", "t", "h", "e"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    parts = tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    made.decoder = tokenizers.decoders.Sequence(list(parts))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    for text in LINES:
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()
    assert tokenizer.encode_array("the").dtype == np.uint16


ODD = [
    "The quick", " a  b\t\n\r\n  x", unicodedata.normalize("NFD", "Zwölf über"), "\ufb01 \u00bd \u00a0x\u200b",
    "1234567 don't WE'LL", "<s> <unk> <|endoftext|> </s> [PAD] <|im_start|>", "", " ", "🙂名\ud7ff", "Ċ Ġ", " .x , n't",
]  # fmt: skip


def assert_same_text(theirs, ours):
    """transformers' tokenizer has the ids of ours, gives each text back, and has none past them."""
    for text in ODD:
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text) and theirs.decode(ids) == text
    assert len(theirs) == ours.vocab_size and not theirs.all_special_tokens
    with pytest.raises(ValueError, match="padding token"):  # none has been trained, and none is made up
        theirs(ODD[:2], padding=True)
    theirs.pad_token = theirs.convert_ids_to_tokens(0)
    padded = theirs(["The quick", "x"], padding=True)
    rows = [[i for i, seen in zip(*row, strict=True) if seen] for row in zip(*padded.values(), strict=True)]
    assert rows == [ours.encode("The quick"), ours.encode("x")] and len(theirs) == ours.vocab_size


WRITTEN_BACK = ["Llama", "Llama, tied, no GQA", "Qwen3", "Qwen3.5"]


@pytest.mark.parametrize("name", WRITTEN_BACK)
def test_text_of_a_written_folder_has_the_ids_that_the_model_was_trained_with(name, helpers, tmp_path):
    save(name, tmp_path / "theirs")
    trained = train_bpe("bpe:400", LINES * 40)
    (tmp_path / "theirs" / "tokenizer.json").write_bytes(trained.content)
    imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    family = FAMILIES[name].model_type
    export.main(helpers.words(checkpoint=tmp_path / "ours", to_hf=tmp_path / "back", family=family))
    assert_same_text(hf.AutoTokenizer.from_pretrained(tmp_path / "back"), trained)


# installed by make test-all; or a folder that pip install --target has made
BEFORE_5 = Path(os.environ.get("TRANSFORMERS_4", ROOT / ".venv" / "transformers4"))


@pytest.mark.slow
@pytest.mark.skipif(
    not BEFORE_5.is_dir(), reason="needs a transformers before 5: make test-all, or TRANSFORMERS_4=FOLDER"
)
def test_transformers_before_5_has_the_same_logits_and_ids(helpers, tmp_path):
    names = [name for name in WRITTEN_BACK if name != "Qwen3.5"]  # which it lacks
    trained, expected = train_bpe("bpe:300", LINES * 40), {}
    for i, name in enumerate(names):
        save(name, tmp_path / f"theirs{i}")
        (tmp_path / f"theirs{i}" / "tokenizer.json").write_bytes(trained.content)
        expected[i] = imported(helpers, tmp_path / f"theirs{i}", tmp_path / f"ours{i}")(IDX)
        family = FAMILIES[name].model_type
        export.main(helpers.words(checkpoint=tmp_path / f"ours{i}", to_hf=tmp_path / "written" / str(i), family=family))
    (tmp_path / "texts.json").write_text(json.dumps(ODD))
    words = [sys.executable, ROOT / "tests" / "transformers_before_5.py", tmp_path / "written", tmp_path / "texts.json"]
    environment = os.environ | {"PYTHONPATH": str(BEFORE_5), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(words, env=environment, capture_output=True, timeout=400)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    for i in expected:
        logits = torch.load(tmp_path / "written" / str(i) / "logits.pt")
        torch.testing.assert_close(logits, expected[i], rtol=0, atol=1e-4)
        found = json.loads((tmp_path / "written" / str(i) / "ids.json").read_text())
        assert found == [trained.vocab_size, [trained.encode(text) for text in ODD]]


def test_a_tokenizer_that_does_not_leave_is_named(helpers, tmp_path, capsys):
    model = GPT(GPTConfig(**OURS | dict(vocab_size=512)))
    about = {"model_args": vars(model.config), "data": {"tokenizer": "gpt2"}}
    checkpoints.save(tmp_path / "a.pt", {"model": model.state_dict()} | about)
    export.main(helpers.words(checkpoint=tmp_path / "a.pt", to_hf=tmp_path / "theirs", family="qwen3"))
    assert "note: without the tokenizer, gpt2; AutoTokenizer takes another" in capsys.readouterr().out
    assert not (tmp_path / "theirs" / "tokenizer.json").exists()


def test_norms_that_hold_one_plus_weight_keep_the_digits_of_float64():
    weight = 1e-9 * torch.rand(8, dtype=torch.float64)
    ours = tensors.to_ours("norm.weight", weight, None, QWEN3_5)
    torch.testing.assert_close(tensors.to_theirs("norm.weight", ours, QWEN3_5), weight, rtol=0, atol=1e-15)


def test_data_of_an_imported_tokenizer_have_transformers_loss(tokenizer_file, helpers, tmp_path, capsys, evaluated):
    model = published.save_gated_qwen3("elementwise", tmp_path / "theirs", **SIZES | dict(vocab_size=70_016))
    shutil.copy(tokenizer_file, tmp_path / "theirs")
    (tmp_path / "book.txt").write_text("".join(LINES * 20))
    out, data = tmp_path / "ours", tmp_path / "data"
    export.main(helpers.words(from_hf=tmp_path / "theirs", out_dir=out, block_size=32))
    text_prepare.main([str(tmp_path / "book.txt"), *helpers.words(tokenizer=out, out_dir=data)])
    dataset = open_dataset(data)
    inputs, _, _ = dataset.batch("train", 0, seed=0, batch_size=2, block_size=32)
    assert inputs.min() > 65_535 and bytes(FileTokenizer(data / "tokenizer.json").decode_bytes(inputs[0].tolist()))
    assert "names no data set" in helpers.error_of(evaluated, out)
    capsys.readouterr()
    result = evaluated(out, dataset=data)
    parts = [(model(inputs).logits[0], targets[0]) for inputs, targets, *_ in dataset.eval_batches("val", 1, 32)]
    logits, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    assert abs(result["loss"] - F.cross_entropy(logits, targets, ignore_index=-100).item()) < 1e-4
    assert targets.max() < 70_002 and result["tokenizer"].startswith("tokenizer.json ")

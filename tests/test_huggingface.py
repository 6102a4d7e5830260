"""Models of transformers, read from the folders that it writes.

No hub is needed: a model of each class gets random weights, is saved with save_pretrained, and read as a user's folder
would be. published.py has the gated attention of Qiu et al., which no class of transformers has.
"""

import copy
import json
import pickle
import shutil
import zlib

import numpy as np
import published
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.nn.functional as F
import transformers as hf
from conftest import LINES
from small_models import logits_of_pieces

import evaluate
import export
import train
from configurator import UserError
from data.shards import open_dataset
from data.text import prepare as text_prepare
from data.tokenizer import FileTokenizer, get_tokenizer, tokenizer_of_checkpoint
from runs import checkpoint as checkpoints
from runs import huggingface

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
PART = "partial_rotary_factor"
PARTIAL = ROPE | {PART: 0.25}
DENSE = dict(mlp_only_layers=[0, 1, 2, 3], num_experts=4, moe_intermediate_size=8, num_experts_per_tok=2)
GPT2 = dict(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation="eager")


FAMILIES = {
    "Llama": hf.LlamaConfig(**SIZES, rope_parameters=ROPE),
    "Llama, tied, no GQA": hf.LlamaConfig(**SIZES | dict(tie_word_embeddings=True, num_key_value_heads=4, head_dim=8)),
    "Qwen3": hf.Qwen3Config(**SIZES, rope_parameters=ROPE),
    "GPT-2": hf.GPT2Config(**GPT2),
    "GPT-2, untied, exact gelu": hf.GPT2Config(
        **GPT2, tie_word_embeddings=False, activation_function="gelu", n_inner=40, layer_norm_epsilon=1e-3
    ),
    "Qwen3-Next": hf.Qwen3NextConfig(**SIZES | DELTA, **DENSE, rope_parameters=PARTIAL),
    "Qwen3.5": hf.Qwen3_5TextConfig(**SIZES | DELTA, rope_parameters=PARTIAL),
    "Qwen3.5 with images": hf.Qwen3_5Config(
        text_config=SIZES | DELTA | dict(rope_parameters=PARTIAL | {"mrope_section": [1, 1, 0]}),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32),
    ),
}


GATED = ["baseline", "headwise", "elementwise"]  # published.py's


def save(name, folder, **how):
    """The folder of a model of theirs with random weights. Returns the model."""
    if name in GATED:
        return published.save_gated_qwen3(name, folder, **how, **SIZES, rope_parameters=ROPE)
    theirs = hf.AutoModelForImageTextToText if "images" in name else hf.AutoModelForCausalLM
    model = theirs.from_config(copy.deepcopy(FAMILIES[name]))
    return published.save(model, folder, **how)


def imported(helpers, folder, out, **keys):
    export.main(helpers.words(from_hf=folder, out_dir=out, **keys))
    return checkpoints.load_model(out)[0]


IDX = torch.arange(2 * 48).view(2, 48) * 37 % 300


@pytest.mark.parametrize("name", [*FAMILIES, *GATED])
def test_logits_of_an_imported_model_are_those_of_transformers(name, helpers, tmp_path):
    theirs = save(name, tmp_path / "theirs", max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    with torch.no_grad():
        expected = theirs(IDX).logits
        for logits in (ours(IDX), logits_of_pieces(ours, IDX, [30, *[1] * 18])):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1
    assert name not in GATED or ours.config.gate == ("none" if name == "baseline" else name)


def test_a_gpt2_as_on_the_hub_is_read(helpers, tmp_path, capsys):
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
    assert "block_size=50, of 64" in capsys.readouterr().out
    with torch.no_grad():
        torch.testing.assert_close(ours(IDX), theirs(IDX).logits, rtol=0, atol=1e-4)


def theirs_of(about):
    """The logits of transformers' model of a config.json, whose weights follow from their names; None if refused."""
    try:
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**copy.deepcopy(about))).eval()
    except Exception:
        return None
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2)
        return model(IDX[:, :8]).logits


def ours_of(about):
    try:
        keys = huggingface.keys_of({name: value for name, value in about.items() if value is not None}, 64)
        return {name: value for name, value in keys.items() if name != "block_size"}
    except UserError:
        return None


def changed_value(value):
    return not value if isinstance(value, bool) else value * 2 if isinstance(value, int) else value * 0.75


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT-2", "Qwen3-Next", "Qwen3.5"])
def test_a_field_of_config_json_changes_our_model_exactly_where_it_changes_theirs(name):
    about = FAMILIES[name].to_dict()
    there, here, ropes = theirs_of(about), ours_of(about), about.get("rope_parameters") or {}
    of_all = hf.PreTrainedConfig().to_dict().keys() | {"output_router_logits"}  # what is returned, not computed
    values = {field: about[field] for field in about if field not in of_all}
    values |= dict(tie_word_embeddings=about["tie_word_embeddings"], mlp_bias=False)
    changes = [{field: changed_value(value)} for field, value in values.items() if type(value) in (int, float, bool)]
    if name != "GPT-2":
        changes += [
            {"partial_rotary_factor": 0.1875},
            {"rope_theta": 750.0},
            {"rope_scaling": {"rope_type": "default"}},
        ]
        changes += [{"rope_parameters": {"full_attention": ROPE}}]
        changes += [{"rope_parameters": ropes | {field: value}} for field, value in (("rope_theta", 9.0), (PART, 0.5))]
    seen = 0
    for changed in changes:
        ours, theirs = ours_of(about | changed), theirs_of(about | changed)
        if ours is not None:  # refused; no field that transformers needs is refused for its own value
            assert theirs is not None and (ours == here) == torch.equal(theirs, there), changed
            seen += ours != here
    assert seen >= 6


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
        table = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        file = folder / table.get(name, min(table.values()))
        tensors = safetensors.torch.load_file(file)
        tensors.pop(name, None)
        safetensors.torch.save_file(tensors | ({} if content is None else {name: content}), file)

    return damage


def leave_a_pickle(folder):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


NORM, Q_PROJ, ONE_ROPE = "model.norm.weight", "model.layers.0.self_attn.q_proj", "only plain RoPE is read, the same"
REFUSED = {
    "a model that is not read": (change(model_type="qwen2"), "model_type='qwen2': must be one of gpt2, llama, qwen3"),
    "scaled RoPE": (change(rope_parameters={"rope_type": "yarn", "factor": 4.0}), ONE_ROPE),
    "partial RoPE, which Qwen3 does not have": (change(rope_parameters=PARTIAL), "partial_rotary_factor=0.25: qwen3"),
    "biases": (change(attention_bias=True), "attention_bias=True: must be one of False"),
    "quantised weights": (change(quantization_config={"bits": 4}), "quantization_config={'bits': 4}: must be"),
    "a tensor that is missing": (change_tensor(NORM, None), f"lacks {NORM}"),
    "a tensor that nobody reads": (change_tensor(f"{Q_PROJ}.bias", torch.ones(64)), f"holds {Q_PROJ}.bias, which the"),
    "a tensor of another shape": (change_tensor(NORM, torch.ones(31)), f"{NORM}: (31,)"),
    "a tied output layer of its own": (change(tie_word_embeddings=True), "lm_head.weight is not model.embed_tokens."),
    "whole numbers": (change_tensor(NORM, torch.ones(32, dtype=torch.int8)), "is torch.int8, and no number"),
    "a pickle": (leave_a_pickle, "has no model.safetensors; a pickle is not read"),
    "GPT-2 with relu": (change(activation_function="relu"), "activation_function='relu': must be one of gelu"),
}


@pytest.mark.parametrize(("name", "damage", "words"), [(name, *case) for name, case in REFUSED.items()], ids=REFUSED)
def test_a_damaged_or_foreign_folder_is_one_line(name, damage, words, folders, helpers, tmp_path):
    folder = shutil.copytree(folders["GPT-2" if name.startswith("GPT-2") else "Qwen3"], tmp_path / "theirs")
    damage(folder)
    message = helpers.error_of(export.main, helpers.words(from_hf=folder, out_dir=tmp_path / "ours"))
    assert words in message and str(folder) in message
    assert not (tmp_path / "ours" / "config.json").exists()


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
    assert tokenizer.vocab_size == 70_002 and pickle.loads(pickle.dumps(tokenizer)).encode(text) == ids
    assert get_tokenizer(tokenizer.name, ["nowhere", tokenizer_file.parent]).name == tokenizer.name
    about = {"tokenizer": tokenizer.name}
    assert tokenizer_of_checkpoint(tokenizer_file.with_name("best.pt"), about).name == tokenizer.name
    in_data = about | {"path": str(tokenizer_file.parent)}
    assert tokenizer_of_checkpoint(tmp_path, in_data).name == tokenizer.name


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


def test_data_of_an_imported_tokenizer_have_the_loss_of_transformers(tokenizer_file, helpers, tmp_path, capsys):
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
    evaluate.main(helpers.words(checkpoint=out, dataset=data, json=True, **here))
    result = json.loads(capsys.readouterr().out)
    parts = [(model(inputs).logits[0], targets[0]) for inputs, targets, _ in dataset.eval_batches("val", 1, 32)]
    logits, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    assert abs(result["loss"] - F.cross_entropy(logits, targets, ignore_index=-100).item()) < 1e-4
    assert targets.max() < 70_002 and result["tokenizer"].startswith("tokenizer.json ")


def test_a_gate_added_to_a_gpt2_starts_at_the_same_function(helpers, tmp_path):
    theirs = save("GPT-2", tmp_path / "theirs")
    published.save_tokenizer(tmp_path / "theirs" / "tokenizer.json", 300)
    ours, data = imported(helpers, tmp_path / "theirs", tmp_path / "ours"), tmp_path / "data"
    idx = IDX[:1, :20]
    assert torch.equal(ours.generate(idx, 9, temperature=0), theirs.generate(idx, max_new_tokens=9, do_sample=False))
    (tmp_path / "book.txt").write_text("".join(LINES * 20))
    text_prepare.main([str(tmp_path / "book.txt"), *helpers.words(tokenizer=tmp_path / "ours", out_dir=data)])
    keys = dict(init_from=tmp_path / "ours", dataset=data, max_iters=2, batch_size=2, device="cpu", threads=1)
    losses = []
    for name, gate in (("plain", {}), ("gated", dict(gate="elementwise", gate_activation="sigmoid2"))):
        train.main(helpers.words(out_dir=tmp_path / name, **keys, **gate))
        losses.append(helpers.metrics(tmp_path / name, "eval")[0]["val_loss"])
    assert losses[0] == losses[1]
    gated, _ = checkpoints.load_model(tmp_path / "gated")
    assert gated.blocks[1].mixer.gates["readout"].proj.weight.any() and gated.config.bias

"""Linear and state space models of others, read from the folders that fla, transformers and Mamba-2's authors write.

Slow: fla's own models, in Triton's interpreter. Other tests take published.FlaMixer, which is written from fla's code.
"""

import json
from pathlib import Path

import published
import pytest
import test_fla
import test_huggingface
import torch
import torch.nn.functional as F
from conftest import Helpers, Malicious
from test_huggingface import IDX, OURS, WITHIN, change, change_tensor, imported, largest_difference, save, save_ours
from transformers import AutoConfig, AutoModelForCausalLM

import export
from runs import checkpoint as checkpoints

SIZES = dict(
    vocab_size=300, hidden_size=32, num_hidden_layers=2, intermediate_size=40, num_heads=2, max_position_embeddings=128,
    norm_eps=1e-5,
)  # fmt: skip
GLA = SIZES | dict(model_type="gla", expand_k=0.5, expand_v=1.0, use_output_gate=True)
GATED_DELTANET = SIZES | dict(model_type="gated_deltanet", head_dim=8, expand_v=2.0, use_gate=True)
DELTA_NET = SIZES | dict(model_type="delta_net", expand_k=1.0, expand_v=1.0, use_gate=False)
KDA = SIZES | dict(model_type="kda", head_dim=8, expand_v=1.0)
ATTN = dict(layers=[1], num_heads=4, num_kv_heads=2, rope_theta=500.0)
OF_FLA = {
    "GLA": GLA,
    "GLA without a gate": GLA | dict(use_output_gate=False, expand_k=1.0, expand_v=0.5, num_hidden_layers=1),
    "Gated DeltaNet": GATED_DELTANET,
    "Gated DeltaNet, grouped": GATED_DELTANET
    | dict(num_v_heads=4, allow_neg_eigval=True, conv_size=3, output_gate_activation="sigmoid"),
    "Gated DeltaNet with softmax": GATED_DELTANET | dict(attn=ATTN, use_gate=False, num_hidden_layers=4),
    "DeltaNet": DELTA_NET,
    "DeltaNet with a gate": DELTA_NET | dict(use_gate=True, expand_k=0.5, use_short_conv=False, allow_neg_eigval=True),
    "KDA": KDA,
    "KDA, grouped": KDA | dict(num_v_heads=4, expand_v=1.5, allow_neg_eigval=True),
}


@pytest.mark.parametrize("name", OF_FLA)
def test_a_model_of_fla_has_the_logits_of_its_definition_and_comes_back_bit_for_bit(name, helpers, tmp_path):
    theirs = published.save_fla(OF_FLA[name], tmp_path / "theirs")
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    assert largest_difference(ours, lambda idx: theirs(idx).logits) < WITHIN[OF_FLA[name]["model_type"]]
    test_huggingface.assert_comes_back(ours, helpers, tmp_path)


ODD = dict(delta_heads=4, delta_key_heads=2, delta_key_dim=11, delta_value_dim=15)  # int(11 * (15 / 11)) is 14


@torch.no_grad()
@pytest.mark.parametrize("attention", ["kda", "deltanet", "kda,softmax"])
def test_a_native_gate_leaves_with_a_bias_of_zero_and_is_none_where_a_mixer_has_none(attention, helpers, tmp_path):
    keys = OURS | dict(attention=attention, gate="native", n_kv_head=None, qk_norm=False, head_dim=4)
    keys |= ODD if attention == "kda" else dict(native_bias=True)
    ours = save_ours(tmp_path / "a.pt", keys)
    export.main(helpers.words(checkpoint=tmp_path / "a.pt", to_hf=tmp_path / "theirs"))
    about = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert attention != "kda" or int(about["head_dim"] * about["expand_v"]) == 15  # as fla computes it
    back = imported(helpers, tmp_path / "theirs", tmp_path / "back")
    assert back.config.native_bias or attention == "deltanet"
    torch.testing.assert_close(back(IDX % 50), ours(IDX % 50), rtol=0, atol=1e-5)


def save_as_the_authors(folder):
    """A folder of state-spaces/mamba: a pickle, its output layer a second time, rows of the vocabulary rounded up."""
    theirs = save("Mamba-2", folder, dict(tie_word_embeddings=True, vocab_size=304))
    (folder / "model.safetensors").unlink()
    tensors = {name.replace("embeddings.", "embedding."): tensor for name, tensor in theirs.state_dict().items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    about = dict(d_model=32, n_layer=2, vocab_size=299, attn_layer_idx=[], attn_cfg={}, rms_norm=True, d_intermediate=0)
    about["ssm_cfg"] = dict(layer="Mamba2", d_state=8, headdim=16, dt_limit=[0.0, float("inf")])  # which is no JSON
    (folder / "config.json").write_text(json.dumps(about))
    return theirs


@torch.no_grad()
def test_a_mamba2_as_its_authors_publish_it_is_read_from_its_pickle(helpers, tmp_path):
    theirs = save_as_the_authors(tmp_path)
    ours = imported(helpers, tmp_path, tmp_path / "ours")
    assert ours.config.vocab_size == 299 and ours.wte.weight.shape == (304, 32)
    assert largest_difference(ours, lambda idx: theirs(idx).logits[..., :299]) < WITHIN["mamba2"]
    assert torch.equal(checkpoints.load_model(tmp_path)[0](IDX), ours(IDX))  # the folder itself


def pickle_of(content):
    return lambda folder: torch.save(content, folder / "pytorch_model.bin")


Q_PROJ, WIDE, NARROW = "model.layers.0.attn.q_proj.weight", torch.ones(17, 32), torch.ones(15, 32)
IN_PROJ, SSM = "backbone.layers.0.mixer.in_proj.weight", dict(layer="Mamba2", d_state=8, headdim=16)
REFUSED = {  # the first word of each is the folder
    "GLA with a SiLU": (change(use_short_conv=True), "conv_size=4: it would be"),
    "GLA with a feature map": (change(feature_map="relu"), "feature_map='relu': must be one of None"),
    "GLA with fewer keys": (change(num_kv_heads=1), "needs num_heads=2 everywhere"),
    "GLA with halves of channels": (change(expand_k=0.3), "a head would have 4.8 key and 16 value channels"),
    "GLA with wide queries": (change_tensor(Q_PROJ, WIDE), f"{Q_PROJ}, model.layers.0.attn.k_proj.weight, "),
    "GLA with biased softmax": (change(attn={"layers": [0], "num_heads": 2, "qkv_bias": True}), "attn.qkv_bias=True"),
    "GLA with two kinds of softmax": (change(attn=[{}, {}]), "attn=[{}, {}]: must be a dict"),
    "KDA with a bound": (change(lower_bound=-5.0), "lower_bound=-5.0: must be one of None"),
    "Mamba-2 with a head more": (change(num_heads=5), "num_heads=5: must be a multiple of expand=2, and"),
    "Mamba-2 without rows": (change_tensor(IN_PROJ, NARROW), f"{IN_PROJ}: (15, 32) is not the shape"),
    "authors of Mamba": (change(ssm_cfg={}), "ssm_cfg has no layer"),
    "authors of Mamba-3": (change(ssm_cfg=SSM | {"layer": "Mamba3"}), "ssm_cfg.layer='Mamba3': must be one of Mamba2"),
    "authors with a part": (change(ssm_cfg=SSM | {"d_ssm": 32}), "ssm_cfg.d_ssm=32: is not read"),
    "authors with an MLP": (change(d_intermediate=64), "d_intermediate=64: must be one of 0"),
    "authors with softmax": (change(attn_layer_idx=[1]), "attn_layer_idx=[1]: must be one of []"),
    "authors with code": (pickle_of({"a": Malicious("made by a pickle")}), "damaged, or no checkpoint"),
    "authors with a list": (pickle_of([1]), "holds no table of tensors"),
    "authors with half a file": (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"), "damaged, or no"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("GLA", "KDA", "Mamba-2", "authors")}
    for name in ("GLA", "KDA"):
        published.save_fla(OF_FLA[name], folders[name])
    save("Mamba-2", folders["Mamba-2"])
    save_as_the_authors(folders["authors"])
    return folders


@pytest.mark.parametrize(("name", "damage", "words"), [(name, *case) for name, case in REFUSED.items()], ids=REFUSED)
def test_a_damaged_or_foreign_folder_is_one_line(name, damage, words, folders, helpers, tmp_path):
    test_huggingface.assert_refused(folders[name.split()[0]], damage, words, helpers, tmp_path)
    assert not Path("made by a pickle").exists()


# ----------------------------------------------------------------------------------------------------------------------
# fla itself. Its kernels run in a process of their own, and so does all that follows here but for the tests

interpreter = test_fla.interpreter
MAMBA2 = dict(  # fla's path without mamba_ssm gives heads to groups in another order than with it: so one group
    model_type="mamba2", vocab_size=300, hidden_size=32, head_dim=16, state_size=8, num_hidden_layers=2, n_groups=1
)
MORE = {"Mamba-2": MAMBA2, "Mamba-2 without a norm": MAMBA2 | dict(rmsnorm=False, expand=1)}
MORE["GLA, window"] = GLA | dict(attn=dict(layers=[0], num_heads=2, window_size=5))


def flash_attn_func(q, k, v, causal, window_size):
    """The function of flash-attn, which needs a GPU: q, k, v (B, T, H, D)."""
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    mask = (distance >= 0) & (distance <= (window_size[0] if window_size[0] >= 0 else len(distance)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def config_of_fla(about):
    import fla.layers.attn
    import fla.models  # noqa: F401, which makes transformers know them

    fla.layers.attn.flash_attn_func = flash_attn_func
    return AutoConfig.for_model(**about)


@torch.no_grad()
def against_fla(name, folder):
    """The largest difference between logits of fla's model and ours; whether both continue a text in the same way, and
    fla's model is the same after it was ours."""
    theirs = published.save(AutoModelForCausalLM.from_config(config_of_fla((OF_FLA | MORE)[name])), folder)
    ours = imported(Helpers, folder, folder / "ours")
    made = ours.generate(IDX[:1, :20], 12, temperature=0)  # fla's own cache gives other ids than its whole forwards
    is_same = torch.equal(made[:, 20:], theirs(made[:, :-1]).logits[:, 19:].argmax(-1))
    if name in OF_FLA:
        export.main(Helpers.words(checkpoint=folder / "ours", to_hf=folder / "back"))
        back = AutoModelForCausalLM.from_pretrained(folder / "back").eval()
        is_same = is_same and torch.equal(back(IDX).logits, theirs(IDX).logits)
    return largest_difference(ours, lambda idx: theirs(idx).logits), is_same


def change_fields(name):
    test_huggingface.compare_changes(config_of_fla((OF_FLA | MORE)[name]).to_dict())


@pytest.mark.slow
@test_fla.needs_the_kernels
@pytest.mark.parametrize("name", OF_FLA | MORE)
def test_logits_of_a_model_of_fla_are_those_of_fla(name, interpreter, tmp_path):
    difference, continues_alike = interpreter(against_fla, name, tmp_path)
    print(name, difference)
    assert difference < 1e-4 and continues_alike


@pytest.mark.slow
@test_fla.needs_the_kernels
@pytest.mark.parametrize("name", ["GLA", "Gated DeltaNet", "DeltaNet", "KDA", "Mamba-2"])
def test_a_field_of_flas_config_changes_our_model_exactly_where_it_changes_theirs(name, interpreter):
    interpreter(change_fields, name)

"""Linear and state space models of others, read from the folders that fla, transformers and Mamba-2's authors write.

Slow: fla's own models, in Triton's interpreter. Other tests take published.FlaMixer, which is written from fla's code.
"""

import published
import pytest
import test_fla
import test_huggingface
import torch
import torch.nn.functional as F
from conftest import Helpers
from test_huggingface import IDX, OURS, WITHIN, change, change_tensor, imported, largest_difference, save, save_ours
from transformers import AutoConfig, AutoModelForCausalLM

from hub import export

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
    test_huggingface.assert_comes_back(ours, helpers, tmp_path, OF_FLA[name]["model_type"])


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "family"), [("kda_fla", "kda"), ("deltanet", "delta_net"), ("kda_fla,softmax", "kda")]
)
def test_a_native_gate_leaves_and_is_none_where_a_mixer_has_none(attention, family, helpers, tmp_path):
    keys = OURS | dict(attention=attention, gate="native", n_kv_head=None, qk_norm=False, head_dim=4)
    ours = save_ours(tmp_path / "a.pt", keys)
    export.main(helpers.words(checkpoint=tmp_path / "a.pt", to_hf=tmp_path / "theirs", family=family))
    back = imported(helpers, tmp_path / "theirs", tmp_path / "back")
    assert back.config.attention == attention
    torch.testing.assert_close(back(IDX % 50), ours(IDX % 50), rtol=0, atol=1e-5)


Q_PROJ, WIDE, NARROW = "model.layers.0.attn.q_proj.weight", torch.ones(17, 32), torch.ones(15, 32)
IN_PROJ = "backbone.layers.0.mixer.in_proj.weight"
REFUSED = {  # the first word of each is the folder
    "GLA with a SiLU": (change(use_short_conv=True), "use_short_conv=True: must be one of False"),
    "GLA with a feature map": (change(feature_map="relu"), "feature_map='relu': must be"),
    "GLA with wide queries": (change_tensor(Q_PROJ, WIDE), "size mismatch for blocks.0.mixer.qkv.weight"),
    "GLA with two kinds of softmax": (change(attn=[{}, {}]), "'list' object has no attribute 'get'"),
    "KDA with a bound": (change(lower_bound=-5.0), "lower_bound=-5.0: must be"),
    "Mamba-2 with a head more": (change(num_heads=6), "split_with_sizes expects"),
    "Mamba-2 without rows": (change_tensor(IN_PROJ, NARROW), "split_with_sizes expects"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("GLA", "KDA", "Mamba-2")}
    for name in ("GLA", "KDA"):
        published.save_fla(OF_FLA[name], folders[name])
    save("Mamba-2", folders["Mamba-2"])
    return folders


@pytest.mark.parametrize(("name", "damage", "words"), [(name, *case) for name, case in REFUSED.items()], ids=REFUSED)
def test_a_damaged_or_foreign_folder_is_one_line(name, damage, words, folders, helpers, tmp_path):
    test_huggingface.assert_refused(folders[name.split()[0]], damage, words, helpers, tmp_path)


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
        family = OF_FLA[name]["model_type"]
        export.main(Helpers.words(checkpoint=folder / "ours", to_hf=folder / "back", family=family))
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

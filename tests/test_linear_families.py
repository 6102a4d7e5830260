"""Linear and state space models of others, read from the folders that fla, transformers and Mamba-2's authors write.

Slow: fla's own models, in Triton's interpreter. Other tests take published.FlaMixer, which is written from fla's code.
"""

import published
import pytest
import test_fla
import test_huggingface
import torch
from conftest import Helpers
from test_huggingface import IDX, WITHIN, change, change_tensor, imported, largest_difference, save
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=300, hidden_size=32, num_hidden_layers=2, intermediate_size=40, num_heads=2, max_position_embeddings=128,
    norm_eps=1e-5,
)  # fmt: skip
GLA = SIZES | dict(model_type="gla", expand_k=0.5, expand_v=1.0, use_output_gate=True)
GATED_DELTANET = SIZES | dict(model_type="gated_deltanet", head_dim=8, expand_v=2.0, use_gate=True)
DELTA_NET = SIZES | dict(model_type="delta_net", expand_k=1.0, expand_v=1.0, use_gate=False)
OF_FLA = {
    "GLA": GLA,
    "Gated DeltaNet": GATED_DELTANET,
    "Gated DeltaNet, grouped": GATED_DELTANET | dict(num_v_heads=4, allow_neg_eigval=True, conv_size=3),
    "DeltaNet": DELTA_NET,
    "DeltaNet without a convolution": DELTA_NET | dict(expand_k=0.5, use_short_conv=False, allow_neg_eigval=True),
}


@pytest.mark.parametrize("name", OF_FLA)
def test_a_model_of_fla_has_the_logits_of_its_definition(name, helpers, tmp_path):
    theirs = published.save_fla(OF_FLA[name], tmp_path / "theirs")
    ours = imported(helpers, tmp_path / "theirs", tmp_path / "ours")
    assert largest_difference(ours, lambda idx: theirs(idx).logits) < WITHIN[OF_FLA[name]["model_type"]]


Q_PROJ, WIDE, NARROW = "model.layers.0.attn.q_proj.weight", torch.ones(17, 32), torch.ones(15, 32)
IN_PROJ = "backbone.layers.0.mixer.in_proj.weight"
REFUSED = {  # the words before "with" are the folder
    "GLA with a SiLU": (change(use_short_conv=True), "use_short_conv=True: must be one of False"),
    "GLA with a feature map": (change(feature_map="relu"), "feature_map='relu': must be one of None"),
    "GLA with wide queries": (change_tensor(Q_PROJ, WIDE), "q_proj.weight has 17 rows; 16 are asked for"),
    "GLA with no gate": (change(use_output_gate=False), "use_output_gate=False: must be one of True"),
    "GLA with softmax layers": (change(attn={"layers": [1]}), "attn={'layers': [1]}: must be"),
    "Gated DeltaNet with a sigmoid": (change(output_gate_activation="sigmoid"), "activation='sigmoid': must"),
    "Mamba-2 with a head more": (change(num_heads=6), "in_proj.weight has"),
    "Mamba-2 with too few rows": (change_tensor(IN_PROJ, NARROW), "in_proj.weight has 15 rows"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("GLA", "Gated DeltaNet", "Mamba-2")}
    for name in ("GLA", "Gated DeltaNet"):
        published.save_fla(OF_FLA[name], folders[name])
    save("Mamba-2", folders["Mamba-2"])
    return folders


@pytest.mark.parametrize(("name", "damage", "words"), [(name, *case) for name, case in REFUSED.items()], ids=REFUSED)
def test_a_damaged_or_foreign_folder_is_one_line(name, damage, words, folders, helpers, tmp_path):
    test_huggingface.assert_refused(folders[name.partition(" with")[0]], damage, words, helpers, tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# fla itself. Its kernels run in a process of their own, and so does all that follows here but for the tests

interpreter = test_fla.interpreter
MAMBA2 = dict(  # fla's path without mamba_ssm gives heads to groups in another order than with it: so one group
    model_type="mamba2", vocab_size=300, hidden_size=32, head_dim=16, state_size=8, num_hidden_layers=2, n_groups=1
)
MORE = {"Mamba-2": MAMBA2, "Mamba-2 without a norm": MAMBA2 | dict(rmsnorm=False, expand=1)}


def config_of_fla(about):
    import fla.models  # noqa: F401, which makes transformers know them

    return AutoConfig.for_model(**about)


@torch.no_grad()
def against_fla(name, folder):
    """The largest difference between logits of fla's model and ours; whether both continue a text in the same way."""
    theirs = published.save(AutoModelForCausalLM.from_config(config_of_fla((OF_FLA | MORE)[name])), folder)
    ours = imported(Helpers, folder, folder / "ours")
    made = ours.generate(IDX[:1, :20], 12, temperature=0)  # fla's own cache gives other ids than its whole forwards
    is_same = torch.equal(made[:, 20:], theirs(made[:, :-1]).logits[:, 19:].argmax(-1))
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
@pytest.mark.parametrize("name", ["GLA", "Gated DeltaNet", "DeltaNet", "Mamba-2"])
def test_a_field_of_flas_config_changes_our_model_exactly_where_it_changes_theirs(name, interpreter):
    interpreter(change_fields, name)

"""Context parallelism in megatron: a sequence that cp ranks share trains the same model.

Attention is a plain one (tests/gathered_attention.py) in place of Transformer Engine's, which needs
a GPU. All else is what a GPU runs: groups, slices, losses, gradients, optimizer and checkpoints.
"""

import pytest

from tests.test_checkpoints_resume import work

pytestmark = pytest.mark.slow

LLAMA = "position=rope,norm=rmsnorm,activation=swiglu,n_kv_head=2"
GPT2 = ("ddp", *(f"megatron:{split}" for split in ("cp=4", "cp=2,pp=2", "cp=2,zero_stage=1")))
# The first of each trains without cp.
MODELS = {"gpt2": GPT2, "llama": (f"ddp:{LLAMA}", f"megatron:cp=2,tp=2,{LLAMA}")}
SPLITS = [(model, name) for model, names in MODELS.items() for name in names[1:]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokens) -> dict[str, dict]:
    """What tests/checkpoint_worker.py found of each model, on 4 ranks."""
    folder = tmp_path_factory.mktemp("cp")
    return {model: work(4, folder / model, tokens, *names) for model, names in MODELS.items()}


@pytest.mark.parametrize(("model", "name"), SPLITS)
def test_ranks_that_share_a_sequence_train_the_same_model_and_save_it_whole(model, name, trained):
    """A run goes on bit for bit from its own checkpoint, and along the same curve from ddp's; ddp
    goes on from the last split's."""
    found, alone = trained[model], MODELS[model][0]
    for ours, theirs in zip(found["straight"][name], found["straight"][alone], strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=2e-4)
        assert ours[1] == pytest.approx(theirs[1], rel=2e-3)
    # Exact: the same ranks of one machine do the same operations in the same order.
    assert found["same"][name] == found["straight"][name][2:] and found["bits"][name]
    for went_on in (found["crossed"][name], found["crossed"][alone]):
        for ours, theirs in zip(went_on, found["straight"][alone][2:], strict=True):
            assert ours[0] == pytest.approx(theirs[0], abs=2e-4)

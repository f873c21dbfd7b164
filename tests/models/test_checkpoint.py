"""Weights as mergekit's loader gives them, whatever the files look like, and a mixture's experts one at a time."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import MakeFamily
from safetensors.torch import load_file
from support.copies import AS_BEFORE, edited, pickled, pickled_shards, sharded
from support.families import Family, checkpoint
from transformers import AutoConfig, PreTrainedModel

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.trace import trace
from mergekit_slta.models.checkpoint import task_vector
from mergekit_slta.models.layout import meta_model

ATTENTION = "model.layers.1.self_attn.q_proj.weight"


def built(folder: Path) -> PreTrainedModel:
    return meta_model(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_what_was_rounded_alone_is_no_change(half: torch.dtype) -> None:
    """As a frozen matrix that was saved in another type; normalized, its rounding would count as a task."""
    base = torch.randn(3, 4)
    assert not task_vector(base.to(half).float(), base).any() and task_vector(base.to(half).float() + 1, base).all()


@pytest.mark.parametrize("layout", [sharded, pickled, partial(pickled, **AS_BEFORE), pickled_shards])
def test_the_layout_of_the_files_does_not_change_the_values(
    layout: Callable[[Path, Path], Path], make_family: MakeFamily, tmp_path: Path
) -> None:
    base = make_family(experts=0, dtype=torch.bfloat16).base
    one, other = checkpoint(base), checkpoint(layout(base, tmp_path / "other"))
    stored = load_file(base / "model.safetensors")
    names = {name: name for name in stored}
    assert other.model.tensors == one.model.tensors and other.fingerprint == one.fingerprint
    for found in (one, other):
        read = found.read(names, built(base))
        assert set(read) == set(stored)
        for name, tensor in read.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, stored[name].float())
        assert found.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tensors: tensors[ATTENTION][3, 5].fill_(torch.nan), "holds NaN or Inf in"),
        (lambda tensors: tensors[ATTENTION][3, 5].fill_(-torch.inf), "holds NaN or Inf in"),
        (lambda tensors: tensors.pop(ATTENTION), "lacks"),
    ],
    ids=["nan", "inf", "none"],
)
def test_a_tensor_that_cannot_be_used_is_named_with_its_model(
    spoil: Callable[[dict[str, torch.Tensor]], object], words: str, llama: Family, tmp_path: Path
) -> None:
    broken = checkpoint(edited(llama.base, tmp_path / "broken", spoil))
    with pytest.raises(SltaError, match=f"broken {words} the tensor {ATTENTION}"):
        broken.read({"q": ATTENTION}, built(llama.base))
    broken.read({"k": ATTENTION.replace("q_proj", "k_proj")}, built(llama.base))


# A mixture's experts, which are read when they are used


STACK = "mlp.experts.gate_up_proj"
NAME = f"model.layers.0.{STACK}"


def read_stack(family: Family, folder: Path) -> torch.Tensor:
    decoder = trace(family.config)
    shape = decoder.layers[0].state_dict()[STACK].shape
    return checkpoint(folder).read({STACK: NAME}, decoder.model, stacks={STACK: shape})[STACK]


def test_experts_that_are_not_finite_are_refused_when_they_are_used(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("mixtral", experts=0)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[next(name for name in tensors if "layers.0" in name and ".experts.3." in name)][2, 1] = torch.nan

    stack = read_stack(family, edited(family.base, tmp_path / "broken", spoil))
    with pytest.raises(SltaError, match=f"holds NaN or Inf in the tensor {NAME}"):
        stack[3]
    assert stack[2].isfinite().all()


def test_experts_are_freed_with_their_layer(make_family: MakeFamily) -> None:
    family = make_family("mixtral", experts=0)
    stack = read_stack(family, family.base)
    with torch.no_grad():
        assert torch.equal(stack[1], stack[1])
    last = weakref.ref(stack)
    del stack
    gc.collect()
    assert last() is None

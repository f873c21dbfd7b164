"""Weights as mergekit's loader gives them, whatever the files look like, and a mixture's experts one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MakeFamily
from safetensors.torch import load_file, save_file
from support import families
from support.copies import edited, pickled, pickled_as_before, pickled_shards, sharded
from support.families import Family, checkpoint
from transformers import AutoConfig, AutoModel, PreTrainedModel

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.trace import trace
from mergekit_slta.models.checkpoint import ExpertStack, blend, stack_of
from mergekit_slta.models.headers import folder_headers
from mergekit_slta.models.layout import meta_model

ATTENTION = "model.layers.1.self_attn.q_proj.weight"


def built(folder: Path) -> PreTrainedModel:
    return meta_model(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("layout", [sharded, pickled, pickled_as_before, pickled_shards])
def test_the_layout_of_the_files_does_not_change_the_values(
    layout: Callable[[Path, Path], Path], make_family: MakeFamily, tmp_path: Path
) -> None:
    base = make_family(experts=0, dtype=torch.bfloat16).base
    one, other = checkpoint(base), checkpoint(layout(base, tmp_path / "other"))
    stored = load_file(base / "model.safetensors")
    names = {name: name for name in stored}
    assert folder_headers(Path(other.folder)) == folder_headers(base) and other.fingerprint() == one.fingerprint()
    for found in (one, other):
        read = found.read(names, built(base))
        assert set(read) == set(stored)
        for name, tensor in read.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, stored[name].float())
        assert found.bytes_read == sum(tensor.nbytes for tensor in stored.values())
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


def test_a_checkpoint_of_the_bare_body_lacks_the_prefix(make_family: MakeFamily, tmp_path: Path) -> None:
    base = make_family("gpt2", experts=0).base
    AutoModel.from_pretrained(base, dtype=torch.float32).save_pretrained(tmp_path / "bare")
    name = "transformer.h.0.attn.c_attn.weight"
    assert name.removeprefix("transformer.") in checkpoint(tmp_path / "bare").tensor_names
    for folder in (base, tmp_path / "bare"):
        read = checkpoint(folder).read({"w": name}, built(base))
        assert torch.equal(read["w"], load_file(base / "model.safetensors")[name])


# A mixture's experts, which are read when they are used


STACK = "mlp.experts.gate_up_proj"
NAME = f"model.layers.0.{STACK}"


def read_stack(family: Family, folder: Path) -> torch.Tensor:
    decoder = trace(family.config)
    shape = decoder.layers[0].state_dict()[STACK].shape
    return checkpoint(folder).read({STACK: NAME}, decoder.model, stacks={STACK: shape})[STACK]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_checkpoints_experts_are_read_one_by_one(
    name: str, fused: bool, make_family: MakeFamily, tmp_path: Path
) -> None:
    """From separate matrices, as transformers saves some mixtures, and from fused ones."""
    family = make_family(name, experts=0, dtype=torch.bfloat16)
    whole = families.load_model(family.base).state_dict()[NAME].float()
    folder = family.base
    if fused:
        stored = load_file(folder / "model.safetensors") | {NAME: whole.bfloat16()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    stack = read_stack(family, folder)
    assert isinstance(stack, ExpertStack)
    assert torch.equal(stack.clone(), whole)


def test_experts_that_are_not_finite_are_refused_before_they_are_used(make_family: MakeFamily, tmp_path: Path) -> None:
    family = make_family("mixtral", experts=0)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[next(name for name in tensors if "layers.0" in name and ".experts.3." in name)][2, 1] = torch.nan

    with pytest.raises(SltaError, match=f"holds NaN or Inf in the tensor {NAME}"):
        read_stack(family, edited(family.base, tmp_path / "broken", spoil))


def test_experts_that_change_while_they_are_used_are_refused(make_family: MakeFamily) -> None:
    family = make_family("mixtral", experts=0)
    stack = read_stack(family, family.base)
    (family.base / "model.safetensors").touch()
    with pytest.raises(SltaError, match="have changed while they were read"):
        stack[0]


# Weighted sums


def test_numbers_that_are_no_weights_stay_the_base_models() -> None:
    """Such as buffers that count."""
    base, expert = {"count": torch.tensor([1, 2])}, {"count": torch.tensor([5, 5])}
    assert torch.equal(blend(base, [expert], torch.ones(1, dtype=torch.float64))["count"], base["count"])


def test_a_mixtures_experts_are_blended_one_by_one() -> None:
    """To the same values as all at once."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(4, 6, 5, generator=generator) for _ in range(3)]
    stacks = [stack_of(tensor, torch.device("cpu")) for tensor in whole]
    alpha = torch.tensor([0.3, 0.9], dtype=torch.float64)
    found, expected = (
        blend({"w": base}, [{"w": expert} for expert in experts], alpha)["w"] for base, *experts in (stacks, whole)
    )
    assert isinstance(found, ExpertStack)
    assert torch.equal(found, expected)

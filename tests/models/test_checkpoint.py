"""Weights as mergekit's loader gives them, whatever the files look like, and a mixture's experts one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MakeFamily
from mergekit.common import ModelReference
from safetensors.torch import load_file, save_file
from support import families
from support.copies import edited, pickled, pickled_as_before, pickled_shards, sharded
from support.families import Family
from transformers import AutoConfig, AutoModel, PreTrainedModel

from mergekit_slta.errors import SltaError
from mergekit_slta.layers.trace import trace
from mergekit_slta.models.checkpoint import Checkpoint, ExpertStack
from mergekit_slta.models.headers import folder_headers
from mergekit_slta.models.layout import meta_model

ATTENTION = "model.layers.1.self_attn.q_proj.weight"


def opened(folder: Path | str) -> Checkpoint:
    return Checkpoint(ModelReference.model_validate(str(folder)))


def built(folder: Path) -> PreTrainedModel:
    return meta_model(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("layout", [sharded, pickled, pickled_as_before, pickled_shards])
def test_the_layout_of_the_files_does_not_change_the_values(
    layout: Callable[[Path, Path], Path], make_family: MakeFamily, tmp_path: Path
) -> None:
    base = make_family(experts=0, dtype=torch.bfloat16).base
    one, other = opened(base), opened(layout(base, tmp_path / "other"))
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


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_refused_with_model_and_tensor(value: float, llama: Family, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[ATTENTION][3, 5] = value

    broken = edited(llama.base, tmp_path / "broken", spoil)
    with pytest.raises(SltaError, match="broken") as caught:
        opened(broken).read({"q": ATTENTION}, built(llama.base))
    assert ATTENTION in caught.value.message
    opened(broken).read({"k": ATTENTION.replace("q_proj", "k_proj")}, built(llama.base))


def test_a_missing_tensor_is_named(llama: Family, tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[ATTENTION]

    with pytest.raises(SltaError, match="lacks the tensor") as caught:
        opened(edited(llama.base, tmp_path / "incomplete", drop)).read({"q": ATTENTION}, built(llama.base))
    assert ATTENTION in caught.value.message
    assert "incomplete" in caught.value.message


def test_a_checkpoint_of_the_bare_body_lacks_the_prefix(make_family: MakeFamily, tmp_path: Path) -> None:
    base = make_family("gpt2", experts=0).base
    AutoModel.from_pretrained(base, dtype=torch.float32).save_pretrained(tmp_path / "bare")
    name = "transformer.h.0.attn.c_attn.weight"
    assert name.removeprefix("transformer.") in opened(tmp_path / "bare").tensor_names
    for folder in (base, tmp_path / "bare"):
        read = opened(folder).read({"w": name}, built(base))
        assert torch.equal(read["w"], load_file(base / "model.safetensors")[name])


# A mixture's experts, which are read when they are used


STACK = "mlp.experts.gate_up_proj"
NAME = f"model.layers.0.{STACK}"


def counted(values: torch.Tensor) -> tuple[ExpertStack, list[int]]:
    """A stack of these values, and the numbers of the parts that have been read."""
    read: list[int] = []

    def part(expert: int) -> torch.Tensor:
        read.append(expert)
        return values[expert]

    return ExpertStack(values.shape, "cpu", part), read


VALUES = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))


def test_a_part_is_read_alone() -> None:
    stack, read = counted(VALUES)
    assert torch.equal(stack[2], VALUES[2])
    assert torch.equal(torch.nn.functional.linear(VALUES[0], stack[torch.tensor(1)]), VALUES[0] @ VALUES[1].T)
    assert read == [2, 1]
    assert (len(stack), stack.shape, stack.dtype) == (4, VALUES.shape, torch.float32)
    read.clear()
    assert not torch.equal(stack, VALUES.index_fill(0, torch.tensor([1]), 0.0))
    assert read == [0, 1]  # compared part by part, too


def test_any_other_operation_gets_all_parts_and_none_writes_to_them() -> None:
    stack, _ = counted(VALUES)
    assert torch.equal(stack * 2, VALUES * 2)
    assert torch.equal(torch.bmm(VALUES.mT, stack), torch.bmm(VALUES.mT, VALUES))
    assert torch.equal(torch.zeros_like(VALUES).addcmul_(stack, torch.tensor(3.0)), VALUES * 3)
    assert torch.equal(stack, VALUES) and torch.equal(VALUES, stack) and type(stack.clone()) is torch.Tensor
    with pytest.raises(TypeError, match="cannot change the experts"):
        stack.add_(1)


def read_stack(family: Family, folder: Path) -> torch.Tensor:
    decoder = trace(family.config)
    (model,) = families.checkpoints([folder])
    shape = decoder.layers[0].state_dict()[STACK].shape
    return model.read({STACK: NAME}, decoder.model, stacks={STACK: shape})[STACK]


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

"""Weights as mergekit's loader gives them, whatever the files look like."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MakeFamily
from mergekit.common import ModelReference
from safetensors.torch import load_file
from support.copies import edited, pickled, pickled_as_before, pickled_shards, sharded
from support.families import Family
from transformers import AutoConfig, AutoModel, PreTrainedModel

from mergekit_slta.errors import SltaError
from mergekit_slta.models.checkpoint import Checkpoint
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

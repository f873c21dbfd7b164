"""Whole merges of a family by any method, compared with float64 tensor by tensor."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support import actmat_reference, families, sftm_reference
from support.copies import edited
from support.families import Family
from support.rounding import WIDEST, rounding

from mergekit_slta.layers.maps import Role
from mergekit_slta.layers.trace import trace

State = dict[str, torch.Tensor]

# The roles of stored tensors by hand, the first pattern that is found in a name.
ROLES = [
    (r"conv1d|conv\.conv|patch_embed", Role.CONVOLUTION),
    (r"norm|ln_\d|ln_f", Role.NORM),
    (r"bias|embed|lm_head|shared_head\.head|shared\.|wte|wpe|A_log|\.D$|pos_table|projector|\.bias_", Role.OTHER),
    (r"c_attn|c_proj|c_fc", Role.TRANSPOSED),
    (r"\.weight$|experts\.(gate_up|down)_proj$", Role.LINEAR),
    (r"", Role.OTHER),
]


def role_by_name(name: str) -> Role:
    return next(role for pattern, role in ROLES if re.search(pattern, name))


def role_of(name: str, tensor: torch.Tensor) -> Role:
    """A stored tensor's role by its name and shape."""
    role = role_by_name(name)
    if role is Role.NORM:
        return role if tensor.ndim == 1 else Role.LINEAR
    return role if tensor.ndim > 1 else Role.OTHER


def stored(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def wrong_tensors(found: State, expected: Callable[[str], torch.Tensor], names: Iterable[str]) -> list[str]:
    """The tensors that differ from what they should be by more than float32 rounds their largest element."""
    assert found.keys() == set(names)

    def wrong(tensor: torch.Tensor, wanted: torch.Tensor) -> bool:
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        terms = max([WIDEST, *wanted.shape[-2:]])  # of the longest sums that a solution of the matrix needs
        return not torch.allclose(tensor.double(), wanted, rtol=0, atol=rounding(terms=terms) * largest)

    return [name for name, tensor in found.items() if wrong(tensor, expected(name).double())]


def weighted(states: list[State], alpha: torch.Tensor, name: str) -> torch.Tensor:
    """The base model's tensor plus the experts' changes, each with its weight."""
    base, *experts = (state[name].double() for state in states)
    return base + sum(float(own) * (expert - base) for own, expert in zip(alpha, experts, strict=True))


def by_reference(states: list[State], method: str, name: str, role: Role | None = None) -> torch.Tensor:
    """What ``actmat`` or ``sftm`` makes of a stored tensor, by their formulas."""
    base, *experts = (state[name] for state in states)
    role = role or role_of(name, base)
    if method == "actmat":
        role = role if role is not Role.CONVOLUTION else Role.OTHER
        return actmat_reference.merged_tensor(role, base, experts)
    count = len(experts)
    role = Role.LINEAR if role is Role.TRANSPOSED else role  # singular features know no direction
    return sftm_reference.merged_tensor(role, base, experts, [1.0] * count, [0.2] * count, 0.6)


def solved(family: Family, folder: Path, states: list[State]) -> Callable[[str], torch.Tensor]:
    """What ``featcal`` with a ridge of 0.1 makes of a tensor, by the model's names: it is solved again in a folder.

    What is not solved is the experts' mean, and outside the language model the base model's.
    """
    tensor = families.feature_merge(family, folder).tensor
    language = trace(family.config).language_tensors
    share = torch.full((len(states) - 1,), 1 / (len(states) - 1))

    def expected(name: str) -> torch.Tensor:
        if (own := tensor(name)) is not None:
            return own
        return weighted(states, share, name) if name in language else states[0][name]

    return expected


def load(folder: Path) -> tuple[State, dict[str, Any]]:
    """A model's tensors as transformers loads them, and what it says of their names."""
    model, info = families.open_model(folder, dtype=torch.float32, output_loading_info=True)
    return model.state_dict(), info


def fuse_experts(folder: Path) -> None:
    """Store a mixture's experts in one tensor, as mergekit writes them, rather than one by one as transformers does."""
    tensors = {name: tensor.clone() for name, tensor in load(folder)[0].items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def merged(family: Family, method: str, out: Path, **parameters: Any) -> Path:
    """A merge by stock mergekit in this process."""
    content = families.recipe(family, method, calibration=method in ("slta", "featcal"), **parameters)
    return families.merge(content, out)


def same_tensors(first: State, second: State) -> bool:
    """Whether two models have the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], own) for name, own in second.items())


def merged_state(folder: Path) -> State:
    """Every tensor of a model folder by the names of ``state_dict``, in float64."""
    return families.load_model(folder).state_dict()


def worst_error(found: State, expected: State) -> float:
    """The largest relative error of a tensor."""
    assert set(found) == set(expected)
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


def spoiled(source: Path, folder: Path, tensor: str) -> Path:
    def spoil(tensors: State) -> None:
        tensors[tensor].view(-1)[-1] = torch.inf

    return edited(source, folder, spoil)

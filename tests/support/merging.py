"""What tests of whole merges share: the tensors of a folder, errors, spoilt models, and counted calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from support.copies import edited

State = dict[str, torch.Tensor]


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


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    """One entry for each call of a module's function."""
    calls: list[int] = []
    function = getattr(module, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, count)
    return calls

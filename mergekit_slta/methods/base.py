"""What all merge methods of this package have in common: they see the recipe first and hand on finite tensors only."""

from __future__ import annotations

from typing import Any

import torch
from mergekit.common import dtype_from_name
from mergekit.config import MergeConfiguration
from mergekit.merge_methods import GroupMergeMethod, TensorGroup
from mergekit.options import MergeOptions

from mergekit_slta.checks.examine import refuse_problems
from mergekit_slta.errors import SltaError


class CheckedMethod(GroupMergeMethod):
    """A merge method that refuses a recipe with problems before it is planned, and a tensor that is not finite."""

    _out_dtype: torch.dtype | None = None

    def merge(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor."""
        raise NotImplementedError

    def begin(self, config: MergeConfiguration, options: MergeOptions) -> None:
        """See the whole recipe before anything is planned.

        Raises:
            SltaError: everything that is wrong with it.
        """
        self._out_dtype = dtype_from_name(config.out_dtype) if config.out_dtype else None
        refuse_problems(config, options, self.spec)

    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> torch.Tensor:
        """Merge one tensor.

        Raises:
            SltaError: the merged tensor is not finite in the data type that it is written in.
        """
        merged = self.merge(group, **parameters)
        dtype = self._out_dtype or merged.dtype
        if not is_finite(merged, dtype):
            raise not_finite(group, dtype)
        return merged


def is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all of a tensor's values are finite in a data type; the smallest and the largest decide for all."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return bool(torch.stack(tensor.aminmax()).to(dtype).isfinite().all())


def not_finite(group: TensorGroup, dtype: torch.dtype) -> SltaError:
    """That a merged tensor is not finite in a data type, with the models whose own tensor is not, if there are some."""
    damaged = [str(entry.id) for entry in group.entries if not is_finite(entry.tensor, entry.tensor.dtype)]
    if damaged:
        return SltaError(
            f"The tensor '{group.metadata.name}' of {', '.join(damaged)} has NaN or infinite values: the checkpoint is "
            "damaged (save or download it again), or too large for the recipe's 'dtype' (set 'dtype: float32')."
        )
    experts = ", ".join(str(entry.id) for entry in group.non_base)
    return SltaError(
        f"The merged tensor '{group.metadata.name}' is not finite as {str(dtype).removeprefix('torch.')}, although it "
        f"is in the base model and in {experts}: set 'dtype: float32' and 'out_dtype: bfloat16', or give these "
        "experts less weight."
    )

"""What the merge methods without data share: they merge tensor by tensor, each by its role in the model."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import TensorGroup
from mergekit.merge_methods.base import TensorMetadata

from mergekit_slta.errors import SltaError
from mergekit_slta.host.base import FiniteMethod, is_finite, not_finite
from mergekit_slta.models.roles import Role, dotted_tails, model_roles, role_by_shape


class DataFreeMethod(FiniteMethod):
    """A merge method that merges each tensor by itself and finds its role in the base model's structure.

    mergekit passes integer tensors through by itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._roles: dict[Hashable, Mapping[str, Role]] = {}
        self._trust_remote_code = False

    def validate_inputs(
        self, input_ids: Sequence[Hashable], base_id: Hashable | None = None, *, group_name: str | None = None
    ) -> None:
        """Check the inputs; at the first slice, drop the previous merge's roles and note mergekit's settings."""
        if base_id is None:
            raise SltaError(f"'{self.spec.name}' needs base_model: the model that the experts were fine-tuned from.")
        super().validate_inputs(input_ids, base_id, group_name=group_name)
        if group_name is not None and group_name.endswith(".slices[0]"):
            # The settings belong to the planning thread; the threads that execute the merge do not see them.
            self._trust_remote_code = LoaderCache().trust_remote_code
            self._roles.pop(base_id, None)

    def merge_tasks(
        self, role: Role, tasks: Iterator[torch.Tensor], group: TensorGroup, parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, float]:
        """Return the merged task vector of a tensor, and its scaling factor.

        Args:
            role: the tensor's role in its model.
            tasks: the experts' task vectors, made one by one.
            group: the tensor in all models.
            parameters: the method's parameters for the tensor.
        """
        raise NotImplementedError

    def merge(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Add the merged task vector to the base model's tensor, in at least float32.

        Raises:
            SltaError: the base model or an expert has a value that is not finite.
        """
        base = group.base
        assert base is not None, "the input contract requires a base"
        start = base.tensor.to(torch.promote_types(base.tensor.dtype, torch.float32))
        role = self._role(base.id, group.metadata, start)
        merged, scale = self.merge_tasks(role, task_vectors(group, start), group, parameters)
        return start.add(merged.to(start.dtype), alpha=scale).to(base.tensor.dtype)

    def _role(self, base: Hashable, metadata: TensorMetadata, tensor: torch.Tensor) -> Role:
        with self._lock:
            if base not in self._roles:
                self._roles[base] = model_roles(base, self._trust_remote_code, self.spec.name)
            roles = self._roles[base]
        known = (roles[ending] for ending in dotted_tails(metadata.name or "") if ending in roles)
        return next(known, None) or role_by_shape(tensor, metadata.vocabulary_axis)


def task_vectors(group: TensorGroup, start: torch.Tensor) -> Iterator[torch.Tensor]:
    """Each expert's task vector, its tensor minus the base model's ``start``, in ``start``'s dtype.

    Raises:
        SltaError: the base model or the expert has a value that is not finite.
    """
    for entry in group.non_base:
        task = entry.tensor.to(start.dtype).sub(start)
        if not is_finite(task, task.dtype):
            raise not_finite(group, start.dtype)
        yield task

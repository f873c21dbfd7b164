"""The anchor: a feature merge begins with what ``merge_method: actmat`` gives, for adapters with another ridge.

The base model, if it has a task, is in it an expert without changes that counts kappa times.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mergekit_slta.actmat.covariance import covariance, merged_vector
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import MAPS, LinearMap, Role, tensor_roles
from mergekit_slta.models.checkpoint import Blend, Checkpoint, ExpertStack, Tensors, blend, task_vector
from mergekit_slta.numerics.symmetric import add_ridge
from mergekit_slta.recipe.settings import ACTMAT_RIDGE, are_adapters

# A few prompts of adapters leave most directions of the input to the prior, and so need more of it than those of full
# fine-tunes, whose ridge is 0.03; without prompts, ``actmat`` takes 3.
RIDGE_OF_ADAPTERS = 0.3


class ActmatAnchor(Blend):
    """The experts' mean; in a layer (``of``), ``actmat`` solves each stored matrix of the linear maps."""

    def __init__(
        self,
        models: Sequence[Checkpoint],  # the base model, then the ``T`` experts
        decoder: Decoder,  # the linear maps of its layers are solved
        counts: Sequence[float],  # of each task: 1 for an expert's, and last kappa for the base model's if it has one
    ) -> None:
        super().__init__(models, torch.full((len(models) - 1,), 1 / sum(counts), dtype=torch.float64))
        self._ridge = RIDGE_OF_ADAPTERS if are_adapters(*(model.reference for model in models)) else ACTMAT_RIDGE
        self.counts = counts
        self._layout = models[0].model.layout(decoder.model)
        roles = tensor_roles(decoder.model)
        names = [name for layer in range(len(decoder)) for name in decoder.layer_tensors[layer].values()]
        self._maps = {name: roles[name] for name in names if roles.get(name) in MAPS}

    def of(self, names: Mapping[str, str], tensors: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        """The anchor's tensors of a layer, from those of the base model, then of the experts."""
        maps = {key: name for key, name in names.items() if name in self._maps}
        others = [{key: tensor for key, tensor in model.items() if key not in maps} for model in tensors]
        solved = {key: self._merged(name, [model[key] for model in tensors]) for key, name in maps.items()}
        return {**tensors[0], **blend(others[0], others[1:], self._alpha), **solved}

    def _merged(self, name: str, models: Sequence[torch.Tensor], mixture_expert: int | None = None) -> torch.Tensor:
        """A map's tensor, or the part of a mixture's expert, from the solutions of its stored matrices.

        The experts of a mixture are solved one by one, because a GPU may not hold them all.
        """
        base, pieces = models[0], self._layout.pieces_of(name, mixture_expert)
        if mixture_expert is None and base.ndim > 2 and self._layout.in_parts(name):

            def part(number: int) -> torch.Tensor:
                return self._merged(name, [model[number] for model in models], number)

            if isinstance(base, ExpertStack):
                return ExpertStack(base.shape, base.device, part)
            return torch.stack([part(number) for number in range(len(base))])
        if len(pieces) == 1 or len(pieces[0].targets) > 1:
            return self._solved(self._maps[name], models)

        def solved(piece: str) -> torch.Tensor:
            return self._solved(Role.LINEAR, [self._layout.restore(piece, lambda *_: tensor) for tensor in models])  # noqa: B023

        return self._layout.read(name, solved, mixture_expert)

    def _solved(self, role: Role, models: Sequence[torch.Tensor]) -> torch.Tensor:
        base, *experts = models
        task_vectors = [task_vector(tensor, base) for tensor in (*experts, base)][: len(self.counts)]
        return base + merged_vector(role, task_vectors, self._ridge, self.counts).to(base.dtype)

    def prior(self, maps: Sequence[LinearMap], base: Tensors, owners: Sequence[Tensors]) -> torch.Tensor | None:
        """The prior of maps with one input: P [in, in], the system of ``actmat`` with a unit mean diagonal.

        From the tensors of the base model, and of each task's own model; None where no expert has changed a map.
        """
        trained = [owner for owner in owners if owner is not base]
        total = sum(sum(covariance(task_vector(m.matrix(one), m.matrix(base))) for one in trained) for m in maps)
        if not isinstance(total, torch.Tensor) or not total.any():
            return None
        add_ridge(total, self._ridge)
        return total.div_(total.diagonal().mean())


def in_a_file(stack: ExpertStack, folder: Path) -> torch.Tensor:
    """A copy of a mixture's matrices in a mapped temporary file of a folder, whose space is freed with the tensor."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(nbytes := stack.numel() * stack.dtype.itemsize)
        if hasattr(os, "posix_fallocate"):  # or a full disk would kill this process when it writes
            os.posix_fallocate(file.fileno(), 0, nbytes)
        copy = torch.from_file(file.name, shared=True, size=stack.numel(), dtype=stack.dtype).view(stack.shape)
    for mixture_expert in range(len(copy)):
        copy[mixture_expert] = stack[mixture_expert]
    return copy

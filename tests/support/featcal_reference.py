"""The naive reference of ``featcal``: whole models in float64, one sample at a time, explicit least squares.

Nothing here comes from ``mergekit_slta``. Where that runs layers one by one on batches, this runs the whole merged
model anew for every group of maps; where that solves normal equations, this stacks every token's row.

Shapes: ``n`` tokens of a task, ``in`` and ``out`` dimensions of a map, ``E`` routed experts, ``f`` their hidden
dimensions, ``d`` the model's.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support import reference
from support.reference import SPLITS, as_linear, float64, forget, hidden_states, routed_map
from torch import Tensor
from torch.nn import Module

Groups = Sequence[Sequence[str]]
Recorded = dict[str, list[Tensor]]

MIXTURES = ("mlp.experts", "feed_forward.experts")


def _in(path: str, *groups: Sequence[str]) -> Groups:
    """Groups of maps below a module."""
    return [[f"{path}.{name}" for name in group] for group in groups]


_ATTENTION: Groups = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",))
_LLAMA: Groups = (*_ATTENTION, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))

# By the keys of ``families.ARCHITECTURES`` and ``families.UNSPLIT``: the maps of a decoder layer in the order in which
# they are solved, those with the same input together. The routed experts of a mixture follow (``MIXTURES``), where they
# are not named.
GROUPS: dict[str, Groups] = {
    **dict.fromkeys(("llama", "gemma2", "olmo2"), _LLAMA),
    "gemma4": (*_LLAMA, ("per_layer_input_gate",), ("per_layer_projection",)),
    "mixtral": _ATTENTION,
    "llama4": (
        *_ATTENTION,
        ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
        ("feed_forward.shared_expert.down_proj",),
    ),
    "longcat_flash": tuple(
        group
        for half in (0, 1)
        for group in (
            *_in(
                f"self_attn.{half}", ("q_a_proj",), ("q_b_proj",), ("kv_a_proj_with_mqa",), ("kv_b_proj",), ("o_proj",)
            ),
            *((("mlp.experts",),) if not half else ()),
            *_in(f"mlps.{half}", ("gate_proj", "up_proj"), ("down_proj",)),
        )
    ),
    "zamba2": (  # what layers share is not solved
        ("linear",),
        *(group for path in ("mamba", "mamba_decoder.mamba") for group in _in(path, ("in_proj",), ("out_proj",))),
    ),
    "gpt2": (("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)),
    "gpt_neox": (("attention.query_key_value",), ("attention.dense",), ("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)),
    "phi3": (("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)),
    "opt": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.out_proj",), ("fc1",), ("fc2",)),
}

# The maps whose output is added to the residual stream, and the modules of the layer that have added theirs before; of
# those that add side by side only the last.
WRITERS: dict[str, dict[str, tuple[str, ...]]] = {
    **{name: {"self_attn.o_proj": (), "mlp.down_proj": ("self_attn.o_proj",)} for name in ("llama", "phi3")},
    **{name: {"self_attn.o_proj": ()} for name in ("mixtral", "llama4")},
    "gpt2": {"attn.c_proj": (), "mlp.c_proj": ("attn.c_proj",)},
    "gpt_neox": {"mlp.dense_4h_to_h": ("attention.dense",)},
    "opt": {"self_attn.out_proj": ()},
    "zamba2": {"mamba.out_proj": ()},
    **{
        name: {"self_attn.o_proj": (), "mlp.down_proj": ("post_attention_layernorm",)}
        for name in ("gemma2", "olmo2", "gemma4")
    },
}
WRITERS["gemma4"]["per_layer_projection"] = ("post_attention_layernorm", "post_feedforward_layernorm")

# The norms that such maps' outputs go through.
NORMS = {
    "self_attn.o_proj": "post_attention_layernorm",
    "mlp.down_proj": "post_feedforward_layernorm",
    "per_layer_projection": "post_per_layer_input_norm",
}


def merge(
    base: Module,
    experts: Sequence[Module],
    tasks: Sequence[Sequence[Sequence[int]]],
    architecture: str,
    anchor: Mapping[str, Tensor],
    *,
    ridge: float = 0.1,
) -> dict[str, Tensor]:
    """Every tensor of the merged model, by the names of ``state_dict``, in float64.

    The ridge is how strongly the solution is held at the anchor, the tensors of a whole model: by the sum of all task
    matrices' Gram matrices, each with a unit trace, and a tenth of its mean diagonal on the diagonal; the output head's
    the same in every direction.
    """
    with torch.no_grad(), float64():
        merged = copy.deepcopy(base)
        merged.load_state_dict(anchor)
        module = SPLITS[architecture].layers
        layers = [f"{module}.{number}" for number, _ in enumerate(merged.get_submodule(module).children())]
        order = steps(merged, layers, GROUPS[architecture])
        writers = WRITERS.get(architecture, {})
        norms = NORMS if architecture in ("gemma2", "olmo2", "gemma4") else {}
        solver = Solver(merged, base, experts, tasks, layers, order, writers, norms, ridge)
        for paths in order:
            (solver.solve_mixture if paths[0].endswith(MIXTURES) else solver.solve_maps)(paths)
        return {name: tensor.clone() for name, tensor in merged.state_dict().items()}


def steps(model: Module, layers: Sequence[str], groups: Groups) -> list[list[str]]:
    """The paths in the model of what is solved one after the other: maps with the same input, or a mixture."""
    groups = [*groups, *([mixture] for mixture in MIXTURES if [mixture] not in map(list, groups))]
    places = [[f"{layer}.{name}" for name in group] for layer in layers for group in groups]
    modules = dict(model.named_modules())
    existing = [[path for path in paths if path in modules] for paths in places]
    # A path that no layer has would go unnoticed: its map would stay the anchor's.
    for name in {name for group in groups for name in group} - set(MIXTURES):
        assert any(path.endswith(f".{name}") for paths in existing for path in paths), name
    output = untied_head(model)
    return [paths for paths in [*existing, [output] if output else []] if paths]


def untied_head(model: Any) -> str | None:
    """The path of the output embedding, unless it shares its weight with the input embedding."""
    head = model.get_output_embeddings()
    if head is None or head.weight is model.get_input_embeddings().weight:
        return None
    path: str = next(path for path, module in model.named_modules() if module is head)
    return path


@dataclass(frozen=True)
class Seen:
    """A map of an expert, and what the map is given on that expert's task.

    The drift is what the expert's residual stream has and the merged model's lacks where the map adds to it, in units
    of the map's output.
    """

    merged: Tensor  # the map's inputs in the merged model, [n, in]
    own: Tensor  # and in the expert, [n, in]
    weight: Tensor  # the expert's, [out, in]
    bias: Tensor | None = None  # the expert's, [out]
    drift: Tensor | float = 0.0  # [n, out]
    counted: Tensor | float = 1.0  # how much each token counts, [n, 1]

    @property
    def wanted(self) -> Tensor:
        """What the merged map should give, without bias, [n, out]."""
        return self.own @ self.weight.T + self.drift / 2


def counts(tasks: Sequence[Seen]) -> list[float]:
    """Each task's weight in the sums over tasks."""
    return [1 / float((seen.merged.T @ (seen.counted * seen.merged)).norm()) for seen in tasks]


def beyond(anchor: Tensor, base: Tensor) -> Tensor:
    """What a map stays near [out, in]: half as far again from the base model's as the anchor's."""
    return base + 1.5 * (anchor - base)


def solved_weight(
    near: Tensor, tasks: Sequence[Seen], scales: Sequence[float], ridge: float, shape: Tensor | None = None
) -> Tensor:
    """The merged map's weight [out, in], held at ``near``, alike in every direction or by ``shape`` [in, in]."""
    roots = [(scale * seen.counted) ** 0.5 for scale, seen in zip(scales, tasks, strict=True)]
    rows = torch.cat([root * seen.merged for root, seen in zip(roots, tasks, strict=True)])
    missing = torch.cat([root * (seen.wanted - seen.merged @ near.T) for root, seen in zip(roots, tasks, strict=True)])
    energy = rows.square().sum(0)
    shape = torch.eye(len(energy)) if shape is None else shape
    hold = (ridge * penalties(energy)).sqrt() * torch.linalg.cholesky(shape).T
    design, target = torch.cat([rows, hold]), torch.cat([missing, missing.new_zeros(len(hold), len(near))])
    change: Tensor = torch.linalg.lstsq(design, target, driver="gelsd").solution.T
    return near + change


def held_by_tasks(bases: Sequence[Tensor], experts: Sequence[Sequence[Tensor]]) -> Tensor:
    """The strength of the hold in the directions of the input [in, in], from the maps of a group, [out, in] each."""
    changes = [weight - base for base, own in zip(bases, experts, strict=True) for weight in own]
    shape = torch.stack([change.T @ change / change.square().sum() for change in changes]).sum(0)
    shape = shape + 0.03 * shape.square().sum() / shape.trace() * torch.eye(len(shape))
    return shape / shape.diagonal().mean()


def penalties(energy: Tensor) -> Tensor:
    """The ridge's weight per input dimension, [in], from the summed squares of that dimension's inputs, [in]."""
    if energy.mean() > 10 * energy.median():
        held = torch.where(energy > 0, energy.clamp(min=energy.median() / 100), energy)
        return held * energy.sum() / held.sum()
    return energy.mean().expand_as(energy)


def solved_bias(anchor: Tensor, weight: Tensor, tasks: Sequence[Seen], scales: Sequence[float], ridge: float) -> Tensor:
    """The merged map's bias [out]: the mean of what its weight [out, in] leaves over, unless the ridge is endless."""
    left, tokens = torch.zeros_like(weight[:, 0]), 0.0
    for seen, scale in zip(tasks, scales, strict=True):
        assert seen.bias is not None
        left += scale * (seen.counted * (seen.wanted + seen.bias - seen.merged @ weight.T)).sum(0)
        tokens += scale * float((seen.counted * torch.ones(len(seen.merged), 1)).sum())
    return anchor + (left / tokens - anchor) / (1 + ridge**2)


class Solver:
    """Replaces the maps of ``merged``, which starts as the anchor, one after the other."""

    def __init__(
        self,
        merged: Module,
        base: Module,
        experts: Sequence[Module],
        tasks: Sequence[Sequence[Sequence[int]]],
        layers: Sequence[str],
        order: Sequence[Sequence[str]],
        writers: Mapping[str, tuple[str, ...]],
        norms: Mapping[str, str],
        ridge: float,
    ) -> None:
        # By the path of each map that adds to the residual stream: its layer's path, and those of what added before.
        self.writers = {
            f"{layer}.{name}": (layer, [f"{layer}.{earlier}" for earlier in before])
            for layer in layers
            for name, before in writers.items()
        }
        self.norms = {f"{layer}.{name}": f"{layer}.{norm}" for layer in layers for name, norm in norms.items()}
        added = {path for layer, before in self.writers.values() for path in (layer, *before)}
        self.adding = sorted(added | {self.norms[path] for path in self.writers if path in self.norms})
        self.merged, self.base, self.experts, self.tasks, self.ridge = merged, base, experts, tasks, ridge
        paths = [*(path for paths in order for path in paths), *self.adding]
        # The experts stay as they are, so that once is enough for them.
        self.own = [recorded(expert, paths, samples) for expert, samples in zip(experts, tasks, strict=True)]

    def streams(self, paths: Sequence[str]) -> list[tuple[Recorded, Recorded]]:
        """Per task, what the modules are given in the merged model and in the expert."""
        paths = [*paths, *self.adding]
        return [(recorded(self.merged, paths, samples), own) for own, samples in zip(self.own, self.tasks, strict=True)]

    def drift(self, path: str, merged: Recorded, own: Recorded) -> Tensor | float:
        """What the expert's residual stream has and the merged model's lacks where a map adds to it, [n, out]."""
        if path not in self.writers:
            return 0.0
        layer, before = self.writers[path]
        drift: Tensor | float = own[layer][0] - merged[layer][0] if not layer.endswith(".0") else 0.0
        return drift + sum(own[f"{name}()"][0] - merged[f"{name}()"][0] for name in before)

    def before_norm(self, path: str, own: Recorded) -> tuple[Tensor | float, Tensor | float]:
        """What turns an error behind a map's norm into one before it [n, out], and how much a token counts [n, 1]."""
        if path not in self.writers or path not in self.norms:
            return 1.0, 1.0
        given, gave = own[f"{path}()"][0], own[f"{self.norms[path]}()"][0]
        multiplied = gave / given
        usual = multiplied.square().median(1, keepdim=True).values
        return multiplied / (multiplied.square() + usual / 100), usual

    def shape(self, paths: Sequence[str]) -> Tensor | None:
        """The hold of a group of maps; the output head's is the same in every direction."""
        if paths == [untied_head(self.base)]:
            return None
        models = (self.base, *self.experts)
        base, *experts = ([parameters(model.get_submodule(path))[0] for path in paths] for model in models)
        return held_by_tasks(base, [list(own) for own in zip(*experts, strict=True)])

    def solve_maps(self, paths: Sequence[str]) -> None:
        """Replace a group of maps."""
        streams, shape = self.streams(paths), self.shape(paths)
        for path in paths:
            tasks = []
            for expert, (merged, own) in zip(self.experts, streams, strict=True):
                factors, counted = self.before_norm(path, own)
                drift = self.drift(path, merged, own) * factors
                weight, bias = parameters(expert.get_submodule(path))
                tasks.append(Seen(merged[path][0], own[path][0], weight, bias, drift, counted))
            (weight, bias), scales = parameters(self.merged.get_submodule(path)), counts(tasks)
            base = self.merged if shape is None else self.base  # nothing is beyond the merged one
            near = beyond(weight, parameters(base.get_submodule(path))[0])
            weight.copy_(solved_weight(near, tasks, scales, self.ridge, shape))
            if bias is not None:
                bias.copy_(solved_bias(bias, weight, tasks, scales, self.ridge))

    def solve_mixture(self, paths: Sequence[str]) -> None:
        """Replace the maps of all routed experts."""
        (path,) = paths
        streams = self.streams(paths)
        module: Any = self.merged.get_submodule(path)
        owners: list[Any] = [expert.get_submodule(path) for expert in self.experts]
        for routed in range(len(module.down_proj)):
            tasks = [
                Seen(*reaching(routed, merged[path], own[path]), routed_map(owner, "gate_up_proj", routed))
                for owner, (merged, own) in zip(owners, streams, strict=True)
            ]
            first, down = (routed_map(module, name, routed) for name in ("gate_up_proj", "down_proj"))
            self.solve_reached(path, routed, "gate_up_proj", first, tasks)
            middle = gated(module.act_fn, first)
            tasks = [
                Seen(
                    middle(seen.merged),
                    gated(owner.act_fn, seen.weight)(seen.own),
                    routed_map(owner, "down_proj", routed),
                )
                for owner, seen in zip(owners, tasks, strict=True)
            ]
            self.solve_reached(path, routed, "down_proj", down, tasks)

    def solve_reached(self, path: str, routed: int, name: str, weight: Tensor, tasks: Iterable[Seen]) -> None:
        """Replace a map of a routed expert, weight [out, in], unless too few tokens reach it."""
        models = (self.base, *self.experts)
        base, *experts = (routed_map(model.get_submodule(path), name, routed) for model in models)
        near, shape = beyond(weight, base), held_by_tasks([base], [experts])
        reached = [seen for seen in tasks if len(seen.merged)]
        if sum(len(seen.merged) for seen in reached) >= weight.shape[1] / 16:
            weight.copy_(solved_weight(near, reached, counts(reached), self.ridge, shape))


def reaching(routed: int, merged: Sequence[Tensor], own: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What a routed expert is given [n, d] at the tokens that the merged model sends to it, there and in the expert.

    Where each routed expert has inputs of its own, [tokens, E, d], which are zero at the tokens that go elsewhere, the
    expert may have none at such a token: the merged model's stand for them.
    """
    if len(merged) > 1:
        here = (merged[1] == routed).any(1)
        return merged[0][here], own[0][here]
    here = merged[0][:, routed].any(1)
    given, theirs = merged[0][here, routed], own[0][here, routed]
    return given, torch.where(theirs.any(1, keepdim=True), theirs, given)


def gated(activation: Callable[[Tensor], Tensor], weight: Tensor) -> Callable[[Tensor], Tensor]:
    """From a routed expert's inputs [n, d] to its hidden values [n, f], through gate and up stacked, [2f, d]."""
    gate, up = weight.chunk(2)
    return lambda hidden: activation(hidden @ gate.T) * (hidden @ up.T)


def parameters(module: Module) -> tuple[Tensor, Tensor | None]:
    """A map's weight as a view [out, in], and its bias [out]."""
    return as_linear(module), module._parameters.get("bias")


def recorded(model: Module, paths: Sequence[str], samples: Sequence[Sequence[int]]) -> Recorded:
    """The arguments [n, ...] of the modules at ``paths``, the tokens of all samples below each other.

    A module that is given the tokens once for each of ``E`` routed experts has [n, E, ...]. What a module gives,
    [n, out], has its path with ``()`` behind it.
    """
    calls: dict[str, list[tuple[Tensor, ...]]] = {name: [] for path in paths for name in (path, f"{path}()")}
    for ids in samples:
        forget(model)
        with reference.recorded({path: model.get_submodule(path) for path in paths}) as (inputs, outputs):
            model(torch.tensor([list(ids)]), use_cache=False)
        for path, args in inputs.items():
            given = args[:1] if path.split(".")[-1].isdigit() else args  # a layer's others are no features
            rows = [arg.reshape(-1, len(ids), arg.shape[-1]).transpose(0, 1) for arg in given]
            calls[path].append(tuple(own[:, 0] if own.shape[1] == 1 else own for own in rows))
            made = hidden_states(outputs[path])
            calls[f"{path}()"].append((made.reshape(-1, made.shape[-1]),))
    return {path: [torch.cat(parts) for parts in zip(*own, strict=True)] for path, own in calls.items()}

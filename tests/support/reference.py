"""The naive reference: whole models in float64, one sample at a time, dense least squares.

Nothing here comes from ``mergekit_slta``. Where that traces how a layer splits, this has a table; where that runs
layers one by one on batches, this runs whole models; where that reduces to Gram matrices, this keeps every feature.

Shapes: ``T`` experts, ``S`` tokens of a sample, ``D`` feature dimensions, ``H`` query heads.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

Tasks = Sequence[Sequence[Sequence[int]]]
Models = Sequence[Any]
EIGENVALUE_CUTOFF = 1e-10


@dataclass(frozen=True)
class Split:
    """How an architecture's decoder layer splits into branches, written down by hand.

    The names are those of all architectures whose children of such names are in such places; none has all of them.
    """

    attn: tuple[str, ...] = (  # the layer's children in each branch
        *("input_layernorm", "self_attn_layer_norm", "ln_1", "ln_attn", "operator_norm", "norm"),
        *("self_attn", "attn", "self_attention", "attention", "linear_attn", "mamba", "mixer", "conv"),
    )
    mlp: tuple[str, ...] = (
        *("post_attention_layernorm", "pre_ff_layernorm", "final_layer_norm", "ln_2", "ln_mlp", "ffn_norm"),
        *("mlp", "fc1", "fc2", "feed_forward", "block_sparse_moe", "shared_mlp"),
    )
    layers: str = "model.layers"
    # The tensors whose rows come from query heads and from key/value heads, and one whose rows come from both: blocks
    # (all q, all k, all v), interleaved (q, k, v of each head) or grouped (the queries of a group, its k, its v).
    queries: tuple[str, ...] = ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.output_gate", "mixer.q_proj")
    keys: tuple[str, ...] = (
        *("self_attn.k_proj", "self_attn.v_proj", "self_attn.kv_b_proj"),
        *("mixer.k_proj", "mixer.v_proj"),
    )
    fused: tuple[str, str] | None = None
    output: tuple[str, ...] = (  # the map after the heads
        *("self_attn.o_proj", "self_attn.out_proj", "self_attn.dense"),
        *("self_attention.dense", "attention.dense", "attn.c_proj", "mixer.o_proj"),
    )
    language: tuple[str, ...] = ("",)  # what the names of the tensors of the language tower and its head begin with
    boundary: str = ""  # the child whose output is the residual stream between the branches
    stacked: bool = False  # whether a layer's hidden states are [n, B, S, D]
    unsplit: str = ""  # a child whose layers are not split: a list of modules, or one that several layers share


_GEMMA2 = Split(
    attn=("input_layernorm", "self_attn", "post_attention_layernorm"),
    mlp=("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
)
_PER_LAYER = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")

# By the keys of ``families.ARCHITECTURES``, and of ``families.UNSPLIT`` where only the path of the layers counts.
SPLITS: dict[str, Split] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "qwen3_moe", "glm4_moe", "glm_moe_dsa"),
            *("gpt_oss", "llama4", "falcon_h1", "jamba_dense", "granite_moe_hybrid", "lfm2"),
        ),
        Split(),
    ),
    **dict.fromkeys(("gemma2", "gemma3", "olmo2"), _GEMMA2),
    "gemma3n": Split(
        attn=(*_GEMMA2.attn, "altup"),
        mlp=("input_layernorm", "laurel", *_GEMMA2.mlp, "altup", *_PER_LAYER),
        stacked=True,
    ),
    "gemma4": Split(attn=(*_GEMMA2.attn, "layer_scalar"), mlp=(*_GEMMA2.mlp, "layer_scalar", *_PER_LAYER)),
    "bloom": Split(
        layers="transformer.h", fused=("self_attention.query_key_value", "interleaved"), boundary="self_attention"
    ),
    "opt": Split(layers="model.decoder.layers"),
    "mamba": Split(layers="backbone.layers"),
    "nemotron_h": Split(attn=("norm", "mixer"), mlp=("norm", "mixer")),
    "minimax": Split(
        attn=_GEMMA2.attn,
        mlp=("mlp",),
        fused=("self_attn.qkv_proj", "interleaved"),
        boundary="post_attention_layernorm",
    ),
    "zamba2": Split(
        attn=("input_layernorm", "mamba", "shared_transformer", "linear", "mamba_decoder"),
        output=(),
        unsplit="shared_transformer",
    ),
    "longcat_flash": Split(
        attn=("input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "mlps"),
        mlp=(),
        output=(),
        unsplit="mlps",
    ),
    "zaya": Split(
        attn=("input_layernorm", "self_attn", "post_attention_residual_scale"),
        mlp=("post_attention_layernorm", "mlp", "post_mlp_residual_scale"),
        output=(),
        boundary="post_attention_residual_scale",
    ),
    **dict.fromkeys(("cohere", "phi"), Split(mlp=("input_layernorm", "mlp"))),
    **dict.fromkeys(("phi3", "phi3_longrope"), Split(fused=("self_attn.qkv_proj", "blocks"))),
    "gpt2": Split(layers="transformer.h", fused=("attn.c_attn", "blocks")),
    "gpt_neox": Split(layers="gpt_neox.layers", fused=("attention.query_key_value", "interleaved")),
    "falcon_new": Split(layers="transformer.h", fused=("self_attention.query_key_value", "grouped")),
    "falcon_alibi": Split(layers="transformer.h", fused=("self_attention.query_key_value", "interleaved")),
}


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Keep float64 where transformers' modules would go down to float32 (norms, softmax, rotary embeddings)."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


# Language towers of multimodal models, by the keys of ``families.MULTIMODAL``.
_TOWER: dict[str, Any] = {"layers": "model.language_model.layers", "language": ("model.language_model.", "lm_head.")}
SPLITS |= {
    **dict.fromkeys(("qwen3_vl", "qwen2_5_vl", "mistral3", "paligemma", "qwen3_5", "qwen3_5_moe"), Split(**_TOWER)),
    "gemma4_vision": replace(SPLITS["gemma4"], **_TOWER),
    "gemma3_vision": replace(_GEMMA2, **_TOWER),
    "llama4_vision": Split(layers="language_model.model.layers", language=("language_model.",)),
}

# Features


@dataclass
class Deltas:
    """The feature deltas of one submodule."""

    samples: list[torch.Tensor] = field(default_factory=list)  # [T, S * D] each
    task: list[int] = field(default_factory=list)  # the index of the expert whose data each sample came from

    def grams(self) -> torch.Tensor:
        """[N, T, T]."""
        return torch.stack([delta @ delta.T for delta in self.samples])


def random_deltas(samples: Sequence[int] = (4, 5, 3), experts: int = 3, seed: int = 0) -> Deltas:
    """Feature deltas of samples of different lengths and sizes, with a direction in common; how many of each task."""
    generator = torch.Generator().manual_seed(seed)
    found = Deltas()
    for task, count in enumerate(samples):
        for sample in range(count):
            size = 6 * (sample + 2)
            common = torch.randn(size, generator=generator, dtype=torch.float64)
            own = torch.randn(experts, size, generator=generator, dtype=torch.float64)
            found.samples.append((own + common) * 10.0 ** (sample - 2) * (task + 1))
            found.task.append(task)
    return found


def gram_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest |dG_bc| / sqrt(G_bb G_cc) of Gram matrices [N, T, T]; where that is 0 / 0, zero."""
    power = expected.diagonal(dim1=1, dim2=2).sqrt()
    scale = power[:, :, None] * power[:, None, :]
    return float(((found - expected).abs() / scale.clamp_min(torch.finfo(scale.dtype).tiny)).max())


def largest_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest ``gram_difference`` of the same submodules' Gram matrices."""
    assert found.keys() == expected.keys()
    return max(gram_difference(found[name], gram) for name, gram in expected.items())


def deltas(models: Models, tasks: Tasks, level: str, split: Split) -> dict[str, Deltas]:
    """The feature deltas of a level's submodules on every sample, from models in float64, the base model first."""
    measured: dict[str, Deltas] = {}
    with torch.no_grad(), float64():
        for task, samples in enumerate(tasks):
            for ids in samples:
                for model in models:
                    forget(model)
                for name, features in sample_features(models, torch.tensor([ids]), level, split):
                    found = measured.setdefault(name, Deltas())
                    found.samples.append(torch.stack([(own - features[0]).flatten() for own in features[1:]]))
                    found.task.append(task)
    return measured


def forget(model: torch.nn.Module) -> None:
    """Make a model what it was when it was built: dynamic rotary embeddings remember the longest sample."""
    for module in model.modules():
        rotary: Any = module
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            setattr(rotary, name, rotary.original_max_seq_len)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name.endswith("original_inv_freq"):
                setattr(rotary, name.replace("original_", ""), buffer.clone())


def sample_features(
    models: Models, ids: torch.Tensor, level: str, split: Split
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Each submodule's name and its features [S, D] with the base model's weights, then with each expert's."""
    if level == "model":
        yield "model", [model(ids, use_cache=False).logits[0] for model in models]
        return
    stacks = [model.get_submodule(split.layers) for model in models]
    with recorded_calls(stacks[0]) as calls:
        models[0](ids, use_cache=False)
    for index, layers in enumerate(zip(*stacks, strict=True)):
        call = replace(calls[index], stacked=split.stacked)
        for name, features in LEVELS[level](layers, call, split, models[0].config.get_text_config()):
            yield f"layer.{index}{name}", features


@torch.no_grad()
def layer_outputs(model: Any, ids: torch.Tensor, path: str) -> list[torch.Tensor]:
    """What each layer below a path gives [B, S, D] in the model's own forward pass."""
    with recorded(dict(model.get_submodule(path).named_children())) as (_, outputs):
        model(ids, use_cache=False)
    return list(map(hidden_states, outputs.values()))


def hidden_states(output: Any) -> torch.Tensor:
    """A module's output, the first of several."""
    states: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return states


@dataclass
class Call:
    """What the base model's forward pass gave a layer; dictionaries that layers share as they were before it."""

    hidden: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stacked: bool = False

    def __call__(self, layer: torch.nn.Module) -> torch.Tensor:
        """The output [S, D] of a layer."""
        kwargs = {name: own_dictionary(value) for name, value in self.kwargs.items()}
        hidden = hidden_states(layer(self.hidden, *self.args, **kwargs))
        return hidden.movedim(0, 2)[0] if self.stacked else hidden[0]


def own_dictionary(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, MutableMapping) else value


@contextlib.contextmanager
def recorded_calls(layers: torch.nn.ModuleList) -> Iterator[list[Call]]:
    """Record how each layer is called."""
    calls: list[Call] = []

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = {name: own_dictionary(value) for name, value in kwargs.items()}
        hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        calls.append(Call(hidden.clone(), args[1:], kwargs))

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(record, with_kwargs=True))
        yield calls


@contextlib.contextmanager
def recorded(
    modules: Mapping[str, torch.nn.Module], replayed: Mapping[str, Any] | None = None
) -> Iterator[tuple[dict[str, tuple[Any, ...]], dict[str, Any]]]:
    """Record what modules are given and what they return, by their names; some return what is ``replayed`` instead."""
    inputs: dict[str, tuple[Any, ...]] = {}
    outputs: dict[str, Any] = {}
    returned = replayed or {}

    def before(name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[name] = own_tensor((*args, *kwargs.values()))

    def after(name: str, module: Any, args: Any, output: Any) -> Any:
        outputs[name] = own_tensor(returned.get(name, output))
        return own_tensor(outputs[name]) if name in returned else None

    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        yield inputs, outputs


Layers = Sequence[torch.nn.Module]
Features = Iterator[tuple[str, list[torch.Tensor]]]


def layer_features(layers: Layers, call: Call, split: Split, config: Any) -> Features:
    yield "", [call(layer) for layer in layers]


def serves(inside: str, children: Sequence[str]) -> bool:
    """Whether a tensor or module of the layer is one of some children, or in one."""
    return any(f"{inside}.".startswith(f"{child}.") for child in children)


def own_tensor(value: Any) -> Any:
    """A tensor's copy, or a tuple with copies of its tensors."""
    if isinstance(value, tuple):
        return tuple(map(own_tensor, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def branch_features(layers: Layers, call: Call, split: Split, config: Any) -> Features:
    """What the layer makes of each branch while the other returns what it returns in the base model."""
    if split.unsplit and hasattr(layers[0], split.unsplit):
        yield from layer_features(layers, call, split, config)
        return
    with recorded(dict(layers[0].named_children())) as (_, base):
        call(layers[0])
    for branch, own, other in (("attn", split.attn, split.mlp), ("mlp", split.mlp, split.attn)):
        if not set(own) & set(base) or (set(own) == set(other) and branch != kind_of(layers[0])):
            continue
        features = []
        kept = {name: output for name, output in base.items() if name in other and name not in own}
        for layer in layers:
            with recorded(dict(layer.named_children()), kept) as (_, outputs):
                output = call(layer)
            between = split.boundary and branch == "attn"
            features.append(hidden_states(outputs[split.boundary])[0] if between else output)
        yield f".{branch}", features


def kind_of(layer: Any) -> str:
    """The branch of a layer that has one only, by what its configuration calls it."""
    return "attn" if layer.block_type in ("linear_attention", "full_attention") else "mlp"


def output_map(layer: torch.nn.Module, split: Split) -> str:
    """The map after a layer's heads; empty unless attention alone mixes the layer's tokens."""
    mixers = [name for name, child in layer.named_children() if name in ("mamba", "conv", "self_attn")]
    names = [name for name in split.output if name in dict(layer.named_modules())]
    return names[0] if names and len(mixers) < 2 else ""


def head_features(layers: Layers, call: Call, split: Split, config: Any) -> Features:
    """The output map restricted to each head's columns, applied to that head's output; branches without heads."""
    if not output_map(layers[0], split):
        yield from branch_features(layers, call, split, config)
        return
    heads = config.num_attention_heads
    per_head: list[list[torch.Tensor]] = [[] for _ in range(heads)]
    for layer in layers:
        output = layer.get_submodule(output_map(layer, split))
        with recorded({"o": output}) as (inputs, _):
            call(layer)
        read = inputs["o"][0][0]
        width = read.shape[-1] // heads
        for head in range(heads):
            columns = slice(head * width, (head + 1) * width)
            per_head[head].append(read[:, columns] @ as_linear(output)[:, columns].T)
    for head in range(heads):
        yield f".head.{head}", per_head[head]
    for name, features in branch_features(layers, call, split, config):
        if name == ".mlp":
            yield name, features


def linear_features(layers: Layers, call: Call, split: Split, config: Any) -> Features:
    """Every linear map on the base model's input to it."""
    kinds = linear_maps(layers[0])
    with recorded({name: layers[0].get_submodule(name) for name in kinds}) as (inputs, _):
        call(layers[0])
    for name, kind in kinds.items():
        modules = [layer.get_submodule(name) for layer in layers]
        if kind == "experts":
            yield from expert_features(name, modules, *inputs[name][:2])
        elif name not in inputs:  # a map that is used without being called has no features
            yield f".{name}", [torch.zeros(1, len(as_linear(module))).double() for module in modules]
        else:
            read = inputs[name][0].reshape(-1, inputs[name][0].shape[-1])
            biases = [module._parameters.get("bias") for module in modules]
            maps = zip(map(as_linear, modules), biases, strict=True)
            yield f".{name}", [torch.nn.functional.linear(read, weight, bias) for weight, bias in maps]


def expert_features(
    name: str, modules: Sequence[torch.nn.Module], hidden: torch.Tensor, chosen: torch.Tensor | None = None
) -> Features:
    """A fused mixture's maps, each on the tokens that the base model's router sends to it.

    Llama 4's experts are given all tokens, scaled, with zeros in place of those that are sent elsewhere.
    """
    base: Any = modules[0]
    for expert in range(len(base.down_proj)):
        if chosen is None:
            read = hidden.view(len(base.down_proj), -1, hidden.shape[-1])[expert]
        else:
            read = hidden.reshape(-1, hidden.shape[-1])[(chosen == expert).any(-1).flatten()]
        middle = fused_map(base, "gate_up_proj", expert, read)
        if hasattr(base, "_apply_gate"):
            middle = base._apply_gate(middle)
        else:
            gate, up = middle.chunk(2, -1)
            middle = base.act_fn(gate) * up
        for part, inputs in (("gate_up_proj", read), ("down_proj", middle)):
            yield f".{name}.{expert}.{part}", [fused_map(module, part, expert, inputs) for module in modules]


def fused_map(module: Any, part: str, expert: int, read: torch.Tensor) -> torch.Tensor:
    output, bias = read @ routed_map(module, part, expert).T, getattr(module, f"{part}_bias", None)
    return output if bias is None else output + bias[expert]


def routed_map(module: Any, part: str, expert: int) -> torch.Tensor:
    """A map of a routed expert as a view [out, in]."""
    weight: torch.Tensor = module.get_parameter(part)[expert]
    first, down = module.gate_up_proj, module.down_proj
    return weight.T if getattr(module, "is_transposed", first.shape[1] == down.shape[2]) else weight


LEVELS: dict[str, Callable[[Layers, Call, Split, Any], Features]] = {
    "layer": layer_features,
    "attn_mlp": branch_features,
    "head_mlp": head_features,
    "linear": linear_features,
}


def linear_maps(layer: torch.nn.Module) -> dict[str, str]:
    """The layer's linear maps by path: ``matrix`` or, for a fused mixture, ``experts``."""
    maps = {}
    for name, module in layer.named_modules():
        routes = type(module).__name__.lower().endswith("router") and "weight" in module._parameters
        if isinstance(module, torch.nn.Linear | Conv1D) or routes:
            maps[name] = "matrix"
        elif "gate_up_proj" in module._parameters:
            maps[name] = "experts"
    return maps


def as_linear(module: torch.nn.Module) -> torch.Tensor:
    """A map's matrix [out, in]."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.T if isinstance(module, Conv1D) else weight


# Merging weights


def merging_weights(
    measured: Deltas, *, balance: bool = True, ridge: float = 0.0, task_weights: Sequence[float] | None = None
) -> torch.Tensor:
    """Least squares over all features at once, [T]: each task's own delta is what the merged delta should equal.

    Where the deltas are linearly dependent, the solution is of minimum norm in coordinates in which each expert's
    features have unit norm.
    """
    design, target = stacked(measured, balance, task_weights)
    experts = design.shape[1]
    if ridge:
        design = torch.cat([design, (ridge * design.square().sum() / experts).sqrt() * torch.eye(experts).double()])
        target = torch.cat([target, torch.zeros(experts).double()])
    scale = design.norm(dim=0)
    scale = torch.where(scale > 0, 1 / scale, 0.0)
    solution = torch.linalg.lstsq(design * scale, target, rcond=EIGENVALUE_CUTOFF**0.5, driver="gelsd").solution
    return scale * solution


def stacked(
    measured: Deltas, balance: bool = True, task_weights: Sequence[float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples' features below each other, [rows, T], and the features [rows] that they should combine to."""
    usable = [bool(delta.any()) or not balance for delta in measured.samples]
    counts = [sum(used for used, own in zip(usable, measured.task, strict=True) if own == t) for t in measured.task]
    design, target = [], []
    for delta, task, used, count in zip(measured.samples, measured.task, usable, counts, strict=True):
        if used:
            weight = (1 / delta.square().sum(1).mean() if balance else 1.0) / count
            weight = weight * (task_weights[task] if task_weights else 1.0)
            design.append(delta.T * weight**0.5)
            target.append(delta[task] * weight**0.5)
    experts = len(measured.samples[0])
    if not design:
        return torch.zeros(1, experts).double(), torch.zeros(1).double()
    return torch.cat(design), torch.cat(target)


def retained(measured: Sequence[Deltas], alphas: Sequence[torch.Tensor], balance: bool = True) -> torch.Tensor:
    """The share of each expert's feature change in submodules that is kept on that expert's own samples, [T]."""
    shares = []
    for task in range(len(alphas[0])):
        lost = before = 0.0
        for found, alpha in zip(measured, alphas, strict=True):
            own = [i for i, other in enumerate(found.task) if other == task]
            design, target = stacked(Deltas([found.samples[i] for i in own], [task] * len(own)), balance)
            lost += float((design @ alpha - target).square().sum())
            before += float(target.square().sum())
        shares.append(1 - lost / before)
    return torch.tensor(shares, dtype=torch.float64)


def solve(measured: Mapping[str, Deltas], **settings: Any) -> dict[str, torch.Tensor]:
    """The merging weights of every submodule."""
    return {name: merging_weights(found, **settings) for name, found in measured.items()}


# Merged tensors


def merged(models: Models, alpha: Mapping[str, torch.Tensor], level: str, split: Split) -> dict[str, torch.Tensor]:
    """Every tensor of the merged model, by the names of ``state_dict``, in float64.

    A tensor that several layers share takes the mean of their weights.
    """
    states = [model.state_dict() for model in models]
    stored = [(name, tensor.data_ptr()) for name, tensor in states[0].items()]
    places = {name: [other for other, address in stored if address == own] for name, own in stored}
    result = {}
    for name, base in states[0].items():
        total = base.clone()
        if base.is_floating_point():
            if name.startswith(split.language):
                found = [tensor_weights(n, base, models[0], alpha, level, split) for n in places[name]]
                weights = torch.stack(found).mean(0)
            else:
                weights = torch.zeros_like(next(iter(alpha.values())))
            for index, state in enumerate(states[1:]):
                total += weights[..., index] * (state[name] - base)
        result[name] = total
    return result


def tensor_weights(
    name: str, tensor: torch.Tensor, model: Any, alpha: Mapping[str, torch.Tensor], level: str, split: Split
) -> torch.Tensor:
    """The merging weights of a tensor's elements, broadcastable to [*shape, T]."""
    if level == "model":
        return alpha["model"]
    if not name.startswith(split.layers + "."):
        return torch.zeros_like(next(iter(alpha.values())))
    index, _, inside = name.removeprefix(split.layers + ".").partition(".")
    place = f"layer.{index}"
    if place in alpha:
        return alpha[place]
    here = {key.removeprefix(f"{place}."): value for key, value in alpha.items() if key.startswith(f"{place}.")}
    layer = model.get_submodule(split.layers)[int(index)]
    if level == "linear":
        return map_weights(inside, tensor, here, split)
    branches = [branch for branch in ("attn", "mlp") if serves(inside, getattr(split, branch))]
    if heads := [value for key, value in here.items() if key.startswith("head.")]:
        rows = head_rows(inside, layer, split, model.config.get_text_config(), torch.stack(heads))
        if rows is not None:
            return rows
        here = {"mlp": torch.stack(heads).mean(0)} | here | {"attn": torch.stack(heads).mean(0)}
    return torch.stack([here[branch] for branch in branches if branch in here]).mean(0)


def map_weights(inside: str, tensor: torch.Tensor, alpha: Mapping[str, torch.Tensor], split: Split) -> torch.Tensor:
    """At level ``linear``: a map's own weights, else the mean over the maps of the tensor's branches.

    What no token reached has no weights of its own: it takes that mean too, and does not count in it.
    """
    owner, _, leaf = inside.rpartition(".")
    if owner in alpha and alpha[owner].any():
        return alpha[owner]
    means = []
    for branch in ("attn", "mlp"):
        if serves(inside, getattr(split, branch)):
            maps = [value for key, value in alpha.items() if serves(key, getattr(split, branch))]
            means.append(torch.stack([value for value in maps if value.any()] or maps).mean(0))
    mean = torch.stack(means).mean(0)
    part = leaf.removesuffix("_bias")
    if owner in alpha or f"{owner}.0.{part}" not in alpha:
        return mean
    nothing = torch.zeros_like(mean)  # for experts that return their input
    own = torch.stack([alpha.get(f"{owner}.{expert}.{part}", nothing) for expert in range(len(tensor))])
    rows = torch.where(own.any(1, keepdim=True), own, mean)
    return rows.reshape(len(tensor), *[1] * (tensor.ndim - 1), -1)


def head_rows(
    inside: str, layer: torch.nn.Module, split: Split, config: Any, heads: torch.Tensor
) -> torch.Tensor | None:
    """At level ``head_mlp``: the weights of a projection's rows (of the output map's columns); None for the rest."""
    owner, _, leaf = inside.rpartition(".")
    if owner in split.output and leaf == "weight":
        columns = heads.repeat_interleave(as_linear(layer.get_submodule(owner)).shape[1] // len(heads), dim=0)
        return columns[:, None] if isinstance(layer.get_submodule(owner), Conv1D) else columns
    units = head_units(owner, split, len(heads), key_value_heads(config, layer))
    if units is None:
        return None
    means = torch.stack([heads[list(unit)].mean(0) for unit in units])
    length = len(as_linear(layer.get_submodule(owner)))
    rows = means.repeat_interleave(length // len(units), dim=0)
    return rows if leaf == "bias" or isinstance(layer.get_submodule(owner), Conv1D) else rows[:, None]


def key_value_heads(config: Any, layer: Any) -> int:
    if config.model_type == "gemma4_text":
        config = config.per_layer_config[layer.layer_idx]
    if config.model_type == "falcon":
        return config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_units(owner: str, split: Split, heads: int, groups: int) -> list[Sequence[int]] | None:
    """Which query heads each block of ``head_dim`` rows belongs to."""
    query: list[Sequence[int]] = [(head,) for head in range(heads)]
    shared: list[Sequence[int]] = [range(g * heads // groups, (g + 1) * heads // groups) for g in range(groups)]
    if split.fused and owner == split.fused[0]:
        if split.fused[1] == "blocks":
            return query + shared + shared
        if split.fused[1] == "interleaved":
            return [unit for unit in query for _ in range(3)]
        return [unit for group in shared for unit in (*((head,) for head in group), group, group)]
    if owner in split.queries:
        return query
    return shared if owner in split.keys else None

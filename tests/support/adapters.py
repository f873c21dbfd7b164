"""Random LoRA adapters on disk, as peft writes them."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from support.families import open_model

RANK = 2
State = dict[str, torch.Tensor]


def write_adapter(
    base: Path, folder: Path, *targets: str, seed: int = 0, alpha: int = 4, parameters: Sequence[str] = (), **more: Any
) -> Path:
    """Write a LoRA of a base model's maps, or of parameters such as fused experts, by the last parts of their names.

    None of its matrices is zero. By default it is one of the query projections; ``more`` are its other settings.
    """
    model = open_model(base, dtype=torch.float32)
    modules = list(targets) or ([] if parameters else ["q_proj"])
    config = peft.LoraConfig(
        r=RANK, lora_alpha=alpha, target_modules=modules, target_parameters=list(parameters), **more
    )
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(str(folder))
    return folder


def merged_by_hand(
    weights: Mapping[str, torch.Tensor], adapter: Path, named: Callable[[str], str] = str, **alphas: float
) -> State:
    """The tensors W + scale B A in float64, those of no module of the adapter as they are.

    ``named`` makes the base model's name of a module of the adapter; ``alphas`` are those of the modules named so.
    """
    found = {name: tensor.double() for name, tensor in weights.items()}
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = {name.removeprefix("base_model.model."): own for name, own in saved(adapter).items()}
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module, up = name.removesuffix(".lora_A.weight"), tensors[name.replace("lora_A", "lora_B")]
            alpha = next((own for end, own in alphas.items() if module.endswith(end)), settings["lora_alpha"])
            found[f"{named(module)}.weight"] += alpha / len(down) * up.double() @ down.double()
    return found


def saved(adapter: Path) -> State:
    return load_file(adapter / "adapter_model.safetensors")


def edit(adapter: Path, change: Callable[[State], State] = dict, **settings: Any) -> Path:
    """Change an adapter's tensors and entries of its configuration."""
    tensors = {name: tensor.contiguous() for name, tensor in change(saved(adapter)).items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return adapter


def renamed(name_of: Callable[[str], str]) -> Callable[[State], State]:
    return lambda tensors: {name_of(name): tensor for name, tensor in tensors.items()}


# A mixture's experts, which were modules of their own before transformers 5: their maps, and who is adapted
EXPERTS = {
    "mixtral": ("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen3_moe": ("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
}

FUSED = ("gate_up_proj", "down_proj")


def of_experts(base: State, architecture: str, folder: Path, parts: Collection[str] = FUSED, experts: int = 4) -> Path:
    """A LoRA of all layers' router ("gate") and of some maps of the first experts, by older names."""
    place, maps = EXPERTS[architecture]
    tensors, generator = dict[str, torch.Tensor](), torch.Generator().manual_seed(0)
    targets = []
    for name, weight in base.items():
        layer, _, map_name = name.partition(".mlp.")
        shapes = dict[str, tuple[int, ...]]()
        if map_name == "gate.weight" and "gate" in parts:
            shapes[f"{layer}.{place}.gate"] = tuple(weight.shape)
        part = map_name.removeprefix("experts.")
        for old in maps.get(part, ()) if part in parts else ():
            rows = len(weight[0]) // len(maps[part])
            shapes |= {f"{layer}.{place}.experts.{e}.{old}": (rows, weight.shape[2]) for e in range(experts)}
        for module, (rows, columns) in shapes.items():
            targets.append(module.rpartition(".")[2])
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": sorted(set(targets))}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder

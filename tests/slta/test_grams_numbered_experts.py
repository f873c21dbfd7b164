"""A mixture whose experts are numbered modules, each called with the tokens that go to it, as in models' own code.

The rows that reach such a module do not say which samples they are of, so the layer is measured as a whole, and featcal
keeps the experts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from support.families import Family
from support.reference import gram_difference
from support.rounding import gram_rounding

from mergekit_slta.engine.loop import pass_layers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.featcal.groups import find_groups
from mergekit_slta.nonlinearity.interpolation import Interpolation
from mergekit_slta.slta.grams import Calibration
from mergekit_slta.slta.solver import solve
from mergekit_slta.slta.weights import TensorWeights, fallbacks


class Mixture(torch.nn.Module):
    """Four experts, of which each token goes to two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(32, 4, bias=False)
        experts = [torch.nn.Linear(32, 32, bias=False) for _ in range(4)]
        self.experts = torch.nn.ModuleDict({str(number): own for number, own in enumerate(experts)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, summed = hidden.flatten(0, 1), torch.zeros_like(hidden).flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        for number, expert in enumerate(self.experts.values()):
            token, slot = torch.where(chosen == number)
            summed = summed.index_add(0, token, weights[token, slot, None] * expert(rows[token]))
        return summed.view_as(hidden)


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.first(hidden[:, :1])


MLPS = {"mixture": Mixture, "first": Gated}


def model_class(mlp: str) -> Any:
    def change(layers: Any) -> None:
        for layer in layers[1:]:
            layer.mlp = MLPS[mlp]()

    return families.changed_llama(change)


def write_models(mlp: str, folder: Path) -> Family:
    """A base model and two experts."""
    generator = torch.Generator().manual_seed(0)
    model = model_class(mlp)(families.config_of("llama"))
    for name in ("base", "expert0", "expert1"):
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder / name)
        families.write_tokenizer(folder / name)
    data = tuple(families.write_records(folder / f"task{index}.jsonl", index, 4, 20, 0) for index in (0, 1))
    return Family(folder / "base", (folder / "expert0", folder / "expert1"), data, model.config)


@pytest.mark.parametrize("mlp", MLPS)
def test_rows_that_do_not_say_their_sample_are_not_given_to_one(mlp: str, tmp_path: Path) -> None:
    """The Gram matrices from batches of several samples are those of each sample alone, in studies of linearity too."""
    family, decoder = write_models(mlp, tmp_path), families.traced(model_class(mlp))
    models, tasks = families.checkpoints(family.folders), family.token_ids()
    together = pass_layers(Calibration(decoder, models, tasks, Ranks(), ["linear"]))
    with families.batches_of(1):
        alone = pass_layers(Calibration(decoder, models, tasks, Ranks(), ["linear", "layer"]))
    at_experts = pass_layers(Interpolation(decoder, models, tasks, Ranks(), ["linear"], torch.eye(2).double()))
    assert at_experts.keys() == together.keys() >= {"layer.0.mlp.up_proj"}
    for name, grams in together.items():
        assert gram_difference(grams, alone[name]) < gram_rounding()
        assert gram_difference(grams, at_experts[name]) < gram_rounding()
    said = list(map(str, fallbacks(decoder, "linear")))
    if mlp == "first":  # one row of each sample, in their order
        assert "layer.1.mlp.first" in together and not said
        return
    assert len(said) == 1 and "in layers 1 to 2 (LlamaDecoderLayer): mlp.experts.0 is given" in said[0]
    unsolved = find_groups(decoder, 1).unsolved
    assert unsolved["mlp.experts.0"] == "in a module that receives only some of the tokens"
    assert {name for name in together if not name.startswith("layer.0.")} == {"layer.1", "layer.2"}
    task = torch.tensor([0] * 4 + [1] * 4)
    solved = {name: solve(grams, task) for name, grams in together.items()}
    weights = TensorWeights(decoder, "linear", solved, families.own_layout(decoder))
    name = "model.layers.1.mlp.experts"
    assert torch.equal(weights[f"{name}.0.weight"], weights["model.layers.1.self_attn.q_proj.weight"])

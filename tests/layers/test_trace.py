"""What a layer does with the outputs of its children, seen by changing them."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support import families
from support.rounding import state_rounding

from mergekit_slta.errors import SltaError
from mergekit_slta.layers import trace
from mergekit_slta.layers.calls import made_up_layer, random_numbers
from mergekit_slta.layers.decoder import INPUT, Decoder, LayerStructure
from mergekit_slta.slta.weights import fallbacks, submodules

Part = Callable[[torch.Tensor], torch.Tensor]
# Given the hidden states, the two branches and a weight of the layer's own, what the layer returns.
Between = Callable[[torch.Tensor, Part, Part, torch.Tensor], torch.Tensor]


def added_in_place(x: torch.Tensor, attend: Part, feed: Part, weight: torch.Tensor) -> torch.Tensor:
    x += attend(x)
    return feed(x).add_(x)


def written_into_a_part(x: torch.Tensor, attend: Part, feed: Part, weight: torch.Tensor) -> torch.Tensor:
    x = x + attend(x)
    total = torch.zeros_like(x)
    total[:] = x
    total[..., :] += feed(x).view(-1, x.shape[-1]).view_as(x)
    return total


def one_after_the_other(x: torch.Tensor, attend: Part, feed: Part) -> torch.Tensor:
    x = x + attend(x)
    return x + feed(x)


# Sums like those of few decoders; the usual ones are in tests/test_architectures.py.
SUMS: dict[str, Between] = {
    "in place": added_in_place,
    "into a part": written_into_a_part,
    "a difference": lambda x, attend, feed, weight: 0.5 * x + attend(x) * 0.25 - 2.0 * feed(x),
    "all scaled by a weight": lambda x, attend, feed, weight: one_after_the_other(x, attend, feed) * weight.mean(),
}
OTHERS: dict[str, Between] = {
    "a branch scaled by a weight": lambda x, attend, feed, weight: x + attend(x) + feed(x) * weight.mean(),
    "a number for each feature": lambda x, attend, feed, weight: x + attend(x) + feed(x) * weight,
    "a gate": lambda x, attend, feed, weight: x + attend(x) + feed(x) * x.sigmoid(),
    "a number added": lambda x, attend, feed, weight: one_after_the_other(x, attend, feed) + 1.0,
    "a norm": lambda x, attend, feed, weight: torch.nn.functional.layer_norm(
        one_after_the_other(x, attend, feed), x.shape[-1:]
    ),
}


class Layer(torch.nn.Module):
    def __init__(self, layer: Any, between: Between) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self.weight = torch.nn.Parameter(torch.empty(layer.input_layernorm.weight.shape))
        self.between = between

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        def attend(x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)[0]
            return output

        def feed(x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.mlp(self.post_attention_layernorm(x))
            return output

        return self.between(hidden_states, attend, feed, self.weight)


def decoder_of(between: Between) -> Decoder:
    def change(layers: torch.nn.ModuleList) -> None:
        for number, layer in enumerate(layers):
            layers[number] = Layer(layer, between)

    return families.traced(families.changed_llama(change))


@pytest.mark.parametrize("name", [*SUMS, *OTHERS])
@torch.no_grad()
def test_a_change_is_that_of_the_output_whatever_lies_between(name: str) -> None:
    decoder = decoder_of((SUMS | OTHERS)[name])
    weights, hidden, call = made_up_layer(decoder, 0)
    others = {**random_numbers(decoder.layers[0].state_dict(), decoder.device, seed=1), "weight": weights["weight"]}
    base, run = (decoder.run(0, own, hidden, call) for own in (weights, others))
    unit = {"a difference": 0.5, "all scaled by a weight": float(weights["weight"].mean())}.get(name, 1.0)
    found = trace.of_each_layer(decoder, trace.find_structure)[0].change("layer", run, base)
    assert torch.allclose(unit * found, run.output - base.output, rtol=0, atol=state_rounding(layers=1))
    if name in SUMS:
        structure = trace.of_each_layer(decoder, trace.find_structure)[0]
        branches = {branch: children - {"weight"} for branch, children in structure.branches.items()}
        assert branches == {"attn": {"input_layernorm", "self_attn"}, "mlp": {"post_attention_layernorm", "mlp"}}


def test_a_layer_that_refuses_changed_outputs_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(x: torch.Tensor, attend: Part, feed: Part, weight: torch.Tensor) -> torch.Tensor:
        if not (fed := feed(x)).any():
            raise ValueError("There is nothing to add.")
        return x + attend(x) + fed

    decoder = decoder_of(refuse)
    assert trace.of_each_layer(decoder, trace.find_structure)[0] == LayerStructure()
    assert len(caplog.messages) == 1 and "fails: layer 0 of Model: ValueError: There is" in caplog.text
    assert [(found.level, found.coarser) for found in fallbacks(decoder, "attn_mlp")] == [("attn_mlp", "layer")]
    assert submodules(decoder, "layer", 0) == ["layer.0"]


def test_a_layer_that_cannot_run_alone_is_refused_by_its_name() -> None:
    def fail(*_: object) -> torch.Tensor:
        raise KeyError("cache")

    with pytest.raises(SltaError, match="cannot be run one at a time .layer 0 of Model: KeyError: 'cache'."):
        decoder_of(fail)


NOT_CALLED = {"trace", "meta_model", "first_line", "_differs_from"}
HELPERS = [name for name, helper in vars(trace).items() if inspect.isfunction(helper) and name not in NOT_CALLED]
OF_TRIALS = ["reads", "summands", "has_mixed", "confirms", "_run"]


@pytest.mark.parametrize("helper", [*HELPERS, *OF_TRIALS])
def test_an_error_of_our_own_in_a_trace_is_not_passed_over(helper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(trace._Trial if helper in OF_TRIALS else trace, helper, mistaken)
    with pytest.raises(TypeError, match="a mistake of ours"):
        trace.of_each_layer(
            families.traced(transformers.LlamaForCausalLM),
            lambda own, layer: (trace.find_heads(own, layer), trace.find_writers(own, layer), trace.tail_problem(own)),
        )


@torch.no_grad()
def test_what_a_layer_changes_in_place_is_recorded_as_it_was() -> None:
    decoder = decoder_of(added_in_place)
    weights, hidden, call = made_up_layer(decoder, 0)
    before = hidden.clone()
    base = decoder.run(0, weights, hidden, call)
    assert torch.equal(hidden, before)
    for _ in range(2):
        assert torch.equal(decoder.run(0, weights, hidden, call, replay=base.outputs).output, base.output)


class Neighbours(torch.nn.Conv1d):
    """A convolution along the tokens [B, S, D], which is no norm."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 2, groups=width, padding=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.mT).mT[:, :-1]


@pytest.mark.parametrize(("kind", "is_norm"), [(torch.nn.LayerNorm, True), (Neighbours, False)])
def test_a_map_writes_through_a_child_that_multiplies_by_no_more_than_a_vector(
    kind: Callable[[int], torch.nn.Module], is_norm: bool
) -> None:
    with torch.device("meta"):
        model: Any = families.model_class(config := families.config_of("gemma2")).from_config(config).eval()
        for layer in model.model.layers:
            layer.post_attention_layernorm = kind(config.hidden_size)
    writers = trace.find_writers(trace.trace(model.config, built=model), 0)
    of_attention = {"self_attn.o_proj": "post_attention_layernorm"} if is_norm else {}
    norms = {module: writer.norm for module, writer in writers.items()}
    assert norms == {**of_attention, "mlp.down_proj": "post_feedforward_layernorm"}
    before = {INPUT: 1.0, "post_attention_layernorm": 1.0}
    assert writers["mlp.down_proj"].stream == pytest.approx(before, abs=state_rounding(layers=1))

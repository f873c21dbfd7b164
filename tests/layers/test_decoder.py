"""Layers run one at a time against the model's own forward pass, and how they split against a table made by hand."""

import copy
import gc
import re
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from support import families, reference
from support.families import LAYERS, PAD
from support.processes import run_python
from support.rounding import state_rounding

from mergekit_slta.engine.streams import padding_matters
from mergekit_slta.errors import SltaError
from mergekit_slta.layers import attention, decoder
from mergekit_slta.layers.calls import embed, logits, made_up_edges, random_numbers
from mergekit_slta.layers.decoder import Decoder, few_queries
from mergekit_slta.layers.trace import tail_problem, trace

LENGTHS = (9, 5)
TOLERANCE = state_rounding()

State = dict[str, torch.Tensor]


def opened(config: transformers.PretrainedConfig) -> tuple[Any, Decoder, State]:
    """A random model, its decoder without weights, and the weights."""
    model = families.random_model(config)
    config.architectures = [type(model).__name__]
    return model, trace(config), dict(model.state_dict())


def padded_ids() -> torch.Tensor:
    ids = torch.randint(3, families.VOCABULARY, (2, max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    ids[1, LENGTHS[1] :] = PAD
    return ids


def edges_of(decoder: Decoder, state: State) -> State:
    return {name: state[name] for name in decoder.edge_tensors}


def weights_of(decoder: Decoder, state: State, layer: int) -> State:
    return {name: state[full] for name, full in decoder.layer_tensors[layer].items()}


def test_a_decoder_leaves_the_configuration_that_others_read_as_it_is() -> None:
    config = families.config_of("mixtral", dtype="bfloat16")
    before = copy.deepcopy(vars(config))
    trace(config)
    assert vars(config) == before


@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
@torch.no_grad()
def test_layer_by_layer_equals_the_models_own_forward_pass(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a padded batch, in which each sample is compared with its own unpadded run; alone where padding matters."""
    monkeypatch.setattr(attention, "SCORES", 100)  # of a few queries at a time
    model, decoder, state = opened(families.config_of(architecture))
    ids = padded_ids()
    expected = []
    for row, length in enumerate(LENGTHS):
        reference.forget(model)
        expected.append(reference.layer_outputs(model, ids[row : row + 1, :length], decoder.layers_path))
    for rows in ((0,), (1,)) if padding_matters(decoder, LENGTHS) else ((0, 1),):
        hidden, calls = embed(decoder, ids[list(rows), : max(LENGTHS[row] for row in rows)], edges_of(decoder, state))
        assert len(decoder) == len(calls) == LAYERS
        for layer in range(LAYERS):
            run = decoder.run(layer, weights_of(decoder, state, layer), hidden, calls[layer])
            hidden = run.output
            for states, row in zip(hidden, rows, strict=True):
                assert torch.allclose(states[: LENGTHS[row]], expected[row][layer][0], rtol=0, atol=TOLERANCE)
        if rows[0] == 0:
            found = logits(decoder, hidden[:1, : LENGTHS[0]], edges_of(decoder, state))
            reference.forget(model)
            assert torch.allclose(found, model(ids[:1, : LENGTHS[0]]).logits, rtol=0, atol=TOLERANCE)


def test_what_a_call_has_captured_does_not_wait_for_garbage_to_be_collected() -> None:
    decoder = families.skeleton("llama")
    gc.disable()
    hidden, calls = embed(decoder, torch.full((1, 4), 3), made_up_edges(decoder))
    alive = weakref.ref(hidden)
    del hidden, calls
    gc.enable()
    assert alive() is None


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_scores_of_all_pairs_are_not_in_memory(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 queries, those of so many scores attend at a time."""
    monkeypatch.setattr(attention, "SCORES", 10**4)
    decoder = trace(families.config_of(architecture))
    hidden, calls = embed(decoder, torch.full((1, 200), 3), made_up_edges(decoder))
    code = sys.modules[type(decoder.layers[0].self_attn).__module__]
    with mock.patch.object(code, "eager_attention_forward", wraps=code.eager_attention_forward) as attend:
        decoder.run(0, random_numbers(decoder.layers[0].state_dict(), decoder.device), hidden, calls[0])
    queries, keys = attend.call_args.args[1:3]
    assert attend.call_count > 1 and queries.shape[:3].numel() * keys.shape[2] <= 10**4


@pytest.mark.parametrize(("architecture", "own"), [("gemma2", {}), ("glm_moe_dsa", {"attn_implementation": "eager"})])
@torch.no_grad()
def test_a_few_queries_attend_as_all_do_at_once(architecture: str, own: dict[str, Any]) -> None:
    """Also where code inherits its attention, and where sparse attention changes the mask for "eager" alone."""
    model, ids = families.random_model(families.config_of(architecture, **own)), torch.arange(3, 23)[None]
    for part in (part for part in model.modules() if "Attention" in type(part).__name__):
        part.__class__ = type("Attention", (type(part),), {})
    expected = model(ids).logits
    table = transformers.AttentionInterface._global_mapping
    with mock.patch.object(decoder, "attend", wraps=decoder.attend) as attend, few_queries():
        with few_queries():
            pass
        assert torch.allclose(model(ids).logits, expected, rtol=0, atol=TOLERANCE)
    assert attend.called and "eager" not in table
    with mock.patch.dict(table, {"eager": max}):  # a user's own
        with few_queries():
            assert table["eager"] is decoder.attend
        assert table["eager"] is max


@pytest.mark.parametrize("architecture", [*families.ARCHITECTURES, *families.UNSPLIT])
def test_samples_are_padded_unless_it_matters(architecture: str) -> None:
    """Rotary embeddings that depend on the length matter beyond the original context only.

    MiniMax's checkpoints hold its causal mask, so that random weights do not show that it is causal.
    """
    decoder = families.skeleton(architecture)
    handing_on = architecture in ("gemma3n", "gemma4", "zaya", "glm_moe_dsa", "minimax")
    assert padding_matters(decoder, (3, 20, 60)) == (handing_on or architecture == "phi3_longrope")
    assert padding_matters(decoder, (3, 5, 8)) == handing_on
    assert not padding_matters(decoder, (20, 20))
    assert padding_matters(decoder, (1, 2)) == handing_on


def test_samples_are_padded_if_no_layer_reads_what_layers_store() -> None:
    assert not padding_matters(families.skeleton("gemma4", num_kv_shared_layers=0), (3, 5, 8))


_TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION = _TINY | {"image_size": 16, "patch_size": 8}


@pytest.mark.parametrize(
    ("config", "tower"),
    [
        # It needs images, so that its language tower runs alone.
        (
            transformers.Blip2Config(
                text_config=families.config_of("opt").to_dict(),
                vision_config=_VISION,
                qformer_config=_TINY | {"encoder_hidden_size": 16},
                num_query_tokens=2,
            ),
            "language_model",
        ),
        # It runs on text alone, and moves the tokens to its first tensor's device, which is an image tower's.
        (transformers.Idefics3Config(text_config=families.config_of("llama").to_dict(), vision_config=_VISION), ""),
    ],
    ids=["blip-2", "idefics3"],
)
@torch.no_grad()
def test_a_wrapper_for_images_runs_on_text(config: transformers.PretrainedConfig, tower: str) -> None:
    model, decoder, state = opened(config)
    ids = padded_ids()[:1]
    hidden, calls = embed(decoder, ids, edges_of(decoder, state))
    assert (decoder.body is decoder.tower is not decoder.model.base_model) == bool(tower)
    expected = reference.layer_outputs(model.get_submodule(tower), ids, decoder.layers_path.removeprefix(f"{tower}."))
    for layer in range(len(decoder)):
        hidden = decoder.run(layer, weights_of(decoder, state, layer), hidden, calls[layer]).output
        assert torch.allclose(hidden, expected[layer], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.BertConfig(architectures=["BertForMaskedLM"]), "not a decoder-only.*actmat"),
        (transformers.LlamaConfig(architectures=None), "architectures"),
    ],
    ids=["bert", "none"],
)
def test_other_kinds_of_models_are_refused(config: transformers.PretrainedConfig, words: str) -> None:
    with pytest.raises(SltaError, match=words):
        trace(config)


# What it is that a model does -> its configuration, and what is said of it.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a prompt before the tokens": (
        "CpmAntConfig",
        {"dim_head": 8, "dim_ff": 48, "prompt_length": 4},
        "CpmAntForCausalLM hands its decoder layers other positions than the tokens'.*'merge_method: actmat'",
    ),
    "a change between layers": (
        "RwkvConfig",
        {"rescale_every": 2},
        "RwkvForCausalLM changes the hidden states between its decoder layers.*'merge_method: actmat'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_cannot_run_one_by_one_are_refused_before_anything_is_measured(case: str) -> None:
    name, arguments, words = REFUSED[case]
    with pytest.raises(SltaError, match=words):
        trace(families.small_config(name, **arguments))


@pytest.mark.skipif(not hasattr(transformers, "Inkling2TextConfig"), reason="this transformers has no such model")
def test_logits_of_more_than_the_last_layer_are_named_before_anything_is_measured() -> None:
    said = "Inkling2ForCausalLM: it cannot compute its logits from .* alone .it needs those of earlier layers too.. Use"
    decoder = trace(families.small_config("Inkling2TextConfig", swa_num_key_value_heads=2))
    assert re.search(said, tail_problem(decoder) or "")


KERNELS = """
from support import families
from transformers.models.lfm2 import modeling_lfm2

families.skeleton("lfm2")
print("traced")
modeling_lfm2.causal_conv1d_fn(None)
"""


def test_kernels_that_need_a_gpu_are_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "causal_conv1d.py").write_text("def causal_conv1d_fn(*_, **__): raise SystemExit('a kernel')")
    monkeypatch.syspath_prepend(tmp_path)
    done = run_python("-c", KERNELS, code=1)
    assert (done.stdout, done.stderr.splitlines()[-1]) == ("traced\n", "a kernel")


DEEPSEEK = """
import transformers
from support.memory import memory_of_this_process
from mergekit_slta.layers.trace import of_each_layer, trace
from mergekit_slta.engine.streams import padding_matters
from mergekit_slta.featcal.groups import find_groups

decoder = trace(transformers.DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]))
padding_matters(decoder, (3, 20))
of_each_layer(decoder, find_groups)
print(memory_of_this_process("VmHWM"))
"""


@pytest.mark.slow
def test_the_full_deepseek_v3_is_traced_in_the_memory_of_a_few_matrices() -> None:
    assert int(run_python("-c", DEEPSEEK).stdout.split()[-1]) < 1.5 * 2**30

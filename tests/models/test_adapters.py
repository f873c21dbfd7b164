"""LoRA adapters in a folder and on a local stand-in for the Hub, and the folder that mergekit merges them into."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from conftest import MakeFamily
from mergekit.common import ModelPath, ModelReference
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support import families
from support.adapters import edit, merged_by_hand, write_adapter
from support.copies import AS_BEFORE, edit_tensors
from support.examining import problems
from support.families import Family
from support.hub import serve
from support.merging import wrong_tensors
from support.rounding import rounding, state_rounding
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_slta import ask, check, evaluate, verify
from mergekit_slta.checks.models import one_model
from mergekit_slta.errors import SltaError
from mergekit_slta.models import headers
from mergekit_slta.models.adapters import merge_adapter
from mergekit_slta.models.headers import TensorHeader, adapter_folder, adapter_weights, file_headers

QUERY = "model.layers.1.self_attn.q_proj.weight"


def test_adapters_on_the_hub(tmp_path: Path) -> None:
    """Nothing but the adapter is downloaded."""
    organization = tmp_path / "hub" / "org"
    for name in ("whole", "empty"):
        (organization / name).mkdir(parents=True)
        (organization / name / "adapter_config.json").write_text("{}")
    save_file({"x": torch.ones(2, 3)}, organization / "whole" / "adapter_model.safetensors")
    (organization / "whole" / "training.bin").write_text("large")
    with serve(tmp_path / "hub", tmp_path / "cache") as hub:
        whole, empty, none = (ModelPath(path=f"org/{name}") for name in ("whole", "empty", "none"))
        assert file_headers(adapter_weights(adapter_folder(whole))) == {"x": TensorHeader(torch.Size((2, 3)), 24)}
        assert set(hub.fetched) == {"adapter_config.json", "adapter_model.safetensors"}
        with pytest.raises(SltaError, match="is not a LoRA adapter: it lacks adapter_model.safetensors"):
            adapter_weights(adapter_folder(empty))
        with pytest.raises(SltaError, match="org/none cannot be used: .*there is no such repository"):
            adapter_folder(none)


def with_dates_of(folder: Path, change: Callable[[], object]) -> None:
    """Change files and give them the dates that they had."""
    dates = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    change()
    for name, date in dates.items():
        os.utime(folder / name, ns=(date, date))


def edit_maps(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("_proj.weight"):
                tensors[name] += 0.05 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))

    edit_tensors(folder, edit)


@pytest.mark.parametrize(("changed", "method"), [("base", "slta"), ("adapter", "task_arithmetic")])
def test_an_adapter_is_merged_as_it_is_now(changed: str, method: str, family: Family, tmp_path: Path) -> None:
    """Its own files or the base model's were replaced by others of the same dates."""
    cache, adapter = tmp_path / "cache", write_adapter(family.base, tmp_path / "adapter")
    own = {"weight": 0.5} if method == "task_arithmetic" else {}
    recipe = families.recipe(family, method, experts=[0, 1], per_expert=own)
    recipe["models"][0]["model"] = f"{family.base}+{adapter}"
    before = families.merge(recipe, tmp_path / "before", lora_merge_cache=str(cache))
    if changed == "base":
        with_dates_of(family.base, lambda: edit_maps(family.base))
    else:
        with_dates_of(adapter, lambda: write_adapter(family.base, adapter, seed=1))
    after = families.merge(recipe, tmp_path / "after", lora_merge_cache=str(cache))
    model = AutoModelForCausalLM.from_pretrained(family.base, dtype=torch.float32)
    peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(tmp_path / "full")
    recipe["models"][0]["model"] = str(tmp_path / "full")
    expected = load_file(families.merge(recipe, tmp_path / "expected") / "model.safetensors")
    found, old = (load_file(folder / "model.safetensors") for folder in (after, before))
    assert wrong_tensors(found, expected.__getitem__, expected) == []
    assert QUERY in wrong_tensors(old, expected.__getitem__, expected)


def test_an_adapter_is_merged_once_for_each_type(llama: Family, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    reference = ModelReference.parse(f"{llama.base}+{write_adapter(llama.base, tmp_path / 'adapter')}")
    full, again, half = (merge_adapter(reference, str(cache), False, dtype) for dtype in (None, None, "bfloat16"))
    assert full == again and full != half
    assert load_file(Path(half.model.path) / "model.safetensors")[QUERY].dtype == torch.bfloat16
    broken = ModelReference.parse(f"{llama.base}+{shutil.copytree(tmp_path / 'adapter', tmp_path / 'broken')}")
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(SafetensorError, match="deserializing header"):
        merge_adapter(broken, str(cache))
    assert {folder for folder in cache.iterdir() if folder.is_dir()} == {Path(full.model.path), Path(half.model.path)}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, 524])
def test_an_adapter_is_merged_where_files_have_no_locks(
    number: int, llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = ModelReference.parse(f"{llama.base}+{write_adapter(llama.base, tmp_path / 'adapter')}")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(number, "no locks")))
    assert Path(merge_adapter(reference, str(tmp_path / "cache")).model.path, "model.safetensors").is_file()


def test_a_check_reads_the_base_model_of_several_adapters_once(llama: Family, tmp_path: Path) -> None:
    recipe = families.recipe(llama, "sftm", calibration=False)
    for number, entry in enumerate(recipe["models"]):
        entry["model"] = f"{llama.base}+{write_adapter(llama.base, tmp_path / str(number), seed=number)}"
    with (
        mock.patch.object(headers, "file_headers", wraps=headers.file_headers) as weights,
        mock.patch.object(AutoTokenizer, "from_pretrained", wraps=AutoTokenizer.from_pretrained) as tokenizers,
    ):
        assert problems(recipe, options={"lora_merge_cache": str(tmp_path / "cache")}) == []
    assert [call.args[0] for call in weights.call_args_list].count(llama.base / "model.safetensors") == 1
    assert [call.args for call in tokenizers.call_args_list] == [(str(llama.base),)]


# The type that an adapter is merged in: the base model's, the recipe's, the option, and what comes out

TYPES = [
    ("slta", "bfloat16", "float32", None, torch.float32),
    ("slta", "bfloat16", "float32", "bfloat16", torch.bfloat16),
    ("task_arithmetic", "bfloat16", "bfloat16", None, torch.bfloat16),
    ("slta", "bfloat16", None, None, torch.bfloat16),
    ("task_arithmetic", "float16", "float32", None, torch.float32),
    ("slta", "float32", "bfloat16", None, torch.float32),  # what the adapter leaves alone is not rounded
]


@pytest.mark.parametrize(("method", "stored", "dtype", "option", "wanted"), TYPES)
def test_the_recipes_type_decides_what_an_adapter_is_merged_in(
    method: str,
    stored: str,
    dtype: str | None,
    option: str | None,
    wanted: Any,
    make_family: MakeFamily,
    tmp_path: Path,
) -> None:
    family, cache = make_family("llama", dtype=getattr(torch, stored)), tmp_path / "cache"
    weak = edit(write_adapter(family.base, tmp_path / "adapter"), lambda own: {name: 0.02 * own[name] for name in own})
    own: dict[str, Any] = {"weight": 1.0} if method == "task_arithmetic" else {}
    shared: dict[str, Any] = {"samples": 3} if method == "slta" else {}
    recipe = families.recipe(family, method, experts=[0, 1], per_expert=own, dtype=dtype, **shared)
    recipe["models"][0]["model"] = f"{family.base}+{weak}"
    out = families.merge(recipe, tmp_path / "out", lora_merge_cache=str(cache), lora_merge_dtype=option)
    (folder,) = (place for place in cache.iterdir() if place.is_dir())
    found, before = load_file(folder / "model.safetensors"), load_file(family.base / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {wanted}
    for name, tensor in merged_by_hand(before, weak).items():
        most = rounding(2, dtype=wanted) * float(tensor.abs().max())
        assert torch.allclose(found[name].double(), tensor, rtol=0, atol=most), name
    if wanted == torch.float32:
        change, kept = (own[QUERY].double() - before[QUERY].double() for own in (merged_by_hand(before, weak), found))
        assert (change - kept).norm() < rounding(2) * before[QUERY].norm()
    if method == "slta" and not option:
        file = families.write_recipe(tmp_path / "recipe.yml", recipe)
        assert not verify(file, out, lora_merge_cache=str(cache), quiet=True).problems
        assert check(file, lora_merge_cache=str(cache)).problems == []
        evaluate(file, out, lora_merge_cache=str(cache), quiet=True)
        assert [place for place in cache.iterdir() if place.is_dir()] == [folder]


# All kinds of adapters: what a merged one computes, compared with the live one before it was saved

Of = tuple[str, dict[str, Any]]  # the architecture of a base model, and entries of its configuration
PLAIN: Of = ("llama", {})
TIED: Of = ("llama", {"tie_word_embeddings": True})
TIED_AT_THE_TOP: Of = ("qwen3_vl", {"tie_word_embeddings": True})
MIXTURE: Of = ("qwen3_moe", {})
BIASED: Of = ("qwen2", {})
MAPS = ["q_proj", "o_proj"]
ROWS = {"embed_tokens": [1, 5], "lm_head": [1, 5]}


Kind = tuple[str, dict[str, Any], Of]  # peft's class of the adapter's configuration, its entries, the base model


def lora(of: Of = PLAIN, **settings: Any) -> Kind:
    return "LoraConfig", {"r": 4, "target_modules": MAPS} | settings, of


def other(kind: str, **settings: Any) -> Kind:
    """An adapter that is no LoRA."""
    return f"{kind}Config", {"target_modules": MAPS} | settings, PLAIN


KINDS = {
    "lora": lora(),
    "in the old format": lora(),
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    **{start: lora(init_lora_weights=start) for start in ("pissa", "olora", "gaussian", "orthogonal", "eva", "mica")},
    "patterns": lora(rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"o_proj": 16}),
    "one layer": lora(layers_to_transform=[1]),
    "all maps": lora(target_modules="all-linear"),
    "biases": lora(BIASED, bias="all"),
    "biases of maps": lora(BIASED, bias="lora_only"),
    "embedding": lora(target_modules=["embed_tokens", "q_proj"]),
    "head": lora(target_modules=["lm_head", "q_proj"]),
    **{f"whole {name}": lora(modules_to_save=[name]) for name in ("lm_head", "embed_tokens", "norm")},
    "tokens": lora(trainable_token_indices=[1, 5]),
    "tokens of the head": lora(trainable_token_indices={"lm_head": [1, 5]}),
    "tokens of both": lora(trainable_token_indices=ROWS | {"lm_head": [2]}),
    "tied, tokens": lora(TIED, trainable_token_indices=[1, 5]),
    "tied, tokens of both": lora(TIED, trainable_token_indices=ROWS),
    "tied, embedding with head": lora(TIED, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True),
    "tied, head with embedding": lora(TIED, target_modules=["lm_head", "q_proj"], ensure_weight_tying=True),
    "tied, whole embedding with head": lora(TIED, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "parameters": lora(MIXTURE, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    "transposed": lora(("gpt2", {}), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "adalora": other("AdaLora", total_step=10),
    "ia3": other("IA3", feedforward_modules=[]),
    "vera": other("Vera", r=4),
    "vblora": other("VBLoRA", r=2, num_vectors=8, vector_length=4),
    "shira": other("Shira", r=2),
    **{kind: other(kind, r=4) for kind in ("LoHa", "LoKr", "Miss", "Delora", "Psoft", "Pvera", "TinyLora")},
    **{kind: other(kind, r=2) for kind in ("HRA", "Hira", "Peanut", "UniLora")},
    "randlora": other("RandLora", r=4, randlora_alpha=40),
    "oft": other("OFT", r=4, oft_block_size=0),
    "boft": other("BOFT", boft_block_size=4),
    "norms": other("LNTuning", target_modules=["input_layernorm"]),
    "fourier": other("FourierFT", n_frequency=20),
    "waves": other("WaveFT", n_frequency=20),
    "c3a": other("C3A", block_size=8),
    "road": other("Road", group_size=8),
    "osf": other("OSF"),
    "tokens alone": other("TrainableTokens", token_indices=[1, 5], target_modules=["embed_tokens"]),
}
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
ONE_TENSOR = "where embedding and output head are one tensor, so it cannot be merged into it: train it on the decoder"
UNMERGED: dict[str, tuple[Kind, str]] = {
    "pissa by chance": (lora(init_lora_weights="pissa_niter_4"), "that 'init_lora_weights: pissa_niter_4' had changed"),
    "lora_ga": (lora(init_lora_weights="lora_ga"), "save it with peft's 'path_initial_model_for_weight_conversion'"),
    "bias beside a map without": (lora(lora_bias=True), "cannot be merged into"),
    "more layers": (lora(layer_replication=[[0, 2], [1, 3]]), "repeats layers ('layer_replication')"),
    "from a token on": (lora(alora_invocation_tokens=[5]), "cannot be merged into"),
    "lily": (other("Lily", r=4), "cannot be merged into"),
    "prompts": (("PromptTuningConfig", VIRTUAL, PLAIN), "is of the type PROMPT_TUNING, which cannot be merged into"),
    "prefixes": (("PrefixTuningConfig", VIRTUAL, PLAIN), "is of the type PREFIX_TUNING, which cannot be merged into"),
    "tied, embedding": (lora(TIED, target_modules=["embed_tokens", "q_proj"]), "changes model.embed_tokens of "),
    "tied at the top": (lora(TIED_AT_THE_TOP, target_modules=["embed_tokens", "q_proj"]), ONE_TENSOR),
    "tied, head": (lora(TIED, target_modules=["lm_head", "q_proj"]), ONE_TENSOR),
    "tied, whole head": (lora(TIED, modules_to_save=["lm_head"]), ONE_TENSOR),
    "tied, tokens of the head": (lora(TIED, trainable_token_indices={"lm_head": [1, 5]}), "changes lm_head of "),
    "tied, other tokens": (lora(TIED, trainable_token_indices=ROWS | {"lm_head": [2]}), ONE_TENSOR),
}


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Of], Path]:
    """The folder of a base model, which is made once."""
    made: dict[str, Path] = {}

    def base(of: Of) -> Path:
        name = str(of)
        if name not in made:
            config = families.config_of(of[0], **of[1])
            made[name] = families.make_family(tmp_path_factory.mktemp("base"), config, experts=0).base
        return made[name]

    return base


def trained(base: Path, kind: Kind, folder: Path) -> torch.Tensor:
    """Save an adapter with random numbers, and return the logits of the model with it."""
    try:
        config = getattr(peft, kind[0])(**kind[1])
    except (AttributeError, TypeError):
        pytest.skip(f"peft {peft.__version__} knows no such adapter")
    model = peft.get_peft_model(families.open_model(base), config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(str(folder))
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[1, 5, 7, 9, 20, 33, 5, 6, 2, 1]])).logits
    return found


def examined(base: Path, adapter: Path) -> None:
    """Check the adapter as ``check`` does."""
    expert = ModelReference.parse(f"{base}+{adapter}")
    recipe = {"merge_method": "sftm", "base_model": str(base), "models": [{"model": str(expert)}]}
    one_model(families.experiment(recipe, lora_merge_cache=str(adapter)), expert)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_computes_what_the_live_one_does(kind: str, base_of: Any, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    live = trained(base := base_of(KINDS[kind][2]), KINDS[kind], adapter)
    if kind == "in the old format":
        file = adapter / "adapter_model.safetensors"
        torch.save(load_file(file), file.with_suffix(".bin"), **AS_BEFORE)
        file.unlink()
    examined(base, adapter)
    merged = merge_adapter(ModelReference.parse(f"{base}+{adapter}"), str(tmp_path / "cache"))
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (merged.model.path, base)]
    found, before = map(logits, models)
    tolerance = state_rounding(float(live.abs().max()))
    assert torch.allclose(found, live, rtol=0, atol=tolerance)
    assert (live - before).abs().max() > 10 * tolerance


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"peft_type": "XLORA", "hidden_size": 32, "adapters": {"one": "org/other"}}, "is of the type XLORA"),
        ({"megatron_config": {"any": 1}, "megatron_core": "module"}, "was trained with Megatron's layers"),
        ({"rank_pattern": {"q_proj.lora_E": [True]}}, "is an AdaLoRA with pruned ranks: merge it by peft"),
        # These need data, and quantization, to be trained.
        ({"init_lora_weights": "corda"}, "was trained on weights that 'init_lora_weights: corda' had changed"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "'init_lora_weights: loftq' had changed"),
    ],
)
def test_an_adapter_whose_configuration_needs_more_than_the_adapter_is_refused(
    entries: dict[str, Any], words: str, base_of: Any, tmp_path: Path
) -> None:
    adapter = edit(write_adapter(base := base_of(PLAIN), tmp_path / "adapter", "q_proj"), **entries)
    with pytest.raises(SltaError, match=words):
        examined(base, adapter)


@pytest.mark.parametrize("kind", UNMERGED)
def test_an_adapter_that_cannot_be_merged_right_is_refused(kind: str, base_of: Any, tmp_path: Path) -> None:
    entry, words = UNMERGED[kind]
    trained(base := base_of(entry[2]), entry, tmp_path / "adapter")
    with pytest.raises(SltaError) as error:
        examined(base, tmp_path / "adapter")
    assert f"The adapter {tmp_path / 'adapter'} " in error.value.message and words in error.value.message


def test_what_a_newer_peft_has_written_is_named(base_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(write_adapter(base := base_of(PLAIN), tmp_path / "adapter"), scaled_by_something_new=True)
    examined(base, tmp_path / "adapter")
    assert f"The adapter {tmp_path}/adapter: Unexpected keyword arguments ['scaled_by_something_new']" in caplog.text


def test_a_model_beside_an_adapter_runs_without_it_or_not_at_all(llama: Family, tmp_path: Path) -> None:
    """mergekit merges the model of the folder, while transformers loads the adapter, too."""
    other = write_adapter(llama.base, tmp_path / "adapter")
    model = shutil.copytree(llama.experts[0], tmp_path / "model")
    write_adapter(llama.base, model)
    with pytest.raises(SltaError, match="model holds an adapter, which transformers would add: move it"):
        merge_adapter(ModelReference.parse(f"{model}+{other}"), str(tmp_path / "cache"))
    with pytest.raises(SltaError, match="model holds an adapter, which transformers would add: move it"):
        ask(model, tmp_path / "answers.jsonl", samples=1, max_new_tokens=4, quiet=True)

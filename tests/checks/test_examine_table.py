"""What is wrong with a recipe, its models or its data, each with the sentence that says so; and what is not wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import MakeFamily
from mergekit.common import ModelReference
from safetensors.torch import load_file
from support import examining, families
from support.adapters import State, edit, of_experts, write_adapter
from support.architecture_scan import small_configs
from support.calibration_samples import refused
from support.copies import edit_tensors
from support.examining import edit_config, grow, larger_vocabulary, look, only, problems, save_random, swap_ids, t5
from support.families import Family, config_of
from support.merging import load

from mergekit_slta.files import PARTIAL_OF_MERGE
from mergekit_slta.models.adapters import merge_adapter


class Case:
    """A family of Llamas, an empty folder, and a recipe of ``slta``; what changes them returns the case."""

    def __init__(self, family: Family, folder: Path, make_family: MakeFamily) -> None:
        self.folder, self.make_family = folder, make_family
        self.arguments: dict[str, Any] = {}  # of ``examine``
        self.merged_too = ""  # an adapter that a merge without checks refuses too
        self.to(family)

    def to(self, family: Family) -> Case:
        self.family, self.base, self.expert = family, family.base, family.experts[0]
        return self.use()

    def of(self, architecture: Any) -> Case:
        return self.to(self.make_family(architecture))

    def use(self, method: str = "slta", **arguments: Any) -> Case:
        """Another method or other parameters; without data where the method needs none."""
        defaults: dict[str, Any] = {"samples": 6} if method in ("slta", "featcal") else {"calibration": False}
        self.recipe = families.recipe(self.family, method, **defaults | arguments)
        return self

    def run(self, **arguments: Any) -> Case:
        self.arguments |= arguments
        return self

    def name(self, expert: object) -> Case:
        """Another model as the first expert."""
        self.recipe["models"][0]["model"] = str(expert)
        return self

    def random(self, config: Any) -> Case:
        return self.name(save_random(config, self.folder / "other"))

    def data(self, source: object, content: str | None = None, template: str = "") -> Case:
        """Other data for the first expert, in the case's folder if there is content."""
        if content is not None:
            source = self.folder / str(source)
            source.write_text(content)
        self.recipe["models"][0]["parameters"] |= {"calibration": str(source), "template": template}
        return self

    def lora(self, *targets: str, base: Path | None = None, **settings: Any) -> Path:
        return write_adapter(base or self.base, self.folder / "adapter", *targets, **settings)

    def adapt(self, adapter: Path, merged_too: bool = True, base: Path | None = None) -> Case:
        """The base model, or another, with an adapter as the first expert."""
        expert = f"{base or self.base}+{adapter}"
        self.merged_too = expert if merged_too else ""
        return self.name(expert).run(options={"lora_merge_cache": str(self.folder / "cache")})

    def filled(self, text: str) -> str:
        for name, path in (("BASE", self.base), ("EXPERT", self.expert), ("HERE", self.folder)):
            text = text.replace(name, str(path))
        return text


Edit = Callable[[Case], object]
Rows = list[tuple[Edit, str]]


@pytest.fixture
def case(family: Family, tmp_path: Path, make_family: MakeFamily, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case on a disk with 50 GB free."""
    usage = shutil.disk_usage("/")._replace(free=50 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    (tmp_path / "case").mkdir()
    return Case(family, tmp_path / "case", make_family)


# Models


def tied(head: bool) -> Any:
    return config_of("llama", tie_word_embeddings=head)


def olmo() -> Any:
    """An architecture of which mergekit has no definition; it ties its head and does not store it."""
    entries = {"model_type": "olmo", "architectures": None, "tie_word_embeddings": True}
    return transformers.OlmoConfig(**config_of("llama").to_diff_dict() | entries)


def no_decoder(case: Case) -> None:
    case.use(experts=[0]).name(t5(case.folder / "expert")).run(merging=False)
    case.recipe["base_model"] = str(t5(case.folder / "base"))


def crimes(method: str) -> Edit:
    return lambda c: c.use(method).random(config_of("mistral", head_dim=8)).run(options={"allow_crimes": True})


def shorter(tensors: State) -> None:
    for name in ("model.norm.weight", UP):
        tensors[name] = tensors[name][:-1]


def compiled(tensors: State) -> None:
    """As a model is saved from inside torch.compile."""
    for name in list(tensors):
        tensors[f"_orig_mod.{name}"] = tensors.pop(name)


UP = "model.layers.1.mlp.up_proj.weight"


def to_integers(tensors: State) -> None:
    """As GPTQ and AWQ store matrices."""
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name.replace(".weight", ".qweight")] = tensors.pop(name).int()


def to_8_bits(tensors: State) -> None:
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)


def quantized(entry: dict[str, Any] | None, change: Callable[[State], None]) -> Edit:
    def quantize(case: Case) -> None:
        edit_tensors(case.expert, change)
        edit_config(case.expert, quantization_config=entry)

    return quantize


GPTQ = {"quant_method": "gptq", "bits": 4}
ORIGINAL = "by its config.json: name the unquantized model, or dequantize it first; or remove the entry "
ELSE = "name the unquantized model, or dequantize it first."


def left_over_below_an_adapter(case: Case) -> None:
    """transformers loads the model of an adapter, with the entry."""
    case.adapt(case.lora(), merged_too=False, base=case.expert)
    edit_config(case.expert, quantization_config=GPTQ)


def linked(place: str, name: str) -> Edit:
    """A file in a model's folder that is a link to a file outside of it."""

    def change(case: Case) -> None:
        (case.folder / "private").write_text("{}")
        folder = Path(case.filled(place))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(case.folder / "private")

    return change


def adapters_alone(case: Case) -> None:
    case.use("actmat").adapt(case.lora("q_proj")).recipe["models"][1:] = []


def adapter_linked(case: Case) -> None:
    case.adapt(case.lora(), merged_too=False)
    linked("HERE/adapter", "tokenizer.json")(case)


def another_tokenizer_linked(case: Case) -> None:
    shutil.copytree(case.expert, case.folder / "third")
    linked("HERE/third", "merges.txt")(case)
    case.recipe["tokenizer"] = {"source": f"{case.folder}/third"}


# What a model's folder may hold a link to, and a merge would copy from there
LINKS = ("merges.txt", "modeling_own.py", "additional_chat_templates/rag.jinja", "1_Pooling/config.json")


def own_code(named: Any, imports: str = "") -> Edit:
    """A base model with code of its own."""

    def change(case: Case) -> None:
        (case.folder / "own.py").write_text("")
        (case.base / "modeling_own.py").write_text(f"{case.filled(imports)}\n")
        edit_config(case.base, auto_map=named)

    return change


OWN = {"AutoModelForCausalLM": "modeling_own.Own"}


def in_a_folder(name: str, beside: str = "") -> Edit:
    """The first expert in a folder of that name, beside another one, which mergekit might read instead."""

    def change(case: Case) -> None:
        if beside:
            shutil.copytree(case.base, case.folder / beside)
        case.name(shutil.copytree(case.expert, case.folder / name))

    return change


MODELS: Rows = [
    *(
        (linked("BASE", name), f"BASE/{name} is a link to a file outside of BASE: replace it with the file itself")
        for name in LINKS
    ),
    (linked("EXPERT", LINKS[0]), f"EXPERT/{LINKS[0]} is a link to a file outside of EXPERT: "),
    (adapter_linked, "HERE/adapter/tokenizer.json is a link to a file outside of HERE/adapter: "),
    (another_tokenizer_linked, "HERE/third/merges.txt is a link to a file outside of HERE/third: "),
    *(
        (
            own_code({"AutoModel": name}),
            f"BASE/config.json cannot be read (it needs the module {module}, which is not in",
        )
        for name, module in (
            ("/home/modeling_own.Own", "/home/modeling_own.py"),
            ("parts/modeling_own.Own", "BASE/parts/modeling_own.py"),
            ("../modeling_own.Own", "BASE/.py"),
        )
    ),
    (own_code(OWN, "from .HERE/own import Own"), "it needs the module HERE/own.py, which is not in its folder"),
    (own_code([OWN]), "BASE/config.json cannot be read ("),
    (lambda c: (c.expert / PARTIAL_OF_MERGE).mkdir(parents=True), "The merge into EXPERT is not finished: run it"),
    (lambda c: edit_config(c.base, num_hidden_layers=10**6), "BASE gives 1000000 layers, more than the checkpoint has"),
    (lambda c: c.name(c.base.with_name("bsae")), "there is no such folder, did you mean 'base', and it is not the"),
    *(
        (edit, f"mergekit takes the name of the folder HERE/{name} apart at '+' or '@': rename it.")
        for name, edit in (
            *((name, in_a_folder(name, beside)) for name in ("a+b", "a@b") for beside in ("", "a")),
            ("adapter@2", lambda c: c.adapt(c.lora("q_proj").rename(c.folder / "adapter@2"), merged_too=False)),
        )
    ),
    (lambda c: c.random(config_of("mistral")), "HERE/other is a MistralForCausalLM (mistral), the base model BASE a "),
    (crimes("slta"), "only models of one architecture can be merged."),
    (
        lambda c: c.random(config_of("llama", hidden_size=16, num_attention_heads=2)),
        "The expert HERE/other has hidden_size 16 instead of 32, num_attention_heads 2 instead of 4: it was not ",
    ),
    (lambda c: edit_tensors(c.expert, shorter), f"The tensor {UP} of the expert EXPERT has the shape [47, 32] instead"),
    (lambda c: c.of(tied(True)).random(tied(False)), "BASE ties its output head to its embedding and HERE/other does"),
    (lambda c: edit_tensors(c.of(olmo()).expert, lambda own: own.pop(UP)), f"EXPERT: the checkpoint lacks {UP} of the"),
    (lambda c: edit_tensors(c.expert, compiled), "saved from inside torch.compile, FSDP or DDP, save the module in"),
    (lambda c: edit_tensors(c.expert, lambda own: own.update({UP: own[UP][:0]})), f"EXPERT holds empty tensors ({UP})"),
    (lambda c: edit_config(c.base, head_dim=4), "BASE: config.json gives other shapes of model.layers.0.self_attn.k_p"),
    (lambda c: c.random(config_of("llama", attention_bias=True)), "HERE/other: the checkpoint has model.layers.0.self"),
    (quantized(GPTQ, to_integers), f"EXPERT is quantized (gptq) {ORIGINAL}"),
    (quantized(None, to_8_bits), f"EXPERT stores {UP} in 8 bits or fewer, so it is quantized: {ELSE}"),
    (left_over_below_an_adapter, f"EXPERT+HERE/adapter is quantized (gptq) {ORIGINAL}"),
    (no_decoder, "T5ForConditionalGeneration is an encoder-decoder, which calibration does not cover: use 'merge_m"),
]

# Adapters

FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
UNGATHERED = "save it again, and gather its shards first."
ALL_EXPERTS = "): train it on all experts and all of their maps, which transformers has in one tensor."


def lora_of(architecture: str, *targets: str, parameters: Any = (), **changes: Any) -> Edit:
    """An adapter of another model."""

    def change(case: Case) -> None:
        other = save_random(config_of(architecture, **changes), case.folder / "other")
        case.adapt(case.lora(*targets, base=other, parameters=parameters))

    return change


def changed(change: Callable[[State], State]) -> Edit:
    return lambda c: c.adapt(edit(c.lora("q_proj", "down_proj"), change))


def emptied(tensors: State) -> State:
    return {name: t[:0] if "layers.1." in name and "lora_B" in name else t for name, t in tensors.items()}


def of_rank_0(tensors: State) -> State:
    return {name: t[:0] if "lora_A" in name else t[:, :0] for name, t in tensors.items()}


def without_a_tensor(tensors: State) -> State:
    return {name: t for name, t in tensors.items() if "layers.1.self_attn.q_proj.lora_B" not in name}


def one_of_several(case: Case) -> None:
    case.adapt(case.lora(), merged_too=False)
    shutil.copytree(case.folder / "adapter", case.folder / "adapter" / "first")  # as peft writes one that has a name
    (case.folder / "adapter" / "adapter_model.safetensors").unlink()


def on_the_language_model(targets: Any, of_text: bool = False) -> Edit:
    """An adapter of a multimodal model, or of its language model, put on the language model."""

    def change(case: Case) -> None:
        whole = case.of("gemma3_vision").family
        text = save_random(whole.config.get_text_config(), case.folder / "text")
        adapter = edit(case.lora(base=text if of_text else whole.base), target_modules=targets)
        case.to(Family(text, (text, text), whole.data, whole.config)).adapt(adapter)

    return change


def of_a_resized_model(*, save_embedding_layers: bool = False, **settings: Any) -> Edit:
    def change(case: Case) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(case.base)
        model.resize_token_embeddings(66)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["q_proj"]} | settings))
        adapted.save_pretrained(str(case.folder / "adapter"), save_embedding_layers=save_embedding_layers)
        case.adapt(case.folder / "adapter")

    return change


def of_some_experts(architecture: str, **parts: Any) -> Edit:
    def change(case: Case) -> None:
        case.of(architecture)
        case.adapt(of_experts(load(case.base)[0], architecture, case.folder / "adapter", **parts))

    return change


def not_fit(reason: str) -> str:
    return f"The adapter HERE/adapter does not fit BASE ({reason}"


ADAPTERS: Rows = [
    (lambda c: c.name(f"{c.base}+{c.lora()}"), "BASE+HERE/adapter is a LoRA adapter: name a folder for the merged"),
    (one_of_several, "it lacks adapter_model.safetensors; name one of the adapters in it, HERE/adapter/first."),
    (lora_of("llama", hidden_size=64), not_fit("model.layers.0")),
    (lambda c: c.adapt(edit(c.lora(), r=10**9)), "HERE/adapter has the rank 1000000000 in its adapter_config.json"),
    (lora_of("gpt2", "c_attn"), not_fit("Target modules {'c_attn'} not found in the base model")),
    (
        lambda c: lora_of("qwen3_moe", parameters=FUSED[1:], hidden_size=64)(c.of("qwen3_moe")),
        not_fit("model.layers.0"),
    ),
    (changed(emptied), "holds empty tensors (base_model.model.model.layers.1.mlp.down_proj.lora_B.weight, "),
    (changed(of_rank_0), UNGATHERED),
    (changed(lambda tensors: {}), f"holds no tensors: {UNGATHERED}"),
    (changed(without_a_tensor), "(it lacks tensors of model.layers.1.self_attn.q_proj, which its adapter_config.json"),
    (
        changed(lambda tensors: tensors | {"base_model.model.score.weight": torch.ones(2, 32)}),
        "(it adapts score.weight, which that model lacks): name the model that it was trained on.",
    ),
    (on_the_language_model(["q_proj"]), "(it adapts model.vision_tower."),
    (on_the_language_model(r".*\.q_proj"), "(it adapts model.vision_tower."),
    (of_a_resized_model(modules_to_save=["embed_tokens", "lm_head"]), "size, so merge it by peft"),
    (of_a_resized_model(save_embedding_layers=True), "size, so merge it by peft"),
    (of_a_resized_model(target_modules=["embed_tokens"]), "[8, 66] instead of [8, 64]"),
    *(
        (of_some_experts(name, **parts), ALL_EXPERTS)
        for name in ("mixtral", "qwen3_moe")
        for parts in ({"experts": 2}, {"parts": ["gate_up_proj"]}, {"parts": ["gate_up_proj", "gate"]})
    ),
]

# Data and statistics


def of_one_name(case: Case) -> Case:
    for number, entry in enumerate(case.recipe["models"]):
        entry["model"] = str(shutil.copytree(entry["model"], case.folder / f"run{number}" / "checkpoint-500"))
    return case


def statistics(file: str, **arguments: Any) -> Edit:
    def change(case: Case) -> None:
        (case.folder / "file").write_text("no statistics")
        case.use(statistics=case.filled(file), **arguments)

    return change


CHAT = json.dumps({"messages": [{"role": "user", "content": "abc"}]})
DATA: Rows = [
    (lambda c: c.data("copy.jsonl", c.family.data[1].read_text()), "hold the same prompts: give each expert prompts"),
    (lambda c: c.data("a.jsonl", '{"text": " "}\n'), "'HERE/a.jsonl' has no usable row: all 1 are empty"),
    (lambda c: c.data(c.family.data[0], template="{text"), "is not a valid format string"),
    (lambda c: c.data("a.jsonl", CHAT), "neither the base model's tokenizer nor the expert's has a chat template"),
    (lambda c: list(map(Path.unlink, c.base.glob("tokenizer*"))), "BASE has no usable tokenizer ("),
    (lambda c: c.of("gpt2").use(max_tokens=512).data("long.txt", "a" * 200), "202 tokens, but BASE has 128 positions"),
    (of_one_name, "same name in the statistics (base, checkpoint-500, checkpoint-500, checkpoint-500)"),
    (statistics("HERE/file"), "HERE/file cannot be read as a safetensors file"),
    (statistics("HERE"), "There is no statistics file"),
    (statistics("hf:org/repo/file.safetensors", calibration=False), "the Hub cannot be reached"),
    (lambda c: c.data("hf:org/data?config=main"), "'hf:org/data?config=main' cannot be read"),
    (statistics("HERE/file/a"), "HERE/file is not a writable folder"),
]

# Tokenizers, folders, disks and devices


def more_tokens(case: Case) -> None:
    examining.add_tokens(case.base, *(f"<{number}>" for number in range(families.VOCABULARY)))
    case.data("task.txt", "a<60>")


def other_ids(method: str = "slta", **entries: Any) -> Edit:
    def change(case: Case) -> None:
        swap_ids(case.expert)
        case.use(method).recipe.update(entries)

    return change


def other_size(method: str = "slta", **entries: Any) -> Edit:
    def change(case: Case) -> None:
        case.use(method).name(larger_vocabulary(case.folder / "other")).recipe.update(entries)

    return change


def writing(name: str, method: str = "slta", size: int = 0) -> Edit:
    """A merge into a folder, of a base model that takes so many bytes more."""

    def change(case: Case) -> None:
        (case.folder / "file").write_text("")
        (case.folder / "link").symlink_to("nowhere")
        grow(case.base, max(4, size))
        case.use(method, experts=[0, 1]).run(**{"out_path": case.folder / name} if name else {})

    return change


CUT = {"options": {"unsafe_truncate_embeddings": True}}
GB = 10**9
ALIGNED: dict[str, Any] = {"tokenizer": {"source": "base"}}
ALIGN = "add 'tokenizer: {source: base}' to the recipe, so that mergekit aligns them."
IDS = "The tokenizers of EXPERT and the base model BASE have different ids for 2 tokens (such as 'a')"
SIZES = "The expert HERE/other has a vocabulary of 66 tokens, the base model BASE one of 64"
OTHERS: Rows = [
    (more_tokens, "but the model has only 64 embeddings"),
    (other_size(), f"{SIZES}: {ALIGN}"),
    (other_size("featcal"), f"{SIZES}: if the expert can do without its added tokens, save it with 64"),
    (other_size("featcal", **ALIGNED), f"{SIZES}: if the expert can do without its added tokens"),
    (other_ids(), f"{IDS}: {ALIGN}"),
    (lambda c: other_ids()(c.run(**CUT)), f"{IDS}: {ALIGN}"),
    (other_ids("featcal", **ALIGNED), f"{IDS}, but this method gives both the same ids: choose experts with the same"),
    (lambda c: (c.expert / "tokenizer.json").write_text('{"model": '), "EXPERT has no usable tokenizer ("),
    (lambda c: c.run(options={"device": "cuda:99"}), "PyTorch cannot compute on the device 'cuda:99' ("),
    (lambda c: c.use(report=f"{c.base}/config.json"), "'report: BASE/config.json' cannot be created"),
    (
        lambda c: c.adapt(c.lora(), merged_too=False).run(options={"lora_merge_cache": __file__}),
        f"'--lora-merge-cache {__file__}' cannot be created",
    ),
    (writing("link"), "HERE/link cannot be created: HERE/link is not a writable folder"),
    (writing("file/out"), "HERE/file/out cannot be created: HERE/file is not a writable folder"),
    (lambda c: c.run(out_path=c.expert), "EXPERT is the folder of EXPERT, which the merge would overwrite"),
    (lambda c: c.adapt(c.lora(), merged_too=False).run(out_path=c.folder / "adapter"), "HERE/adapter holds an adapter"),
    (writing("a/b", size=100 * GB), "HERE/a/b has 50 GB free, too little for the merged model (about 100 GB): make"),
    (writing("out", "featcal", size=60 * GB), "the merged model (about 60 GB) and the solved layers (about "),
]


def short(value: object) -> str:
    return value[:60] if isinstance(value, str) else ""


@pytest.mark.parametrize(("edit", "sentence"), [*MODELS, *ADAPTERS, *DATA, *OTHERS], ids=short)
def test_what_is_wrong_is_said_in_one_sentence(edit: Edit, sentence: str, case: Case) -> None:
    edit(case)
    problem = only(case.recipe, **case.arguments)
    assert case.filled(sentence) in problem
    if case.merged_too:  # a merge without the checks says the same, and leaves nothing
        cache = case.folder / "cache"
        assert refused(merge_adapter, ModelReference.parse(case.merged_too), str(cache)) == problem
        assert not [place for place in cache.iterdir() if place.is_dir()]


# What is not wrong


def copies_of_the_ends(case: Case) -> None:
    """An adapter that peft saved with the embedding and the head, which it does not train."""
    model = transformers.AutoModelForCausalLM.from_pretrained(case.of("gemma3").base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(str(case.folder / "adapter"), save_embedding_layers=True)
    case.adapt(case.folder / "adapter")


def in_the_hubs_cache(case: Case) -> None:
    """Where every file of a model is a link."""
    blobs = case.folder / "models--org--base" / "blobs"
    snapshot = blobs.parent / "snapshots" / "main"
    shutil.copytree(case.base, blobs)
    store = case.folder / "blobs" / "ab"  # of all models
    store.mkdir(parents=True)
    (store.parent / ".huggingface-shared-blobs").touch()
    (blobs / "model.safetensors").rename(store / "weights")
    (blobs / "model.safetensors").symlink_to(store / "weights")
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    case.recipe["base_model"] = str(snapshot)


def the_experts_chat_template(case: Case) -> None:
    families.write_tokenizer(case.expert, "{% for turn in messages %}{{ turn.content }}{% endfor %}")
    case.data("a.jsonl", CHAT)


@pytest.mark.parametrize(
    "edit",
    [
        crimes("sftm"),
        in_the_hubs_cache,
        own_code(OWN | {"AutoTokenizer": [None, "org/other--modeling_own.Fast"]}),
        lambda c: c.of(tied(True)),
        lambda c: c.of(olmo()).use(level="layer"),
        lambda c: c.adapt(c.lora("q_proj", "down_proj")),
        lambda c: c.of("qwen3_moe").adapt(c.lora(parameters=FUSED)),
        lambda c: c.of("mixtral").adapt(c.lora(parameters=["mlp.gate.weight"])),
        copies_of_the_ends,
        on_the_language_model(r".*\.q_proj", of_text=True),
        the_experts_chat_template,
        lambda c: c.of("gpt2").use(max_tokens=128).data("long.txt", "a" * 200),
        lambda c: c.of(next(small_configs("kosmos-2.5", "Kosmos2_5ForConditionalGeneration"))),  # two segments
        lambda c: of_one_name(c.use("featcal")),
        statistics("HERE/new/stats.safetensors"),
        lambda c: (c.base / "._config.json").write_bytes(b"\0\x05\x16\x07"),
        lambda c: examining.add_tokens(c.expert, "<turn>"),
        other_ids(**ALIGNED),
        other_size(**ALIGNED),
        other_size(tokenizer_source="union"),
        lambda c: other_size()(c.run(merging=False)),
        lambda c: other_size("sftm")(c.run(**CUT)),
        writing("", size=100 * GB),
        writing("out", size=40 * GB),
        lambda c: writing("out", size=100 * GB)(c.run(merging=False)),
    ],
)
def test_what_is_sound_is_let_through(edit: Edit, case: Case) -> None:
    edit(case)
    assert problems(case.recipe, **case.arguments) == []
    assert not (case.folder / "cache").exists()


# What is worth knowing


def half(dtype: str | None) -> Edit:
    def change(case: Case) -> None:
        edit_config(case.base, dtype="bfloat16")
        case.recipe["dtype"] = dtype

    return change


def labelled(case: Case) -> None:
    """Classifiers by the last layer's norm, whose labels are in another order."""
    for folder, first in ((case.use("sftm", experts=[0]).base, "no"), (case.expert, "yes")):
        edit_tensors(folder, lambda own: own.update({"score.weight": own.pop("lm_head.weight")[:2].clone()}))
        edit_config(folder, architectures=["LlamaForSequenceClassification"], id2label={"0": first, "1": "other"})


def pickle(case: Case) -> None:
    weights = case.expert / "model.safetensors"
    torch.save(load_file(weights), case.expert / "pytorch_model.bin")
    weights.unlink()


ROTATION = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}, "rms_norm_eps": 1e-3}
DIFFERS = (
    "The configuration of the expert EXPERT differs from that of the base model BASE in rms_norm_eps, "
    "rope_parameters.rope_theta: the merged model gets the base model's configuration"
)
LONGER = DIFFERS.replace("rms_norm_eps, rope_parameters.rope_theta", "max_position_embeddings")
ROUNDS = "Merging in bfloat16 rounds at every step: to round only once, set 'dtype: float32' and 'out_dtype: bfloat16'."


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda c: None, ""),
        (half("bfloat16"), ROUNDS),
        (half(None), ROUNDS),
        (half("float32"), ""),
        (lambda c: half("bfloat16")(c.use("featcal")), ""),
        (lambda c: half("bfloat16")(c.use("featcal").adapt(c.lora("q_proj"))), ROUNDS),
        (lambda c: half(None)(c.run(merging=False)), ""),
        (lambda c: edit_config(c.expert, **ROTATION), f"{DIFFERS}, and the expert is measured with it too."),
        (lambda c: edit_config(c.use("sftm").expert, **ROTATION), f"{DIFFERS}."),
        (labelled, "The configuration of the expert EXPERT differs from that of the base model BASE in id2label: the "),
        (lambda c: edit_config(c.expert, use_cache=False, eos_token_id=0, attention_dropout=0.5), ""),
        (lambda c: edit_config(c.expert, max_position_embeddings=7), ""),  # of rotations that have no longest position
        (lambda c: edit_config(c.expert, max_position_embeddings=10**6), LONGER),
        (pickle, "EXPERT is pickled, so each of its files is read whole into memory, for every layer anew: load it"),
        (lambda c: c.of("bloom").use("featcal"), "In layers 0, 1, 2, no map corrects what"),
        (adapters_alone, "'task_arithmetic' with a 'weight' of about 1."),
    ],
    ids=short,
)
def test_what_is_worth_knowing_is_said_once(edit: Edit, sentence: str, case: Case) -> None:
    edit(case)
    notes = look(case.recipe, **case.arguments).notes
    assert len(notes) == bool(sentence)
    assert all(case.filled(sentence) in note for note in notes)

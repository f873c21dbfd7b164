"""The fingerprint goes by a model's content alone, and keeps the values that published statistics carry."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mergekit.io.tasks import LoaderCache
from safetensors.torch import save_file
from support.adapters import edit, write_adapter
from support.copies import edited
from support.families import Family, checkpoint

from mergekit_slta.errors import SltaError
from mergekit_slta.models.fingerprint import fingerprint_of

ATTENTION = "model.layers.1.self_attn.q_proj.weight"
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def test_published_fingerprints_still_fit_their_models(tmp_path: Path) -> None:
    """Tensors of all dtypes and of several sizes, one empty and one a number, in either file format."""
    tensors: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        content = torch.arange(5000 * dtype.itemsize) % (2 if dtype is torch.bool else 251)
        stored = content.byte().view(dtype)
        tensors |= {f"{dtype}.0": stored[:0], f"{dtype}.1": stored[7], f"{dtype}.5000": stored.view(5, 1000)}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("safetensors", "pickled", "adapter"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "safetensors" / "model.safetensors")
    torch.save(tensors, tmp_path / "pickled" / "pytorch_model.bin")
    adapter = tmp_path / "adapter"
    for folder in (tmp_path / "safetensors", tmp_path / "pickled"):
        assert fingerprint_of(folder) == "43efb438767c2b945ae1547fabbbbdf1e5d40a6065e8be6b72ddd749a376e387"
    save_file({"x.lora_A.weight": tensors[f"{torch.float32}.5000"]}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"r": 5, "revision": null, "target_modules": ["x", "b"]}')
    adapted = fingerprint_of(tmp_path / "pickled", adapter)
    assert adapted == "049807463e6cd80e5d97a5e4a7fd92ec075c93593cb8eb7a4ffe31f1aea0074a"


def test_other_content_has_another_fingerprint(llama: Family, tmp_path: Path) -> None:
    edits: list[Callable[[dict[str, torch.Tensor]], object]] = [
        lambda tensors: tensors[ATTENTION].mul_(1.001),
        lambda tensors: tensors.update(other=tensors.pop(ATTENTION)),
        lambda tensors: tensors.update({ATTENTION: tensors[ATTENTION].view(16, 64)}),
        lambda tensors: tensors.update({ATTENTION: tensors[ATTENTION].bfloat16()}),
    ]
    folders = [edited(llama.base, tmp_path / str(number), edit) for number, edit in enumerate(edits)]
    found = [checkpoint(folder).fingerprint for folder in (*llama.folders, *folders)]
    assert len(set(found)) == len(found)


def test_a_lora_is_known_by_its_base_and_its_adapter(
    llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoaderCache(), "lora_cache_dir", str(tmp_path / "loras"))  # as a merge tells its loader

    def fingerprint(base: Path, adapter: Path) -> str:
        return checkpoint(f"{base}+{adapter}").fingerprint

    first = write_adapter(llama.base, tmp_path / "first")
    copy = shutil.copytree(first, tmp_path / "copy")
    assert fingerprint(llama.base, first) == fingerprint(llama.base, copy)
    edit(copy, base_model_name_or_path="org/base")
    assert fingerprint(llama.base, first) == fingerprint(llama.base, copy)
    edit(copy, lora_alpha=40)
    retrained = write_adapter(llama.base, tmp_path / "retrained", seed=1)
    found = [fingerprint(llama.base, adapter) for adapter in (first, copy, retrained)]
    found += [fingerprint(llama.experts[0], first), checkpoint(llama.base).fingerprint]
    assert len(set(found)) == len(found)


def test_a_models_own_code_has_a_stamp(llama: Family, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama.base, tmp_path / "model"))
    code = folder / "modeling_own.py"
    code.write_text("scale = 1\n")
    before, model = checkpoint(folder).stamps, checkpoint(folder)
    code.write_text("scale = 20\n")
    assert checkpoint(folder).stamps != before
    with pytest.raises(SltaError, match="have changed while they were read"):
        model.refuse_changes()

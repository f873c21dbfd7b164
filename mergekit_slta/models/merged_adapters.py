"""Have mergekit merge a LoRA adapter into a folder named by the content of the adapter and its base model."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock
from mergekit.common import ModelPath, ModelReference
from mergekit.io.tasks import LoaderCache

from mergekit_slta.errors import SltaError
from mergekit_slta.files import digest
from mergekit_slta.models.adapters import source_files, source_folders
from mergekit_slta.models.fingerprint import fingerprint_of, stamps

NO_FOLDER = "{model} is a LoRA adapter: give mergekit a folder to merge it in with --lora-merge-cache FOLDER."


def adapter_option(references: Iterable[ModelReference]) -> str:
    """The option that a printed command needs for mergekit to merge these models, if one is an adapter."""
    return " --lora-merge-cache ./adapters" if any(reference.lora for reference in references) else ""


_MERGED = getattr(ModelReference.merged, "__wrapped__", ModelReference.merged)  # mergekit's own


@functools.wraps(_MERGED)
def merge_adapter(
    self: ModelReference,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
    lora_merge_dtype: str | None = None,
) -> ModelReference:
    """Replace mergekit's ``ModelReference.merged``, which names the folder by the two paths.

    mergekit reuses that folder even if the base model or the adapter has changed, or if the merge was interrupted.
    Here the name depends on the content of both and on the dtype, and the folder gets it only when it is complete.

    Raises:
        SltaError: an adapter has no folder to be merged in.
    """
    if self.lora is None:
        return _MERGED(self, cache_dir, trust_remote_code, lora_merge_dtype)
    if not cache_dir:
        raise SltaError(NO_FOLDER.format(model=self))
    paths = f"{self.model._unique_id()}_{self.lora._unique_id()}"  # mergekit's name
    sources = source_folders(self, LoaderCache().hf_cache_dir)
    content = [fingerprint_of(*sources, lora_merge_dtype), sorted(stamps(source_files(*sources)).values())]
    folder = Path(cache_dir) / f"{paths}_{digest(content)[:16]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                part = folder.with_name(f"{folder.name}.partial")
                shutil.rmtree(part, ignore_errors=True)  # of a merge that was killed
                try:
                    os.replace(_MERGED(self, str(part), trust_remote_code, lora_merge_dtype).model.path, folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    return ModelReference(model=ModelPath(path=str(folder)))

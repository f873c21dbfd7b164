"""Products of float32 matrices as exact as float32: small changes of features need it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products and convolutions exactly while the block runs.

    Torch rounds no factors to TF32, as it does on a GPU in convolutions by default and in products on demand, nor to
    bfloat16, as it does on a CPU on demand.
    """
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    with contextlib.ExitStack() as changed:

        def change(owner: Any, name: str, value: object) -> None:
            changed.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        with contextlib.suppress(RuntimeError):  # it was set by torch's newer interface, which refuses to be mixed
            change(cudnn, "allow_tf32", False)
        if not hasattr(cuda, "fp32_precision"):  # a torch without the newer interface
            change(cuda, "allow_tf32", False)
        else:
            for owner in (cuda, cudnn.conv, mkldnn.matmul, mkldnn.conv):
                if owner.fp32_precision in ("tf32", "bf16"):  # perhaps from a setting for all backends
                    change(owner, "fp32_precision", "ieee")
        yield

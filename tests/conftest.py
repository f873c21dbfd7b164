"""What every test stands on: nothing outside its own folders, no network, and factories for tiny model families."""

from __future__ import annotations

import gc
import importlib.util
import logging
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch, transformers and huggingface_hub read them; subprocesses inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
# On tensors as small as these, threads only wait for each other.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["LOGNAME"] = f"user{os.getuid()}"  # in the names of folders, where mergekit takes names apart at @ and +

import pytest

# The process that hands tests out to workers needs none of the libraries, so the fixtures import them.
if TYPE_CHECKING:
    from support.families import Family
    from transformers import PreTrainedTokenizerBase

IN_MEMORY = Path("/dev/shm")
# A user's and a cluster's settings, which are for other commands; the stand-in for the Hub is on this machine.
OTHERS = ("http_proxy", "https_proxy", "all_proxy", "world_size", "rank", "local_rank", "mergekit_slta_disable")
ROOT = Path(__file__).resolve().parents[1]
ROOM = 4 * 2**30  # bytes; the suite takes a tenth of it

MakeFamily = Callable[..., "Family"]
WriteRecipe = Callable[..., Path]


def pytest_configure() -> None:
    """Put the tests' folders into memory where that has room: they write many small models, each file synced."""
    package = importlib.util.find_spec("mergekit_slta")
    if package is None or package.origin is None or Path(package.origin).resolve().parents[1] != ROOT:
        pytest.exit("The installed mergekit_slta is not this checkout's: pip install -e . here.", 1)
    for variable in (*OTHERS, *map(str.upper, OTHERS)):
        os.environ.pop(variable, None)
    if IN_MEMORY.is_dir():
        system = os.statvfs(IN_MEMORY)
        free, may_run = system.f_bavail * system.f_frsize, not system.f_flag & os.ST_NOEXEC
        if free > ROOM and may_run and os.access(IN_MEMORY, os.W_OK):
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from the modules' many objects, which it would look through again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of an earlier test: no models in the loader, no silenced log, no random numbers drawn."""
    import torch
    import transformers
    from mergekit.io.tasks import LoaderCache

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    LoaderCache.loaders.clear()
    torch.manual_seed(0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # or checks would note that it is not used
    logging.getLogger("mergekit_slta").setLevel(logging.NOTSET)


@pytest.fixture
def make_family(tmp_path_factory: pytest.TempPathFactory) -> MakeFamily:
    """``families.make_family`` in a new folder; a test may change what it made."""
    from support import families

    def make(*args: Any, **kwargs: Any) -> Family:
        return families.make_family(tmp_path_factory.mktemp("family"), *args, **kwargs)

    return make


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A float32 Llama with grouped heads and three experts, shared by all tests: not to be changed."""
    from support import families

    return families.make_family(tmp_path_factory.mktemp("llama"), experts=3)


@pytest.fixture
def family(llama: Family, tmp_path: Path) -> Family:
    """A family that a test may change."""
    from support.families import Family

    root = Path(shutil.copytree(llama.base.parent, tmp_path / "models"))
    experts, data = (tuple(root / path.name for path in paths) for paths in (llama.experts, llama.data))
    return Family(root / "base", experts, data, llama.config)


@pytest.fixture(scope="session")
def forks() -> ForkServerContext:
    """Processes forked from one that has imported everything but computed nothing, so that each starts at once."""
    context = multiprocessing.get_context("forkserver")
    commands = ("mergekit.scripts.run_yaml", "mergekit_slta.cli.commands", "mergekit_slta.checks.examine")
    context.set_forkserver_preload(
        ["pytest", "support.families", "transformers.models.llama.modeling_llama", *commands]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the preload knows no other
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # glibc gives back what is freed, so memory can be measured
        forkserver.ensure_running()
    return context


@pytest.fixture
def write_recipe(tmp_path: Path) -> WriteRecipe:
    """``families.recipe`` written to ``recipe.yml`` in the test's folder."""
    from support import families

    def write(family: Family, method: str = "slta", name: str = "recipe.yml", **arguments: Any) -> Path:
        return families.write_recipe(tmp_path / name, families.recipe(family, method, **arguments))

    return write


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """``calibration_samples.write_tokenizer`` without a chat template."""
    from support import calibration_samples

    return calibration_samples.write_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def dataset_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own for what ``datasets`` loads."""
    import datasets  # slow to import

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths start there

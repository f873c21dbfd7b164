"""Large inputs take bounded time and memory; the figures are in docs/robustness.md.

Run by name, because they take minutes: ``pytest -m slow -n 0 -s tests/test_load.py``. Times are the processor's, which
other work on the machine does not change.
"""

from __future__ import annotations

import itertools
import json
import time
import tracemalloc
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from support import synthetic
from support.calibration_samples import write_tokenizer
from support.memory import PeakMemory

from mergekit_slta.data.draw import CalibrationSource
from mergekit_slta.data.sources import read_records
from mergekit_slta.errors import SltaError
from mergekit_slta.slta.statistics import Statistics

MB = 10**6


LARGE = [(10_000, 200), (100_000, 2000), (1_000_000, 20), (1, 10 * MB), (1, 100 * MB)]
# A million records in each other format; the bytes of more memory for each byte of the file. A .json file is one value,
# which is read whole.
OTHER_FORMATS = {".csv": 6, ".txt": 6, ".parquet": 12, ".json": 25}


def source(path: Path, folder: Path, max_tokens: int = 512) -> CalibrationSource:
    tokenizer = write_tokenizer(folder / "tokenizer")
    return CalibrationSource(str(path), "", tokenizer, lambda: tokenizer, max_tokens, 0)


def write_lines(path: Path, count: int, size: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"text": f"{number} " + "abcd " * (size // 5)}) + "\n")
    return path


def test_records_are_read_when_they_are_used(tmp_path: Path) -> None:
    """What is kept of a file of JSON lines is the place of each line."""
    path = write_lines(tmp_path / "a.jsonl", 2000, 2000)
    tracemalloc.start()
    records = read_records(str(path))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < path.stat().st_size / 20
    assert len(records) == 2000
    assert records[1234]["text"].startswith("1234 ")
    assert [record["text"].split()[0] for record in records] == list(map(str, range(2000)))


def test_a_long_text_is_tokenized_as_far_as_it_is_kept(tmp_path: Path) -> None:
    text = "".join(chr(97 + (i * i) % 26) for i in range(200_000))
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n")
    drawn = source(path, tmp_path, max_tokens=100).draw(1)
    tokenizer = write_tokenizer(tmp_path / "whole")
    whole = tokenizer(text, padding=False, truncation=False)["input_ids"]
    assert drawn.token_ids == (tuple(whole[:100]),)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "size"), LARGE)
def test_large_files_of_records(count: int, size: int, tmp_path: Path) -> None:
    """10,000 records, 200 MB, a million records, a line of 10 MB and one of 100 MB."""
    path = write_lines(tmp_path / "a.jsonl", count, size)
    grown = draw_samples(path, min(count, 30), tmp_path)
    assert grown < 100 + (0 if count > 1 else 8 * size / MB)


@pytest.mark.slow
@pytest.mark.parametrize("extension", OTHER_FORMATS)
def test_a_million_records_in_every_other_format(extension: str, tmp_path: Path) -> None:
    texts = [f"{number} abcd abcd abcd" for number in range(MB)]
    path = tmp_path / f"a{extension}"
    if extension == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    elif extension == ".json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    else:
        path.write_text("\n".join(["text", *texts]) + "\n")
    del texts
    assert draw_samples(path, 30, tmp_path) < 100 + OTHER_FORMATS[extension] * path.stat().st_size / MB


def draw_samples(path: Path, samples: int, folder: Path) -> float:
    """Draw samples of a file, and print and return by how many MB the memory grew."""
    drawing = source(path, folder)
    begin = time.process_time()
    with PeakMemory() as peak:
        drawn = drawing.draw(samples)
    seconds, grown = time.process_time() - begin, peak.bytes / MB
    print(f"{path.suffix} of {path.stat().st_size / MB:.1f} MB: {seconds:.1f} s, {grown:.0f} MB more memory")
    assert len(drawn.token_ids) == samples
    return grown


def test_a_number_of_layers_fills_no_memory(tmp_path: Path) -> None:
    """What a published file says of itself is not counted up to."""
    found = synthetic.statistics(["org/a", "org/b"], ["layer"], layers=2)
    info = found.info.model_copy(update={"num_layers": 2**40})
    Statistics(found.grams, found.task, found.tokens, info).save(tmp_path / "stats.safetensors")
    with pytest.raises(SltaError, match="does not cover the 1099511627776 layers"):
        Statistics.load(tmp_path / "stats.safetensors")


@pytest.mark.parametrize("name", ["layer.0s", "layer.²", "layer.1.x.12345678901", f"layer.{'9' * 5000}", "layer.", ""])
def test_a_submodule_with_an_odd_name_is_refused(name: str, tmp_path: Path) -> None:
    found = synthetic.statistics(["org/a", "org/b"], ["layer"], layers=2)
    grams = {**found.grams, name: next(iter(found.grams.values())).clone()}
    Statistics(grams, found.task, found.tokens, found.info).save(tmp_path / "stats.safetensors")
    with pytest.raises(SltaError, match="is not the name of a submodule"):
        Statistics.load(tmp_path / "stats.safetensors")


@pytest.mark.slow
def test_many_experts(tmp_path: Path) -> None:
    found = synthetic.statistics([f"org/e{index}" for index in range(100)], ["attn_mlp"], layers=32, samples=2)
    measure("100 experts, 32 layers, attn_mlp", found, "attn_mlp", tmp_path)


@pytest.mark.slow
def test_many_submodules(tmp_path: Path) -> None:
    found = synthetic.statistics([f"org/e{index}" for index in range(8)], ["linear"], layers=40, samples=300)
    measure("8 experts, 40 layers, 300 samples each, linear", found, "linear", tmp_path)


def measure(name: str, found: Statistics, level: str, folder: Path) -> None:
    """Save, load, solve and report, and print what it takes."""
    torch.set_num_threads(1)
    found.save(folder / "stats.safetensors")
    size = (folder / "stats.safetensors").stat().st_size / MB
    times = [time.process_time()]
    with PeakMemory() as memory:
        loaded = Statistics.load(folder / "stats.safetensors")
        times.append(time.process_time())
        solution = loaded.solve(level)
        times.append(time.process_time())
        solution.report(folder / "report")
        times.append(time.process_time())
    load, solve, report = (later - earlier for earlier, later in itertools.pairwise(times))
    peak = memory.bytes / MB
    print(f"{name}: {size:.0f} MB; load {load:.0f} s, solve {solve:.0f} s, report {report:.0f} s; peak {peak:.0f} MB")
    assert all(alpha.isfinite().all() for alpha in solution.alpha.values())
    assert peak < 2000 + 8 * size

"""Check, measure, solve, merge and evaluate the quickstart's family from Python.

Run it after the quickstart, with the quickstart's output folder:

    python examples/python_api.py quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path

import mergekit_slta as slta


def main(folder: Path) -> None:
    """Merge the family in ``folder/family``; everything that is written goes to ``folder/python``."""
    family, out = folder / "family", folder / "python"
    files = sorted((family / "calibration").glob("*.jsonl"))
    recipe = slta.Recipe(
        {
            "merge_method": "slta",
            "base_model": family / "base",
            "models": [{"model": family / file.stem, "parameters": {"calibration": file}} for file in files],
            "parameters": {"level": "attn_mlp"},
            "dtype": "float32",
        }
    )

    # What is wrong with the recipe, from configurations, file headers and data alone.
    print(slta.check(recipe))

    # The measurement is all that the rest needs: a small file without weights and without data.
    statistics = slta.measure(recipe, levels=["layer", "attn_mlp"])
    statistics = slta.Statistics.load(statistics.save(out / "merge.slta.safetensors"))
    print(statistics)

    # The merging weights of all experts, and how sure they are.
    solution = statistics.solve("attn_mlp")
    print(solution)
    print(solution.bootstrap(200).table())
    (out / "solution.json").write_text(solution.to_json())

    # Another merge from the same measurement: two of the experts, the first of them counting twice.
    first, second, *_ = statistics.info.models
    pair = statistics.select(first, second).solve("layer", ridge=0.01, task_weights={first: 2})
    print(pair)

    # The same numbers as a figure.
    solution.plot().savefig(out / "alpha.png")

    # A recipe that mergekit runs without this package, and a page with figures.
    names = [statistics.info.base_model, *statistics.info.models]
    paths = {name: str(family / Path(name).name) for name in names}
    plain = solution.save_recipe(out / "plain.yml", models=paths)
    print(plain, slta.report(solution, out / "report"), sep="\n")

    # The merge itself, with the weights that were solved, and what it keeps of each expert's skill.
    merged = slta.merge(plain, out / "merged")
    print(slta.evaluate(recipe, merged, samples=20))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

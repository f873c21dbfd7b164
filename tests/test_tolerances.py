"""The tests of the tests: a tolerance comes from ``support/rounding.py``, not from what one machine gave."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
# What compares floats, and which tolerances each has: those that a call leaves out would be literals of the library's.
BOTH = {"rtol", "atol"}
NEEDED = {"pytest.approx": {"abs"}, "torch.allclose": BOTH, "torch.isclose": BOTH, "torch.testing.assert_close": BOTH}
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def observed(source: str) -> Iterator[int]:
    """The lines of comparisons that take a tolerance such as ``1e-6``, also by a name, or the default of a library."""
    tree = ast.parse(source)

    def literal(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in named
        small = isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < 0.1
        return small and "e-" in (ast.get_source_segment(source, node) or "")

    named: set[str] = set()
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    named |= {ast.unparse(node.targets[0]) for node in assigned if any(map(literal, ast.walk(node.value)))}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.expr)):
        given: list[ast.expr] = []
        if isinstance(node, ast.Compare) and any(isinstance(op, ORDERED) for op in node.ops):
            given = [node.left, *node.comparators]
        elif isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {word.arg for word in node.keywords}
            compares = any(word in name for word in ("approx", "close", "same", "near"))
            given = [*node.args[1:], *(word.value for word in node.keywords)] if compares else []
            if name in NEEDED and not NEEDED[name] <= keywords and "rel" not in keywords:
                yield node.lineno
        if any(literal(inner) for argument in given for inner in ast.walk(argument)):
            yield node.lineno


def test_every_comparison_of_floats_takes_its_tolerance_from_a_rule() -> None:
    files = [path for path in TESTS.rglob("*.py") if "benchmarks" not in path.parts]
    lines = [f"{path.relative_to(TESTS)}:{line}" for path in files for line in observed(path.read_text("utf-8"))]
    for compared in ("error < 1e-6", "x == pytest.approx(y)", "torch.allclose(x, y, rtol=0)"):
        assert list(observed(f"assert {compared}")) == [1]
    assert not lines, f"take the tolerances of {', '.join(sorted(lines))} from tests/support/rounding.py"

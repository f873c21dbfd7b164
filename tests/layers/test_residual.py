"""The residual stream that remembers its summands: its value is always their sum, or it has none."""

from collections.abc import Callable

import pytest
import torch

from mergekit_slta.layers.residual import INPUT, ResidualStream, Term, plain, sources

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def stream(name: str, seed: int) -> ResidualStream:
    value = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    return ResidualStream.of(value, (Term(name, value),))


def add_in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += b
    return a


def scaled_in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total = a + b
    total *= 3.0
    return total


SUMS: dict[str, Operation] = {
    "add": lambda a, b: a + b,
    "torch.add": torch.add,
    "method": lambda a, b: a.add(b),
    "in place": add_in_place,
    "scaled": lambda a, b: a + b * 0.25,
    "scaled from the left": lambda a, b: 2 * a + 3.0 * b,
    "scaled by torch.mul": lambda a, b: torch.mul(a, 2) + torch.mul(0.5, b),
    "dropout": lambda a, b: a + torch.nn.functional.dropout(b, 0.5, False),
    "dropout by name": lambda a, b: a + torch.nn.functional.dropout(b, p=0.5, training=False),
    "same values": lambda a, b: a.contiguous() + b.clone().float(),
    "scaled by a tensor": lambda a, b: a * torch.tensor(2.0) + b / torch.arange(1.0, 5.0),
    "scaled in place": scaled_in_place,
    "part": lambda a, b: (a + b)[:, :1],
    "reshaped": lambda a, b: a.view(6, 4) + b.reshape(-1, 4),
    "turned": lambda a, b: (a + b).transpose(0, 1).unsqueeze(0),
}

OTHERS: dict[str, Operation] = {
    "product": lambda a, b: a * b,
    "difference": lambda a, b: a - b,
    "plain tensor added": lambda a, b: a + torch.ones(4),
    "number added": lambda a, b: a + 1.0,
    "weighted sum": lambda a, b: torch.add(a, b, alpha=2),
    "dropout in training": lambda a, b: torch.nn.functional.dropout(a, 0.5, True),
    "norm": lambda a, b: torch.nn.functional.layer_norm(a, (4,)),
    "mean": lambda a, b: a.mean(-1, keepdim=True),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_known_by_its_terms(name: str) -> None:
    expected = SUMS[name](plain(stream(INPUT, 0)).clone(), plain(stream("attn", 1)).clone())
    result = SUMS[name](stream(INPUT, 0), stream("attn", 1))
    assert torch.equal(plain(result), expected)
    assert isinstance(result, ResidualStream)
    assert sources(result) == {INPUT, "attn"}
    assert result.terms is not None
    assert torch.allclose(torch.stack([term.value for term in result.terms]).sum(0), expected, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_knows_only_what_it_was_made_from(name: str) -> None:
    torch.manual_seed(0)
    result = OTHERS[name](stream(INPUT, 0), stream("attn", 1))
    torch.manual_seed(0)
    assert isinstance(result, ResidualStream) and result.terms is None
    assert {INPUT} <= sources(result) <= {INPUT, "attn"}
    assert torch.equal(plain(result), OTHERS[name](plain(stream(INPUT, 0)), plain(stream("attn", 1))))


def test_adding_in_place_changes_no_branchs_own_value() -> None:
    branch, other = stream("mlp", 0), stream("attn", 1)
    before = plain(branch).clone()
    total = add_in_place(branch, other)
    assert isinstance(total, ResidualStream)
    assert total.terms is not None
    assert torch.equal(total.terms[0].value, before)


def test_changing_a_part_in_place_leaves_what_it_was_made_from_alone() -> None:
    whole, other = stream(INPUT, 0), stream("mlp", 1)
    before = plain(whole).clone()
    assert whole.terms is not None
    summand = whole.terms[0].value
    whole[1:] += other[1:]
    assert sources(whole) == {INPUT, "mlp"} and whole.terms is None
    assert torch.equal(plain(whole)[1:], before[1:] + plain(other)[1:])
    assert torch.equal(summand, before)

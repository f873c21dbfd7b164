"""Which maps correct what the maps before them have missed; ``featcal_reference.WRITERS`` has more."""

from __future__ import annotations

import pytest
from support import families

from mergekit_slta.featcal.groups import groups_by_layer
from mergekit_slta.featcal.writers import Writer
from mergekit_slta.layers.decoder import INPUT


@pytest.mark.parametrize(
    ("architecture", "writers"),
    [
        ("gemma2", {}),  # a norm is behind each branch
        ("cohere", {"mlp.down_proj": Writer(1.0, {INPUT: 1.0, "self_attn": 1.0})}),  # beside the attention
        (
            "granite_moe_hybrid",  # its configuration multiplies every branch
            {
                "mamba.out_proj": Writer(0.4, {INPUT: 1.0}),
                "shared_mlp.output_linear": Writer(0.4, {INPUT: 1.0, "mamba": 0.4, "block_sparse_moe": 0.4}),
            },
        ),
        ("mixtral", {"self_attn.o_proj": Writer(1.0, {INPUT: 1.0})}),  # a router weighs the routed experts' outputs
    ],
)
def test_maps_that_add_a_constant_times_their_output_are_writers(architecture: str, writers: dict[str, Writer]) -> None:
    found = groups_by_layer(families.skeleton(architecture))[-1].writers
    assert found.keys() == writers.keys()
    for module, writer in writers.items():
        assert found[module].factor == pytest.approx(writer.factor)
        assert found[module].before == pytest.approx(writer.before)

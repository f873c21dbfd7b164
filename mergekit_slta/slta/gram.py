"""Per-sample Gram matrices of feature deltas: all that calibration keeps of a forward pass.

Shapes: ``T`` experts, ``B`` samples in a batch, ``S`` positions (right-padded), ``D`` feature dimensions.
"""

from collections.abc import Sequence

import torch

# Elements of the features that are multiplied at once on a processor, whose cache holds their copies in float64 too.
MULTIPLIED = 2**17


def sample_grams(deltas: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """Inner products of the experts' feature deltas, one matrix per sample (the sum in Eq. 14 of arXiv 2504.10902).

    Each sample is reduced alone and without its padding, so that neither the other samples nor the padding can change
    its matrix.

    Args:
        deltas: ``T`` tensors of shape [B, S, D], the feature delta of each expert.
        lengths: the number of tokens of each sample, ``B`` in all.

    Returns:
        [B, T, T] float64 on the CPU, exactly symmetric.
    """
    grams = []
    for row, length in enumerate(lengths):
        total = torch.zeros(len(deltas), len(deltas), dtype=torch.float64, device=deltas[0].device)
        whole = [delta[row, :length].reshape(-1) for delta in deltas]
        size = MULTIPLIED // len(whole) if total.device.type == "cpu" else whole[0].numel()
        for parts in zip(*(delta.split(size) for delta in whole), strict=True):
            features = torch.stack(parts).double()
            total += features @ features.T
        grams.append(total)
    products = torch.stack(grams).cpu()
    return (products + products.mT) / 2

"""The merge methods of this package."""

from __future__ import annotations

from mergekit import merge_methods

from mergekit_slta.host.actmat import ActmatMerge
from mergekit_slta.host.featcal import FeatcalMerge
from mergekit_slta.host.method import Merge, Method
from mergekit_slta.host.sftm import SftmMerge
from mergekit_slta.host.slta import SltaMerge

# A new merge method is entered here.
MERGES: tuple[type[Merge], ...] = (SltaMerge, FeatcalMerge, ActmatMerge, SftmMerge)
METHODS = {kind.spec.name: Method(kind) for kind in MERGES}


def register() -> None:
    """Make the merge methods known to mergekit; a second call changes nothing."""
    known = {method.spec.name for method in merge_methods.registered_methods()}
    for name, method in METHODS.items():
        if name not in known:
            merge_methods.register(method)

"""Registers the merge methods as soon as a program imports mergekit's.

mergekit has no plugin discovery and takes seconds to import, so ``mergekit_slta.pth``, at the root of site-packages,
calls `install` at every start of Python, and `install` only puts a finder in front of ``sys.meta_path``. The finder
waits for ``mergekit.merge_methods``, lets it execute, removes itself and registers. As every start of Python runs this
file, it imports nothing but ``sys`` until mergekit is there.
"""

import sys

TYPE_CHECKING = False  # a type checker takes the name for true; importing it from typing would cost every start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

HOST = "mergekit.merge_methods"


def install() -> None:
    """Register with mergekit: at once when its merge methods are imported already, else as soon as they are."""
    if HOST in sys.modules:
        register()
    elif not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, HostFinder())


def register() -> None:
    """Register the merge methods; a failure is one RuntimeWarning, because mergekit's own methods do not need ours."""
    try:
        from mergekit_slta.methods import register as register_methods

        register_methods()
    except Exception as error:
        from warnings import warn

        warn(
            f"mergekit-slta could not register its merge methods ({type(error).__name__}: {error}); "
            "`python -c 'import mergekit_slta.methods as m; m.register()'` shows where it fails",
            RuntimeWarning,
            stacklevel=2,
        )


class HostFinder:
    """Finds the host module as the other finders do and has a `HostLoader` load it."""

    def __init__(self) -> None:
        self.asking: set[int] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the host's spec, and None for every other module (the protocol of ``sys.meta_path``)."""
        if name != HOST:
            return None
        from threading import get_ident

        # Another finder may ask all finders in its turn, this one included: then it is that finder's to answer.
        thread = get_ident()
        if thread in self.asking:
            return None
        self.asking.add(thread)
        try:
            spec = self.ask_others(name, path, target)
        finally:
            self.asking.discard(thread)
        # Without exec_module (loaders from before PEP 451) there is no moment to wait for.
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = HostLoader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def ask_others(self, name: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "ModuleSpec | None":
        """Return the first spec that another finder has for the module."""
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is not self and find_spec is not None and (spec := find_spec(name, path, target)) is not None:
                return spec
        return None


class HostLoader:
    """Executes the host module by its own loader and registers when that has succeeded."""

    def __init__(self, loader: "Any", finder: HostFinder) -> None:
        self.loader = loader
        self.finder = finder

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Execute the module, remove the finder, register.

        The finder goes this late because a bare ``find_spec`` must not use it up, and a failed import may be repeated.
        """
        # Whoever asks the module for its loader from here on (reload, resources, source) gets its own.
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        register()

"""Makes the merge methods known as soon as a program imports mergekit.

mergekit has no plugin discovery and takes seconds to import, so ``mergekit_slta.pth``, at the root of site-packages,
calls `install` at every start of Python, and `install` only puts a finder in front of ``sys.meta_path``. The finder
waits for the modules of mergekit that `HOOKS` names, lets each execute, calls its hook, and goes with the last one. As
every start of Python runs this file, it imports nothing but ``sys`` until mergekit is there.
"""

import sys

TYPE_CHECKING = False  # a type checker takes the name for true; importing it from typing would cost every start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Host module -> the function of methods/registry.py to call once it is imported. mergekit.plan is a host of its own
# because it imports mergekit.merge_methods and is not complete yet when that is.
HOOKS = {"mergekit.merge_methods": "register", "mergekit.plan": "watch_planner"}


def install() -> None:
    """Call the hooks of imported hosts now, and those of the others when they are imported."""
    if any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        return
    finder = HostFinder()
    sys.meta_path.insert(0, finder)
    for host in [host for host in HOOKS if host in sys.modules]:
        finder.imported(host)


def call(hook: str) -> bool:
    """Call a hook; a failure is one RuntimeWarning and False, because mergekit's own methods do not need ours."""
    if importing_this_package():  # its modules are not complete yet; mergekit.plan comes later and registers too
        return True
    try:
        from mergekit_slta.methods import registry

        getattr(registry, hook)()
    except Exception as error:
        from warnings import warn

        warn(
            f"mergekit-slta does not work here, mergekit's own merge methods do ({type(error).__name__}: {error}); "
            f"`python -c 'import mergekit_slta.methods.registry as m; m.{hook}()'` shows where it fails",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def importing_this_package() -> bool:
    """Whether the import of the host is part of the import of one of this package's own modules."""
    return any(
        name.startswith("mergekit_slta.") and getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
    )


class HostFinder:
    """Finds the hosts as the other finders do and has a `HostLoader` load them."""

    def __init__(self) -> None:
        self.waiting = dict(HOOKS)
        self.asking: set[int] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return a host's spec, and None for every other module (the protocol of ``sys.meta_path``)."""
        if name not in self.waiting:
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

    def imported(self, host: str) -> None:
        """Call the host's hook once; leave ``sys.meta_path`` when no host is left, or when the hook failed."""
        hook = self.waiting.pop(host, None)
        if hook is not None and not call(hook):
            self.waiting.clear()
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


class HostLoader:
    """Executes a host by its own loader and tells the finder when that has succeeded."""

    def __init__(self, loader: "Any", finder: HostFinder) -> None:
        self.loader = loader
        self.finder = finder

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Execute the module; only then is it no longer waited for.

        A bare ``find_spec`` must not use the finder up, and a failed import may be repeated.
        """
        # From here on the module shows its own loader, for reload, resources and source.
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.finder.imported(module.__name__)

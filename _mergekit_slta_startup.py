"""Makes the merge methods known as soon as a program imports mergekit.

mergekit has no plugin discovery. So Python runs ``mergekit_slta.pth``, at the root of site-packages, at every start.
That calls `install`, which puts a finder in front of ``sys.meta_path``. The finder waits until a program imports one of
mergekit's modules that `HOOKS` names, lets Python execute the module, and calls the hook; after the last hook it
removes itself. Because every start of Python runs this file, it imports only ``sys``, which Python has got by then. It
is no part of the package: at a start the current folder is not on the search path yet, so an import of the package
would take the installed one where another checkout is meant. With ``MERGEKIT_SLTA_DISABLE=1`` in the environment the
start-up line does not import it.
"""

import sys

TYPE_CHECKING = False  # type checkers treat this name as true; importing typing would slow every start of Python
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# By module of mergekit, a host: the function to call when the host is imported. mergekit.merge imports
# mergekit.merge_methods, so mergekit.merge is still incomplete when the first hook is called: it needs its own.
HOOKS = {
    "mergekit.merge_methods": "mergekit_slta.host.run.register",
    "mergekit.merge": "mergekit_slta.host.patches.install",
}


def install() -> None:
    """Call the hooks of hosts that are imported already, and have a finder call the others later."""
    if any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        return
    finder = HostFinder()
    sys.meta_path.insert(0, finder)
    for host in [host for host in HOOKS if host in sys.modules]:
        finder.imported(host)


def call(hook: str) -> bool:
    """Call a hook and return whether it worked; a failure is only a warning, because mergekit works without us."""
    if importing_this_package():  # this package is incomplete now; that of mergekit.merge registers the methods too
        return True
    try:
        from importlib import import_module

        module, _, function = hook.rpartition(".")
        getattr(import_module(module), function)()
    except Exception as error:
        from warnings import warn

        warn(
            f"mergekit-slta does not work here, mergekit's own merge methods do ({type(error).__name__}: {error}); "
            f"`python -c 'import {module} as m; m.{function}()'` shows where it fails",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def importing_this_package() -> bool:
    """Whether a module of this package is being imported, and has imported the host."""
    return any(
        name.startswith("mergekit_slta.") and getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in list(sys.modules.items())
    )


class HostFinder:
    """Finds a host as Python does, and has its loader call the hook once the host has been executed.

    Not before: a program may only look for a module's spec, or import it again after an import that failed.
    """

    def __init__(self) -> None:
        self.waiting = dict(HOOKS)

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return a host's spec, and None for every other module (the protocol of ``sys.meta_path``)."""
        if name not in self.waiting:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: "ModuleType") -> None:
                del loader.exec_module  # reload, importlib.resources and inspect need the loader as it was
                execute(module)
                self.imported(name)

            loader.exec_module = exec_module
        return spec

    def imported(self, host: str) -> None:
        """Call the host's hook once; leave ``sys.meta_path`` when no host is left, or when the hook failed."""
        hook = self.waiting.pop(host, None)
        if hook is not None and not call(hook):
            self.waiting.clear()
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)

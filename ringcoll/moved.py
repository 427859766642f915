"""Deprecated names of modules, from before the package had folders.

`import ringcoll.schedule` still works: it warns, and gives `ringcoll.schedules.schedule` itself.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

#: The old names of modules, and their new names.
MOVED = MappingProxyType(
    {
        "all_reduces": "collectives.all_reduce",
        "all_to_alls": "collectives.all_to_all",
        "arguments": "commands.arguments",
        "axes": "collectives.axes",
        "bounds": "io.bounds",
        "broadcasts": "collectives.broadcast",
        "built_in": "runtime.built_in",
        "calls": "collectives.front_door",
        "choice": "collectives.choice",
        "engine": "runtime.engine",
        "factors": "matmuls.checks",
        "figure": "io.figure",
        "files": "io.files",
        "forms": "matmuls.forms",
        "formulas": "costs.closed_forms",
        "gathers": "collectives.all_gather",
        "hosts": "runtime.hosts",
        "how": "matmuls.options",
        "labels": "matmuls.labels",
        "listing": "schedules.registry",
        "loops_on_cpu": "runtime.cpu.loops",
        "manual": "runtime.value_types",
        "marks": "runtime.progress",
        "matmul_cost": "costs.matmul",
        "messages": "runtime.contributions",
        "order": "runtime.barriers",
        "permutes": "collectives.permute",
        "phases": "schedules.phases",
        "pieces": "runtime.slicing",
        "primitive": "runtime.primitive",
        "products": "matmuls.overlapped",
        "quickest": "matmuls.auto",
        "refusals": "collectives.refusals",
        "routing": "costs.routes",
        "schedule": "schedules.schedule",
        "scheduled": "collectives.by_schedule",
        "sharded": "matmuls.sharded",
        "slices": "costs.slices",
        "strict": "io.strict_json",
        "table": "collectives.table",
        "text": "io.text",
        "turns": "runtime.turns",
        "visitors": "collectives.placing",
        "wire": "runtime.hop",
    }
)


class _Moved(MetaPathFinder, Loader):
    """Finds a module by its old name, if Python has found no module of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == __package__ and name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = f"{__package__}.{MOVED[old.rpartition('.')[2]]}"
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)  # `import` returns what is here afterwards


def serve() -> None:
    """Make the old names importable. A second call changes nothing."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())

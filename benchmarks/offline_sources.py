"""The kernels that the package launches, and a hash of the code that each depends on. Nothing is imported."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "halflife"
KERNELS = "halflife.ops.backends.triton."  # where they are; the names of kernels leave it out

Place = tuple[str, str]  # name of a module, name of a function or constant


class _Modules:
    """The functions and constants of all files with kernels, and what they name."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.defined: dict[Place, ast.stmt] = {}
        self.text = {module: text.splitlines() for module, text in texts.items()}
        self.imported: dict[Place, Place] = {}
        for module, text in texts.items():
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self.defined[module, node.name] = node
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    goals = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = [n.id for goal in goals for n in ast.walk(goal) if isinstance(n, ast.Name)]
                    self.defined |= {(module, name): node for name in names}
                elif isinstance(node, ast.ImportFrom) and node.module in texts:
                    self.imported |= {(module, a.asname or a.name): (node.module, a.name) for a in node.names}

    def used(self, place: Place) -> set[Place]:
        """What a definition names, of this package."""
        names = {n.id for n in ast.walk(self.defined[place]) if isinstance(n, ast.Name)} - {place[1]}
        places = {self.imported.get((place[0], name), (place[0], name)) for name in names}
        return places & self.defined.keys()

    @functools.cached_property
    def uses(self) -> dict[Place, set[Place]]:
        """`used` of all definitions."""
        return {place: self.used(place) for place in self.defined}

    def launches(self, place: Place) -> set[Place]:
        """The kernels that a function launches: `launch(kernel, grid)`."""
        calls = [n for n in ast.walk(self.defined[place]) if isinstance(n, ast.Call) and n.args]
        names = {n.args[0].id for n in calls if ast.unparse(n.func) == "launch" and isinstance(n.args[0], ast.Name)}
        places = {self.imported.get((place[0], name), (place[0], name)) for name in names}
        return {at for at in places & self.defined.keys() if "jit" in _decorators(self.defined[at])}

    def hosts_of(self, launchers: set[Place]) -> set[Place]:
        """Functions that launch a kernel, those that call them, and what all of them read, without code of kernels.

        The tiles of a kernel may be chosen far from its launch.
        """
        hosts = {place for place, node in self.defined.items() if "jit" not in _decorators(node)}
        used = {place: self.uses[place] & hosts for place in hosts}
        users: dict[Place, set[Place]] = {}
        for place, names in used.items():
            for name in names:
                users.setdefault(name, set()).add(place)
        return closure(closure(launchers, users), used)


def closure(starts: set[Place], edges: dict[Place, set[Place]]) -> set[Place]:
    """What can be reached from some definitions."""
    found, waiting = set(starts), list(starts)
    while waiting:
        new = edges.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _decorators(node: ast.stmt) -> str:
    return " ".join(ast.unparse(x) for x in getattr(node, "decorator_list", []))


def _code(text: list[str], node: ast.stmt) -> str:
    """The code of a definition in the lines `text`, without comments, layout and documentation."""
    first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
    lines = {n: text[n - 1] for n in range(first, (node.end_lineno or first) + 1)}
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
        head = node.body[0]
        for n in range(head.lineno, (head.end_lineno or head.lineno) + 1):
            del lines[n]
    return "".join(re.sub(r"#.*|\s", "", line) for line in lines.values())


def name_of(module: str, function: str) -> str:
    """ "delta.gradients.gradients_kernel": a kernel by its module and function."""
    return f"{module.removeprefix(KERNELS)}.{function}"


def sources(package: Path = PACKAGE, hosts: bool = True) -> dict[str, str]:
    """Each kernel (`name_of`) → a hash of its code, of what it calls, and of the host code that leads to its launch."""
    texts = {
        ".".join(file.relative_to(package.parent).with_suffix("").parts): file.read_text(encoding="utf-8")
        for file in sorted(package.rglob("*.py"))
    }
    modules = _Modules({module: text for module, text in texts.items() if "import triton" in text})
    launchers: dict[Place, set[Place]] = {}
    for place, node in modules.defined.items():
        if isinstance(node, ast.FunctionDef):
            for kernel in modules.launches(place):
                launchers.setdefault(kernel, set()).add(place)
    hashes = {}
    for kernel, places in sorted(launchers.items()):
        depends = closure({kernel}, modules.uses) | (modules.hosts_of(places) if hosts else set())
        text = "\n".join(_code(modules.text[place[0]], modules.defined[place]) for place in sorted(depends))
        hashes[name_of(*kernel)] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return hashes

"""The floors of the package, from the imports in its files; the sizes of folders and files; the cost of an import."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent / "halflife"

# Floors from the lowest to the highest. A part may import lower floors and the parts named beside it.
FLOORS = (
    ("shapes", "registry", "files", "initial", "precision", "packing", "extras", "extensions"),
    ("ops", "position", "tasks"),
    ("decay",),
    ("layers",),
    ("models",),
    ("data", "hf", "evaluation", "parallel"),
    ("training", "serve", "export"),
    ("analysis",),
    ("runs",),
    ("report",),
    ("lab",),
    ("cli",),
)
ROOMY = 16  # files in a folder
LONG = 330  # lines in a file
LAZY = ("triton", "fla", "transformers", "datasets", "ray", "lm_eval", "matplotlib", "safetensors", "scipy")
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


NAMES = {name_of(path): path for path in MODULES}
# The files of kernels are imported when one of their kernels is needed.
KERNELS = [p for p in MODULES if "triton" in p.parent.relative_to(ROOT).parts and p.name != "__init__.py"]
LIGHT = {"__init__", *(name for floor in FLOORS[:7] for name in floor)} - {"hf", "training"}
CORE = [p for p in MODULES if part_of(p) in LIGHT and p not in KERNELS]


@cache
def allowed(part):
    if part == "__init__":
        return {"decay", "extensions", "extras", "layers", "models", "ops", "tasks"}
    rank = next(i for i, floor in enumerate(FLOORS) if part in floor)
    return {name for floor in FLOORS[:rank] for name in floor} | {part} | (set(FLOORS[0]) if rank == 0 else set())


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def imports(path, top_level_only=False):
    """The modules that a file imports. `from a import b` gives `a.b` if this is a module, and otherwise `a`."""
    tree, found = tree_of(path), []
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name in NAMES or node.module == "halflife" else node.module for name in names]
    return found


def circles(arrows):
    """Return groups of names that reach each other (Tarjan's strongly connected components, without single names)."""
    index, low, stack, found = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in arrows[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in arrows:
        if name not in index:
            visit(name)
    return found


def test_imports_only_what_stands_below():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in MODULES
        for name in imports(path)
        # Every part may import the version from the package itself.
        if name.startswith("halflife.") and name.split(".")[1] not in allowed(part_of(path)) | {"__version__"}
    ]
    assert not wrong


def test_the_library_does_not_import_the_lab():
    """A test of its own: the lab may move between floors, but never below the library."""
    library = {name for floor in FLOORS[:7] for name in floor}
    assert not {str(path) for path in MODULES if part_of(path) in library and "halflife.lab" in " ".join(imports(path))}


def test_no_circle_of_imports():
    """The `__init__` of a package re-exports names, so an import from the package itself is no edge."""
    faces = {name for name, path in NAMES.items() if path.name == "__init__.py"}
    arrows = {name: {n for n in imports(path) if n in NAMES} - {name} - faces for name, path in NAMES.items()}
    assert sum(map(len, arrows.values())) > 300
    assert circles(arrows) == []


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_core_imports_no_heavy_library_at_its_top():
    found = {path: [name for name in imports(path, top_level_only=True) if name.split(".")[0] in LAZY] for path in CORE}
    assert not {str(path.relative_to(ROOT)): names for path, names in found.items() if names}


def test_only_kernels_import_kernels():
    """No other file imports the modules of kernels at its top level."""
    names = {name_of(path) for path in KERNELS}
    assert len(names) > 3
    for path in set(MODULES) - set(KERNELS):
        assert not names & set(imports(path)), path


LIGHTLY = """
import sys, torch
before = set(sys.modules)
import halflife
from halflife import Session, ops
new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert not new - {'halflife', 'torch', 'jaxtyping', 'numpy'}, new
for op in ops.ops():
    ops.available_backends(op), ops.available_backends(op, 'mps')
assert not {'triton', 'fla', 'transformers', 'matplotlib', 'jinja2'} & set(sys.modules)
import halflife.report.redraw
assert 'matplotlib.pyplot' not in sys.modules
"""


def test_imports_are_light():
    """The library and a session need torch alone, asking for backends imports neither Triton nor fla."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", LIGHTLY], check=True, env=environment)


def test_a_comparison_imports_what_it_runs(tmp_path):
    """Up to its first step, `compare mamba2` imports the library and its own experiment, and no other experiment."""
    arguments = ["compare", "mamba2", "--steps", "2", "--quiet", "--output", str(tmp_path / "comparison")]
    code = f"""
import sys, halflife.runs.one, halflife.cli
def stop(*arguments, **options):
    print(*(name for name in sys.modules if name.startswith("halflife")), file=sys.stderr)
    raise SystemExit
halflife.runs.one.fit = stop
halflife.cli.main({arguments})
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = out.stderr.split()
    assert 100 < len(names) <= 185, len(names)
    experiments = [name for name in names if name.startswith("halflife.lab.experiments.")]
    assert {name.rpartition(".")[2] for name in experiments} == {"base", "compare", "mqar", "overrides", "values"}
    assert not [name for name in names if name.startswith(("halflife.analysis", "halflife.lab.theory"))]


def test_files_are_short():
    long = {str(path.relative_to(ROOT)): n for path in MODULES if (n := len(path.read_text().splitlines())) > LONG}
    assert not long


def test_folders_are_small():
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {path.parent for path in MODULES}}
    assert not {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > ROOMY}


def test_every_part_stands_on_a_floor():
    parts = {part_of(path) for path in MODULES} - {"__init__"}
    assert parts == {name for floor in FLOORS for name in floor}


if __name__ == "__main__":  # print the floors, the highest first
    for floor in reversed(FLOORS):
        for part in floor:
            files = [path for path in MODULES if part_of(path) == part]
            lines = sum(len(path.read_text().splitlines()) for path in files)
            print(f"{part:12} {len(files):3} files {lines:6,} lines")


def test_saved_tensors_are_read_once():
    """In a backward pass; an activation checkpoint gives each of them a single time."""

    def reads(function):
        return sum(isinstance(x, ast.Attribute) and x.attr == "saved_tensors" for x in ast.walk(function))

    readers = [p for p in MODULES if "saved_tensors" in p.read_text()]
    assert len(readers) > 10
    functions = [(p, f) for p in readers for f in ast.walk(tree_of(p)) if isinstance(f, ast.FunctionDef)]
    assert [f"{path.name}: {f.name}" for path, f in functions if reads(f) > 1] == []

"""Print the versions of the installed packages as a constraints file for pip.

A package that a supported Python cannot install gets a marker. The pins leave out triton, because each build of torch
with CUDA asks for one version of it.
"""

import platform
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

LEFT_OUT = {"halflife-lm", "pip", "setuptools", "wheel", "triton"}
OLDEST = "3.10"  # requires-python in pyproject.toml

print(f"# The versions that the tests ran with (Python {platform.python_version()}); `make constraints` writes them.")
for dist in sorted(metadata.distributions(), key=lambda dist: dist.metadata["Name"].lower()):
    name = dist.metadata["Name"]
    if name.lower() in LEFT_OUT:
        continue
    needs = dist.metadata["Requires-Python"] or ""
    admitted = [v for v in (f"3.{minor}" for minor in range(10, 20)) if SpecifierSet(needs).contains(v + ".99")]
    marker = "" if admitted[0] == OLDEST else f' ; python_version >= "{admitted[0]}"'
    print(f"{name}=={Version(dist.version).public}{marker}")

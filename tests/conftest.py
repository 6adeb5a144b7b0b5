"""Before any test: shape annotations are checked, two threads, and the same random numbers every time."""

import pytest
import torch
from jaxtyping import install_import_hook

# Every annotation of halflife is checked at run time, here only; the hook must precede the first import.
install_import_hook("halflife", "beartype.beartype")

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)

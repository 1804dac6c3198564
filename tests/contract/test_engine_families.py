"""Weights by Hugging Face name in every engine and family: fused, padded, transposed and tied ones included; and engines on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drumroll import plugins
from drumroll.digest import digest
from drumroll.engines.base import Engine, GenerateRequest, SamplingParams
from drumroll.errors import UserError
from tests.contract.test_engines import LOGPROB_TOLERANCE, plain_logprobs, pushed, reference, start
from tests.engine_models import make, spec
from tests.ranks import run_ranks

FULL_ATTENTION = ["llama", "qwen2", "qwen3", "qwen3-moe", "mistral", "gpt2"]
REFUSED = {("vllm", "qwen3-moe"): r"Qwen3MoeForCausalLM is a mixture of experts \(model\.layers\.0\.mlp\.experts\.gate_up_proj\)"}


@pytest.mark.parametrize("name", plugins.names("engines"))
@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_a_push_is_held_by_name_and_sampled_from(name: str, family: str, tmp_path: Path) -> None:
    """Digests at start are those of the folder, after a push those of what was pushed; log-probs follow in the engines that sample."""
    folder = make(family, tmp_path)
    if (name, family) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[name, family]):
            start(name, folder)
        return
    engine, model = start(name, folder), reference(folder)
    try:
        assert engine.digests() == {name: digest(p) for name, p in model.named_parameters()}
        buckets = pushed(model, 0.8)
        engine.load_weights(buckets, 1)
        assert engine.digests() == {name: digest(tensor) for bucket in buckets for name, tensor in bucket}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.8)
        asked = GenerateRequest(0, [1, 40, 9], 2, SamplingParams(16, temperature=0.6))
        for completion in engine.generate([asked]):
            if name != "scripted":
                plain = plain_logprobs(model, asked, completion, 0.6)
                assert float((plain - torch.tensor(completion.logprobs)).abs().max()) < LOGPROB_TOLERANCE
    finally:
        engine.close()


def _sample_on_a_rank(rank: int, world: int, name: str, folder: Path) -> list[int] | None:
    """Tokens of this rank's own request; None where the engine is not installed. The ranks' group works on after `close`."""
    plugin = plugins.load("engines", name)
    engine: Engine = plugin(plugin.Config())
    try:
        engine.start(spec(folder))
    except UserError:
        return None
    done = [c.token_ids for c in engine.generate([GenerateRequest(rank, [1, 5], 1, SamplingParams(4 + 3 * rank))])]
    engine.close()
    total = torch.tensor([len(done[0])])
    dist.all_reduce(total)
    return [*done[0], int(total)]


@pytest.mark.parametrize("name", plugins.names("engines"))
def test_engines_inside_two_training_ranks(name: str, tmp_path: Path) -> None:
    """Each rank samples alone, for as long as its own requests take, and leaves the process group as it was."""
    results = run_ranks(_sample_on_a_rank, 2, name, make("llama", tmp_path), timeout=150)
    if None in results:
        pytest.skip(f"engine {name} is not installed")
    if name != "scripted":
        assert [len(tokens) for tokens in results] == [5, 8]
    assert results[0][-1] == results[1][-1] == sum(len(tokens) - 1 for tokens in results)

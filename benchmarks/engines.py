"""The embedded engine against `model.generate` with its dynamic cache, and against vLLM in process where that is installed.

A 5.5M-parameter Llama with random weights, 64 prompts of 8 to 40 tokens, batch 64, float32, one thread; responses of 16 to 192 tokens
("varied") or of 128 each ("equal"), prescribed by each request's max_tokens. The sides run in processes of their own and take turns.

    python benchmarks/engines.py --json engines.json
    python benchmarks/engines.py --vllm-python .venv-vllm/bin/python      vLLM from an environment of its own
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import announce, parser, report, side_rows
from sides import Channel, Stopwatch, Summary, alternate, python

from drumroll import plugins
from drumroll.observe.checks import CheckRow, at_least, measured

GENERATE, VLLM = "generate", "vllm"
TARGETS = {("varied", GENERATE): 2.5, ("equal", GENERATE): 1.3, ("varied", VLLM): 0.9, ("equal", VLLM): 0.9}
ROWS = 64
MAX_LENGTH = 256


def workload(kind: str, turn: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and response lengths; the lengths are the same in every turn, the prompts are not."""
    generator = torch.Generator().manual_seed(1)
    prompt_lengths = torch.randint(8, 41, (ROWS,), generator=generator).tolist()
    lengths = torch.randint(16, 193, (ROWS,), generator=generator).tolist() if kind == "varied" else [128] * ROWS
    generator.manual_seed(1000 + turn)
    return [torch.randint(3, 512, (length,), generator=generator).tolist() for length in prompt_lengths], lengths


def write_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from drumroll.models.builtin import tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=560,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def generate_side(channel: Channel) -> None:
    """transformers alone: left-padded rows, dynamic cache, as many steps as the longest row needs."""
    from transformers import GenerationConfig, LlamaForCausalLM

    channel.ready()
    model = LlamaForCausalLM.from_pretrained(channel.spec["model"], attn_implementation="sdpa").eval()
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    turn = 0
    while channel.wait():
        prompts, lengths = workload(channel.spec["kind"], turn)
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        watch = Stopwatch()
        with torch.inference_mode():
            model.generate(padded, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max(lengths))
        channel.answer(watch.measure(sum(lengths)))
        turn += 1


def engine_side(channel: Channel, name: str) -> None:
    """An engine of drumroll, with its own defaults but for the number of rows."""
    from drumroll.engines.base import EngineSpec, GenerateRequest, SamplingParams

    plugin = plugins.load("engines", name)
    rows = {plugins.EMBEDDED_ENGINE: "slots", VLLM: "max_num_seqs"}[name]
    engine = plugin(plugin.Config(**{rows: ROWS}))
    channel.ready()
    engine.start(EngineSpec(channel.spec["model"], torch.float32, torch.device("cpu"), seed=0, max_length=MAX_LENGTH))
    turn = 0
    while channel.wait():
        prompts, lengths = workload(channel.spec["kind"], turn)
        requests = [GenerateRequest(i, prompts[i], 1, SamplingParams(lengths[i])) for i in range(ROWS)]
        watch = Stopwatch()
        tokens = sum(len(completion.token_ids) for completion in engine.generate(requests))
        channel.answer(watch.measure(tokens))
        assert tokens == sum(lengths)
        turn += 1


def compare(kind: str, summaries: Mapping[str, Summary]) -> list[CheckRow]:
    """What each side took, and how many times faster the embedded engine was than the others."""
    options: dict[str, Any] = {"lengths": kind, "rows": ROWS}
    ours = summaries[plugins.EMBEDDED_ENGINE]
    rows = [row for name, summary in summaries.items() for row in side_rows(kind, summary, name, options)]
    for name, other in summaries.items():
        if name != plugins.EMBEDDED_ENGINE:
            check, label = f"{kind}: times as fast as {name}", {"backend": plugins.EMBEDDED_ENGINE, "options": options}
            rows.append(at_least(check, other.seconds / ours.seconds, TARGETS[kind, name], **label))
            rows.append(measured(f"{check}, by processor time", other.cpu_seconds / ours.cpu_seconds, **label))
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        channel = Channel()
        torch.set_num_threads(1)
        generate_side(channel) if sys.argv[2] == GENERATE else engine_side(channel, sys.argv[2])
        return
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5, help="turns of each side that count")
    arguments.add_argument("--kinds", nargs="+", choices=["varied", "equal"], default=["varied", "equal"])
    arguments.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM and drumroll")
    given = arguments.parse_args()
    announce()
    here = Path(__file__)
    commands: dict[str, Any] = {name: python(here, "--side", name) for name in (plugins.EMBEDDED_ENGINE, GENERATE)}
    if given.vllm_python or find_spec(VLLM):
        commands[VLLM] = python(here, "--side", VLLM, interpreter=given.vllm_python or sys.executable)
    rows: list[CheckRow] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for kind in given.kinds:
            rows += compare(kind, alternate(commands, {"model": folder, "kind": kind}, given.rounds))
    report(rows, "Embedded engine, fp32, one thread", given.json)


if __name__ == "__main__":
    main()

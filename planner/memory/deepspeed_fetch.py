"""Which parameters DeepSpeed's ZeRO-3 holds gathered as a step goes on.

Its coordinator is followed module by module (deepspeed 0.19.8,
runtime/zero/partitioned_param_coordinator.py) in a steady step, when it knows the order of modules
and fetches ahead; default buckets. World sizes do not matter: whole parameters are counted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from planner.families import parameter_shapes
from planner.memory.groups import Place
from planner.model import ModelSpec

# stage3_max_live_parameters, stage3_max_reuse_distance, stage3_prefetch_bucket_size and
# stage3_param_persistence_threshold, in elements.
MAX_LIVE_NUMEL = MAX_REUSE_NUMEL = 1_000_000_000
PREFETCH_NUMEL = 50_000_000
PERSISTENT_NUMEL = 100_000


class _Parameter(NamedTuple):
    name: str
    numel: int


class _Call(NamedTuple):
    """One module's turn: where in the step, and the parameters that it holds itself."""

    place: Place
    parameters: tuple[_Parameter, ...]


class Step(Enum):
    """What happens to parameters that are gathered in one call.

    Several come in one buffer. Whoever needs the first of them copies all of them out of it, but the
    buffer stays until the last has been needed (AllGatherCoalescedHandle, partition_parameters.py).
    """

    GATHER = auto()
    COPY_OUT = auto()
    DROP_BUFFER = auto()
    RELEASE = auto()


class Event(NamedTuple):
    """A step of parameters gathered in one call, or the release of one parameter."""

    step: Step
    parameters: tuple[_Parameter, ...]
    call: int = 0


@dataclass(slots=True)
class Fetches:
    """Live elements at each place, and events in order; `persistent` ones are never sharded.

    `live` is taken after the place's last fetch, at the loss's backward before its first.
    """

    persistent_numel: int = 0
    gathered_numel: int = 0
    calls: int = 0
    live: dict[Place, int] = field(default_factory=dict)
    events: dict[Place, list[Event]] = field(default_factory=lambda: defaultdict(list))


def _modules(spec: ModelSpec) -> dict[str, dict[str, list[_Parameter]]]:
    """Parameters by module, for the groups "embedding", "head" and each layer's number."""
    groups: dict[str, dict[str, list[_Parameter]]] = defaultdict(lambda: defaultdict(list))
    for shape in parameter_shapes(spec):
        layers = [str(layer) for layer in shape.layers] or [shape.group]
        for group, name in zip(layers, shape.names(), strict=True):
            groups[group][name.rpartition(".")[0]].append(_Parameter(name, shape.numel))
    return groups


def _calls(spec: ModelSpec, recomputes: bool) -> Iterator[_Call]:
    """Every module's turn in a forward and a backward; containers have turns without parameters."""
    groups = _modules(spec)
    embedding = [tuple(own) for own in groups["embedding"].values()]
    head = [tuple(own) for own in groups["head"].values()]
    if spec.tie_word_embeddings:
        head.append((embedding[0][0],))
    layers = [
        [(), (), *(tuple(own) for own in groups[str(layer)].values())]
        for layer in range(spec.num_layers)
    ]
    yield from (_Call(Place("embed"), own) for own in [(), (), *embedding])
    for number, layer in enumerate(layers):
        yield from (_Call(Place("layer", number), own) for own in layer)
    yield from (_Call(Place("head"), own) for own in head)
    yield from (_Call(Place("loss_backward"), own) for own in reversed(head))
    for number in reversed(range(spec.num_layers)):
        turns = [*(layers[number] if recomputes else ()), *reversed(layers[number])]
        yield from (_Call(Place("layer_backward", number), own) for own in turns)
    yield from (_Call(Place("embed_backward"), own) for own in reversed(embedding))


class _Coordinator:
    def __init__(self, calls: list[_Call]) -> None:
        self._calls = calls
        self._queue = deque((p, turn) for turn, call in enumerate(calls) for p in call.parameters)
        everything = {p for call in calls for p in call.parameters}
        self._persistent = {p for p in everything if p.numel <= PERSISTENT_NUMEL}
        self._available = set(self._persistent)
        self._fetched_for: dict[_Parameter, int] = defaultdict(lambda: -1)
        self._live_numel = 0
        self._in_flight: dict[_Parameter, Event] = {}
        self._copied_out: set[Event] = set()
        persistent_numel = sum(p.numel for p in self._persistent)
        self.fetches = Fetches(persistent_numel=persistent_numel)

    def run(self) -> Fetches:
        """Take every module's turn once."""
        for turn, call in enumerate(self._calls):
            is_first_loss = call.place.section == "loss_backward"
            if is_first_loss:
                self.fetches.live.setdefault(call.place, self._live_numel)
            self._gather(call.place, [p for p in call.parameters if p not in self._available])
            self._wait(call)
            self._skip_own(turn, call)
            self._prefetch(call.place)
            if not is_first_loss:
                self.fetches.live[call.place] = self._live_numel
            self._release(turn + 1, call)
        return self.fetches

    def _gather(self, place: Place, parameters: list[_Parameter]) -> None:
        if not parameters:
            return
        numel = sum(p.numel for p in parameters)
        self._available.update(parameters)
        self._live_numel += numel
        self.fetches.gathered_numel += numel
        self.fetches.calls += 1
        event = Event(Step.GATHER, tuple(parameters), self.fetches.calls)
        self._in_flight.update(dict.fromkeys(parameters, event))
        self.fetches.events[place].append(event)

    def _wait(self, call: _Call) -> None:
        """Wait for the module's own parameters, and with the first of a call for all of them."""
        events = self.fetches.events[call.place]
        for parameter in call.parameters:
            gathered = self._in_flight.pop(parameter, None)
            if gathered is None or len(gathered.parameters) == 1:
                continue
            if gathered not in self._copied_out:
                self._copied_out.add(gathered)
                events.append(gathered._replace(step=Step.COPY_OUT))
            if gathered not in self._in_flight.values():
                events.append(gathered._replace(step=Step.DROP_BUFFER))

    def _skip_own(self, turn: int, call: _Call) -> None:
        """Take the module's own parameters off the queue of those to prefetch."""
        waiting = {p for p in call.parameters if self._fetched_for[p] < turn}
        while waiting:
            parameter, used_at = self._queue.popleft()
            self._fetched_for[parameter] = used_at
            waiting.discard(parameter)

    def _prefetch(self, place: Place) -> None:
        room = min(MAX_LIVE_NUMEL - self._live_numel, PREFETCH_NUMEL)
        ahead: dict[_Parameter, None] = {}
        while self._queue and sum(p.numel for p in ahead) < room:
            parameter, used_at = self._queue.popleft()
            self._fetched_for[parameter] = max(self._fetched_for[parameter], used_at)
            if parameter not in self._available:
                ahead[parameter] = None
        self._gather(place, list(ahead))

    def _release(self, turn: int, call: _Call) -> None:
        """Release what is not used again within the reuse distance, nor skipped by a prefetch."""
        done = {p for p in call.parameters if self._fetched_for[p] <= turn} - self._persistent
        passed_numel = 0
        for later in self._calls[turn:]:
            if passed_numel >= MAX_REUSE_NUMEL or not done:
                break
            done.difference_update(later.parameters)
            passed_numel += sum(p.numel for p in later.parameters)
        for parameter in call.parameters:
            if parameter in done:
                self._available.discard(parameter)
                self._live_numel -= parameter.numel
                self.fetches.events[call.place].append(Event(Step.RELEASE, (parameter,)))


@lru_cache(maxsize=64)
def steady_fetches(spec: ModelSpec, recomputes: bool) -> Fetches:
    """Follow one steady step; `recomputes` runs each layer's forward again in its backward."""
    return _Coordinator(list(_calls(spec, recomputes))).run()


@lru_cache(maxsize=64)
def first_fetches(spec: ModelSpec, recomputes: bool) -> dict[Place, list[Event]]:
    """Events of the first micro-batch, which learns the order: nothing is fetched ahead or kept."""
    events: dict[Place, list[Event]] = defaultdict(list)
    for number, call in enumerate(_calls(spec, recomputes)):
        own = tuple(p for p in call.parameters if p.numel > PERSISTENT_NUMEL)
        if own:
            steps = (
                [Step.GATHER] if len(own) == 1 else [Step.GATHER, Step.COPY_OUT, Step.DROP_BUFFER]
            )
            events[call.place] += [Event(step, own, -number) for step in steps]
            events[call.place] += [Event(Step.RELEASE, (p,)) for p in own]
    return events

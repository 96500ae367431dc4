"""Which parameters DeepSpeed's ZeRO-3 holds gathered as a step goes on.

Its coordinator is followed module by module (deepspeed 0.19.8,
runtime/zero/partitioned_param_coordinator.py) in a steady step, when it knows the order of modules
and fetches ahead; default buckets. World sizes do not matter: whole parameters are counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from itertools import accumulate
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
    """One module's turn: where in the step, and the parameters that it holds itself.

    They are fetched before the module runs and released behind it, if it gets there (see `_again`).
    """

    place: Place
    parameters: tuple[_Parameter, ...]
    fetches: bool = True
    releases: bool = True


class _Module(NamedTuple):
    """A module with the parameters that it holds itself and, in the order of calls, its modules."""

    parameters: tuple[_Parameter, ...] = ()
    children: tuple[_Module, ...] = ()

    def forward(self) -> Iterator[_Module]:
        """Yield every module as its forward begins."""
        yield self
        for child in self.children:
            yield from child.forward()

    def backward(self) -> Iterator[_Module]:
        """Yield every module as its backward begins: a module's own output comes first."""
        yield self
        for child in reversed(self.children):
            yield from child.backward()


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


# The order in which a layer's modules are called; parameters are listed in another. Modules that
# hold none have their turns too: containers, activations, the rotary embedding.
_CALL_ORDER = (
    *("input_layernorm", "ln_1", "self_attn_layer_norm"),
    *("self_attn", "attn", "attention", "self_attention"),
    *("q_proj", "q_norm", "k_proj", "k_norm", "q_a_proj", "q_a_layernorm", "q_b_proj"),
    *("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "v_proj", "o_proj", "out_proj"),
    *("post_attention_layernorm", "ln_2", "final_layer_norm", "pre_feedforward_layernorm"),
    *("mlp", "gate", "router", "experts", "shared_experts", "fc1", "gate_proj", "gate_up_proj"),
    *("c_fc", "dense_h_to_4h", "activation", "up_proj", "down_proj", "fc2"),
    "post_feedforward_layernorm",
)
_BEFORE_ACTIVATION = ("fc1", "gate_proj", "gate_up_proj", "c_fc", "dense_h_to_4h")


def _modules(spec: ModelSpec) -> dict[str, dict[str, list[_Parameter]]]:
    """Parameters by module, for the groups "embedding", "head" and each layer's number."""
    groups: dict[str, dict[str, list[_Parameter]]] = defaultdict(lambda: defaultdict(list))
    for shape in parameter_shapes(spec):
        layers = [str(layer) for layer in shape.layers] or [shape.group]
        for group, name in zip(layers, shape.names(), strict=True):
            module = name.rpartition(".")[0].rpartition(f".{group}.")[2]
            groups[group][module].append(_Parameter(name, shape.numel))
    return groups


def _tree(modules: dict[str, list[_Parameter]]) -> _Module:
    """The modules of a layer, by their paths in it, below the layer itself."""
    below: dict[str, dict[str, list[_Parameter]]] = defaultdict(dict)
    for path, parameters in modules.items():
        name, _, rest = path.partition(".")
        below[name][rest] = parameters
    own = modules.get("", [])
    below.pop("", None)
    if any(name in _BEFORE_ACTIVATION for name in below):
        below["activation"] = {}
    known = {name: turn for turn, name in enumerate(_CALL_ORDER)}
    names = sorted(below, key=lambda name: known.get(name, len(known)))
    return _Module(tuple(own), tuple(_tree(below[name]) for name in names))


def _calls(spec: ModelSpec, recomputes: bool) -> Iterator[_Call]:
    """Every module's turn in a forward and a backward."""
    groups = _modules(spec)
    container = _Module()
    embedding = [_Module(tuple(own)) for own in groups["embedding"].values()]
    head = [_Module(tuple(own)) for own in groups["head"].values()]
    if spec.tie_word_embeddings:
        head.append(_Module((embedding[0].parameters[0],)))
    layers = [_tree(groups[str(layer)]) for layer in range(spec.num_layers)]
    rotary = [container] if spec.rotary_dim or spec.latent else []
    # The causal model and the model in it begin before the embedding; in the backward the model's
    # turn comes when the head's is over.
    for module in (container, container, *embedding, *rotary):
        yield _Call(Place("embed"), module.parameters)
    for number, layer in enumerate(layers):
        yield from (_Call(Place("layer", number), m.parameters) for m in layer.forward())
    yield from (_Call(Place("head"), module.parameters) for module in head)
    for module in (container, head[-1], container, *reversed(head[:-1])):
        yield _Call(Place("loss_backward"), module.parameters)
    for number in reversed(range(spec.num_layers)):
        place = Place("layer_backward", number)
        turns = _again(place, layers[number]) if recomputes else _back(place, layers[number])
        yield from turns
    yield from (_Call(Place("embed_backward"), m.parameters) for m in reversed(embedding))


def _back(place: Place, layer: _Module) -> list[_Call]:
    return [_Call(place, module.parameters) for module in layer.backward()]


def _again(place: Place, layer: _Module) -> list[_Call]:
    """A layer's backward that runs its forward again.

    Its last linear asks for what it has saved, so that one is fetched before. The forward stops as
    soon as it has saved that again, and so releases nothing of the last linear
    (torch/utils/checkpoint.py, _StopRecomputationError).
    """
    backward = list(layer.backward())
    last = next(turn for turn, module in enumerate(backward) if _is_linear(module))
    before = [_Call(place, m.parameters, releases=False) for m in backward[: last + 1]]
    forward = list(layer.forward())
    stop = max(turn for turn, module in enumerate(forward) if module is backward[last])
    again = [_Call(place, module.parameters) for module in forward[:stop]]
    again.append(_Call(place, forward[stop].parameters, releases=False))
    again.append(_Call(place, backward[last].parameters, fetches=False))
    return [*before, *again, *(_Call(place, m.parameters) for m in backward[last + 1 :])]


def _is_linear(module: _Module) -> bool:
    return any(p.numel > PERSISTENT_NUMEL for p in module.parameters)


class _Coordinator:
    def __init__(self, calls: list[_Call]) -> None:
        self._calls = calls
        self._turns = [call for call in calls if call.fetches]
        self._queue = deque(
            (p, turn) for turn, own in enumerate(self._turns) for p in own.parameters
        )
        self._used_in: dict[_Parameter, list[int]] = defaultdict(list)
        for parameter, turn in self._queue:
            self._used_in[parameter].append(turn)
        own_numels = (sum(p.numel for p in call.parameters) for call in self._turns)
        self._numel_before = list(accumulate(own_numels, initial=0))
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
        turn = 0
        for call in self._calls:
            is_first_loss = call.place.section == "loss_backward"
            if is_first_loss:
                self.fetches.live.setdefault(call.place, self._live_numel)
            if call.fetches:
                self._gather(call.place, [p for p in call.parameters if p not in self._available])
                self._wait(call)
                self._skip_own(turn, call)
                self._prefetch(call.place)
                turn += 1
            if not is_first_loss:
                self.fetches.live[call.place] = self._live_numel
            if call.releases:
                self._release(turn, call)
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
        end = bisect_left(self._numel_before, self._numel_before[turn] + MAX_REUSE_NUMEL)
        done = {p for p in done if not self._is_used(p, turn, end)}
        for parameter in call.parameters:
            if parameter in done:
                self._available.discard(parameter)
                self._live_numel -= parameter.numel
                self.fetches.events[call.place].append(Event(Step.RELEASE, (parameter,)))

    def _is_used(self, parameter: _Parameter, turn: int, end: int) -> bool:
        used_in = self._used_in[parameter]
        following = bisect_left(used_in, turn)
        return following < len(used_in) and used_in[following] < end


@lru_cache(maxsize=64)
def steady_fetches(spec: ModelSpec, recomputes: bool) -> Fetches:
    """Follow one steady step; `recomputes` runs each layer's forward again in its backward."""
    return _Coordinator(list(_calls(spec, recomputes))).run()


@lru_cache(maxsize=64)
def first_fetches(spec: ModelSpec, recomputes: bool) -> dict[Place, list[Event]]:
    """Events of the first micro-batch, which learns the order: nothing is fetched ahead or kept."""
    events: dict[Place, list[Event]] = defaultdict(list)
    held: set[_Parameter] = set()
    for number, call in enumerate(_calls(spec, recomputes)):
        own = tuple(p for p in call.parameters if p.numel > PERSISTENT_NUMEL)
        missing = tuple(p for p in own if p not in held)
        if missing and call.fetches:
            steps = [Step.GATHER]
            if len(missing) > 1:
                steps += [Step.COPY_OUT, Step.DROP_BUFFER]
            events[call.place] += [Event(step, missing, -number) for step in steps]
        held.update(own)
        if call.releases:
            events[call.place] += [Event(Step.RELEASE, (p,)) for p in own]
            held.difference_update(own)
    return events

"""The links between GPUs that we know: a fact table with its sources (data/interconnects.json)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from planner.errors import PlanError


@dataclass(frozen=True, slots=True)
class Interconnect:
    """A link: bytes per second that each GPU sends in each direction; `kind` as the table says."""

    id: str
    name: str
    kind: str
    bytes_s: float

    @property
    def in_node(self) -> bool:
        """Whether it joins GPUs of one node."""
        return self.kind.startswith("intra-node")

    @property
    def between_nodes(self) -> bool:
        """Whether it joins nodes."""
        return self.kind == "inter-node"


@cache
def interconnects() -> tuple[Interconnect, ...]:
    """Return every link of the table."""
    rows = json.loads(files("planner").joinpath("data/interconnects.json").read_text())
    return tuple(
        Interconnect(
            row["id"],
            row["name"],
            row["kind"],
            float(row["per_gpu_bandwidth_each_direction_bytes_s"]),
        )
        for row in rows
    )


def interconnect(link_id: str) -> Interconnect:
    """Return the link of that id; raises PlanError where there is none."""
    found = next((link for link in interconnects() if link.id == link_id), None)
    if found is None:
        known = ", ".join(link.id for link in interconnects())
        raise PlanError("interconnect", link_id, f"one of {known}")
    return found

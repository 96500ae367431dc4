"""The runs that constants of serving were fitted to: no evidence for the times they set."""

from __future__ import annotations

# Steps and prefills (model, batch, context) that a constant of planner/serving/times.py was fitted to: no row of
# them is evidence for the time it sets, however often they are run. Of served traces the rows' ids.
_SMALL, _LARGE, _MIXTURE = (
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-30B-A3B",
)
FITTED_STEPS = frozenset(
    (
        *((_SMALL, *shape) for shape in ((16, 512), (1, 512), (16, 8192))),
        *((_MIXTURE, *shape) for shape in ((1, 1024), (16, 1024))),
    )
)
FITTED_PREFILLS = frozenset(
    (
        *(
            (name, *shape)
            for name in (_SMALL, _LARGE)
            for shape in ((1, 1024), (16, 1024), (32, 8192))
        ),
        (_SMALL, 1, 512),
        (_MIXTURE, 16, 1024),
    )
)
SERVE_ROWS = frozenset(("df40b0c8d35820ec", "7185e92847b1d823"))

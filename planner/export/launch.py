"""The commands that start a training plan's processes: torchrun, and a Slurm script around it.

Options as in torch/distributed/run.py and sbatch(1). Whatever a person names is quoted for the shell.
"""

from __future__ import annotations

import shlex

from planner.errors import PlanError
from planner.export.target import Draft, ExportFile, Target, gpus_of, plain_name, refuse, training
from planner.plan import Plan
from planner.workload import TrainingWorkload

TORCHRUN_FILE, SBATCH_FILE = "train.sh", "train.sbatch"
PORT = 29500
MAX_SCRIPT_CHARACTERS = 500
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_HEAD = "#!/bin/bash\n# Exported by Peakmark\nset -euo pipefail\n"


def nodes_of(plan: Plan, target: Target) -> tuple[int, int]:
    """Return nodes and GPUs of each for a plan, as few nodes as its GPU's kind allows.

    Raises PlanError where the GPUs do not split evenly.
    """
    gpus, room = gpus_of(plan), plan.hardware.gpus_per_node
    fewest = -(-gpus // room)
    for nodes in range(fewest, gpus + 1):
        if gpus % nodes == 0:
            return nodes, gpus // nodes
    raise refuse(target, "parallelism.world_size", plan.parallelism.world_size, "no even split")


def checked_script(script: str) -> str:
    """Return the name of a training script; raises PlanError for what no file can be named."""
    allowed = (
        f"a path of at most {MAX_SCRIPT_CHARACTERS} printable characters that does not begin with -"
    )
    is_long = len(script) > MAX_SCRIPT_CHARACTERS
    if not script.strip() or is_long or not script.isprintable() or script.startswith("-"):
        raise PlanError("export.script", script, allowed)
    return script


def torchrun_draft(plan: Plan, script: str) -> Draft:
    """Write the command: standalone on one node, else one line for each of the nodes."""
    workload = training(plan, Target.TORCHRUN)
    nodes, each = nodes_of(plan, Target.TORCHRUN)
    words = ["torchrun", *_places(nodes, each), script]
    line = shlex.join(words)
    notes = ["torchrun starts the processes; everything else of the plan is the script's."]
    if nodes > 1:
        # The address is the shell's variable, so it stands outside of what is quoted.
        address = f'--rdzv-endpoint="$HEAD_NODE:{PORT}"'
        line = f"{shlex.join(words[:-1])} {address} {shlex.quote(script)}"
        notes.append(
            f"Run it on each of the {nodes:,} nodes with HEAD_NODE set to the first's name."
        )
    text = f"{_HEAD}{_allocator(workload)}exec {line}\n"
    return _draft(TORCHRUN_FILE, text, workload, notes)


def sbatch_draft(plan: Plan, script: str) -> Draft:
    """Write a Slurm script that starts torchrun once on every node."""
    workload = training(plan, Target.SBATCH)
    nodes, each = nodes_of(plan, Target.SBATCH)
    options = (
        f"--job-name=peakmark-{plain_name(plan)}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={each}",
    )
    places = " ".join(
        (
            '--nnodes="$SLURM_JOB_NUM_NODES"',
            f"--nproc-per-node={each}",
            "--rdzv-backend=c10d",
            '--rdzv-id="$SLURM_JOB_ID"',
            f'--rdzv-endpoint="$head_node:{PORT}"',
        )
    )
    # sed reads to the end: under pipefail a reader that stops early would end the script.
    text = (
        "#!/bin/bash\n"
        + "".join(f"#SBATCH {option}\n" for option in options)
        + f"# Exported by Peakmark\nset -euo pipefail\n{_allocator(workload)}"
        + 'head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)\n'
        + f"srun torchrun {places} {shlex.quote(script)}\n"
    )
    notes = [
        "Add what your cluster asks for: --time, --partition, --account, CPUs and memory.",
        "The script starts the processes; everything else of the plan is the training script's.",
    ]
    return _draft(SBATCH_FILE, text, workload, notes)


def _places(nodes: int, each: int) -> list[str]:
    if nodes == 1:
        return ["--standalone", f"--nproc-per-node={each}"]
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={each}",
        "--rdzv-backend=c10d",
        "--rdzv-id=peakmark",
    ]


def _allocator(workload: TrainingWorkload) -> str:
    return f"export {ALLOCATOR}\n" if workload.expandable_segments else ""


def _draft(name: str, text: str, workload: TrainingWorkload, notes: list[str]) -> Draft:
    holds = {"world_size"} | ({"expandable_segments"} if workload.expandable_segments else set())
    file = ExportFile(name=name, text=text, language="bash")
    return Draft(files=(file,), holds=frozenset(holds), notes=tuple(notes))

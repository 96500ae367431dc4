"""Run every RUN line of the Dockerfile without a Docker engine.

The lines run verbatim, as root, in a throw-away copy-on-write view of this machine (a mount
namespace with an overlay over /), in the Dockerfile's order together with its COPY and WORKDIR.
What this does not check: the base image itself (this machine's Debian and Python stand in for it), and that
the largest packages (`LINKED`) can be unpacked: the environment that runs this has done that.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What `make test` has unpacked just before, from the same metadata.
LINKED = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "numba",
    "llvmlite",
    "pandas",
    "pyarrow",
    "plotly",
)
# Debian's Python in a fresh virtual environment takes the place of the base image's.
STAND_IN = (
    "apt-get update -q && apt-get install -q -y --no-install-recommends python3 python3-venv",
    "/usr/bin/python3 -m venv /opt/image-python",
    "export PATH=/opt/image-python/bin:$PATH",
    # Byte code of what is never imported here is not needed; the image has it compiled.
    "export PIP_NO_COMPILE=1",
    # The largest packages, most of what there is to unpack, are those of the repository's own environment where
    # it has them: pip finds them satisfied, and what they need themselves is installed as everything else.
    "mkdir /opt/unpacked",
    f"for name in {' '.join(LINKED)}; do"
    " for found in {root}/.venv/lib/python3*/site-packages/$name"
    " {root}/.venv/lib/python3*/site-packages/$name-*.dist-info; do"
    " if [ -e $found ]; then ln -s $found /opt/unpacked/; fi; done; done",
    "for site in /opt/image-python/lib/python3*/site-packages; do"
    " echo /opt/unpacked > $site/unpacked.pth; done",
)
# What must hold in the end, for the image's user: init, compiler, Triton's headers, the product.
PROOF = (
    "command -v tini && command -v gcc",
    "su peakmark -s /bin/sh -c 'cd /srv/peakmark && touch /data/probe"
    " && /opt/image-python/bin/peakmark plan --json > /dev/null"
    " && /opt/image-python/bin/python -m runners.worker --help > /dev/null'",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One Dockerfile instruction with its continuation lines joined."""

    name: str
    argument: str


def read_instructions(text: str) -> list[Instruction]:
    """Split a Dockerfile into instructions; comments and blank lines are dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [Instruction(name=name.upper(), argument=" ".join(rest.split())) for name, rest in parts]


def read_ignored(text: str) -> list[str]:
    """Return the patterns of a .dockerignore as tar takes them: they match at any depth."""
    return [line.removeprefix("**/") for line in text.splitlines() if line.strip()]


def shell_script(instructions: list[Instruction], ignored: list[str]) -> str:
    """Return the script that replays COPY, WORKDIR and RUN inside the throw-away root.

    It ends by proving that the image's user has the command line, a worker and the volume.
    """
    excludes = " ".join(shlex.quote(f"--exclude={pattern}") for pattern in ignored)
    steps = [line.replace("{root}", shlex.quote(str(ROOT))) for line in STAND_IN]
    for instruction in instructions:
        if instruction.name == "WORKDIR":
            steps.append(f"mkdir -p {instruction.argument} && cd {instruction.argument}")
        elif instruction.name == "COPY":
            source, target = instruction.argument.split()
            source = "." if source == "." else shlex.quote(source)
            steps.append(f"tar -C /mnt/source {excludes} -c {source} | tar -x -C {target}")
        elif instruction.name == "RUN":
            steps += [f"echo {shlex.quote('RUN ' + instruction.argument)}", instruction.argument]
    return "set -eu\n" + "\n".join([*steps, *PROOF]) + "\n"


OVERLAY = """
set -eu
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/view
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/view
mkdir -p /mnt/view/mnt/source
mount --bind "$1" /mnt/view/mnt/source
mount --rbind /dev /mnt/view/dev
mount --bind /proc /mnt/view/proc
exec chroot /mnt/view sh -s
"""


def replay(script: str) -> int:
    """Run `script` in the throw-away root; returns its exit code. Needs root."""
    command = ["unshare", "--mount", "sh", "-c", OVERLAY, "overlay", str(ROOT)]
    return subprocess.run(command, input=script, text=True, check=False).returncode


def main() -> int:
    """Replay the Dockerfile of this repository."""
    instructions = read_instructions((ROOT / "Dockerfile").read_text())
    return replay(shell_script(instructions, read_ignored((ROOT / ".dockerignore").read_text())))


if __name__ == "__main__":
    sys.exit(main())

"""The export on page Plan: the plan's files for the program that runs it, to read and take away."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from app.components.problems import told_in_one_sentence
from planner.export.plan_export import DEFAULT_SCRIPT, export
from planner.export.target import SERVES, ExportFile, Target
from planner.plan import Plan

NAMES: Mapping[Target, str] = {
    Target.DEEPSPEED: "DeepSpeed",
    Target.ACCELERATE: "accelerate",
    Target.FSDP2: "FSDP2",
    Target.TORCHTITAN: "torchtitan",
    Target.TORCHRUN: "torchrun",
    Target.SBATCH: "Slurm",
    Target.VLLM: "vLLM",
}
STARTS_SCRIPT = (Target.TORCHRUN, Target.SBATCH)
WIDTH_PX = 640


def show_export_box(plan: Plan) -> None:
    """Draw the button and, behind it, the chosen target's files."""
    box = st.popover(
        "Export",
        icon=":material/ios_share:",
        key="export",
        on_change="rerun",
        help="Configuration for DeepSpeed, accelerate, FSDP2, torchtitan, torchrun, Slurm, vLLM.",
    )
    if box.open:
        with box, st.container(width=WIDTH_PX):
            _choose(plan)


def _choose(plan: Plan) -> None:
    targets = [target for target in Target if (target in SERVES) == (plan.job == "serve")]
    name = st.pills(
        "For",
        [str(target) for target in targets],
        default=str(targets[0]),
        required=True,
        format_func=lambda target: NAMES[Target(target)],
        key=f"export_target_{plan.job}",
    )
    target = Target(str(name))
    script = DEFAULT_SCRIPT
    if target in STARTS_SCRIPT:
        script = st.text_input("Training script", DEFAULT_SCRIPT, key="export_script")
    with told_in_one_sentence():
        found = export(plan, target, script)
        for file in found.files:
            _file(file)
        for note in found.notes:
            st.caption(f":material/info: {note}")


def _file(file: ExportFile) -> None:
    st.code(file.text, language=file.language, wrap_lines=True)
    st.download_button(
        file.name,
        data=file.text,
        file_name=file.name,
        icon=":material/download:",
        on_click="ignore",
        key=f"export_{file.name}",
    )

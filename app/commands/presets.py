"""`peakmark presets`: every model and GPU that has a name here."""

from __future__ import annotations

from app.commands.output import JsonFlag, make_table, print_json, print_table


def presets_command(json: JsonFlag = False) -> None:
    """List the models and GPUs that can be named in a plan."""
    from planner.hardware import gpu_presets
    from planner.presets import model_presets, resolve_model
    from planner.units import format_bytes, format_count

    models = [(preset.id, resolve_model(preset.id)) for preset in model_presets()]
    gpus = gpu_presets()
    if json:
        named = [{"id": name, "parameters": spec.parameters} for name, spec in models]
        cards = [{"id": gpu.id, "visible_bytes": gpu.visible_bytes} for gpu in gpus]
        print_json({"schema": 1, "models": named, "gpus": cards})
        return
    sizes = [(name, spec.family, format_count(spec.parameters)) for name, spec in models]
    print_table(make_table("Models", ("--model", "family"), ("parameters",), sizes))
    memory = [(gpu.id, gpu.name, format_bytes(gpu.visible_bytes)) for gpu in gpus]
    print_table(make_table("GPUs", ("--gpu", "name"), ("memory that CUDA shows",), memory))

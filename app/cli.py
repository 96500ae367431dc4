"""The command line: the same answers as the pages, for people and (with --json) for programs."""

from __future__ import annotations

import sys

import typer

from app.commands import (
    accuracy,
    attention,
    calibrate,
    claims,
    compare,
    decode,
    doctor,
    experiments,
    export,
    import_rows,
    levers,
    plan,
    presets,
    profile,
    prove,
    quality,
    runs,
    serve,
    sweep,
    trace,
    worker,
)
from app.commands.output import fail_with

app = typer.Typer(
    name="peakmark",
    help="Predict the GPU memory and speed of transformer training and serving, and prove it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan_command)
app.command("sweep")(sweep.sweep_command)
app.command("levers")(levers.levers_command)
app.command("compare")(compare.compare_command)
app.command("trace")(trace.trace_command)
app.command("prove")(prove.prove_command)
app.command("calibrate")(calibrate.calibrate_command)
app.command("attention")(attention.attention_command)
app.command("decode")(decode.decode_command)
app.command("serve")(serve.serve_command)
app.command("profile")(profile.profile_command)
app.command("quality")(quality.quality_command)
app.command("claims")(claims.claims_command)
app.command("export")(export.export_command)
app.command("presets")(presets.presets_command)
app.command("worker")(worker.worker_command)
app.add_typer(runs.app, name="runs")
app.add_typer(experiments.app, name="experiments")
app.command("accuracy")(accuracy.accuracy_command)
app.command("import")(import_rows.import_command)
app.command("doctor")(doctor.doctor_command)


def main() -> None:
    """Run the command line; a wrong input is one sentence on stderr and exit code 2."""
    as_json = "--json" in sys.argv
    try:
        code = app(standalone_mode=False, prog_name="peakmark")
    except typer.Abort:
        code = 130
    except Exception as error:
        code = fail_with(error, as_json=as_json)
    sys.exit(code)


if __name__ == "__main__":
    main()

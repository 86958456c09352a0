"""Accelerate's trackers, for the numbers of metrics.jsonl on a dashboard."""

from pathlib import Path

from utils.display.metrics import read_run


def check_trackers(report_to: str) -> list[str]:
    """report_to ("none", or names separated by commas) -> what Accelerator(log_with=...) takes. ValueError
    for a tracker whose package is missing, which accelerate leaves out without a word."""
    from accelerate.tracking import get_available_trackers

    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    missing = sorted(set(names) - {str(name) for name in get_available_trackers()} - {"all"})
    if missing:
        raise ValueError(
            f"report_to is {report_to!r}, but {', '.join(missing)} cannot be imported here: "
            f"`pip install {' '.join(missing)}`, or --report_to none"
        )
    return names


def start_trackers(accelerator, project: str, output_dir, settings: dict, step: int = 0):
    """accelerator.init_trackers such that a resumed run (step > 0) continues its curves. On all processes."""
    if not accelerator.log_with:
        return
    run_id, name = read_run(output_dir)["id"], Path(output_dir).resolve().name
    plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in settings.items()}
    accelerator.init_trackers(
        project,
        config=None if step else plain,
        init_kwargs={
            "wandb": {"id": run_id, "name": name, "resume": "allow"},
            "trackio": {"name": f"{name}-{run_id}", "resume": "allow"},
            "tensorboard": {"purge_step": step + 1 if step else None},  # hides what came after the checkpoint
        },
    )


def log_to_trackers(accelerator, record: dict):
    """Send one metrics.jsonl record to the trackers, if there are any: numbers only, at the record's step."""
    if accelerator.trackers:
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
        accelerator.log(numbers, step=record["step"])

"""Accelerate's trackers: the numbers of metrics.jsonl on a dashboard."""

from pathlib import Path


def tracker_problems(report_to: str) -> list[str]:
    """A line if the package of a tracker is missing: accelerate would leave it out silently."""
    from accelerate.tracking import get_available_trackers

    wanted = {name.strip() for name in report_to.split(",")} - {"", "none", "all"}
    if not (missing := sorted(wanted - {str(name) for name in get_available_trackers()})):
        return []
    cause = f"report_to is {report_to!r}, but {', '.join(missing)} cannot be imported here"
    return [f"{cause}: `pip install {' '.join(missing)}`, or --report_to none"]


def start_trackers(accelerator, project: str, output_dir, run_id: str, settings: dict, step: int) -> None:
    """accelerator.init_trackers, so that a resumed run (step > 0) continues its curves."""
    if not accelerator.log_with:
        return
    name = Path(output_dir).resolve().name
    options = {
        "wandb": {"id": run_id, "name": name, "resume": "allow"},
        "trackio": {"name": f"{name}-{run_id}", "resume": "allow"},
        "tensorboard": {"purge_step": step + 1 if step else None},
    }
    accelerator.init_trackers(project, init_kwargs=options)
    plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in settings.items()}
    for tracker in accelerator.trackers:
        if not step or tracker.name != "tensorboard":  # there it would make each start another run
            tracker.store_init_configuration(plain)


def log_to_trackers(accelerator, record: dict) -> None:
    """Send the numbers of a record of metrics.jsonl to the trackers, if any, at the record's step."""
    numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
    accelerator.log(numbers, step=record["step"])

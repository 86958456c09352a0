"""Calls that a step makes of torch: on a GPU each is at least one kernel that the host starts."""

from torch.profiler import ProfilerActivity, profile

# These compute nothing; `to` only where another runs inside it.
VIEWS = """to mT t unbind view expand select slice detach transpose as_strided _unsafe_view reshape permute
    unsqueeze squeeze split alias flatten unflatten empty empty_like empty_strided lift_fresh""".split()


def launches(call) -> int:
    """Operations that call() runs, without those that run inside another, and without views."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    return counted(profiled)


def counted(profiled) -> int:
    """The same of what a profiler has seen; where it has seen a GPU's kernels started, their number."""
    kernels = sum("LaunchKernel" in event.name for event in profiled.events())
    return kernels or sum(_counts(event) for event in profiled.events())


def _counts(event) -> bool:
    computes = event.name.startswith("aten::") and event.name[6:] not in VIEWS
    while (event := event.cpu_parent) is not None:
        computes = computes and (event.name[6:] in VIEWS or not event.name.startswith("aten::"))
    return computes

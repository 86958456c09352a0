"""Kernels that a step launches, counted by torch's profiler."""

# These compute nothing; `to` only where another runs inside it.
VIEWS = """to mT t unbind view expand select slice detach transpose as_strided _unsafe_view reshape permute
    unsqueeze squeeze split alias flatten unflatten empty empty_like empty_strided lift_fresh""".split()


def counted(profiled) -> int:
    """Kernels that were launched on a GPU; on a CPU operations, without views and those inside another."""
    kernels = sum("LaunchKernel" in event.name for event in profiled.events())
    return kernels or sum(_counts(event) for event in profiled.events())


def _counts(event) -> bool:
    computes = event.name.startswith("aten::") and event.name[6:] not in VIEWS
    while (event := event.cpu_parent) is not None:
        computes = computes and (event.name[6:] in VIEWS or not event.name.startswith("aten::"))
    return computes

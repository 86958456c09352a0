"""Regional compilation: torch.compile of the model's blocks and the loss's softmax, in place, so that weights
keep their names. TORCH_LOGS=recompiles says what is compiled again, and why."""

import torch
from accelerate.utils import DynamoBackend
from torch import nn

from utils.learning.configuration import one_line
from utils.learning.fused_head import ChunkSoftmax, CompilerSoftmax

GRAPHS = 64  # per function: all blocks share Module._call_impl, and evaluation has graphs of its own


def compile_blocks(accelerator, model):
    """Compile blocks if the launcher's YAML asks for that. Call it before `prepare`, which compiles the whole
    model if the YAML asks for that. If blocks fail to compile, a warning is printed and they run eagerly."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return
    import torch._dynamo

    model.chunk_softmax = ChunkSoftmax() if accelerator.device.type == "cpu" else CompilerSoftmax()
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    if not plugin.use_regional_compilation:
        return
    blocks, options = _blocks(model), plugin.to_kwargs()
    plugin.use_regional_compilation, plugin.disable = False, True  # nothing is left for `prepare`
    parts = [*blocks, model.chunk_softmax]
    for part in parts:
        part._compiled_call_impl = _or_eager(part, parts, options, accelerator.print)
    names = ", ".join(dict.fromkeys(type(block).__name__ for block in blocks))
    what = f"{len(blocks)} x {names} and the loss, with {options['backend']}"
    accelerator.print(f"compiles   {what}; --dynamo_backend no turns it off")


def _blocks(module):
    """The modules in the outermost ModuleLists."""
    if isinstance(module, nn.ModuleList):
        return [*module]
    return [block for child in module.children() for block in _blocks(child)]


def _or_eager(part, parts, options, say):
    from torch._dynamo.exc import TorchDynamoException

    compiled = torch.compile(part._call_impl, **options)

    def call(*args, **kwargs):
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            for each in parts:
                each._compiled_call_impl = None
            say(f"warning: not compiled, {type(part).__name__} failed: {one_line(error)}")
            return part._call_impl(*args, **kwargs)

    return call

"""Shared fixtures, and the order of the test files: the longest first, so that all workers end together."""

import gc
import os
import shutil

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.forked import free_port

LONGEST = """test_readme test_hub test_compiled test_check test_edits test_train_clm test_presets
    test_multi_node test_recipes test_saved_models test_train_mlm test_bad_input test_model_folders
    test_preemption test_losses test_load test_convert test_tokenizer test_pairs test_corpus test_prepare
    test_notebook test_checkpoint test_crash test_fsdp""".split()

os.environ.setdefault("OMP_NUM_THREADS", "1")  # or the threads of all workers would wait for each other
if "GPU" not in os.environ:  # several processes share this machine, and digits are compared with a CPU's
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
gc.disable()  # during imports, which leave no garbage


def pytest_collection_finish():
    gc.freeze()  # or each collection would visit a million objects
    gc.enable()


def pytest_collection_modifyitems(items):
    def place(item):
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def restore_process_state():
    """Undo what a test leaves in the process: accelerate's shared state and environment variables."""
    shared = [os.environ, *(state._shared_state for state in (PartialState, AcceleratorState, GradientState))]
    before = [dict(each) for each in shared]
    yield
    for each, values in zip(shared, before, strict=True):
        if each != values:
            each.clear()
            each.update(values)


@pytest.fixture(scope="session")
def hub_port():
    """One port for all Hub servers: the client reads the address at import, so another address would need
    another fork server (tests/forked.py)."""
    return free_port()


@pytest.fixture(scope="session")
def _home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def hub_home(_home):
    """HF_HOME of the clients: for the same reason one folder, emptied before each test."""
    shutil.rmtree(_home)
    _home.mkdir()
    return _home

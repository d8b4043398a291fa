"""What `modal_train.py` needs at the client: modal, pyyaml, python-dotenv, and nothing heavy."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = {"launch", "environments", "pipeline", "ops", "modal_train", "yaml", "_yaml", "dotenv"}

LIST_NEW_MODULES = """
import sys
import modal, rich.progress
before = set(sys.modules)
import modal_train
for name in sorted(set(sys.modules) - before):
    print(name)
"""


def test_importing_it_imports_our_launcher_a_few_light_modules_and_the_standard_library() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", LIST_NEW_MODULES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    new = listed.stdout.split()
    # What PyYAML's C part registers for itself.
    packages = {name.partition(".")[0] for name in new if "cython" not in name}
    assert packages <= OURS | sys.stdlib_module_names | {"modal", "rich"}
    ours = [name for name in new if name.startswith(("pipeline.", "ops."))]
    assert ours == ["ops.errors", "ops.files", "ops.versions", "pipeline.rates"]
    # The interface, and no environment.
    of_environments = {name.partition(".")[2] for name in new if name.startswith("environments.")}
    interface = {"call", "conversation", "episode", "fault", "registry", "row", "score", "taskset"}
    assert of_environments <= interface

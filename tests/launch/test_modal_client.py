"""What our apps need at the client: modal, pyyaml, python-dotenv, and nothing heavy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"drzero", "environments", "modal_train", "modal_search", "modal_agent", "yaml", "_yaml", "dotenv"}

LIST_NEW_MODULES = """
import sys
import modal, rich.progress
before = set(sys.modules)
__import__(sys.argv.pop())
for name in sorted(set(sys.modules) - before):
    print(name)
"""


@pytest.mark.parametrize("app", ["modal_train", "modal_search", "modal_agent"])
def test_importing_it_imports_our_launcher_a_few_light_modules_and_the_standard_library(app):
    command = [sys.executable, "-c", LIST_NEW_MODULES, app]
    env = {**os.environ, "RETRIEVAL_TOKEN": "of a service", "AGENT_TOKEN": "of another"}
    listed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    new = listed.stdout.split()
    # What PyYAML's C part registers for itself.
    packages = {name.partition(".")[0] for name in new if "cython" not in name}
    assert packages <= OURS | sys.stdlib_module_names | {"modal", "rich"}
    ours = [name for name in new if name.startswith(("drzero.ops.", "drzero.recipe."))]
    # All of the settings but what registers them with Hydra.
    settings = {
        f"drzero.recipe.settings.{path.stem}" for path in (ROOT / "drzero/recipe/settings").glob("[!_]*.py")
    }
    assert set(ours) <= {
        "drzero.ops.bearer",
        "drzero.ops.errors",
        "drzero.ops.files",
        "drzero.ops.text",
        "drzero.ops.versions",
        "drzero.recipe.gpu_prices",
        "drzero.recipe.settings",
        *settings - {"drzero.recipe.settings.register"},
    }
    # The interface, and no environment.
    of_environments = {name.partition(".")[2] for name in new if name.startswith("environments.")}
    interface = {"call", "conversation", "episode", "fault", "registry", "row", "score", "taskset"}
    assert of_environments <= interface | {"turn_text"}

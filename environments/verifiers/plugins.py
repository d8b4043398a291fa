"""Our additions to the library in `sys.modules`, since it imports tasksets by a name without dots."""

import sys
from importlib import import_module

HARNESS = "drzero_in_process"
GAMES = "drzero_textarena"

for _name, _module in ((HARNESS, "harness"), (GAMES, "games")):
    sys.modules.setdefault(_name, import_module(f"environments.verifiers.{_module}"))

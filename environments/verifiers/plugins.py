"""Our additions to the library, under names it can import.

The library imports tasksets and programs by a name without dots. Ours live in a package, so `sys.modules`
gets them under such a name too.
"""

import sys
from importlib import import_module

HARNESS = "drzero_in_process"
GAMES = "drzero_textarena"

for _name, _module in ((HARNESS, "harness"), (GAMES, "games")):
    sys.modules.setdefault(_name, import_module(f"environments.verifiers.{_module}"))

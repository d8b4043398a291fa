"""What this project adds to the library, under the names by which it is imported there.

The library finds a taskset or a program by a name without dots, which it imports as a module. Ours live in a
package: each is put into `sys.modules` under such a name as well.
"""

import sys
from importlib import import_module

HARNESS = "drzero_in_process"
"""The program that plays a seat: `environments.verifiers.harness`."""
GAMES = "drzero_textarena"
"""TextArena's games that the library does not list: `environments.verifiers.games`."""

for _name, _module in ((HARNESS, "harness"), (GAMES, "games")):
    sys.modules.setdefault(_name, import_module(f"environments.verifiers.{_module}"))

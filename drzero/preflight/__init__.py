"""What can be judged before a run starts and costs money.

One file per subject yields findings; `run` has the table of checks per stage, `report` prints them. Checks
read configs, files and headers: they start nothing, load no model weights and need no GPU. Checks of running
services are in `drzero.labs.check_services`.
"""

"""Which call works on which run: claims in a Modal Dict, where only one caller can take a key.

Each call claims its run under the next number: `challenger_iter1/0`, `…/1`. The last claim holds until Modal
says that its call and all continuations have ended. Without a heartbeat, a long commit is harmless. `evolve`
and its stages exclude each other. Modal keeps an entry for a week, longer than any call.
"""

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import modal

from drzero.launch.compute import MODAL_LIMIT_S
from drzero.launch.errors import LaunchError
from drzero.launch.known_keys import STAGES
from drzero.launch.request import Request

_LOOP = "evolve"
_OF_THE_LOOP = re.compile(rf"(?:{'|'.join(STAGES)})_iter\d+")


@dataclass(frozen=True)
class Claim:
    """One call's claim of a run."""

    launch: str
    part: int
    action: str
    call: str
    app: str | None
    at: float  # Unix time of the request, then of the call's last start


class Claims:
    """All claims on one checkpoints volume."""

    def __init__(
        self,
        table: "modal.Dict",
        is_running: Callable[[str], bool] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._is_running = is_running or call_is_running
        self._clock = clock

    def call_of(self, request: Request) -> str | None:
        """The call that already has this part of the launch, for a restarted caller to wait for."""
        mine = (request.id, request.part)
        claims = self._of(request.name).values()
        return next((claim.call for claim in claims if (claim.launch, claim.part) == mine), None)

    def running(self, run: str) -> Claim | None:
        """The claim of this run, or of the loop it belongs to, while it is running, or None."""
        for name in (run, *([_LOOP] if _OF_THE_LOOP.fullmatch(run) else [])):
            if (claims := self._of(name)) and self._holds(last := claims[max(claims)]):
                return last
        return None

    def require_free(self, request: Request) -> None:
        """Raise LaunchError if a running launch writes the same folders."""
        for run, claims in self._all().items():
            last = claims[max(claims)]
            same = run == request.name or _shares_folders(request.action, request.name, last.action, run)
            if same and last.launch != request.id and self._holds(last):
                raise LaunchError(
                    f"{request.name}: {'another launch of this run' if run == request.name else run} is "
                    f"running (call {last.call}): watch it with --action logs {run} --follow, or end it with "
                    f"`modal app stop {last.app or 'APP_ID'}` and repeat this command"
                )

    def take(self, request: Request, call: str, app: str | None) -> str:
        """Returns the call that has this part, normally `call`. Raises LaunchError for taken folders."""
        mine = Claim(request.id, request.part, request.action, call, app, self._clock())
        while True:
            claims = self._of(request.name)
            for number, claim in claims.items():
                if (claim.launch, claim.part) == (request.id, request.part):
                    if claim.call == call:
                        self._table.put(f"{request.name}/{number}", asdict(mine))
                    return claim.call
            self.require_free(request)
            key = f"{request.name}/{max(claims, default=-1) + 1}"
            if self._table.put(key, asdict(mine), skip_if_exists=True):
                # Two launches that share folders may both get here at once: then both are refused.
                self.require_free(request)
                return call

    def _holds(self, claim: Claim) -> bool:
        # Even if Modal is wrong: no call runs or waits for its machine longer than this.
        return self._clock() - claim.at < 2 * MODAL_LIMIT_S and self._is_running(claim.call)

    def _of(self, run: str) -> dict[int, Claim]:
        return self._all().get(run, {})

    def _all(self) -> dict[str, dict[int, Claim]]:
        found: dict[str, dict[int, Claim]] = {}
        for key, values in self._table.items():
            run, _, number = key.rpartition("/")
            if run:
                found.setdefault(run, {})[int(number)] = Claim(**values)
        return found


def _shares_folders(action: str, run: str, other_action: str, other_run: str) -> bool:
    if _LOOP not in (action, other_action):
        return False
    stage_run = other_run if action == _LOOP else run
    return action == other_action or _OF_THE_LOOP.fullmatch(stage_run) is not None


def call_is_running(call_id: str) -> bool:
    """Whether the call or its continuation is still running. Raises LaunchError if Modal does not say."""
    call: modal.FunctionCall[Any] = modal.FunctionCall.from_id(call_id)
    try:
        result = call.get(timeout=0)
    except TimeoutError:
        return True
    except (modal.exception.ConnectionError, modal.exception.ServiceError) as error:
        raise LaunchError(f"Modal did not say whether call {call_id} is running ({error}): repeat") from None
    # The call raised something, was cancelled, or Modal no longer knows it: it has ended.
    except Exception:
        return False
    return bool(result["next"]) and call_is_running(result["next"])

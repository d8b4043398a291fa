"""TextArena's other games for one player: those that the built-in taskset `textarena` does not list.

    find("verifiers:textarena").load(game="Mastermind-v0")

The library lists five word games, which fetch word lists when they start. The rest of TextArena's run without
a network. Everything but the list is the library's: its environment steps the engine, its system prompt
opens.
"""

import copy
import itertools
import random
from collections.abc import Iterator

import textarena
import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena.taskset import SYSTEM_PROMPT, TextArenaData, TextArenaEnv, TextArenaTask


class GameConfig(vf.TasksetConfig):
    """Which game."""

    game: str
    """TextArena's name of it, e.g. `Mastermind-v0`."""


class GameTaskset(vf.Taskset[TextArenaTask, GameConfig]):
    """One seeded game a task, without end."""

    INFINITE = True

    def load(self) -> Iterator[TextArenaTask]:
        """Tasks as the library's own taskset makes them."""
        template = textarena.make(env_id=self.config.game)
        for seed in itertools.count():
            random.seed(seed)
            game = copy.deepcopy(template)
            game.reset(num_players=1)
            yield TextArenaTask(
                TextArenaData(
                    name=f"{self.config.game}#{seed}",
                    prompt=str(game.get_observation()[1]),
                    system_prompt=SYSTEM_PROMPT,
                    info={"game": self.config.game, "seed": seed},
                ),
                self.config.task,
            )


__all__ = ["GameTaskset", "TextArenaEnv"]

"""TextArena's offline one-player games: the library's taskset `textarena` lists only five, which download."""

import copy
import itertools
import random
from collections.abc import Iterator

import textarena
import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena.taskset import SYSTEM_PROMPT, TextArenaData, TextArenaEnv, TextArenaTask


class GameConfig(vf.TasksetConfig):
    """Which game."""

    game: str  # in TextArena, such as `Mastermind-v0`


class GameTaskset(vf.Taskset[TextArenaTask, GameConfig]):
    """An endless taskset with one seeded game a task."""

    INFINITE = True

    def load(self) -> Iterator[TextArenaTask]:
        """The tasks, as the library's own taskset makes them."""
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

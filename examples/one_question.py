"""The method on two screens: one challenger step, from the prompt to the advantage.

    .venv/bin/python examples/one_question.py            # after `make setup`; under two minutes on two cores
    .venv/bin/python examples/one_question.py --hop 1 --seed 7

A challenger reads a document, searches, and writes a question with its answer. A solver tries the question
five times. The challenger is rewarded if the solver succeeds sometimes but not always, and its questions are
compared with others of the same hop count (HRPO, arXiv 2601.07055; docs/method.md has the formulas).

Every part is the one that training uses: demo policy, engine, index, prompts, tool calls, rewards, advantage.
Training puts veRL, Ray and HTTP between them; here they are called directly, so you can read the method from
top to bottom, or put a breakpoint anywhere. Only the update is missing: veRL multiplies each advantage with
the gradient of the log-probability of that rollout's sampled tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.demo_world import generate_world, write_world
from drzero.stages.demo_models import prepare_demo_models
from search.chroma.store import Store, open_collection
from search.embedders import PACKAGED_EMBEDDER, Embedder, EmbedderSpec
from search.indexing.shards import build_index
from verl_ext.engine.engine import ReferenceEngine
from verl_ext.engine.loading import eos_token_ids, load_model
from verl_ext.engine.sampling import SamplingParams
from verl_ext.method.advantages import hop_advantages
from verl_ext.method.answers import same_answer
from verl_ext.method.challenger_reward import (
    ATTEMPTS,
    ChallengerScore,
    challenger_reward,
    extract_pair,
    has_integrity,
)
from verl_ext.method.chat import read_turn, render_prompt_ids, tool_turn_ids
from verl_ext.method.passages import format_passages
from verl_ext.method.prompts import Message, challenger_messages, solver_messages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA, invalid_call_response, parse_tool_calls
from verl_ext.method.solver_reward import solver_answer
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

OUTPUTS = Path(__file__).resolve().parents[1] / "outputs"
EMBEDDER = EmbedderSpec(PACKAGED_EMBEDDER, device="cpu")
# As in config/model/demo-policy.yaml: what the demo policy was warm-started on.
TOPK, RESPONSE_CHARS, MAX_TURNS, TOKENS_PER_TURN = 2, 1024, 4, 96


@dataclass(frozen=True)
class Player:
    """A model with a search tool. Challenger and solver are the same model here, with different prompts."""

    engine: ReferenceEngine
    tokenizer: Any
    embedder: Embedder
    index: Store

    async def converse(self, messages: Sequence[Message], seed: int) -> Trajectory:
        """Play one conversation: the model writes a turn, its searches are answered, until it makes none."""
        context = render_prompt_ids(self.tokenizer, messages, [SEARCH_TOOL_SCHEMA])
        turns: list[Turn] = []
        while len(turns) < MAX_TURNS:
            sampled = await self.engine.generate(
                context, SamplingParams(max_tokens=TOKENS_PER_TURN, seed=seed)
            )
            text = read_turn(self.tokenizer, context, sampled.token_ids)
            calls = tuple(self.answer(call) for call in parse_tool_calls(text))
            turns.append(Turn(text, calls, truncated=sampled.finish_reason == "length"))
            if not calls:
                break
            # The context grows by the sampled ids themselves. Decoded and tokenised again, the same text can
            # have other ids, and the model would be trained on tokens that it did not sample.
            responses = [call.response or "" for call in calls]
            context += sampled.token_ids + tool_turn_ids(self.tokenizer, sampled.token_ids, responses)
        return Trajectory(tuple(turns))

    def answer(self, call: SearchCall) -> SearchCall:
        """The call with the tool's response: passages from the index, or what is wrong with the call."""
        if call.queries is None:
            return replace(call, response=invalid_call_response(call))
        scored = self.index.query(self.embedder.encode_queries(list(call.queries)), TOPK)
        found = [[passage["document"] for passage in passages] for passages in scored]
        return replace(call, response=format_passages(call.queries, found, RESPONSE_CHARS))


@dataclass(frozen=True)
class Question:
    """One row of the step: a rollout, the solver's answers to its question, and the reward."""

    document: str
    rollout: Trajectory
    solver_answers: list[str | None]
    score: ChallengerScore


async def ask(player: Player, document: str, hop: int, seed: int) -> Question:
    """Roll out the challenger on one document, let the solver try its question, and score both."""
    # 1. Prompt and rollout. "short" is the prompt form that this small model was warm-started on.
    rollout = await player.converse(challenger_messages(document, hop, "short"), seed)

    # 2. Question and answer, read from the last turn. Both must exist, and the question must not contain the
    #    answer; otherwise the reward is 0 and the solver is not asked.
    question, answer = extract_pair(rollout)
    solver_answers: list[str | None] = []
    k = None
    if question is not None and answer is not None and has_integrity(question, answer):
        # 3. Five independent attempts; k of them give the challenger's answer.
        messages = solver_messages(question, "short")
        attempts = await asyncio.gather(
            *(player.converse(messages, 1000 * seed + i) for i in range(ATTEMPTS))
        )
        solver_answers = [solver_answer(attempt) for attempt in attempts]
        k = sum(same_answer(given, [answer]) for given in solver_answers)

    # 4. Reward: r = 1[0 < k < n] · (n - k) / (n - 1) + f / 2, with f the format score.
    return Question(document, rollout, solver_answers, challenger_reward(rollout, document, hop, k=k))


async def run_step(player: Player, documents: Sequence[str], hop: int, seed: int) -> list[Question]:
    """All questions of the step at once: the engine batches whatever is in flight."""
    step = random.Random(seed)
    return list(
        await asyncio.gather(*(ask(player, document, hop, step.getrandbits(20)) for document in documents))
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """One challenger step on the demo world, printed piece by piece."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--hop", type=int, default=2, help="hops of every question (default: 2)")
    parser.add_argument("--questions", type=int, default=6, help="questions in the step (default: 6)")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--model", help="a model folder (default: the demo policy)")
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="where index and model are kept")
    options = parser.parse_args(arguments)

    title("The corpus: an invented world, so no model can know the answers")
    world = generate_world(seed=0)
    folder = options.outputs / "example"
    folder.mkdir(parents=True, exist_ok=True)
    write_world(world, folder)
    build_index(folder / "corpus.jsonl", folder / "chromadb", "corpus", EMBEDDER)
    passages = random.Random(options.seed).sample(list(world.passages.values()), options.questions)
    documents = [f"{passage.title}\n{passage.text}" for passage in passages]
    print(f"{len(world.passages)} passages, indexed in {folder / 'chromadb'}. One of them:")
    show(documents[0])

    title("The model: SmolLM2-135M, warm-started on the format of a search conversation")
    path = options.model or str(prepare_demo_models(options.outputs / "corpus" / "models")[1])
    model, tokenizer = load_model(path)
    engine = ReferenceEngine(model, eos_token_ids=eos_token_ids(model, tokenizer), seed=options.seed)
    print(f"{path}: {model.num_parameters() / 1e6:.0f} million parameters")

    title(f"The rollouts: {options.questions} documents, one {options.hop}-hop question for each")
    print("The prompt for the document above:")
    show(challenger_messages(documents[0], options.hop, "short")[0]["content"])
    print(f"... now sampling, with up to {ATTEMPTS} solver attempts for each question")
    with open_collection(folder / "chromadb", "corpus") as index:
        player = Player(engine, tokenizer, Embedder(EMBEDDER), index)
        step = asyncio.run(run_step(player, documents, options.hop, options.seed))
    engine.close()

    best = max(step, key=lambda row: row.score.score)
    title("The rollout with the highest reward, turn by turn")
    show(best.document)
    for turn in best.rollout.turns:
        print("challenger:")
        show(turn.text)
        for call in turn.calls:
            print("search tool:")
            show(call.response or "")

    title("The reward: difficulty + half the format score")
    print(f"question: {best.score.question}\nanswer:   {best.score.answer}")
    print(
        f"solver:   {', '.join(map(str, best.solver_answers)) or 'not asked: the question has no integrity'}"
    )
    score = best.score
    print(f"right attempts: {score.k} of {score.n}, so difficulty {score.difficulty:.2f}")
    print(
        f"format: (1 + think {score.think:.2f} + tool {score.tool:.2f} + answer {score.answer_part:.2f}) / 4 "
        f"= {score.format:.2f}"
    )
    print(f"reward: {score.difficulty:.2f} + {score.format:.2f} / 2 = {score.score:.3f}")

    # 5. Advantage: how much better a question did than the others of its hop count in this step.
    title(f"The advantage (HRPO): the step's {options.hop}-hop questions compared with one another")
    rewards, hops = [row.score.score for row in step], [row.score.hop for row in step]
    advantages = hop_advantages(rewards, hops, [row.score.valid for row in step])
    print("searches  right  difficulty  format  reward  advantage  question")
    for row, advantage in zip(step, advantages, strict=True):
        s, right = row.score, "-" if row.score.k is None else f"{row.score.k}/{row.score.n}"
        print(
            f"{len(row.rollout.searches):>8}  {right:>5}  {s.difficulty:>10.2f}  {s.format:>6.2f}  "
            f"{s.score:>6.3f}  {advantage:>+9.2f}  {textwrap.shorten(str(s.question), 60)}"
        )
    print("\nveRL's update makes rollouts with a positive advantage more likely, the others less.")


def title(text: str) -> None:
    """A heading."""
    print(f"\n── {text} ".ljust(100, "─"))


def show(text: str) -> None:
    """A block of text, indented and wrapped."""
    for line in text.splitlines():
        print(textwrap.fill(line, 100, initial_indent="  │ ", subsequent_indent="  │ "))


if __name__ == "__main__":
    main()

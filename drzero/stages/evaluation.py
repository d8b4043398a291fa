"""The evaluate stage: a model, or an endpoint that serves one, on benchmarks or in an environment.

    drzero evaluate iteration=1                                   # a solver of the loop on the benchmarks
    drzero evaluate endpoint=http://127.0.0.1:8001/v1 tokenizer=outputs/corpus/models/demo-policy run.name=x
    drzero evaluate env=wordle model=qwen2.5-3b num_examples=50   # a model in an environment
    drzero evaluate env=wordle solver.model_path=outputs/checkpoints/train_wordle_hf run.name=evaluate_after

A rerun asks or plays only what is missing. `drzero compare` holds two evaluations of the same tasks against
each other.
"""

from omegaconf import DictConfig

from drzero.stages.evaluate import run_evaluate
from drzero.stages.evaluate_environment import run_evaluate_environment


def run_evaluation(config: DictConfig) -> None:
    """Evaluate in the environment that `environment` names, else on the benchmarks."""
    (run_evaluate_environment if config.environment.name else run_evaluate)(config)

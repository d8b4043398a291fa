"""Builds one of eight training ranks on 8×H100 with veRL's own code, and takes a step of its engine.

    .venv-sglang/bin/python tests/rehearsal/gpu_actor.py < case.json

A case is a stage with its overrides. The last line printed is JSON, for `test_gpu_path.py`. The config,
veRL's trainer and worker, torch's FSDP2, the models' sizes and SGLang's adapter are real. The GPUs
(`fake_cuda.py`), the weights (shapes without content) and the attention are not.
"""

import json
import os
import sys

import fake_cuda
import torch
from omegaconf import OmegaConf

from drzero.recipe.compose import compose_stage, resolve, write_resolved

MICRO_BATCH = 300  # tokens


def trainer_facts(config):
    """veRL's trainer, as far as it goes without Ray, and the checks of its entry point."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import validate_config

    needs = {"use_reference_policy": need_reference_policy(config), "use_critic": need_critic(config)}
    validate_config(config=config, **needs)
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
    trainer._init_tokenizer()
    trainer._init_dataloader()
    trainer._init_resource_pool_mgr()
    (role,) = trainer.role_worker_mapping
    return {
        **needs,
        "trainer": type(trainer).__name__,
        "prompts_a_step": len(next(iter(trainer.train_dataloader))["raw_prompt"]),
        "pools": trainer.resource_pool_manager.resource_pool_spec,
        "role": str(role),
        "worker": trainer.role_worker_mapping[role].__ray_metadata__.class_name,
        "reward": get_custom_reward_fn(config).args[0].__name__,
    }


def without_content():
    """Make the engine's weights shapes on the GPU, and its attention a copy."""
    from transformers import AutoModelForCausalLM
    from verl.models.transformers import monkey_patch
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from verl_ext.rollout.platforms import CudaPlatform

    # torch would take a bare number for a device of its accelerator, and has none.
    CudaPlatform.current_device = lambda _: fake_cuda.DEVICE
    build = FSDPEngine.initialize

    def initialize(engine):
        with fake_cuda.on_the_gpu():
            build(engine)

    def from_pretrained(cls, *, config, torch_dtype, trust_remote_code, **_):
        with fake_cuda.DEVICE:
            return cls.from_config(config, dtype=torch_dtype, trust_remote_code=trust_remote_code)

    FSDPEngine.initialize = initialize
    AutoModelForCausalLM.from_pretrained = classmethod(from_pretrained)
    # The real one reads sequence ends from the positions (tests/verl_ext/test_gpu_update.py).
    monkey_patch._flash_attention_forward = lambda query, *_, **__: query * 1


def worker_of(config, role):
    """A rank's worker with its model, optimizer, checkpoint manager and weight adapter."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    worker = ActorRolloutRefWorker(
        config=config.actor_rollout_ref, role=role, distillation_config=config.distillation
    )
    worker.init_model()
    return worker


def devices(tensors):
    return sorted({str(each.device) for each in tensors})


def built(worker):
    """The results of `init_model`."""
    from torch.distributed.fsdp import FSDPModule

    actor, engine = worker.actor, worker.actor.engine
    parameters = dict(engine.module.named_parameters())
    shards = [module for module in engine.module.modules() if isinstance(module, FSDPModule)]
    group = engine.optimizer.param_groups[0]
    return {
        "engine": type(engine).__name__,
        "mesh": [engine.device_mesh.device_type, *engine.device_mesh.shape],
        "parameters": sum(each.numel() for each in parameters.values()),
        "trained": sum(each.numel() for each in parameters.values() if each.requires_grad),
        "on_this_rank": sum(each.to_local().numel() for each in parameters.values()),
        "dtypes": sorted({str(each.dtype) for each in parameters.values()}),
        "devices": devices(parameters.values()),
        "wrapped": sorted({type(each).__name__ for each in shards}),
        "wraps": len(shards),
        "computes_in": str(engine._autocast_dtype),
        "reduces_in": str(engine.module._get_fsdp_state()._mp_policy.reduce_dtype),
        "attention": engine.module.config._attn_implementation,
        "checkpointing": engine.module.is_gradient_checkpointing,
        "optimizer": [
            type(engine.optimizer).__name__,
            group["initial_lr"],
            *group["betas"],
            group["weight_decay"],
        ],
        "first_rates": [engine.lr_scheduler.lr_lambdas[0](step) for step in range(3)],
        "clip": actor.optimizer_config.clip_grad,
        "compiles_entropy": hasattr(engine.compute_entropy_from_logits, "_torchdynamo_orig_callable"),
        "micro_batches": [
            actor.engine_config.micro_batch_size_per_gpu,
            actor.engine_config.infer_micro_batch_size_per_gpu,
        ],
        "mini_batch": worker.loss_fn.keywords["config"].ppo_mini_batch_size,
        "saves": list(engine.checkpoint_manager.checkpoint_save_contents),
        "loss": worker.loss_fn.keywords["config"].policy_loss.loss_mode,
        "adapter": type(worker.rollout).__name__,
        "engines": list(worker.rollout.device_mesh.shape),
        "sleep_level": worker.rollout.sleep_level,
    }


def stepped(worker):
    """A forward pass, an optimizer step with zero gradients, and the weights for the engines."""
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

    engine, facts = worker.actor.engine, {}
    parameters = list(engine.module.parameters())
    with fake_cuda.on_the_gpu():
        facts["before"] = devices(parameters)
        engine.to("cuda", model=True, optimizer=True, grad=True)
        facts["loaded"] = devices(parameters)
        positions = torch.arange(MICRO_BATCH)[None]
        with torch.autocast("cuda", dtype=engine._autocast_dtype):
            output = engine.module(
                input_ids=positions,
                attention_mask=None,
                position_ids=positions,
                shift_labels=positions,
                temperature=1.0,
                return_dict=True,
                use_cache=False,
            )
        # veRL's fused head gives log-probs in float32 and the entropy as the model computes.
        facts["head"] = [str(output.entropy.dtype), *output.log_probs.shape]
        engine.module.reshard()
        parameters = list(engine.module.parameters())
        for each in parameters:
            each.grad = torch.zeros_like(each) if each.requires_grad else None
        fsdp2_clip_grad_norm_(parameters, max_norm=engine.optimizer_config.clip_grad)
        engine.optimizer.step()
        engine.lr_scheduler_step()
        engine.optimizer_zero_grad()
        engine.to("cpu", model=True, optimizer=True, grad=True)
        facts["offloaded"] = devices(parameters)
        states = [each for state in engine.optimizer.state.values() for each in state.values()]
        facts["optimizer_offloaded"] = devices(states)
        facts["states"] = sum(each.to_local().numel() for each in states if each.dim())
        sent, adapter = engine.get_per_tensor_param(layered_summon=worker.layered_summon, base_sync_done=True)
        tensors = [(str(each.dtype), str(each.device), each.numel()) for _, each in sent]
        facts["sent"] = sum(numbers for *_, numbers in tensors)
        facts["sent_as"] = sorted({kind for kind, *_ in tensors})
        facts["sent_from"] = sorted({place for _, place, _ in tensors})
        facts["sent_adapter"] = adapter is not None
        facts["after"] = devices(engine.module.parameters())
    return facts


def main():
    stage, overrides = json.load(sys.stdin)
    config = resolve(compose_stage(stage, overrides))
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": str(fake_cuda.GPUS),
        "RAY_LOCAL_WORLD_SIZE": str(fake_cuda.GPUS),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "CUDA_VISIBLE_DEVICES": "0"}
    fake_cuda.stand_in()
    without_content()
    # As the trainer reads it.
    config = OmegaConf.load(write_resolved(config))
    facts = trainer_facts(config)
    worker = worker_of(config, facts["role"])
    print(json.dumps(facts | built(worker) | stepped(worker)))


if __name__ == "__main__":
    main()

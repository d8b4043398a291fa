"""Lines of veRL's, Ray's and the engines' logs that say what a start is doing, and the words for it.

They were read in veRL 0.9.1, Ray 2.55.1, transformers 5.9.0, SGLang 0.5.12 and vLLM 0.24.0. SGLang's
sentences need `log_level=INFO`, or for rollouts `rollout.server_args.log_level=info`. Its progress bars are
always there.
flashinfer 0.6.11 compiles without a word, because SGLang silences its logger.
"""

SGLANG = {
    "Init torch distributed begin": "joins its ranks",
    "Load weight begin": "loads the engine's weights",
    "Loading safetensors checkpoint shards": "loads the engine's weights",
    "Multi-thread loading shards": "loads the engine's weights",
    "KV Cache is allocated": "has its weights and its KV cache",
    "Capture cuda graph begin": "captures CUDA graphs",
    "Capturing batches (": "captures CUDA graphs",
}
VLLM = {
    "Starting to load model": "loads the engine's weights",
    "Loading safetensors checkpoint shards": "loads the engine's weights",
    "Dynamo bytecode transform time": "compiles the engine's model",
    "GPU KV cache size": "has its weights and its KV cache",
    "Capturing CUDA graphs": "captures CUDA graphs",
}
TRAINER = {
    "Started a local Ray instance": "Ray is up, and starts veRL's processes",
    "Loading weights:": "loads the trained model's weights",
    "num_warmup_steps: ": "has the model and its optimizer",
    "SGLang http server: rollout_mode=": "starts SGLang's rollout engines",
    "vLLMHttpServer, replica_rank:": "starts vLLM's rollout engines",
    **SGLANG,
    **VLLM,
}

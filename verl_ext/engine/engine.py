"""The reference engine: batched generation with a plain Transformers model, on a CPU or one CUDA GPU.

One worker thread owns the model. A step's error ends its requests, the loop's error the engine.
"""

import asyncio
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from verl_ext.engine.kv_cache import GROUPED_ATTENTION, PrefixCache, SlotCache, common_prefix_length
from verl_ext.engine.loading import load_weights
from verl_ext.engine.sampling import SamplingParams, TopLogProbs, sample, top_log_probs

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Generation:
    """A finished request: sampled ids with any stop id, and the log-probability of each in nats."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    top_log_probs: list[TopLogProbs] = field(default_factory=list)  # per position, as many as requested


@dataclass(eq=False)
class Sequence:
    """One request. Its cache slot holds the keys and values of all ids but the newest."""

    prompt: np.ndarray
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    draws: random.Random
    stop_when: Callable[[list[int]], bool] | None
    future: Future[Generation] = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tops: list[TopLogProbs] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """All ids but the newest, after the prefill."""
        return len(self.prompt) + len(self.token_ids) - 1

    @property
    def newest(self) -> int:
        """The next forward reads it."""
        return self.token_ids[-1] if self.token_ids else int(self.prompt[-1])

    def append(self, token_id: int, log_prob: float, top: TopLogProbs) -> FinishReason | None:
        """Append a sampled id. Returns why the request ends, or None."""
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        self.tops.append(top)
        if token_id in self.stop_ids or (self.stop_when is not None and self.stop_when(self.token_ids)):
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    def cached_ids(self) -> np.ndarray:
        """The cached ids, in order."""
        return np.concatenate([self.prompt, np.array(self.token_ids, dtype=np.int64)])[: self.cached]

    def fail(self, failure: Exception) -> None:
        """Raise `failure` in the caller, unless it has cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(failure)

    def resolve(self, reason: FinishReason) -> None:
        """Pass the result to the caller, unless it has cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(Generation(self.token_ids, self.log_probs, reason, self.tops))


class EngineFailure(RuntimeError):
    """The engine cannot serve: a forward failed, it has ended, or a weight update failed."""


@dataclass
class EngineStats:
    """Counters since the start, and the present state (the last three)."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    prefix_tokens_reused: int = 0  # prompt ids copied, not computed
    decode_steps: int = 0
    running: int = 0
    waiting: int = 0
    prefix_cache_bytes: int = 0


@dataclass
class _Command:
    run: Callable[[], None]
    future: Future[None]


class ReferenceEngine:
    """Continuous batching over `model`, whose attention implementation it replaces.

    `max_seq_len` bounds prompt plus response, in ids. With `prefix_cache_bytes` 0 only prefixes in flight are
    shared. `seed` fixes the draws of requests without a seed, in order of arrival.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Iterable[int],
        max_batch_size: int = 32,
        max_seq_len: int = 4096,
        prefix_cache_bytes: int = 1 << 30,
        seed: int = 0,
    ) -> None:
        model.eval().set_attn_implementation(GROUPED_ATTENTION)
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self._eos_ids = frozenset(eos_token_ids)
        self._slots = SlotCache(model.config, model.dtype, model.device)
        self._prefixes = PrefixCache(prefix_cache_bytes)
        self._seeds = random.Random(seed)
        self._stats = EngineStats()
        self._running: list[Sequence] = []  # the sequence at index i occupies slot i
        self._waiting: deque[Sequence] = deque()
        self._inbox: queue.SimpleQueue[Sequence | _Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing may be submitted after the failure is set
        self.failure: BaseException | None = None  # the error that stopped the engine
        self.on_crash: Callable[[], None] = lambda: None  # called in the worker's thread after a crash
        self._half_updated = False
        self._thread = threading.Thread(target=self._work, name="reference-engine", daemon=True)
        self._thread.start()

    # Called from any thread.

    async def generate(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        stop_when: Callable[[list[int]], bool] | None = None,
    ) -> Generation:
        """Continue until an eos or stop id, a limit, or `stop_when`, which runs in the worker's thread.

        Cancelling frees the slot. Raises ValueError for an impossible prompt, or EngineFailure.
        """
        prompt = self.checked(list(prompt_ids))
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        sequence = Sequence(
            prompt=prompt,
            params=params,
            stop_ids=self._eos_ids | set(params.stop_token_ids),
            max_tokens=min(params.max_tokens, self.max_seq_len - len(prompt)),
            draws=random.Random(seed),
            stop_when=stop_when,
        )
        self._submit(sequence)
        return await asyncio.wrap_future(sequence.future)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises RuntimeError during requests. Any other error stops generation until an update succeeds."""

        def load() -> None:
            if in_flight := len(self._running) + len(self._waiting):
                raise RuntimeError(f"cannot update the weights with {in_flight} requests in flight")
            self._half_updated = True
            load_weights(self.model, weights)
            self._half_updated = False
            self._prefixes.clear()
            self._slots.release()

        command = _Command(load, Future())
        self._submit(command)
        await asyncio.wrap_future(command.future)

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._waiting) + self._inbox.qsize(),
            prefix_cache_bytes=self._prefixes.used_bytes,
        )

    def close(self) -> None:
        """Abort the requests in flight and end the worker."""
        self._inbox.put(None)
        self._thread.join()

    def checked(self, prompt: list[int]) -> np.ndarray:
        """The prompt as an array. Raises ValueError as `generate` does."""
        if not 0 < len(prompt) < self.max_seq_len:
            raise ValueError(
                f"the prompt has {len(prompt)} ids; it must have at least 1 and leave room for a response "
                f"within the engine's max_seq_len of {self.max_seq_len}"
            )
        vocabulary = self.model.config.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise ValueError(f"the prompt has an id outside the model's vocabulary of {vocabulary} ids")
        return np.array(prompt, dtype=np.int64)

    def _submit(self, item: Sequence | _Command) -> None:
        with self._lock:
            if self.failure is not None:
                raise EngineFailure(f"the engine has stopped: {self.failure}") from self.failure
            if self._half_updated and isinstance(item, Sequence):
                raise EngineFailure("the last weight update failed half way: repeat it")
            self._inbox.put(item)

    # Everything below runs in the worker's thread.

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_in():
                    self._admit()
                    if self._running:
                        self._decode()
            self._abort_all()
            self._fail(EngineFailure("it was closed"))
        except BaseException as error:  # any kind, or the callers would wait forever
            self._fail(error)
            self.on_crash()

    def _take_in(self) -> bool:
        """False if the engine is to close."""
        for slot in reversed(range(len(self._running))):
            if self._running[slot].future.cancelled():
                self._leave(slot)
        while not self._inbox.empty() or not (self._running or self._waiting):
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, Sequence):
                self._waiting.append(item)
            elif item.future.set_running_or_notify_cancel():
                try:
                    item.run()
                    item.future.set_result(None)
                except Exception as error:  # a command's error belongs to its caller
                    item.future.set_exception(error)
        return True

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = error
        left: list[Sequence | _Command | None] = [*self._running, *self._waiting]
        while not self._inbox.empty():
            left.append(self._inbox.get())
        self._running.clear()
        self._waiting.clear()
        for item in left:
            if item is not None and item.future.set_running_or_notify_cancel():
                item.future.set_exception(_failure("the engine has stopped", error))

    def _admit(self) -> None:
        """Cache all but the last id of the prompts of waiting sequences."""
        while self._waiting and len(self._running) < self.max_batch_size:
            sequence = self._waiting[0]  # stays queued until the end, so that a failure here reaches it
            if sequence.future.cancelled():
                self._waiting.popleft()
                continue
            slot = len(self._running)
            try:
                self._slots.reserve(slot + 1, len(sequence.prompt))
                reused = self._reuse_prefix(sequence, slot)
                if reused < sequence.cached:
                    self._prefill(sequence, slot, reused)
            except Exception as error:  # such as a lack of memory: it belongs to this sequence
                self._waiting.popleft().fail(_failure("the prompt's forward failed", error))
                continue
            self._running.append(self._waiting.popleft())
            self._stats.requests += 1
            self._stats.tokens_in += len(sequence.prompt)
            self._stats.prefix_tokens_reused += reused

    def _reuse_prefix(self, sequence: Sequence, slot: int) -> int:
        """Copy the longest known prefix of the prompt. Returns its length."""
        wanted = sequence.prompt[: sequence.cached]
        states = self._prefixes.longest_match(wanted)
        best = 0 if states is None else states.shape[3]
        for donor, other in enumerate(self._running):
            shared = common_prefix_length(other.prompt[: other.cached], wanted)
            if shared > best:
                best, states = shared, self._slots.read(donor, shared)
        if states is not None:
            self._slots.write(slot, states)
        return best

    def _prefill(self, sequence: Sequence, slot: int, start: int) -> None:
        device, end = self.model.device, sequence.cached
        positions = torch.arange(start, end, device=device)
        mask = None if start == 0 else _additive_mask(positions, end, self.model.dtype)[None, None]
        self.model.get_decoder()(
            input_ids=torch.from_numpy(sequence.prompt[start:end]).to(device)[None],
            attention_mask=mask,
            position_ids=positions[None],
            past_key_values=self._slots.prefill_window(slot, start, end),
            use_cache=True,
        )

    def _decode(self) -> None:
        try:
            sampled = self._step()
        except Exception as error:  # nothing shows which sequence caused it
            while self._running:
                self._running.pop().fail(_failure("the decode step failed", error))
            self._slots.release()
            return
        # Backwards: the last sequence replaces one that ends, and already has its new id.
        for slot in reversed(range(len(sampled))):
            sequence, (token_id, log_prob, top) = self._running[slot], sampled[slot]
            try:
                if log_prob != log_prob:
                    raise ArithmeticError("the model's logits are not numbers (NaN): its weights are broken")
                reason = sequence.append(token_id, log_prob, top)
            except Exception as error:  # may come from the caller's `stop_when`
                self._slots.blank(slot)
                self._vacate(slot)
                sequence.fail(_failure("the request failed", error))
                continue
            self._stats.tokens_out += 1
            if reason is not None:
                self._leave(slot, reason)

    def _step(self) -> list[tuple[int, float, TopLogProbs]]:
        batch, device = self._running, self.model.device
        lengths = [sequence.cached for sequence in batch]
        longest = max(lengths) + 1
        self._slots.reserve(len(batch), longest)
        positions = torch.tensor(lengths, device=device)
        ragged = min(lengths) + 1 < longest
        mask = _additive_mask(positions, longest, self.model.dtype)[:, None, None] if ragged else None
        logits = self.model(
            input_ids=torch.tensor([[sequence.newest] for sequence in batch], device=device),
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=self._slots.decode_window(positions, longest),
            use_cache=True,
        ).logits[:, -1]
        params = [s.params for s in batch]
        ids, log_probs = sample(logits, params, [s.draws.random() for s in batch])
        self._stats.decode_steps += 1
        return list(zip(ids.tolist(), log_probs.tolist(), top_log_probs(logits, params), strict=True))

    def _leave(self, slot: int, reason: FinishReason = "aborted") -> None:
        sequence = self._running[slot]
        self._prefixes.insert(sequence.cached_ids(), self._slots.read(slot, sequence.cached))
        self._vacate(slot)
        sequence.resolve(reason)

    def _vacate(self, slot: int) -> None:
        last = self._running.pop()
        if slot < len(self._running):
            self._slots.write(slot, self._slots.read(len(self._running), last.cached))
            self._running[slot] = last

    def _abort_all(self) -> None:
        while self._running:
            self._leave(len(self._running) - 1)
        while self._waiting:
            self._waiting.popleft().resolve("aborted")


def _failure(what: str, error: BaseException) -> EngineFailure:
    failure = EngineFailure(f"{what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _additive_mask(positions: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Mask (queries, length): 0 up to each query's position, then minus infinity."""
    hidden = torch.arange(length, device=positions.device) > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))

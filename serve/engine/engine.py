"""The engine: a thread that schedules a step, launches it, and reads the one before."""

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.calibration.survival import Scaling
from dspark_jax.decoding.keys import seeds_of
from dspark_jax.decoding.state import Finish
from dspark_jax.drafters.kinds import AnyDrafter
from dspark_jax.models.decoder import Decoder
from dspark_jax.scheduling import Outcome, Plain, Policy, StepCosts
from serve.engine.budget import Budget
from serve.engine.config import EngineConfig
from serve.engine.counts import Gauges, StepCounts
from serve.engine.pages import PagePool
from serve.engine.request import FinishReason, Output, QueueFull, ServeRequest, TokenLogprob
from serve.engine.runner import Choice, Launch, Runner
from serve.engine.scheduler import OutOfPages, Scheduler, Sequence, Step
from serve.engine.step import Results
from serve.engine.stream import EngineStream
from serve.engine.terms import check

log = logging.getLogger(__name__)

REASONS: dict[int, FinishReason] = {Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclasses.dataclass(frozen=True)
class Flight:
    """A step launched and not read; `room` [s] is what the policy was told."""

    step: Step
    choice: Choice
    launch: Launch
    room: np.ndarray


class ServeEngine:
    """See `serve.engine.request.Engine`.

    One thread owns scheduler, policy and device state; others only hand it requests and cancellations. A step is
    launched before the one before it is read, so that the device does not wait for the host. Start it with `warm_up`,
    `use` and `start`.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: AnyDrafter | None,
        config: EngineConfig,
        *,
        scaling: Scaling | None = None,
        gauges: Gauges | None = None,
        mesh: Mesh | None = None,
    ):
        """Args:
          drafter: None decodes plainly.
          scaling: of confidence logits; gauges: told of every step.
          mesh: that both models lie on, see `dspark_jax.sharding`; pages are split over its `tensor` axis.

        Raises:
          ValueError: see `Runner`.
        """
        self.runner = runner = Runner(target, drafter, config, scaling, mesh)
        self.capacity = config.slots + config.max_waiting
        self.config, self.target_config, self.max_length, self.gauges = config, target.config, runner.max_length, gauges
        pool = PagePool(runner.pages, config.page_size, reserved=1)
        self.scheduler = Scheduler(pool, config.slots, runner.columns, config.chunk, runner.reach)
        self.budget = Budget(Plain(), config.slots, max(runner.block_size, 1))
        self.counts = StepCounts()
        self._flights: deque[Flight] = deque()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._live = 0
        self._failed = self._stopping = False
        self._thread: threading.Thread | None = None

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None, repeats: int = 3) -> StepCosts:
        """See `Runner.warm_up`."""
        costs = self.runner.warm_up(progress, repeats)
        self.counts.compiled = self.runner.programs
        return costs

    def use(self, policy: Policy) -> None:
        """Chooses by this policy; without a drafter, plainly."""
        policy = policy if self.runner.drafts else Plain()
        self.budget = Budget(policy, self.config.slots, max(self.runner.block_size, 1))

    def start(self) -> None:
        """Starts the thread."""
        self.budget.warm_up()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread behind the step it is in; what waits or runs ends with `abort`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether requests are taken."""
        return self._thread is not None and not self._failed and not self._stopping

    @property
    def live(self) -> int:
        """Requests that wait or run."""
        return self._live

    def submit(self, request: ServeRequest) -> EngineStream:
        """See `serve.engine.request.Engine.submit`."""
        check(request, self.target_config, self.max_length)
        # In Python's integers: a cap such as sys.maxsize must not wrap around.
        limit = min(len(request.prompt) + int(request.max_tokens), self.max_length)
        stream = EngineStream(lambda: self._tell(lambda: self._end(sequence, "abort")))
        sequence = Sequence(request, limit, stream, seeds_of([request.seed])[0])
        with self._wake:  # in one go: whoever ends the engine ends all that it was handed
            if not self.healthy or self._live >= self.capacity:
                raise QueueFull(self._live, max(1.0, 0.1 * self._live))
            self._live += 1
            self._inbox.append(lambda: self.scheduler.waiting.append(sequence))
            self._wake.notify()
        return stream

    def _tell(self, message: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _loop(self) -> None:
        try:
            while not self._stopping:
                if not self._turn():
                    with self._wake:
                        while not (self._inbox or self._stopping):
                            self._wake.wait()
            self._end_all("abort")
        except Exception:
            log.exception("the engine has broken down")
            with self._wake:
                self._failed = True
            self._end_all("error")

    def _turn(self) -> bool:
        """Messages, then a step launched and one read; False if there was nothing to do."""
        while self._inbox:
            self._inbox.popleft()()
        for sequence in self.scheduler.admit():
            self.runner.enter(sequence)
            self.budget.enter(sequence.slot)
        try:
            step = self.scheduler.step()
        except OutOfPages:
            if self._flights:  # what they bring may free pages
                self._read(self._flights.popleft())
            else:
                self.scheduler.preempt()
            return True
        if step is not None:
            self._flights.append(self._launch(step))
        if self._flights and (step is None or len(self._flights) > 1):
            self._read(self._flights.popleft())
        return step is not None or bool(self._flights or self.scheduler.waiting)

    def _launch(self, step: Step) -> Flight:
        running, room = np.zeros(self.config.slots, bool), np.zeros(self.config.slots, np.int32)
        for sequence in step.draftable:
            running[sequence.slot] = sequence.request.speculative
            room[sequence.slot] = np.clip(sequence.limit - sequence.known - 1, 0, self.runner.block_size)
        drafted, admitted = self.budget.choose(running, room)
        budget = self.budget
        choice = Choice(running, drafted, admitted, budget.most, budget.floor, budget.threshold)
        return Flight(step, choice, self.runner.launch(step, choice), room)

    def _read(self, flight: Flight) -> None:
        """Takes in what a step brought, and tells requests, policy and gauges."""
        results = jax.device_get(flight.launch.results)
        for sequence in flight.step.decoding:
            sequence.ahead -= 1
            slot, usage = sequence.slot, sequence.usage
            if sequence.ended or not (count := int(results.count[slot])):
                continue
            tokens = results.block[slot, :count].tolist()
            sequence.tokens += tokens
            first, drafted = sequence in flight.step.starting, flight.choice.drafted and flight.choice.running[slot]
            sequence.usage = dataclasses.replace(
                usage,
                completion_tokens=usage.completion_tokens + count,
                rounds=usage.rounds + (not first),
                drafted=usage.drafted + int(drafted) * self.runner.block_size,
                verified=usage.verified + int(results.verified[slot]),
                accepted=usage.accepted + int(results.accepted[slot]),
            )
            reason, logprobs = REASONS.get(int(results.finish[slot])), _logprobs(sequence, results, tokens)
            if reason is None:
                sequence.sink.put(Output(tokens, sequence.usage, logprobs))
            else:
                self._end(sequence, reason, tokens, logprobs)
        outcome = Outcome(results.survival, results.verified, results.accepted) if flight.choice.drafted else None
        self.budget.update(flight.choice.running & (results.count > 0), flight.room, outcome)
        self.counts.add(flight, results)
        if self.gauges is not None:
            self.gauges.set(self, flight, results)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        if sequence.ended:
            return
        sequence.ended = True
        self.scheduler.leave(sequence)
        with self._wake:
            self._live -= 1
        sequence.sink.put(Output(tokens or [], sequence.usage, logprobs, reason))

    def _end_all(self, reason: FinishReason) -> None:
        while self._inbox:
            self._inbox.popleft()()
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self._end(sequence, reason)


def _logprobs(sequence: Sequence, results: Results, tokens: list[int]) -> list[TokenLogprob] | None:
    n, slot = sequence.request.logprobs, sequence.slot
    if n is None:
        return None
    told = []
    for i, token in enumerate(tokens):
        ids, values = results.top_ids[slot, i, :n].tolist(), results.top[slot, i, :n].tolist()
        told.append(TokenLogprob(token, float(results.logprobs[slot, i]), tuple(zip(ids, values, strict=True))))
    return told

"""What the engine is asked for, and what it gives."""

import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Literal, Protocol

from dspark_jax.decoding.generate import Request

TOP = 20
"""Most likely tokens a request may be told of; OpenAI's limit."""

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class ServeRequest(Request):
    """A request of `dspark_jax`, and what only a server is asked for.

    Penalties are of OpenAI's API, on tokens generated so far, drafts of the same block included; `repetition_penalty`
    is of CTRL (arXiv 1909.05858), on tokens of prompt and output. All of them change the law that is sampled, and
    speculation keeps the changed one.

    Attributes:
      min_tokens: no stop id is drawn before so many tokens.
      logit_bias: added to the logits of these ids.
      logprobs: log probabilities to tell of each token, besides its own; None tells none. They are of the target's
        unchanged distribution.
      speculative: False decodes this request plainly.
    """

    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    speculative: bool = True


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Of one emitted token.

    Attributes:
      top: (id, log probability) of the most likely tokens, descending; as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a request took.

    Attributes:
      cached_tokens: of the prompt, found in the prefix cache.
      rounds: steps that brought tokens, the prompt's own not among them; drafted, verified, accepted: draft tokens.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def mean_accept_length(self) -> float | None:
        """Tokens a round, bonus included; None without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclasses.dataclass(frozen=True)
class Output:
    """Tokens of a step, and on the last one how it ended.

    Attributes:
      logprobs: one entry a token where they were asked for, else None.
      usage: so far.
    """

    tokens: list[int]
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None


class Stream(Protocol):
    """Outputs of one request as they come, the last with a `finish_reason`."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def cancel(self) -> None:
        """Ends the request: its slot and pages are free within a step. Behind its end it does nothing."""
        ...


class QueueFull(Exception):
    """As many requests wait as may; `retry_after` seconds are a guess at when to come again."""

    def __init__(self, waiting: int, retry_after: float):
        super().__init__(f"{waiting} requests wait already; try again in {retry_after:.0f} s.")
        self.retry_after = retry_after


class Engine(Protocol):
    """What the HTTP side needs."""

    max_length: int
    capacity: int
    """Requests that run and wait at most."""

    def submit(self, request: ServeRequest) -> Stream:
        """Queues a request; called on the event loop's thread, returns at once.

        Raises:
          ValueError: it can never run: a parameter out of range, or a prompt too long; QueueFull: try later.
        """
        ...

    @property
    def healthy(self) -> bool:
        """Whether steps are running; False once the loop has broken down, or is draining."""
        ...

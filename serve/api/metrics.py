"""What Prometheus is told."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.engine.engine import Flight, ServeEngine
from serve.engine.request import Usage
from serve.engine.step import Results

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
LENGTHS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8)


class Metrics:
    """One server's metrics, in a registry of their own.

    The HTTP side counts requests, tokens and latencies; the engine sets the gauges and counts recompiles.

    Attributes:
      requests: by route and outcome: `ok`, `refused`, `busy`, `unavailable`, `gone` (the client left), `error`.
      prompt_tokens, cached_tokens, generated_tokens, rounds, drafted, verified, accepted: as in `Usage`, as they come.
      accept_length: of finished requests, the mean tokens a round.
      time_to_first_token: seconds from the body's last byte to the first token.
      inter_token: seconds between two steps' tokens of a request, divided by the tokens of the later step.
      running, waiting: requests in the engine; pages, pages_used: of the KV pool; budget: draft tokens that the
        scheduler granted in the last step; bucket: tokens that the step was padded to; padding: share of them.
      preemptions: requests that had to give way; recompiles: programs compiled after warm-up; both so far.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def make(kind, name: str, says: str, labels: tuple[str, ...] = (), **options):
            return kind(f"dspark_{name}", says, labels, registry=registry, **options)

        self.requests = make(Counter, "requests", "requests by route and outcome", ("route", "outcome"))
        self.prompt_tokens = make(Counter, "prompt_tokens", "tokens of prompts")
        self.cached_tokens = make(Counter, "cached_prompt_tokens", "of these, found in the prefix cache")
        self.generated_tokens = make(Counter, "generated_tokens", "tokens generated")
        self.rounds = make(Counter, "rounds", "steps that brought a request tokens, its prefill not among them")
        self.drafted = make(Counter, "drafted_tokens", "tokens drafted")
        self.verified = make(Counter, "verified_tokens", "drafted tokens that the target verified")
        self.accepted = make(Counter, "accepted_tokens", "drafted tokens that were accepted")
        self.accept_length = make(Histogram, "accept_length", "tokens a round of a request", buckets=LENGTHS)
        self.time_to_first_token = make(Histogram, "time_to_first_token_seconds", "to the first token", buckets=SECONDS)
        self.inter_token = make(Histogram, "inter_token_seconds", "a token after the first", buckets=TOKEN_SECONDS)
        self.request_seconds = make(Histogram, "request_seconds", "a whole request", buckets=SECONDS)
        self.running = make(Gauge, "running_requests", "requests that hold a slot")
        self.waiting = make(Gauge, "waiting_requests", "requests that wait for one")
        self.pages = make(Gauge, "pages", "pages of the KV pool")
        self.pages_used = make(Gauge, "pages_used", "of these, in use by requests")
        self.budget = make(Gauge, "budget_tokens", "draft tokens granted in the last step")
        self.bucket = make(Gauge, "bucket_tokens", "tokens that the last step was padded to")
        self.padding = make(Gauge, "padding_share", "share of the last step's tokens that were padding")
        self.preemptions = make(Gauge, "preemptions", "requests that had to give way so far")
        self.recompiles = make(Gauge, "recompiles", "programs compiled after warm-up so far")

    def count(self, now: Usage, before: Usage) -> None:
        """Adds what a request took since `before`."""
        self.prompt_tokens.inc(now.prompt_tokens - before.prompt_tokens)
        self.cached_tokens.inc(now.cached_tokens - before.cached_tokens)
        self.generated_tokens.inc(now.completion_tokens - before.completion_tokens)
        self.rounds.inc(now.rounds - before.rounds)
        self.drafted.inc(now.drafted - before.drafted)
        self.verified.inc(now.verified - before.verified)
        self.accepted.inc(now.accepted - before.accepted)

    def watch(self, engine: ServeEngine) -> None:
        """Takes from an engine, whenever metrics are asked for, what is true between its steps too."""
        scheduler = engine.scheduler
        self.running.set_function(lambda: len(scheduler.running))
        self.waiting.set_function(lambda: max(engine.live - len(scheduler.running), 0))
        self.pages.set(scheduler.pool.total)
        self.pages_used.set_function(lambda: scheduler.pool.used)
        self.preemptions.set_function(lambda: scheduler.preemptions)
        self.recompiles.set_function(lambda: engine.runner.programs - engine.counts.compiled)

    def set(self, engine: ServeEngine, flight: Flight, results: Results) -> None:
        """Sets the other gauges to what a step of the engine was."""
        launch = flight.launch
        places = launch.rows + launch.extra
        used = results.used + int(flight.step.prefill.sum())
        self.budget.set((launch.rows - len(flight.step.decoding)) * flight.choice.drafted)
        self.bucket.set(places)
        self.padding.set(1 - used / places)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

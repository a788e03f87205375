"""Records: what every round drafted, how sure it was, how much was verified and how much survived."""

import dataclasses
import hashlib
import zipfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dspark_jax.whole_file import whole_file

if TYPE_CHECKING:  # decoding imports policies, and those may import calibration
    from dspark_jax.decoding.generate import Generation, Request

ARRAYS = ("confidence_logits", "scheduled", "accepted", "prompt", "domain", "temperature")


@dataclasses.dataclass(frozen=True)
class Records:
    """Rounds of many generations, those of one generation in order.

    A position beyond `scheduled` is censored: nobody knows whether its draft would have survived.

    Attributes:
      confidence_logits: [n, g] of the drafted block, raw (before any temperature).
      scheduled: [n] drafts whose fate was decided by verification alone.
      accepted: [n] drafts accepted, at most `scheduled`.
      prompt: [n] what tells prompts apart: a number made from the prompt's tokens, the same in every file.
      domain: [n] index into `domains`.
      temperature: [n] the request's sampling temperature.
      drafter: fingerprint of the drafter, "" if unknown.

    Raises:
      ValueError: arrays of other shapes, more accepted than scheduled, a confidence that is NaN.
    """

    confidence_logits: np.ndarray
    scheduled: np.ndarray
    accepted: np.ndarray
    prompt: np.ndarray
    domain: np.ndarray
    temperature: np.ndarray
    domains: tuple[str, ...]
    drafter: str = ""

    def __post_init__(self) -> None:
        z = self.confidence_logits
        if z.ndim != 2 or not z.shape[1]:
            raise ValueError(f"confidence_logits must be [rounds, drafts], got shape {z.shape}.")
        for name in ARRAYS[1:]:
            if (shape := getattr(self, name).shape) != z.shape[:1]:
                raise ValueError(f"{name} must have one value a round, shape {z.shape[:1]}, got {shape}.")
        if bad := int(np.isnan(z).any(1).sum()):
            raise ValueError(f"{bad} of {len(z)} rounds have a confidence that is NaN; the drafter is broken.")
        if ((self.accepted < 0) | (self.accepted > self.scheduled) | (self.scheduled > z.shape[1])).any():
            raise ValueError(f"expected 0 <= accepted <= scheduled <= {z.shape[1]} in every round.")
        if len(z) and not (self.domain.min() >= 0 and self.domain.max() < len(self.domains)):
            raise ValueError(f"domain must be within 0..{len(self.domains) - 1}, the domains {self.domains}.")

    def __len__(self) -> int:
        return len(self.scheduled)

    @property
    def block_size(self) -> int:
        """Drafts a block, g."""
        return self.confidence_logits.shape[1]

    @cached_property
    def verified(self) -> np.ndarray:
        """[n, g] booleans: the draft at this position was verified, or would have been but for a rejection before."""
        return self.scheduled[:, None] > np.arange(self.block_size)

    @cached_property
    def survived(self) -> np.ndarray:
        """[n, g] booleans: this draft and all before it were accepted."""
        return self.accepted[:, None] > np.arange(self.block_size)

    @cached_property
    def at_risk(self) -> np.ndarray:
        """[n, g] booleans: verified after all before it were accepted, so that this draft's own test took place."""
        return self.verified & (self.accepted[:, None] >= np.arange(self.block_size))

    def where(self, keep: np.ndarray) -> "Records":
        """The rounds where keep [n] is true."""
        return dataclasses.replace(self, **{name: getattr(self, name)[keep] for name in ARRAYS})

    def of_domain(self, *names: str) -> "Records":
        """The rounds of some domains, and no other domain's name.

        Raises:
          ValueError: no such domain.
        """
        if unknown := sorted(set(names) - set(self.domains)):
            raise ValueError(f"no domain {unknown[0]!r} in these records, which hold {', '.join(self.domains)}.")
        where = [self.domains.index(name) for name in names]
        renamed = np.full(len(self.domains), -1, self.domain.dtype)
        renamed[where] = np.arange(len(where))
        domain = renamed[self.domain]
        return dataclasses.replace(self.where(domain >= 0), domain=domain[domain >= 0], domains=names)

    def split(self, held_out: float, seed: int = 0) -> tuple["Records", "Records"]:
        """Two parts without a common prompt: to fit on, and a share `held_out` of every domain's prompts to measure on.

        Raises:
          ValueError: a share out of range, or a domain too small to leave a prompt on both sides.
        """
        if not 0 < held_out < 1:
            raise ValueError(f"held_out must be within (0, 1), got {held_out}.")
        random, chosen = np.random.default_rng(seed), []
        for i in np.unique(self.domain):
            prompts = random.permutation(np.unique(self.prompt[self.domain == i]))
            if len(prompts) < 2:
                raise ValueError(
                    f"domain {self.domains[i]!r} has {len(prompts)} prompt, expected at least 2: one to fit on and one "
                    "to measure on. Record more prompts."
                )
            chosen.extend(prompts[: min(max(round(len(prompts) * held_out), 1), len(prompts) - 1)])
        measured = np.isin(self.prompt, chosen)
        return self.where(~measured), self.where(measured)


def record_rounds(
    generations: Sequence["Generation"],
    requests: Sequence["Request"],
    *,
    domain: str,
    stop_ids: Sequence[int],
    drafter: str = "",
) -> Records:
    """Records of the rounds of generations.

    What stands behind a drafted stop id is censored whether or not the stop was reached: generation would have cut the
    round there if all before had survived, so counting the other rounds alone would count failures only.

    Args:
      generations, requests: results and what was asked, in the same order.
      stop_ids: the target's own.

    Raises:
      ValueError: no rounds, rounds without drafts, or a confidence that is NaN.
    """
    if any(not generation.drafts.shape[1] for generation in generations):
        raise ValueError("rounds of plain decoding have nothing to record; expected a drafter and blocks of 1 or more.")
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ARRAYS}
    for generation, request in zip(generations, requests, strict=True):
        n = len(generation.accepted)
        stops = [*request.stop_ids, *(() if request.ignore_eos else stop_ids)]
        is_stop = np.isin(generation.drafts, stops)
        live = np.where(is_stop.any(1), is_stop.argmax(1) + 1, generation.drafts.shape[1])
        columns["confidence_logits"].append(generation.confidence_logits)
        columns["scheduled"].append(np.minimum(generation.scheduled, live))
        columns["accepted"].append(generation.accepted)
        columns["prompt"].append(np.full(n, _number(request.prompt)))
        columns["domain"].append(np.zeros(n, int))
        columns["temperature"].append(np.full(n, request.temperature))
    if not sum(map(len, columns["accepted"])):
        raise ValueError("no rounds to record; expected generations longer than one token.")
    types = (np.float32, np.int8, np.int8, np.int64, np.int16, np.float32)
    arrays = {name: np.concatenate(columns[name]).astype(t) for name, t in zip(ARRAYS, types, strict=True)}
    return Records(**arrays, domains=(domain,), drafter=drafter)


def join(parts: Sequence[Records]) -> Records:
    """Records one after the other; domains of one name are one.

    Raises:
      ValueError: nothing to join, or parts of other block sizes or drafters.
    """
    if not parts:
        raise ValueError("expected at least one set of records, got none.")
    first = parts[0]
    for part in parts:
        if (part.block_size, part.drafter) != (first.block_size, first.drafter):
            raise ValueError(
                f"records of drafter {part.drafter or 'unknown'} with {part.block_size} drafts a block do not go with "
                f"those of {first.drafter or 'unknown'} with {first.block_size}; calibrate each drafter by itself."
            )
    domains = tuple(dict.fromkeys(name for part in parts for name in part.domains))
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    arrays["domain"] = np.concatenate(
        [np.array([domains.index(name) for name in part.domains], np.int16)[part.domain] for part in parts]
    )
    return Records(**arrays, domains=domains, drafter=first.drafter)


def write_records(path: str | Path, records: Records) -> None:
    """Writes an .npz, whole or not at all."""
    arrays = {name: getattr(records, name) for name in ARRAYS}
    # A handle, since numpy would add a suffix to a name without one.
    with whole_file(path) as work, work.open("wb") as file:
        np.savez_compressed(file, domains=np.array(records.domains), drafter=np.array(records.drafter), **arrays)


def read_records(path: str | Path) -> Records:
    """Reads what `write_records` wrote.

    Raises:
      FileNotFoundError: no such file; ValueError: not such an .npz, or values that cannot be.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `dspark evaluate DATA --records {path}` writes it.")
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*ARRAYS, "domains", "drafter")}
    except KeyError as error:
        raise ValueError(
            f"{path} lacks {error.args[0]}; expected the file `dspark evaluate --records` writes."
        ) from error
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a whole .npz of records ({error}); record it again.") from error
    domains, drafter = tuple(map(str, arrays.pop("domains"))), str(arrays.pop("drafter"))
    try:
        return Records(**arrays, domains=domains, drafter=drafter)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _number(prompt: Sequence[int]) -> int:
    digest = hashlib.sha256(np.asarray(prompt, np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)

"""Requests that come, leave and are preempted at random steps of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from baton.sampling_params import SamplingParams
from testkit.engines import Stepped, Stream, request


@dataclass(frozen=True, slots=True)
class Said:
    """What an engine says to a prompt when it has no other request."""

    prompt: list[int]
    params: SamplingParams
    stream: Stream

    def follows(self, rest: Stream, num_known: int) -> bool:
        """Whether a stream that began after `num_known` output tokens says the rest, with the same rounds if it began
        with none.
        """
        same_rounds = num_known > 0 or rest.accepted == self.stream.accepted
        return rest.error is None and rest.token_ids == self.stream.token_ids[num_known:] and same_rounds


class Disorder:
    """Events between the steps of an engine. `most_rows`: of a step, now and then, so that later requests have no room
    beside the drafts of earlier ones.
    """

    def __init__(self, one: Stepped, wanted: Sequence[Said], seed: int, most_rows: int) -> None:
        self._one, self._wanted, self._random, self._most_rows = one, wanted, Random(seed), most_rows
        self._running: dict[str, tuple[Said, int]] = {}
        self.num_ended = self.num_preempted = self._num_came = 0

    def step(self) -> None:
        one, random, scheduler = self._one, self._random, self._one.core.scheduler
        event = random.random()
        if event < 0.3 and len(self._running) < 5:
            self._come(random.choice(self._wanted))
        elif event < 0.33 and self._running:
            name = random.choice([*self._running])
            del self._running[name]
            one.core.abort(name)
        elif event < 0.45 and scheduler.running:
            scheduler.preempt(random.choice(scheduler.running))
            self.num_preempted += 1
        elif event < 0.55:
            scheduler.max_num_batched_tokens = random.choice([self._most_rows, self._most_rows + 5, 64])
        one.step()
        for name, (said, num_known) in list(self._running.items()):
            if (stream := one.streams[name]).ended:
                assert said.follows(stream, num_known), (stream, said, num_known)
                del self._running[name]
                self.num_ended += 1

    def _come(self, said: Said) -> None:
        """Many continue after tokens that another request may have left in the prefix cache."""
        num_known = self._random.choice([0, 0, self._random.randrange(1, len(said.stream.token_ids) - 1)])
        self._num_came += 1
        name = f"{self._num_came}"
        known = said.stream.token_ids[:num_known] or None
        self._one.add(request(name, said.prompt, said.params, known))
        self._running[name] = said, num_known

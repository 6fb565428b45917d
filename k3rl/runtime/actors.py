"""The actors of a run behind plain calls: one learner and the rollout workers. Every wait has a deadline and a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3rl.errors import WeightSyncError
from k3rl.learner.worker import LearnerWorker
from k3rl.rollout.worker import RolloutWorker
from k3rl.runtime.cluster import make_actor, wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import RunConfig
    from k3rl.rollout.agent_loop import EpisodeSpec
    from k3rl.trajectory import PolicyVersion, Summary


class Actors:
    """Starts the actors; they die with the Ray session."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._learner = make_actor(LearnerWorker, config, name="learner")
        self._names = [f"rollout-{i}" for i in range(config.rollout.num_workers)]
        self._workers = [make_actor(RolloutWorker, config, name=name) for name in self._names]

    def ask_learner(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the learner and wait for its answer."""
        ref = getattr(self._learner, method).remote(*args, **kwargs)
        return wait_for([ref], ["learner"], self._config.learner.timeout_s, method, "learner.timeout_s")[0]

    def start(self, method: str, specs: Sequence[EpisodeSpec], *args: Any) -> list[Any]:
        """Spread episodes over the workers, whole groups to one worker in turn; :meth:`collect` waits for them."""
        n = len(self._workers)
        size = self._config.rollout.group_size
        shares = [[s for i, s in enumerate(specs) if (i // size) % n == w] for w in range(n)]
        return [
            getattr(worker, method).remote(share, *args) for worker, share in zip(self._workers, shares, strict=True)
        ]

    def collect(self, refs: list[Any], what: str) -> list[Summary]:
        """Summaries of started work, in order of key."""
        shares = wait_for(refs, self._names, self._config.rollout.timeout_s, what, "rollout.timeout_s")
        return sorted((s for share in shares for s in share), key=lambda s: s.key)

    def play(self, method: str, specs: Sequence[EpisodeSpec], what: str, *args: Any) -> list[Summary]:
        """Start and collect."""
        return self.collect(self.start(method, specs, *args), what)

    def publish(self, incarnation: int, step: int) -> PolicyVersion:
        """Give the learner's weights to every rollout worker; each answers with the digest of what it now serves."""
        weights = self.ask_learner("publish", incarnation, step, self._config.rollout.timeout_s)
        refs = [worker.update_weights.remote(weights) for worker in self._workers]
        digests = wait_for(refs, self._names, self._config.rollout.timeout_s, "weight update", "rollout.timeout_s")
        version = weights.version
        wrong = [name for name, digest in zip(self._names, digests, strict=True) if digest != version.digest]
        if wrong:
            raise WeightSyncError(f"{', '.join(wrong)} received other weights than the learner sent at step {step}")
        return version

"""Ray Serve's request router over the server's own routing policies."""

import uuid
from pathlib import Path
from typing import Any, TextIO

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from server.routing.policies import new_policy
from server.routing.policy import RoutedPrompt, RoutingPolicy
from server.routing.recording import RecordingPolicy
from server.routing.replica_loads import ReplicaLoad

_NO_PROMPT = RoutedPrompt((), 1, 1)


class PolicyRequestRouter(RequestRouter):  # type: ignore[misc]
    """Sends requests to the replicas that a policy chooses. What the policy is told of a request comes in its keyword
    arguments: `prompt`, and `excluded`, the replicas that failed it."""

    _policy: RoutingPolicy

    def initialize_state(self, policy: str, record: str = "") -> None:
        """Makes the policy of this name. Where `record` names a directory, a file there gets all its decisions."""
        self._policy = RecordingPolicy(policy, _new_file(record)) if record else new_policy(policy)
        self._known: set[str] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray when replicas come and go, and when one has reported."""
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id: replica for replica in replicas}
        for gone in self._known - names.keys():
            self._policy.remove(gone)
        self._known = set(names)
        for name, replica in names.items():
            self._policy.add(name)
            if stats := replica.routing_stats:
                self._policy.report(name, ReplicaLoad(stats["waiting_tokens"], stats["requests_running"]))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the policy's choice, and behind it all others: where that one does not answer, any will do."""
        asked: dict[str, Any] = pending_request.kwargs if pending_request else {}
        prompt = asked.get("prompt") or _NO_PROMPT
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        chosen = self._policy.choose(prompt, asked.get("excluded", ()))
        if chosen is None or chosen not in names:
            return [candidate_replicas]
        self._policy.sent(prompt, chosen)
        return [[names.pop(chosen)], list(names.values())]

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.remove(replica_id.unique_id)


def _new_file(directory: str) -> TextIO:
    """Opens a file that no other router has."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    return Path(directory, f"{uuid.uuid4().hex}.jsonl").open("x", encoding="utf-8")

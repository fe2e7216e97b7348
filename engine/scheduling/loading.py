"""The requests that wait outside the queue until their prefix is read from the KV store; torch-free."""

from engine.core.request import Request, RequestStatus
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.kv_allocator import KVAllocator


class LoadingRequests:
    """Requests on their way from the queue back into it, while others run."""

    def __init__(self, kv: KVAllocator, waiting: FairQueue) -> None:
        self._kv = kv
        self._waiting = waiting
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def try_add(self, request: Request, spare: int, now_s: float) -> bool:
        """Takes a request out of the queue while more of its prefix is read. Returns False, and changes nothing, if
        nothing is to be read, or fewer than `spare` available blocks would be left."""
        if not self._kv.try_load(request, spare, now_s):
            return False
        self._waiting.remove(request)
        request.status = RequestStatus.LOADING
        self._requests.append(request)
        return True

    def requeue(self, now_s: float) -> None:
        """Moves the requests whose prefix was read, or took too long, back to their places in the queue."""
        for request in [each for each in self._requests if not self._kv.is_loading(each, now_s)]:
            self.remove(request)
            request.status = RequestStatus.WAITING
            self._waiting.put_back(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

"""Which rollout cell takes the next request. Pure and single-threaded: the caller locks.

A router owns the table of requests in flight. The caller tells it what happened (`submit`, `complete`, `cell_down`,
`cell_up`) and sends whatever `take()` then hands out. Invariants, asserted by the tests:

- every submitted request is in exactly one place: held back, or in flight on one cell, or finished;
- a request is finished once. Each hand-out has a *ticket*; a completion under any other ticket (a cell declared
  dead that speaks up again, or the same answer twice) is ignored;
- what was in flight on a cell that went down is handed out again exactly once;
- a cell that is not up gets nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rollout.requests import GenerationOutput, GenerationRequest


@dataclass(frozen=True)
class Assignment:
    """Send `request` to `cell` and report its end under `ticket`. deaths: cells it was on when they went down."""

    ticket: int
    cell: int
    request: GenerationRequest
    deaths: tuple[int, ...] = ()


@dataclass(frozen=True)
class LostRequest:
    """A request that is not handed out again: too many cells went down with it in flight."""

    request: GenerationRequest
    deaths: tuple[int, ...]

    def __str__(self) -> str:
        cells = ", ".join(map(str, self.deaths))
        return f"request {self.request.request_id!r} was in flight when cells {cells} went down; it is not tried again"


@dataclass(frozen=True)
class _Held:
    request: GenerationRequest
    deaths: tuple[int, ...] = ()


class Router:
    """Least outstanding tokens, with affinity for samples of one prompt.

    A request goes to the cell with the fewest outstanding tokens (`GenerationRequest.cost`, summed over what is in
    flight there; ties to the lowest index). Samples that share `request.group` follow the first of them, whose prompt
    is in that cell's prefix cache, as long as that cell is at most `max_imbalance_tokens` ahead of the least loaded.

    max_in_flight: requests a cell is given at once (None: all of them); the rest waits here, so that a slow cell takes
    less of a batch and not just longer. max_deaths: after that many cells went down under one request it is returned by
    `lost()` instead of being tried once more, since it may well be the cause. remembered_groups: how many prompts are
    remembered for affinity.

    Raises:
        ValueError: no cell, one index twice, a bound that is not positive.
        KeyError: a method got a cell that is not configured.
    """

    def __init__(
        self,
        cells: Iterable[int],
        *,
        max_imbalance_tokens: int = 8192,
        max_in_flight: int | None = None,
        max_deaths: int = 5,
        remembered_groups: int = 8192,
    ) -> None:
        least = {
            "max_imbalance_tokens": (max_imbalance_tokens, 0),
            "max_in_flight": (1 if max_in_flight is None else max_in_flight, 1),
            "max_deaths": (max_deaths, 1),
            "remembered_groups": (remembered_groups, 1),
        }
        if problems := [f"{name} must be >= {low}, got {value}" for name, (value, low) in least.items() if value < low]:
            raise ValueError("; ".join(problems))
        self._cells = _distinct(cells)
        self._up = set(self._cells)
        self._max_imbalance = max_imbalance_tokens
        self._max_in_flight = max_in_flight
        self._count = dict.fromkeys(self._cells, 0)
        self._max_deaths = max_deaths
        self._max_groups = remembered_groups
        self._held: deque[_Held] = deque()
        self._flying: dict[str, Assignment] = {}
        self._ids: set[str] = set()
        self._load = dict.fromkeys(self._cells, 0)
        self._groups: OrderedDict[str, int] = OrderedDict()
        self._lost: list[LostRequest] = []
        self._tickets = 0

    def submit(self, *requests: GenerationRequest) -> None:
        """Queues requests for `take`.

        Raises:
            ValueError: an id is already queued or in flight (nothing of this call is queued then).
        """
        _refuse_known(requests, self._ids)
        self._ids.update(request.request_id for request in requests)
        self._held.extend(_Held(request) for request in requests)

    def take(self) -> list[Assignment]:
        """Everything that may be sent now, in order of submission; what went down with a cell comes first."""
        taken: list[Assignment] = []
        while self._held and self._open():
            held = self._held.popleft()
            cell = self._choose(held.request)
            self._tickets += 1
            assignment = Assignment(self._tickets, cell, held.request, held.deaths)
            self._flying[held.request.request_id] = assignment
            self._load[cell] += held.request.cost
            self._count[cell] += 1
            taken.append(assignment)
        return taken

    def complete(self, request_id: str, ticket: int) -> bool:
        """The request ended. True for the first report under its current ticket; anything else is ignored."""
        assignment = self._flying.get(request_id)
        if assignment is None or assignment.ticket != ticket:
            return False
        del self._flying[request_id]
        self._ids.discard(request_id)
        self._load[assignment.cell] -= assignment.request.cost
        self._count[assignment.cell] -= 1
        return True

    def withdraw(self, request_id: str) -> Assignment | None:
        """The caller does not want it any more. Returns where it was in flight (to be aborted there), None if it was
        held back or is not known."""
        assignment = self._flying.get(request_id)
        if assignment is not None:
            self.complete(request_id, assignment.ticket)
            return assignment
        if request_id in self._ids:
            self._ids.discard(request_id)
            self._held = deque(held for held in self._held if held.request.request_id != request_id)
        return None

    def cell_down(self, cell: int, partial: Mapping[str, GenerationOutput] | None = None) -> int:
        """Nothing more to `cell`; what it had in flight goes back to the head of the queue. Returns how many those are.

        partial: what was already received of some of them; those go on from there instead of starting again.
        """
        self._known(cell)
        self._up.discard(cell)
        again: list[_Held] = []
        for assignment in [a for a in self._flying.values() if a.cell == cell]:
            request, deaths = assignment.request, (*assignment.deaths, cell)
            del self._flying[request.request_id]
            if len(deaths) >= self._max_deaths:
                self._ids.discard(request.request_id)
                self._lost.append(LostRequest(request, deaths))
                continue
            if partial and request.request_id in partial:
                request = request.resumed_from(partial[request.request_id])
            again.append(_Held(request, deaths))
        self._load[cell] = self._count[cell] = 0
        self._held.extendleft(reversed(again))
        return len(again)

    def cell_up(self, cell: int) -> None:
        """`cell` may be given requests (again)."""
        self._known(cell)
        self._up.add(cell)

    def lost(self) -> list[LostRequest]:
        """Requests given up since the last call; each is reported once."""
        lost, self._lost = self._lost, []
        return lost

    def in_flight(self, cell: int) -> tuple[Assignment, ...]:
        self._known(cell)
        return tuple(a for a in self._flying.values() if a.cell == cell)

    def outstanding_tokens(self, cell: int) -> int:
        self._known(cell)
        return self._load[cell]

    @property
    def up(self) -> frozenset[int]:
        return frozenset(self._up)

    @property
    def held(self) -> int:
        """Requests that wait because no cell is up (or `take` was not called)."""
        return len(self._held)

    def _open(self) -> set[int]:
        """Cells that take another request now."""
        limit = self._max_in_flight
        return self._up if limit is None else {cell for cell in self._up if self._count[cell] < limit}

    def _choose(self, request: GenerationRequest) -> int:
        least = min(self._open(), key=lambda cell: (self._load[cell], cell))
        if request.group is None:
            return least
        cell = self._groups.get(request.group)
        if cell is None or cell not in self._open() or self._load[cell] - self._load[least] > self._max_imbalance:
            cell = least
        # Kept in order of use; the prompt asked for least recently is the first to be forgotten.
        self._groups[request.group] = cell
        self._groups.move_to_end(request.group)
        if len(self._groups) > self._max_groups:
            self._groups.popitem(last=False)
        return cell

    def _known(self, cell: int) -> None:
        if cell not in self._load:
            raise KeyError(f"rollout cell {cell} is not configured; cells are {sorted(self._cells)}")


@dataclass
class _Share:
    """All requests of one batch that belong together: they always run as a whole, in this order, on one cell."""

    home: int
    requests: tuple[GenerationRequest, ...]
    host: int
    running: bool = False
    tickets: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    deaths: tuple[int, ...] = ()


class StaticRouter:
    """Fixed assignment for `--deterministic`: sample i of a batch belongs to configured cell i mod n, alive or not.

    Matrix products depend on the composition of an engine's batch, so a *share* (all of one batch's samples of one
    cell) is only ever run as a whole: the caller admits everything that one `take()` hands out for a cell before that
    cell's next engine step. When a cell goes down its whole share is held, samples that had finished included, until
    the same cell is up again; `give_up` hands its shares to the next live index, where they run after that cell's own.
    The second answer for a sample that had finished is ignored: it holds the same bits.
    """

    def __init__(self, cells: Iterable[int]) -> None:
        self._cells = _distinct(cells)
        self._up = set(self._cells)
        self._given_up: set[int] = set()
        self._shares: list[_Share] = []
        self._tickets = 0

    def submit(self, *requests: GenerationRequest) -> None:
        """Queues one batch; a request's position in the call decides its cell."""
        _refuse_known(requests, {r.request_id for share in self._shares for r in share.requests})
        count = len(self._cells)
        for offset, cell in enumerate(self._cells):
            mine = requests[offset::count]
            if mine:
                self._shares.append(_Share(cell, mine, self._host_of(cell)))

    def take(self) -> list[Assignment]:
        """All requests of every share whose cell is up and runs no other share."""
        taken: list[Assignment] = []
        busy = {share.host for share in self._shares if share.running}
        for share in self._shares:
            if share.running or share.host in busy or share.host not in self._up:
                continue
            busy.add(share.host)
            share.running = True
            for request in share.requests:
                self._tickets += 1
                share.tickets[request.request_id] = self._tickets
                taken.append(Assignment(self._tickets, share.host, request, share.deaths))
        return taken

    def complete(self, request_id: str, ticket: int) -> bool:
        """As `Router.complete`; also False for a sample whose answer was already taken before its share was re-run."""
        for share in self._shares:
            if share.tickets.get(request_id) == ticket:
                del share.tickets[request_id]
                first = request_id not in share.finished
                share.finished.add(request_id)
                if not share.tickets:
                    self._shares.remove(share)
                return first
        return False

    def withdraw(self, request_id: str) -> Assignment | None:
        """As `Router.withdraw`. A held share keeps the sample, so that its composition stays; the answer is ignored."""
        for share in self._shares:
            for request in share.requests:
                if request.request_id != request_id or request_id in share.finished:
                    continue
                ticket = share.tickets.get(request_id)
                if ticket is not None:
                    self.complete(request_id, ticket)
                    return Assignment(ticket, share.host, request, share.deaths)
                share.finished.add(request_id)
                if len(share.finished) == len(share.requests):
                    self._shares.remove(share)
                return None
        return None

    def cell_down(self, cell: int) -> int:
        """Holds every share that runs on `cell`; returns how many requests will be run again."""
        self._known(cell)
        self._up.discard(cell)
        again = 0
        for share in self._shares:
            if share.running and share.host == cell:
                share.running = False
                share.tickets.clear()
                share.deaths = (*share.deaths, cell)
                again += len(share.requests)
        return again

    def cell_up(self, cell: int) -> None:
        self._known(cell)
        self._up.add(cell)
        self._given_up.discard(cell)

    def give_up(self, cell: int) -> None:
        """`cell` will not come back: its shares, now and later, go to the next index that was not given up.

        Raises:
            RuntimeError: no cell is left.
        """
        self._known(cell)
        self.cell_down(cell)
        self._given_up.add(cell)
        for share in self._shares:
            if not share.running:
                share.host = self._host_of(share.home)

    @property
    def up(self) -> frozenset[int]:
        return frozenset(self._up)

    @property
    def held(self) -> int:
        return sum(len(share.requests) for share in self._shares if not share.running)

    def _host_of(self, home: int) -> int:
        start = self._cells.index(home)
        for step in range(len(self._cells)):
            cell = self._cells[(start + step) % len(self._cells)]
            if cell not in self._given_up:
                return cell
        raise RuntimeError(f"all rollout cells {sorted(self._cells)} were given up; nothing can be generated")

    def _known(self, cell: int) -> None:
        if cell not in self._cells:
            raise KeyError(f"rollout cell {cell} is not configured; cells are {sorted(self._cells)}")


def _distinct(cells: Iterable[int]) -> tuple[int, ...]:
    indices = tuple(sorted(cells))
    if not indices or len(set(indices)) != len(indices):
        raise ValueError(f"rollout cells must be distinct and at least one, got {list(indices)}")
    return indices


def _refuse_known(requests: Sequence[GenerationRequest], known: set[str]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.request_id in known or request.request_id in seen:
            raise ValueError(f"request id {request.request_id!r} is already queued or in flight")
        seen.add(request.request_id)

"""Trainer cells: independent data-parallel replicas that may die at any moment.

Pure (neither ray nor torch.distributed, clocks injected):
    timeouts    every deadline             state     states of one cell, restart budget
    quorum      quorum, attempt, guard     pairing   which trainer cell refits which rollout cell
    watchdog    heartbeat and progress     control   commands from a server thread to the loop
    events, event_log, arbiter, audit      what happened, decided durably, provable afterwards
With processes:
    store       where cells meet           group, lane, buckets           collectives that can be aborted
    state_tree, state_transfer             how a cell heals
    worker, train_group                    one rank; all cells of one role, as the driver drives them
    heartbeat, supervisor, healing         who is dead, who is replaced by what, who heals from whom
    rollout_fleet, sync                    the same for rollout cells; refits
    fault_plan, trials                     failures on purpose, and whether a trial held (`trainer_hooks.chaos`)
    control_server, control_page           HTTP for people, Prometheus and operators

In the driver, once:
    log = EventLog(path)                   # continues a log that is there; its lock keeps a second driver out
    arbiter = Arbiter(log, timeouts)       # replays the log; open attempts of a dead driver are discarded
    store = StoreServer(host)              # loopback unless cells live on other machines
    check_connect(actor_shape, critic_shape)
    quorum = saved.restored() if resumed else Quorum()
    log "run_started"; after a resume also arbiter.restore(checkpoint, steps, version, lost_rollouts)

Deaths are found by any thread (`Heartbeats`, a call that fails) and passed through `state.transition` under the lock of
the `Supervisor`, which also starts replacements in threads of their own. Everything that touches the run's state is the
loop's alone: it heals replacements, refits rollout cells and takes commands from `ControlQueue.take`, between two
pieces of work and while it waits for samples (`Runtime.tend`).

When a cell is declared dead, in this order:
    1. transition(cell, Died(...)); log "cell_dead"; watchdog.forget
    2. arbiter.lose(cell, cause)                          an attempt that waits for its vote ends now
    3. group.abort(cause, through=quorum_id) on every rank of every survivor, through a side thread of theirs
    4. SIGKILL, wait until reaped (a process that was only stopped is fenced by this), transition(cell, Reaped(...))
    5. only now may a new quorum be formed
    6. later: transition(cell, Launch()), log "cell_restarted", watchdog.watch, … Started

A heal, between two attempts: a `CrossCellGroup` of its own on either side, so that its failure breaks no quorum:
    role "<role>-heal", the same Megatron rank; as quorum_id a heal number that only grows; the source is rank 0 of 2
    send_state(group, 1, state) there, receive_state(group, 0) here; then group.close()
    success: log "heal" and the cell's "weights", transition(cell, Healed(...)); it is in the next quorum
    failure: the source goes on as before; transition(cell, SourceLost(...)) and another source, a new heal number
    the first start, and a start from a checkpoint, log "heal" with source None

One attempt at a step:
    driver   quorum = quorum.next(members that `trains`); if it changed: log "quorum", and every member's ranks call
             group.configure(store.address, quorum_id, quorum.rank_of(cell), quorum.world) at the same time
    driver   attempt = arbiter.begin(step, quorum); split the batch for this quorum
    cell     guard.admit(attempt); forward, backward on its shard; log "trained" through the driver
    cell     group.check_equal(global counts); group.all_reduce(gradients); group.all_reduce(loss sums)
             a GroupError, a non-finite gradient or any exception is the vote 'discard' with its cause
    cell     ranks of the cell agree (their own world), then the leader votes: arbiter.vote(attempt, cell, …)
    cell     decision from the reply, else arbiter.ask(attempt) until it is not None
    commit   guard.apply(attempt); optimizer step; report. Driver: log "committed" when the first cell has applied it,
             log "weights" of every cell if the step made a version. A cell that cannot finish is declared dead and
             heals; if no cell finished: restore the checkpoint
    discard  zero the gradient buffers (they may hold sums in part), log "discarded", next attempt with the same batch

Restoring a checkpoint: every cell loads it (weights, optimizer, StepGuard.state_dict); arbiter.restore(...) first, then
quorum = quorum.restored(): the next quorum has a new id even if its members are the same, so that nothing sent before
is taken for something sent after.

A refit: fleet.begin_refit(version) fixes the rollout cells; plan_pairs(N, live trainer cells, refit.cells); each pair
in parallel; log "weights" of both sides and "refit"; fleet.refitted / end_refit.
"""
